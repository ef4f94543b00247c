"""Tells the mirror of a parameter server what is changed, in a thread of its own.

The thread of the socket never waits for a mirror: two servers may be the mirrors of each other.

Note [A mirror that is silent]
    The mirror owes its next answer by a fixed time, whatever else is changed meanwhile; then it
    counts as away, and is asked anew. For how long it has confirmed nothing, the server says with
    its beats (`mirror_alone_s`), so that the coordinator can end what would go on for ever.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from replicax.foundation import errors, lazy
from replicax.protocol import error_replies, messages
from replicax.protocol.tasks import Task
from replicax.ps.process import snapshot_files
from replicax.ps.process.mirror_log import Batch, MirrorLog, State, Target
from replicax.ps.store import jobs, journal
from replicax.ps.store.service import ParameterStore
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.keys import Keys
from replicax.transport.wakeup import Wakeup

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

PIECE_BYTES = 8 << 20
# Messages under way, and what one of them carries.
_WINDOW = 8
_MOST_CHANGES = 256
_MOST_BYTES = 32 << 20
# A mirror that has nothing to hear is asked so often whether it is still the same; one that is
# away, so often whether it is back.
_BEAT_S = 0.5
_RETRY_S = 0.1
_IDLE_S = 60.0
# A snapshot that is being saved is waited for so long.
_CUT_S = 60.0
_JOIN_S = 5.0

_log = logging.getLogger(__name__)


class Mirroring:
    """Keeps the mirror of one server in step, for as long as a job wants it.

    Args:
      task: The server.
      store: What it holds.
      keys: What it proves with who it is.
      incarnation: The life of its process: the mirror follows one at a time.
      log: What the mirror has not confirmed.
    """

    def __init__(
        self, task: Task, store: ParameterStore, keys: Keys | None, incarnation: int, log: MirrorLog
    ) -> None:
        self._task = task
        self._store = store
        self._keys = keys
        self._incarnation = incarnation
        self._log = log
        self._ending = threading.Event()
        self._wakeup = Wakeup()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # The job for which the mirror was reached; the first time, this process replaces others.
        self._reached: str | None = None
        # The job in which another process has replaced this one.
        self._fenced: str | None = None
        # See Note [A mirror that is silent]: what it is given for an answer, by when it owes the
        # next one, and when it last took or confirmed something.
        self._answer_s = jobs.DEFAULT_MIRROR_ANSWER_S
        self._due_s = self._moved_s = time.monotonic()

    @property
    def alone_s(self) -> float:
        """For how long the mirror has confirmed nothing; 0 while it still has time to."""
        seconds = time.monotonic() - self._moved_s
        return seconds if seconds > self._answer_s else 0.0

    def start(self) -> None:
        """Begins to tell; again is harmless."""
        with self._lock:
            if self._thread is None and not self._ending.is_set():
                self._note_moved()
                name = f"replicax-ps-{self._task.index}-mirror"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """There is something to tell, or nothing any more; from any thread."""
        self._wakeup.set()

    def reached(self, job: str) -> None:
        """Notes that this process is the one that the mirror follows."""
        self._reached = job

    def close(self) -> None:
        """Ends the thread; answers that wait are not sent."""
        with self._lock:
            self._ending.set()
            thread = self._thread
        self._wakeup.set()
        if thread is not None:
            thread.join(_JOIN_S)
        self._wakeup.close()

    # The thread.

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wakeup.clear()
            target = self._log.target
            if target is None or target.job == self._fenced:
                self._is_woken(_IDLE_S)
                continue
            self._answer_s = jobs.mirror_answer_of(target.attach)
            self._note_moved()
            with self._channel(target) as channel:
                self._serve(channel, target)

    def _serve(self, channel: Channel, target: Target) -> None:
        """Follows one job; whatever goes wrong with the mirror, it is tried again."""
        mirror = Task("ps", target.mirror)
        while not self._is_over(target):
            try:
                self._follow(channel, target.job)
            except errors.FencedError as error:
                self._fenced = target.job
                self._log.lose(State.FENCED)
                _log.error("%s was replaced, and may change nothing: %s", self._task, error)
                return
            except (errors.DistributeError, OSError, snapshot_files.GivenUpError) as error:
                self._lose(mirror, error)
            except Exception as error:
                # Whatever it is: without this thread answers would be held back for ever.
                _log.exception("%s could not be told what is changed", mirror)
                self._lose(mirror, error)
            channel.reset()
            self._ending.wait(_RETRY_S)

    def _lose(self, mirror: Task, error: Exception) -> None:
        if self._log.state is State.IN_STEP:
            text = "%s has lost its mirror %s, and acknowledges no change until it is back: %s"
            _log.warning(text, self._task, mirror, error)
        self._log.lose()

    def _note_moved(self) -> None:
        self._moved_s = time.monotonic()

    def _note_asked(self) -> None:
        """From now on the mirror owes an answer: the first one, or the next."""
        self._due_s = time.monotonic() + self._answer_s

    def _is_over(self, target: Target) -> bool:
        found = self._log.target
        is_same = found is not None and (found.job, found.mirror) == (target.job, target.mirror)
        return self._ending.is_set() or not is_same

    def _is_woken(self, seconds: float) -> bool:
        """Waits until there is something to do, or for some seconds."""
        return bool(zmq.zmq_poll([(self._wakeup.fd, 1)], int(seconds * 1e3)))

    @contextlib.contextmanager
    def _channel(self, target: Target) -> Iterator[Channel]:
        location = addresses.resolve(target.attach.servers[target.mirror], None, self._keys)
        mirror = Task("ps", target.mirror)
        with Channel(location, self._task, self._keys, self._incarnation, peer=mirror) as channel:

            def given_up() -> Exception | None:
                if self._is_over(target):
                    text = f"{self._task} does not need its mirror any more."
                    return errors.UnavailableError(text)
                return self._overdue(mirror) if time.monotonic() > self._due_s else None

            channel.job = target.job
            channel.check_failure = given_up
            yield channel

    def _overdue(self, mirror: Task) -> errors.DeadlineExceededError:
        return errors.DeadlineExceededError(
            f"{mirror} must answer {self._task} within {self._answer_s:g} s, as its mirror",
            "it has not",
            "Look into its log, and at the network between the two.",
        )

    def _follow(self, channel: Channel, job: str) -> None:
        """Finds out how far the mirror is, brings it up to date, and tells it what comes."""
        target = self._log.target
        if target is None or target.job != job:
            return
        channel.epoch = target.epoch
        is_known = False
        with contextlib.suppress(errors.NotFoundError):
            self._note_asked()
            answer, _ = channel.request(messages.Replicate(0, 0), timeout=self._answer_s)
            assert isinstance(answer, messages.Replicated), answer
            is_known = self._log.resume(answer.position)
        if not is_known:
            self._seed(channel, job)
        self._reached = job
        self._tell(channel)

    def _tell(self, channel: Channel) -> None:
        """Tells what comes, until the mirror needs everything anew."""
        num_asked = 0
        while not self._log.needs_seed:
            self._wakeup.clear()
            if not num_asked:
                self._note_asked()
            while num_asked < _WINDOW and (batch := self._take()) is not None:
                self._post(channel, batch)
                num_asked += 1
            if not num_asked:
                if not self._is_woken(_BEAT_S):
                    self._note_asked()
                    channel.send(messages.Replicate(0, 0))
                    num_asked += 1
                if self._log.target is None or self._ending.is_set():
                    return
                continue
            # With a full window there is nothing to be woken for.
            wakeup = self._wakeup.fd if num_asked < _WINDOW else None
            found = channel.receive(self._answer_s, wakeup)
            if found is not None:
                num_asked -= 1
                self._note_asked()
                if self._log.confirm(_position(found[1])):
                    self._note_moved()

    def _take(self) -> Batch | None:
        return self._log.take(_MOST_CHANGES, _MOST_BYTES)

    def _post(self, channel: Channel, batch: Batch) -> None:
        is_slow = any(isinstance(change.body, self._store.SLOW) for change in batch.changes)
        body = messages.Replicate(batch.position, len(batch.changes), is_slow)
        channel.send(body, [journal.encode(batch.changes), *batch.buffers])

    def _seed(self, channel: Channel, job: str) -> None:
        """Gives the mirror all that the store holds, while that goes on."""
        with tempfile.TemporaryFile() as file:
            position, attach, total = self._cut_into(file, job)
            num_asked = 0
            self._note_asked()
            for offset in range(0, total, PIECE_BYTES):
                file.seek(offset)
                is_first = self._reached != job
                seed = messages.Seed(position, offset, total, is_first, attach)
                channel.send(seed, [file.read(PIECE_BYTES)])
                num_asked += 1
                while num_asked >= _WINDOW or (num_asked and offset + PIECE_BYTES >= total):
                    found = channel.receive(self._answer_s)
                    if found is not None:
                        num_asked -= 1
                        if isinstance(found[1], messages.ErrorReply):
                            raise error_replies.to_error(found[1])
                        self._note_asked()
                        self._note_moved()
        self._log.end_seed(position)
        _log.info("%s has given its mirror %d bytes", self._task, total)

    def _cut_into(self, file: IO[bytes], job: str) -> tuple[int, messages.Attach, int]:
        """Writes a cut; returns its place, what the coordinator had said then, and its length."""
        taken: list[tuple[int, Target | None]] = []

        def on_cut() -> None:
            taken.append((self._log.begin_seed(), self._log.target))

        if not self._store.cutting.acquire(timeout=_CUT_S):
            raise errors.UnavailableError(f"A snapshot of {self._task} takes too long.")
        try:
            cut = self._store.snapshot(on_cut)
            if cut is None:
                raise errors.UnavailableError(f"{self._task} holds nothing.")
            try:
                position, target = taken[0]
                if target is None or target.job != job:
                    raise errors.UnavailableError(f"{self._task} holds another job.")
                looked_s = time.monotonic()

                def is_wanted(_: float) -> bool:
                    # Time that the mirror does not owe.
                    nonlocal looked_s
                    before_s, looked_s = looked_s, time.monotonic()
                    self._moved_s += looked_s - before_s
                    return not self._ending.is_set()

                return position, target.attach, snapshot_files.write(file, cut, is_wanted)
            finally:
                cut.close()
        finally:
            self._store.cutting.release()


def _position(answer: messages.Body) -> int:
    if isinstance(answer, messages.ErrorReply):
        raise error_replies.to_error(answer)
    assert isinstance(answer, messages.Replicated), answer
    return answer.position
