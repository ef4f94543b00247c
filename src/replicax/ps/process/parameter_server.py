"""What a parameter server process runs: a store behind a socket, with a lane for slow work."""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicax.foundation import errors
from replicax.protocol import error_replies, messages
from replicax.protocol.tasks import Task, new_incarnation
from replicax.ps.process.mirror_copies import Replicas
from replicax.ps.process.mirror_log import MirrorLog
from replicax.ps.process.mirror_recovery import Returning
from replicax.ps.process.mirroring import Mirroring
from replicax.ps.process.snapshots import DEFAULT_EVERY_S, Snapshots
from replicax.ps.store.master_record import PromiseFile
from replicax.ps.store.service import ParameterStore
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.service import Service
from replicax.transport.sessions import Session

_log = logging.getLogger(__name__)

# What a session may say while slow work of its own is going on: it concerns no part.
_AT_ANY_TIME = (messages.Ping, messages.Fence)
# Requests that wait in the slow lane; their buffers are in memory.
_LONGEST_LANE = 1_000
_JOIN_SECONDS = 5.0
# Beside the snapshots: whom the server obeys.
_PROMISE = "promise.json"

_Request = tuple[Session, messages.Envelope, Sequence[memoryview]]
_Answer = tuple[messages.Body, Sequence[Any]]


