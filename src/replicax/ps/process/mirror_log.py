"""The mutations that the mirror of a parameter server has not confirmed, and the deferred replies.

Pure: no threads, no sockets, no clock.

Note [No acknowledged change on one server only]
    A change is applied, appended to the log, and sent to the mirror; its reply is sent when the
    mirror has confirmed it. Entries have consecutive positions over the lifetime of the process,
    so that the mirror applies each of them once, in order. Replies are sent in the order of their
    requests: a session that waits for one gets all later ones after it. Where the two states may
    differ, the mirror is seeded again: a snapshot stands for all entries before it. Replies to
    heartbeats, fences and `Attach` are never deferred; the coordinator repeats these requests to a
    restarted server.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from replicax.foundation import errors, runtime
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.ps.store import jobs
from replicax.ps.store.journal import Entry
from replicax.ps.store.service import Reply
from replicax.transport.service import Session

Send = Callable[[Session, messages.Envelope, messages.Body, Sequence[Buffer]], None]

# Requests whose replies wait for the mirror, beside exchanges with changes.
_DEFERRED = (
    messages.CreatePart,
    messages.DropParts,
    messages.RegisterOptimizer,
    messages.FlushGradients,
)
# Entries that are kept for an unreachable mirror; beyond that, it is seeded again.
_MOST_KEPT = 10_000
_MOST_KEPT_BYTES = 64 << 20
# Deferred replies. The coordinator reports a lost mirror long before.
_MOST_DEFERRED = 20_000


class State(enum.IntEnum):
    """The state of the mirror; the numbers are sent in `Pong`."""

    OFF = 0  # The job has no mirrors.
    UNREACHABLE = 1  # It cannot be reached, or is not attached to the job yet.
    SEEDING = 2  # A snapshot is being sent to it.
    IN_SYNC = 3  # It receives every change.
    FENCED = 4  # It mirrors another incarnation, which has replaced this process.


class Batch(NamedTuple):
    """Entries to send: the position of the first, the entries, and all their buffers."""

    position: int
    entries: list[Entry]
    buffers: list[Buffer]


class Target(NamedTuple):
    """The mirror to send to: the job, the coordinator's request, and the index of the mirror."""

    job: str
    epoch: int
    attach: messages.Attach
    mirror: int


class _Logged(NamedTuple):
    entry: Entry
    buffers: Sequence[Buffer]
    num_bytes: int


class _Deferred(NamedTuple):
    position: int
    session: Session
    envelope: messages.Envelope
    reply: Reply


