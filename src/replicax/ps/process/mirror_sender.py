"""Sends the mutations of a parameter server to its mirror, in a thread of its own.

The socket thread never waits for a mirror: two servers may be the mirrors of each other.

Note [A silent mirror]
    The mirror must send its next reply within a fixed time, whatever else changes meanwhile;
    otherwise it counts as unreachable and is contacted again. The server reports in its heartbeats
    for how long the mirror has confirmed nothing (`mirror_unconfirmed_s`), so that the coordinator
    can fail work that would wait forever.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from typing import IO

from replicax.foundation import errors, runtime
from replicax.protocol import error_replies, messages
from replicax.protocol.tasks import Task
from replicax.ps.process import snapshot_files
from replicax.ps.process.mirror_log import Batch, MirrorLog, State, Target
from replicax.ps.store import jobs, journal
from replicax.ps.store.service import ParameterStore
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.keys import Keys
from replicax.transport.streams import network as streams

PIECE_BYTES = 8 << 20
# Messages in flight, and the entries of one of them.
_MOST_IN_FLIGHT = 8
_MOST_CHANGES = 256
_MOST_BYTES = 32 << 20
# How often to check that an idle mirror has not restarted, and to retry an unreachable one.
_HEARTBEAT_S = 0.5
_RETRY_S = 0.1
_IDLE_S = 60.0
# How long to wait for a snapshot that is being saved.
_CUT_S = 60.0
_JOIN_S = 5.0

_log = logging.getLogger(__name__)


class MirrorSender:
    """Keeps the mirror of one server in sync while the server's job has mirrors.

    Args:
      task: The server.
      store: Its store.
      keys: The certificates of this task.
      incarnation: The incarnation of this process.
      log: The entries that the mirror has not confirmed.
    """

    def __init__(
        self, task: Task, store: ParameterStore, keys: Keys | None, incarnation: int, log: MirrorLog
    ) -> None:
        self._task = task
        self._store = store
        self._keys = keys
        self._incarnation = incarnation
        self._log = log
        self._closing = runtime.Event()
        self._wakeup = streams.NETWORK.wakeup()
        self._lock = runtime.Lock()
        self._thread: runtime.Thread | None = None
        # The job in which the mirror follows this process; before, it may follow another one.
        self._reached: str | None = None
        # The job in which another incarnation has replaced this one.
        self._fenced: str | None = None
        # See Note [A silent mirror]: the timeout of a reply, when the next one is due, and when the
        # mirror last received or confirmed something.
        self._reply_timeout_s = jobs.DEFAULT_MIRROR_REPLY_S
        self._due_s = self._progress_s = runtime.now()

    @property
    def unconfirmed_s(self) -> float:
        """The seconds since the mirror's last confirmation; 0 within the timeout of a reply."""
        seconds = runtime.now() - self._progress_s
        return seconds if seconds > self._reply_timeout_s else 0.0

    def start(self) -> None:
        """Starts the thread. Idempotent."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._mark_progress()
                name = f"replicax-ps-{self._task.index}-mirror"
                self._thread = runtime.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Wakes the thread; thread-safe."""
        self._wakeup.set()

    def set_reached(self, job: str) -> None:
        """Records that the mirror follows this process in a job."""
        self._reached = job

    def close(self) -> None:
        """Stops the thread; deferred replies are not sent."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        self._wakeup.set()
        if thread is not None:
            thread.join(_JOIN_S)
        self._wakeup.close()

    # The thread.

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wakeup.clear()
            target = self._log.target
            if target is None or target.job == self._fenced:
                self._wait(_IDLE_S)
                continue
            self._reply_timeout_s = jobs.mirror_reply_timeout_of(target.attach)
            self._mark_progress()
            with self._channel(target) as channel:
                self._serve(channel, target)

    def _serve(self, channel: Channel, target: Target) -> None:
        """Serves the mirror in one job; retries after every failure."""
        mirror = Task("ps", target.mirror)
        while not self._is_over(target):
            try:
                self._follow(channel, target.job)
            except errors.FencedError as error:
                self._fenced = target.job
                self._log.mark_unreachable(State.FENCED)
                _log.error("%s was replaced by another process: %s", self._task, error)
                return
            except (errors.DistributeError, OSError, snapshot_files.GivenUpError) as error:
                self._mark_unreachable(mirror, error)
            except Exception as error:
                # Without this thread, replies would be deferred forever.
                _log.exception("Replication to %s failed", mirror)
                self._mark_unreachable(mirror, error)
            channel.reset()
            self._closing.wait(_RETRY_S)

    def _mark_unreachable(self, mirror: Task, error: Exception) -> None:
        if self._log.state is State.IN_SYNC:
            text = "%s lost its mirror %s, and defers all replies to changes until it is back: %s"
            _log.warning(text, self._task, mirror, error)
        self._log.mark_unreachable()

    def _mark_progress(self) -> None:
        self._progress_s = runtime.now()

    def _restart_deadline(self) -> None:
        """Restarts the time within which the mirror must send its next reply."""
        self._due_s = runtime.now() + self._reply_timeout_s

    def _is_over(self, target: Target) -> bool:
        found = self._log.target
        is_same = found is not None and (found.job, found.mirror) == (target.job, target.mirror)
        return self._closing.is_set() or not is_same

    def _wait(self, seconds: float) -> bool:
        """Waits for a wakeup; returns whether there was one."""
        return self._wakeup.wait(seconds)

    @contextlib.contextmanager
    def _channel(self, target: Target) -> Iterator[Channel]:
        location = addresses.resolve(target.attach.servers[target.mirror], None, self._keys)
        mirror = Task("ps", target.mirror)
        with Channel(location, self._task, self._keys, self._incarnation, peer=mirror) as channel:

            def failure() -> Exception | None:
                if self._is_over(target):
                    text = f"The job of {self._task} has ended or has no mirror any more."
                    return errors.UnavailableError(text)
                return self._overdue(mirror) if runtime.now() > self._due_s else None

            channel.job = target.job
            channel.check_failure = failure
            yield channel

    def _overdue(self, mirror: Task) -> errors.DeadlineExceededError:
        return errors.DeadlineExceededError(
            f"{mirror} did not reply to {self._task}, whose mirror it is, within "
            f"{self._reply_timeout_s:g} s. Check its log, and the network between the two."
        )

    def _follow(self, channel: Channel, job: str) -> None:
        """Queries the position of the mirror, seeds it if needed, and sends it new entries."""
        target = self._log.target
        if target is None or target.job != job:
            return
        channel.epoch = target.epoch
        is_known = False
        with contextlib.suppress(errors.NotFoundError):
            self._restart_deadline()
            reply, _ = channel.request(messages.Replicate(0, 0), timeout=self._reply_timeout_s)
            assert isinstance(reply, messages.Replicated), reply
            is_known = self._log.resume(reply.position)
        if not is_known:
            self._seed(channel, job)
        self._reached = job
        self._replicate(channel)

    def _replicate(self, channel: Channel) -> None:
        """Sends new entries until the mirror must be seeded."""
        num_in_flight = 0
        while not self._log.needs_seed:
            self._wakeup.clear()
            if not num_in_flight:
                self._restart_deadline()
            while num_in_flight < _MOST_IN_FLIGHT and (batch := self._take()) is not None:
                self._post(channel, batch)
                num_in_flight += 1
            if not num_in_flight:
                if not self._wait(_HEARTBEAT_S):
                    self._restart_deadline()
                    channel.send(messages.Replicate(0, 0))
                    num_in_flight += 1
                if self._log.target is None or self._closing.is_set():
                    return
                continue
            # With no room in flight, new entries need no wakeup.
            wakeup = self._wakeup.fd if num_in_flight < _MOST_IN_FLIGHT else None
            found = channel.receive(self._reply_timeout_s, wakeup)
            if found is not None:
                num_in_flight -= 1
                self._restart_deadline()
                if self._log.confirm(_position(found[1])):
                    self._mark_progress()

    def _take(self) -> Batch | None:
        return self._log.take(_MOST_CHANGES, _MOST_BYTES)

    def _post(self, channel: Channel, batch: Batch) -> None:
        is_slow = any(isinstance(entry.body, self._store.SLOW) for entry in batch.entries)
        body = messages.Replicate(batch.position, len(batch.entries), is_slow)
        channel.send(body, [journal.encode(batch.entries), *batch.buffers])

    def _seed(self, channel: Channel, job: str) -> None:
        """Sends a snapshot of the store to the mirror, while the store serves requests."""
        with tempfile.TemporaryFile() as file:
            position, attach, total = self._cut_into(file, job)
            num_in_flight = 0
            self._restart_deadline()
            for offset in range(0, total, PIECE_BYTES):
                file.seek(offset)
                is_first = self._reached != job
                seed = messages.Seed(position, offset, total, is_first, attach)
                channel.send(seed, [file.read(PIECE_BYTES)])
                num_in_flight += 1
                is_last = offset + PIECE_BYTES >= total
                while num_in_flight >= (1 if is_last else _MOST_IN_FLIGHT):
                    found = channel.receive(self._reply_timeout_s)
                    if found is not None:
                        num_in_flight -= 1
                        if isinstance(found[1], messages.ErrorReply):
                            raise error_replies.to_error(found[1])
                        self._restart_deadline()
                        self._mark_progress()
        self._log.end_seed(position)
        _log.info("%s sent a snapshot of %d bytes to its mirror", self._task, total)

    def _cut_into(self, file: IO[bytes], job: str) -> tuple[int, messages.Attach, int]:
        """Writes a cut; returns its position, its `Attach` request, and its length."""
        taken: list[tuple[int, Target | None]] = []

        def on_cut() -> None:
            taken.append((self._log.begin_seed(), self._log.target))

        if not self._store.snapshot_lock.acquire(timeout=_CUT_S):
            text = f"Another snapshot of {self._task} takes more than {_CUT_S:g} s."
            raise errors.UnavailableError(text)
        try:
            cut = self._store.snapshot(on_cut)
            if cut is None:
                raise errors.UnavailableError(f"{self._task} is not attached to a job.")
            try:
                position, target = taken[0]
                if target is None or target.job != job:
                    raise errors.UnavailableError(f"{self._task} is attached to another job.")
                looked_s = runtime.now()

                def is_wanted(_: float) -> bool:
                    # The time of writing does not count as silence of the mirror.
                    nonlocal looked_s
                    before_s, looked_s = looked_s, runtime.now()
                    self._progress_s += looked_s - before_s
                    return not self._closing.is_set()

                return position, target.attach, snapshot_files.write(file, cut, is_wanted)
            finally:
                cut.close()
        finally:
            self._store.snapshot_lock.release()


def _position(reply: messages.Body) -> int:
    if isinstance(reply, messages.ErrorReply):
        raise error_replies.to_error(reply)
    assert isinstance(reply, messages.Replicated), reply
    return reply.position
