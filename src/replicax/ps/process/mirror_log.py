"""What the mirror of a parameter server has not confirmed yet, and the answers that wait for it.

Pure: no threads of its own, no sockets, no clock.

Note [No acknowledged change on one server only]
    A change is made, put into the log, and told to the mirror; who asked for it gets its answer
    when the mirror has confirmed it. Changes have places, counted without a gap for as long as
    the process lives, so that the mirror makes each of them once, in order. Answers leave in the
    order in which they were given; a session that waits for one gets all later ones after it.
    Where the two may differ, the mirror gets everything anew: a cut stands for all changes
    before it. Signs of life, fences and words about the job wait for nobody; the
    coordinator says them again to a server that comes back.
"""

from __future__ import annotations

import collections
import enum
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.ps.store import jobs
from replicax.ps.store.journal import Change
from replicax.transport.sessions import Session

Answer = tuple[messages.Body, Sequence[Any]]
Send = Callable[..., None]

# Requests whose answers wait for the mirror; and exchanges that change something.
_HELD = (
    messages.CreatePart,
    messages.DropParts,
    messages.RegisterOptimizer,
    messages.FlushGradients,
)
# Changes that are kept for a mirror that is away; with more of them it gets everything anew.
_KEPT_CHANGES = 10_000
_KEPT_BYTES = 64 << 20
# Answers that wait. The coordinator stops everything when a mirror is lost, long before.
_MOST_HELD = 20_000


class State(enum.IntEnum):
    """How it stands with the mirror; the numbers are what `Pong` says."""

    OFF = 0  # The job wants none.
    AWAY = 1  # It cannot be reached, or has not joined the job yet.
    SEEDING = 2  # It is given everything.
    IN_STEP = 3  # It follows.
    FENCED = 4  # It follows another process, which has taken the place of this one.


class Batch(NamedTuple):
    """Changes to be told: the place of the first, and each with its buffers."""

    position: int
    changes: list[Change]
    buffers: list[Any]


class Target(NamedTuple):
    """Whom to tell: the job, what the coordinator said, and the index of the mirror."""

    job: str
    epoch: int
    attach: messages.Attach
    mirror: int


class _Entry(NamedTuple):
    change: Change
    buffers: Sequence[Any]
    num_bytes: int


class _Held(NamedTuple):
    position: int
    session: Session
    envelope: messages.Envelope
    answer: Answer