class MirrorLog:
    """The journal of one server's store; see Note [No acknowledged change on one server only].

    Args:
      index: The index of the server.
      send: Sends a deferred reply without blocking.
      wake: Called without blocking when there are entries to send, or the target changed.

    Attributes:
      state: The state of the mirror.
      target: The mirror to send to; None if there is none.
    """

    def __init__(self, index: int, send: Send, wake: Callable[[], None]) -> None:
        self._index = index
        self._send = send
        self._wake = wake
        # Acquired after the write lock of the store; nothing blocks while it is held.
        self._lock = runtime.Lock()
        self.state = State.OFF
        self.target: Target | None = None
        # A job that was recovered from the mirror, and the position of its next entry.
        self._expected: tuple[str, int] | None = None
        # The positions of the first entry, of the next one to send, after the last one, and after
        # the last confirmed one.
        self._entries: collections.deque[_Logged] = collections.deque()
        self._first = self._next = self._end = self._confirmed = 0
        self._num_bytes = 0
        self._needs_seed = True
        self._deferred: collections.deque[_Deferred] = collections.deque()
        # The number of deferred replies by connection.
        self._waiting: collections.Counter[bytes] = collections.Counter()

    # Called by the store under its write lock; see `journal.Journal`.

    def attached(self, job: str, attach: messages.Attach, entry: Entry) -> None:
        """Records that a coordinator attached the server."""
        with self._lock:
            if not jobs.is_mirrored(attach):
                self._clear_target()
                return
            mirror = (self._index + 1) % len(attach.servers)
            was_on = self.target is not None and self.target.job == job
            self.target = Target(job, entry.epoch, attach, mirror)
            if was_on:
                self._append(_Logged(entry, (), 0))
            else:
                self._begin(job)
                if not self._needs_seed:
                    self._append(_Logged(entry, (), 0))
        self._wake()

    def record(self, entry: Entry, buffers: Sequence[Buffer]) -> None:
        """Records a mutation."""
        if self.target is None:
            return
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._lock:
            if self.target is None:
                return
            self._append(_Logged(entry, buffers, num_bytes))
        self._wake()

    def mark_unrepeatable(self) -> None:
        """Records a mutation that cannot be replayed exactly: the mirror is seeded again."""
        with self._lock:
            self._drop_entries()
            self._end += 1
            self._first = self._next = self._end
        self._wake()

    def job_ended(self) -> None:
        """Records that the job ended."""
        with self._lock:
            self._clear_target()
        self._wake()

    # Called by the threads that reply.

    def defer(
        self,
        session: Session,
        envelope: messages.Envelope,
        reply: Reply,
        *,
        is_error: bool = False,
    ) -> bool:
        """Defers a reply if it must wait for the mirror; False if it may be sent now.

        Raises:
          ResourceExhaustedError: Too many replies wait; the request may be repeated.
        """
        if self.target is None:
            return False
        with self._lock:
            if self.target is None:
                return False
            is_change = not is_error and _is_change(envelope.body)
            is_behind = session.identity in self._waiting
            if not is_behind and not (is_change and self._end > self._confirmed):
                return False
            if len(self._deferred) >= _MOST_DEFERRED:
                raise errors.ResourceExhaustedError(
                    f"/job:ps/task:{self._index} has {_MOST_DEFERRED} replies that wait for its "
                    "mirror. Restart the mirror, and repeat the request."
                )
            position = self._end if is_change else self._deferred[-1].position
            self._deferred.append(_Deferred(position, session, envelope, reply))
            self._waiting[session.identity] += 1
            return True

    @property
    def num_deferred(self) -> int:
        """The number of deferred replies."""
        return len(self._deferred)

    # Called by the thread that sends to the mirror.

    @property
    def needs_seed(self) -> bool:
        """Whether the mirror needs a snapshot before it can follow."""
        return self._needs_seed

    def expect(self, job: str, position: int) -> None:
        """Records that a job was recovered from the mirror, which expects `position` next."""
        with self._lock:
            self._expected = job, position

    def resume(self, position: int) -> bool:
        """Continues at the position that the mirror expects; False if it must be seeded."""
        with self._lock:
            if self._needs_seed or not self._first <= position <= self._end:
                self._drop_entries()
                return False
            self._confirm(position)
            self._next = position
            self.state = State.IN_SYNC
            return True

    def begin_seed(self) -> int:
        """Records a cut, which stands for all entries so far; the write lock is held.

        Returns:
          The position of the first entry that is not in the cut.
        """
        with self._lock:
            self._drop_entries()
            self._needs_seed = False
            self.state = State.SEEDING
            return self._end

    def end_seed(self, position: int) -> bool:
        """Records that the mirror has loaded a cut; False if later entries were dropped."""
        with self._lock:
            if self._needs_seed:
                return False
            self._confirm(position)
            self.state = State.IN_SYNC
            return True

    def take(self, most: int, most_bytes: int) -> Batch | None:
        """Returns the next entries to send; None if there are none."""
        with self._lock:
            start = self._next - self._first
            taken: list[_Logged] = []
            num_bytes = 0
            for logged in itertools.islice(self._entries, start, start + most):
                if taken and num_bytes + logged.num_bytes > most_bytes:
                    break
                taken.append(logged)
                num_bytes += logged.num_bytes
            if not taken:
                return None
            position = self._next
            self._next += len(taken)
        buffers = [buffer for logged in taken for buffer in logged.buffers]
        return Batch(position, [logged.entry for logged in taken], buffers)

    def confirm(self, position: int) -> bool:
        """Sends the replies that waited for entries before `position`.

        Returns:
          Whether the mirror makes progress: it confirmed new entries, or all of them.
        """
        with self._lock:
            before = self._confirmed
            self._confirm(position)
            return self._confirmed > before or self._confirmed >= self._end

    def mark_unreachable(self, state: State = State.UNREACHABLE) -> None:
        """Records that the mirror cannot be reached."""
        with self._lock:
            if self.target is not None:
                self.state = state
                self._limit_entries()

    # Under the lock.

    def _begin(self, job: str) -> None:
        self._drop_entries()
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == job and expected[1] >= self._end:
            self._end = expected[1]
            self._needs_seed = False
        self._first = self._next = self._confirmed = self._end
        self.state = State.UNREACHABLE

    def _clear_target(self) -> None:
        """Sends all deferred replies: the state that could be lost was dropped."""
        self.target = None
        self.state = State.OFF
        self._drop_entries()
        self._confirm(self._end)

    def _append(self, logged: _Logged) -> None:
        self._end += 1
        if self._needs_seed:
            # The next cut contains it.
            self._first = self._next = self._end
            return
        self._entries.append(logged)
        self._num_bytes += logged.num_bytes
        if self.state is State.UNREACHABLE:
            self._limit_entries()

    def _limit_entries(self) -> None:
        if len(self._entries) > _MOST_KEPT or self._num_bytes > _MOST_KEPT_BYTES:
            self._drop_entries()

    def _drop_entries(self) -> None:
        self._entries.clear()
        self._num_bytes = 0
        self._first = self._next = self._end
        self._needs_seed = True

    def _confirm(self, position: int) -> None:
        while self._entries and self._first < position:
            self._num_bytes -= self._entries.popleft().num_bytes
            self._first += 1
        self._confirmed = max(self._confirmed, position)
        while self._deferred and self._deferred[0].position <= self._confirmed:
            _, session, envelope, reply = self._deferred.popleft()
            self._waiting[session.identity] -= 1
            if not self._waiting[session.identity]:
                del self._waiting[session.identity]
            self._send(session, envelope, *reply)


def _is_change(body: messages.Body) -> bool:
    if isinstance(body, messages.Exchange):
        return bool(body.pushes)
    return isinstance(body, _DEFERRED)