class ParameterServerTask:
    """One parameter server: it listens from `start` until it is closed.

    Filling a part of 5 GB, or compiling an optimizer, takes seconds. A thread of its own does
    such work, one request after the other, so that training and beats go on. Requests of one
    session still take effect in the order in which they were sent.

    When the lease of its job runs out, `run_forever` returns, and `ending` says why: a process
    that nobody needs ends itself. Snapshots of the job stay for the process that follows.

    Args:
      index: Its index in the job.
      location: Where to listen; the place is taken at once.
      keys: What to prove with who listens.
      snapshots: The directory where it keeps snapshots, and starts from them; None for none.
      snapshot_every: The seconds between two snapshots.
    """

    def __init__(
        self,
        index: int,
        location: Location,
        *,
        keys: Keys | None = None,
        snapshots: Path | None = None,
        snapshot_every: float = DEFAULT_EVERY_S,
    ) -> None:
        self._task = Task("ps", index)
        self._log = MirrorLog(index, self._answer_late, self._wake)
        self._promises = None if snapshots is None else PromiseFile(snapshots / _PROMISE)
        self._store = ParameterStore(
            index,
            is_saved=snapshots is not None,
            journal=self._log,
            promises=self._promises,
            is_connected=lambda incarnation: self._service.has_session("coordinator", incarnation),
        )
        self._replicas = Replicas(index)
        self._directory = snapshots
        self._snapshot_every_s = snapshot_every
        self._snapshots: Snapshots | None = None
        self._ending: str | None = None
        self._ended = threading.Event()
        self._lane: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lane_thread = threading.Thread(
            target=self._work, name=f"replicax-ps-{index}-slow", daemon=True
        )
        # Requests in the lane, by connection. `_lock` protects it, and is never held while a
        # request is handled.
        self._lock = threading.Lock()
        self._waiting: collections.Counter[bytes] = collections.Counter()
        incarnation = new_incarnation()
        self._mirroring = Mirroring(self._task, self._store, keys, incarnation, self._log)
        self._returning = Returning(
            self._task,
            self._store,
            self._log,
            keys,
            incarnation,
            self._respond,
            self._mirroring.reached,
        )
        self._service = Service(
            location,
            self._task,
            self._handle,
            keys,
            incarnation,
            on_idle=self._expire,
            on_failed=self._fail,
        )

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._service.address

    @property
    def ending(self) -> str | None:
        """Why it has ended itself; None if it has not."""
        return self._ending

    def start(self) -> None:
        """Begins to answer, once it has restored what another process has left."""
        try:
            if self._directory is not None and self._promises is not None:
                self._snapshots = Snapshots(
                    self._store,
                    self._directory,
                    self._snapshot_every_s,
                    f"replicax-ps-{self._task.index}",
                    self._is_making,
                )
                # The directory is this process's own by now.
                self._promises.read()
                self._snapshots.restore()
                self._snapshots.start()
            self._lane_thread.start()
            self._service.start()
        except BaseException:
            self.close()
            raise

    def run_forever(self) -> None:
        """Returns when the task was interrupted or closed; others do the work."""
        while not self._ended.wait(timeout=60.0):
            pass

    def interrupt(self) -> None:
        """Makes `run_forever` return; may be called from anywhere, any number of times."""
        self._ended.set()

    def close(self) -> None:
        """Listens no more; again is harmless."""
        self._ended.set()
        self._lane.put(None)
        self._returning.close()
        self._mirroring.close()
        self._service.close()
        if self._lane_thread.ident is not None:
            self._lane_thread.join(_JOIN_SECONDS)
        self._replicas.clear()
        if self._snapshots is not None:
            # Last: nothing can change any more.
            self._snapshots.close()

    def _handle(
        self, session: Session, envelope: messages.Envelope, buffers: Sequence[memoryview]
    ) -> _Answer | None:
        """Answers in the thread of the socket, or leaves the request to others."""
        if self._returning.takes((session, envelope, buffers)):
            return None
        key = _key(session)
        if self._is_quick(key, envelope.body):
            return self._answer(session, envelope, buffers)
        with self._lock:
            if self._waiting.total() >= _LONGEST_LANE:
                raise errors.ResourceExhaustedError(
                    f"{self._task} keeps at most {_LONGEST_LANE} slow requests waiting",
                    f"{session} sent one more",
                    "Wait for answers before sending more.",
                )
            self._waiting[key] += 1
        self._lane.put((session, envelope, buffers))
        return None

    def _is_quick(self, key: bytes, body: messages.Body) -> bool:
        if isinstance(body, _AT_ANY_TIME):
            return True
        is_slow = isinstance(body, self._store.SLOW + self._replicas.SLOW) or (
            isinstance(body, messages.Replicate) and body.is_slow
        )
        with self._lock:
            return not is_slow and not self._waiting[key]

    def _answer(
        self, session: Session, envelope: messages.Envelope, buffers: Sequence[memoryview]
    ) -> _Answer | None:
        """Returns the answer; None if it waits for the mirror."""
        if session.role == "ps":
            return self._replicas.handle(session, envelope, buffers, self._log.target)
        try:
            body, found = self._store.handle(
                session.role,
                session.incarnation,
                envelope.body,
                buffers,
                job=envelope.job,
                epoch=envelope.epoch,
                now=time.monotonic(),
            )
        except errors.DistributeError as error:
            refusal = error_replies.from_error(error), ()
            if self._log.hold(session, envelope, refusal, is_refusal=True):
                return None
            raise
        if isinstance(body, messages.Pong):
            body = messages.Pong(body.progress, body.figures | self._figures())
        elif isinstance(body, messages.Attached):
            self._replicas.clear(but=envelope.job)
            if self._log.target is not None:
                self._mirroring.start()
        elif isinstance(envelope.body, messages.Detach):
            self._replicas.clear(but=self._store.job)
        return None if self._log.hold(session, envelope, (body, found)) else (body, found)

    def _figures(self) -> dict[str, int | float]:
        """Returns what the store does not know."""
        found: dict[str, int | float] = {
            "bytes_received": self._service.num_bytes_received,
            "bytes_sent": self._service.num_bytes_sent,
        }
        if self._snapshots is not None:
            found |= self._snapshots.figures()
        if self._log.target is not None:
            found |= {"mirror_state": int(self._log.state), "mirror_lag": self._log.num_held}
            found["mirror_alone_s"] = self._mirroring.alone_s
            found |= self._replicas.figures()
        return found

    def _work(self) -> None:
        """The lane: one request after the other, in order of arrival."""
        while (request := self._lane.get()) is not None:
            self._respond(request)
            with self._lock:
                self._waiting -= collections.Counter([_key(request[0])])

    def _respond(self, request: _Request) -> None:
        """Answers from another thread than that of the socket."""
        session, envelope, _ = request
        answer: _Answer | None
        try:
            answer = self._answer(*request)
        except Exception as error:
            if not isinstance(error, errors.DistributeError):
                _log.exception("%s could not answer %s", self._task, session)
            answer = error_replies.from_error(error), ()
        # It goes before the way is free for quick requests of this session.
        if answer is not None:
            self._answer_late(session, envelope, *answer)

    def _answer_late(
        self,
        session: Session,
        envelope: messages.Envelope,
        body: messages.Body,
        buffers: Sequence[Any],
    ) -> None:
        self._service.reply(session, envelope, body, buffers)

    def _wake(self) -> None:
        self._mirroring.wake()

    def _is_making(self) -> bool:
        with self._lock:
            return self._waiting.total() > 0

    def _fail(self, why: str) -> None:
        self._ending = why
        self.interrupt()

    def _expire(self, now: float) -> None:
        self._store.expire(now)
        expired = self._store.expired
        if self._ending is None and expired is not None and self._store.job is None:
            self._ending = f"the lease of job {expired!r} ran out"
            _log.warning("%s: %s; its variables are gone from memory", self._task, self._ending)
            self._replicas.clear()
            self.interrupt()


def _key(session: Session) -> bytes:
    """What requests have in common that take effect in the order in which they came.

    Those of a server concern one copy, whichever process of that server sends them.
    """
    return b"ps-%d" % session.task if session.role == "ps" else session.identity