class MirrorLog:
    """The journal of one server's store; see Note [No acknowledged change on one server only].

    Args:
      index: The index of the server.
      send: Sends a late answer: (session, envelope, body, buffers). It does not wait.
      wake: Called when there is something to tell, or nothing any more. It does not wait.

    Attributes:
      state: How it stands with the mirror.
    """

    def __init__(self, index: int, send: Send, wake: Callable[[], None]) -> None:
        self._index = index
        self._send = send
        self._wake = wake
        # Taken after `changing` of the store; nothing is waited for while it is held.
        self._lock = threading.Lock()
        self.state = State.OFF
        self._target: Target | None = None
        # A job that was fetched from the mirror, and the place of its next change.
        self._expected: tuple[str, int] | None = None
        # The place of the first entry, of the next to be told, of the next to be made; and up to
        # which the mirror has confirmed.
        self._entries: collections.deque[_Entry] = collections.deque()
        self._first = self._next = self._end = self._confirmed = 0
        self._num_bytes = 0
        # Whether the mirror must get everything.
        self._needs_seed = True
        self._held: collections.deque[_Held] = collections.deque()
        # How many of them each connection waits for.
        self._waiting: collections.Counter[bytes] = collections.Counter()

    # What the store says, while it holds `changing`; see `journal.Journal`.

    def attached(self, job: str, attach: messages.Attach, change: Change) -> None:
        """A coordinator has taken the server into its job."""
        with self._lock:
            if not jobs.is_mirrored(attach):
                self._end_target()
                return
            mirror = (self._index + 1) % len(attach.servers)
            was_on = self._target is not None and self._target.job == job
            self._target = Target(job, change.epoch, attach, mirror)
            if was_on:
                self._append(_Entry(change, (), 0))
            else:
                self._begin(job)
                if not self._needs_seed:
                    self._append(_Entry(change, (), 0))
        self._wake()

    def note(self, change: Change, buffers: Sequence[Any]) -> None:
        """Something was changed."""
        if self._target is None:
            return
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._lock:
            if self._target is None:
                return
            self._append(_Entry(change, buffers, num_bytes))
        self._wake()

    def doubt(self) -> None:
        """Something was changed that cannot be repeated exactly."""
        with self._lock:
            self._forget_entries()
            self._end += 1
            self._first = self._next = self._end
        self._wake()

    def ended(self) -> None:
        """The job is over; nobody has to be told any more."""
        with self._lock:
            self._end_target()
        self._wake()

    # What those say who answer.

    def hold(
        self,
        session: Session,
        envelope: messages.Envelope,
        answer: Answer,
        *,
        is_refusal: bool = False,
    ) -> bool:
        """Keeps an answer back if it must wait; False if it may leave now.

        Raises:
          ResourceExhaustedError: Too many wait; this one may be asked for again.
        """
        if self._target is None:
            return False
        with self._lock:
            if self._target is None:
                return False
            needs = not is_refusal and _is_change(envelope.body)
            is_behind = session.identity in self._waiting
            if not is_behind and not (needs and self._end > self._confirmed):
                return False
            if len(self._held) >= _MOST_HELD:
                raise self._too_many()
            position = self._end if needs else self._held[-1].position
            self._held.append(_Held(position, session, envelope, answer))
            self._waiting[session.identity] += 1
            return True

    @property
    def num_held(self) -> int:
        """How many answers wait."""
        return len(self._held)

    # What the thread says that talks to the mirror.

    @property
    def target(self) -> Target | None:
        """Whom to tell; None if nobody."""
        return self._target

    @property
    def needs_seed(self) -> bool:
        """Whether the mirror must get everything before it can follow."""
        return self._needs_seed

    def expect(self, job: str, position: int) -> None:
        """Notes that a job was fetched from the mirror, which follows from a place on."""
        with self._lock:
            self._expected = job, position

    def resume(self, position: int) -> bool:
        """Goes on where the mirror is; False if it must get everything."""
        with self._lock:
            if self._needs_seed or not self._first <= position <= self._end:
                self._forget_entries()
                return False
            self._confirm(position)
            self._next = position
            self.state = State.IN_STEP
            return True

    def begin_seed(self) -> int:
        """A cut was taken at this moment (`changing` is held): it stands for all before it.

        Returns:
          The place of the first change that is not in it.
        """
        with self._lock:
            self._forget_entries()
            self._needs_seed = False
            self.state = State.SEEDING
            return self._end

    def end_seed(self, position: int) -> bool:
        """The mirror has taken a cut; False if changes after it are lost, so it needs another."""
        with self._lock:
            if self._needs_seed:
                return False
            self._confirm(position)
            self.state = State.IN_STEP
            return True

    def take(self, most: int, most_bytes: int) -> Batch | None:
        """Returns changes to be told next; None if there are none."""
        with self._lock:
            start = self._next - self._first
            taken: list[_Entry] = []
            num_bytes = 0
            for entry in itertools.islice(self._entries, start, start + most):
                if taken and num_bytes + entry.num_bytes > most_bytes:
                    break
                taken.append(entry)
                num_bytes += entry.num_bytes
            if not taken:
                return None
            position = self._next
            self._next += len(taken)
        buffers = [buffer for entry in taken for buffer in entry.buffers]
        return Batch(position, [entry.change for entry in taken], buffers)

    def confirm(self, position: int) -> bool:
        """The mirror has made all changes before a place: answers that waited for it leave.

        Returns:
          Whether it goes on: some of them were not confirmed before, or none are left.
        """
        with self._lock:
            before = self._confirmed
            self._confirm(position)
            return self._confirmed > before or self._confirmed >= self._end

    def lose(self, state: State = State.AWAY) -> None:
        """The mirror cannot be reached."""
        with self._lock:
            if self._target is not None:
                self.state = state
                self._bound()

    # Under the lock.

    def _begin(self, job: str) -> None:
        self._forget_entries()
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] == job and expected[1] >= self._end:
            self._end = expected[1]
            self._needs_seed = False
        self._first = self._next = self._confirmed = self._end
        self.state = State.AWAY

    def _end_target(self) -> None:
        """Lets all answers go: there is nothing left that could be lost."""
        self._target = None
        self.state = State.OFF
        self._forget_entries()
        self._confirm(self._end)

    def _append(self, entry: _Entry) -> None:
        self._end += 1
        if self._needs_seed:
            # The cut will stand for it.
            self._first = self._next = self._end
            return
        self._entries.append(entry)
        self._num_bytes += entry.num_bytes
        if self.state is State.AWAY:
            self._bound()

    def _bound(self) -> None:
        if len(self._entries) > _KEPT_CHANGES or self._num_bytes > _KEPT_BYTES:
            self._forget_entries()

    def _forget_entries(self) -> None:
        self._entries.clear()
        self._num_bytes = 0
        self._first = self._next = self._end
        self._needs_seed = True

    def _confirm(self, position: int) -> None:
        while self._entries and self._first < position:
            self._num_bytes -= self._entries.popleft().num_bytes
            self._first += 1
        self._confirmed = max(self._confirmed, position)
        while self._held and self._held[0].position <= self._confirmed:
            held = self._held.popleft()
            identity = held.session.identity
            self._waiting[identity] -= 1
            if not self._waiting[identity]:
                del self._waiting[identity]
            self._send(held.session, held.envelope, *held.answer)

    def _too_many(self) -> errors.ResourceExhaustedError:
        return errors.ResourceExhaustedError(
            f"/job:ps/task:{self._index} keeps at most {_MOST_HELD} answers until its mirror "
            "has confirmed them",
            "as many wait",
            "Bring the mirror back, and ask again.",
        )


def _is_change(body: messages.Body) -> bool:
    if isinstance(body, messages.Exchange):
        return bool(body.pushes)
    return isinstance(body, _HELD)
