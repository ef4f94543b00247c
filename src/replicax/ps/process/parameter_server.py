"""The parameter server task: a store behind a socket, with a queue for slow requests."""

from __future__ import annotations

import collections
import logging
import queue
from collections.abc import Sequence
from pathlib import Path

from replicax.foundation import errors, runtime
from replicax.protocol import error_replies, messages
from replicax.protocol.codec import Buffer
from replicax.protocol.tasks import Task, new_incarnation
from replicax.ps.process.checkpoint_files import CheckpointFiles
from replicax.ps.process.master_record import MasterRecordFile
from replicax.ps.process.mirror_copies import MirrorCopies
from replicax.ps.process.mirror_log import MirrorLog
from replicax.ps.process.mirror_recovery import MirrorRecovery
from replicax.ps.process.mirror_sender import MirrorSender
from replicax.ps.process.snapshots import DEFAULT_EVERY_S, Snapshots
from replicax.ps.store.service import ParameterStore, Reply
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.service import Service, Session

_log = logging.getLogger(__name__)

# Requests that do not depend on slow requests of the same session.
_AT_ANY_TIME = (messages.Ping, messages.Fence)
# Slow requests in the queue; their buffers are in memory.
_MOST_SLOW_REQUESTS = 1_000
_JOIN_SECONDS = 5.0

_Request = tuple[Session, messages.Envelope, Sequence[memoryview]]


class ParameterServerTask:
    """One parameter server: it listens from `start` until it is closed.

    Initializing a part of 5 GB, or compiling an optimizer, takes seconds. A separate thread handles
    such requests one after the other, so that training and heartbeats continue. Requests of one
    session still take effect in the order in which they were sent.

    When the lease of its job expires, `run_forever` returns, and `ending` is the reason. Snapshots
    of the job remain for the next process.

    Args:
      index: Its index in the job.
      location: The address to listen on; bound at once.
      keys: The certificates of this task.
      snapshots: The directory for snapshots, from which the task also restores; None for none.
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
        self._log = MirrorLog(index, self._send_reply, self._wake_sender)
        self._master_record = None if snapshots is None else MasterRecordFile(snapshots)
        self._store = ParameterStore(
            index,
            is_saved=snapshots is not None,
            journal=self._log,
            master_record=self._master_record,
            checkpoints=CheckpointFiles(index),
            is_connected=lambda incarnation: self._service.has_session("coordinator", incarnation),
        )
        self._copies = MirrorCopies(index)
        self._slow_kinds = self._store.SLOW + self._copies.SLOW
        self._directory = snapshots
        self._snapshot_every_s = snapshot_every
        self._snapshots: Snapshots | None = None
        self._ending: str | None = None
        self._ended = runtime.Event()
        self._slow_requests: queue.SimpleQueue[_Request | None] = runtime.SimpleQueue()
        self._slow_thread = runtime.Thread(
            target=self._handle_slow_requests, name=f"replicax-ps-{index}-slow", daemon=True
        )
        # The number of slow requests by session. `_lock` protects it, and is never held while a
        # request is handled.
        self._lock = runtime.Lock()
        self._num_slow: collections.Counter[bytes] = collections.Counter()
        incarnation = new_incarnation()
        self._mirror = MirrorSender(self._task, self._store, keys, incarnation, self._log)
        self._recovery = MirrorRecovery(
            self._task,
            self._store,
            self._log,
            keys,
            incarnation,
            self._respond,
            self._mirror.set_reached,
        )
        self._service = Service(
            location,
            self._task,
            self._receive,
            keys,
            incarnation,
            on_idle=self._expire,
            on_failed=self._fail,
        )

    @property
    def address(self) -> str:
        """The address it listens on."""
        return self._service.address

    @property
    def ending(self) -> str | None:
        """Why the task has stopped itself; None if it has not."""
        return self._ending

    def status(self) -> dict[str, object]:
        """Returns what it holds and has done, for those who observe it."""
        job = self._store.job
        return {
            "role": "ps",
            "state": "detached" if job is None else "ready",
            "address": self.address,
            "job": job,
            "counters": self._store.counters() | self._counters(),
            "waits_for": [],
        }

    def start(self) -> None:
        """Restores the last snapshot, if there is one, and starts to serve."""
        try:
            if self._directory is not None and self._master_record is not None:
                self._snapshots = Snapshots(
                    self._store,
                    self._directory,
                    self._snapshot_every_s,
                    f"replicax-ps-{self._task.index}",
                    self._is_creating,
                )
                # `Snapshots` has locked the directory.
                self._master_record.read()
                self._snapshots.restore()
                self._snapshots.start()
            self._slow_thread.start()
            self._service.start()
        except BaseException:
            self.close()
            raise

    def run_forever(self) -> None:
        """Blocks until the task is interrupted or closed."""
        while not self._ended.wait(timeout=60.0):
            pass

    def interrupt(self) -> None:
        """Makes `run_forever` return. Idempotent; thread-safe."""
        self._ended.set()

    def close(self) -> None:
        """Stops serving. Idempotent."""
        self._ended.set()
        self._slow_requests.put(None)
        self._recovery.close()
        self._mirror.close()
        self._service.close()
        if self._slow_thread.ident is not None:
            self._slow_thread.join(_JOIN_SECONDS)
        self._copies.clear()
        if self._snapshots is not None:
            # Last, when nothing changes any more.
            self._snapshots.close()

    def _receive(
        self, session: Session, envelope: messages.Envelope, buffers: Sequence[memoryview]
    ) -> Reply | None:
        """Handles a request in the socket thread, or leaves it to another thread."""
        is_attach = isinstance(envelope.body, messages.Attach)
        if is_attach and self._recovery.defer((session, envelope, buffers)):
            return None
        key = _key(session)
        if self._is_quick(key, envelope.body):
            return self._handle(session, envelope, buffers)
        with self._lock:
            if self._num_slow.total() >= _MOST_SLOW_REQUESTS:
                raise errors.ResourceExhaustedError(
                    f"{self._task} queues at most {_MOST_SLOW_REQUESTS} slow requests",
                    f"{session} sent one more",
                    "Wait for replies before sending more.",
                )
            self._num_slow[key] += 1
        self._slow_requests.put((session, envelope, buffers))
        return None

    def _is_quick(self, key: bytes, body: messages.Body) -> bool:
        if isinstance(body, _AT_ANY_TIME):
            return True
        is_slow = isinstance(body, self._slow_kinds) or (
            isinstance(body, messages.Replicate) and body.is_slow
        )
        with self._lock:
            return not is_slow and not self._num_slow[key]

    def _handle(
        self, session: Session, envelope: messages.Envelope, buffers: Sequence[memoryview]
    ) -> Reply | None:
        """Returns the reply to a request; None if it waits for the mirror."""
        if session.role == "ps":
            return self._copies.handle(session, envelope, buffers, self._log.target)
        try:
            body, found = self._store.handle(
                session.role,
                session.incarnation,
                envelope.body,
                buffers,
                job=envelope.job,
                epoch=envelope.epoch,
                now=runtime.now(),
            )
        except errors.DistributeError as error:
            reply = error_replies.from_error(error), ()
            if self._log.defer(session, envelope, reply, is_error=True):
                return None
            raise
        if isinstance(body, messages.Pong):
            body = messages.Pong(body.progress, body.counters | self._counters())
        elif isinstance(body, messages.Attached):
            self._copies.clear(but=envelope.job)
            if self._log.target is not None:
                self._mirror.start()
        elif isinstance(envelope.body, messages.Detach):
            self._copies.clear(but=self._store.job)
        if self._log.target is not None and self._log.defer(session, envelope, (body, found)):
            return None
        return body, found

    def _counters(self) -> dict[str, int | float]:
        """Returns the counters that are not those of the store."""
        found: dict[str, int | float] = {
            "bytes_received": self._service.num_bytes_received,
            "bytes_sent": self._service.num_bytes_sent,
        }
        if self._snapshots is not None:
            found |= self._snapshots.counters()
        if self._log.target is not None:
            found |= {"mirror_state": int(self._log.state), "mirror_lag": self._log.num_deferred}
            found["mirror_unconfirmed_s"] = self._mirror.unconfirmed_s
            found |= self._copies.counters()
        return found

    def _handle_slow_requests(self) -> None:
        while (request := self._slow_requests.get()) is not None:
            self._respond(request)
            with self._lock:
                self._num_slow -= collections.Counter([_key(request[0])])

    def _respond(self, request: _Request) -> None:
        """Handles a request in another thread than that of the socket."""
        session, envelope, _ = request
        reply: Reply | None
        try:
            reply = self._handle(*request)
        except Exception as error:
            if not isinstance(error, errors.DistributeError):
                _log.exception("%s could not handle a request of %s", self._task, session)
            reply = error_replies.from_error(error), ()
        # Before quick requests of this session are handled.
        if reply is not None:
            self._send_reply(session, envelope, *reply)

    def _send_reply(
        self,
        session: Session,
        envelope: messages.Envelope,
        body: messages.Body,
        buffers: Sequence[Buffer],
    ) -> None:
        self._service.reply(session, envelope, body, buffers)

    def _wake_sender(self) -> None:
        self._mirror.wake()

    def _is_creating(self) -> bool:
        with self._lock:
            return self._num_slow.total() > 0

    def _fail(self, why: str) -> None:
        self._ending = why
        self.interrupt()

    def _expire(self, now: float) -> None:
        self._store.expire(now)
        expired = self._store.expired
        if self._ending is None and expired is not None and self._store.job is None:
            self._ending = f"the lease of job {expired!r} expired"
            _log.warning("%s: %s; its variables were dropped from memory", self._task, self._ending)
            self._copies.clear()
            self.interrupt()


def _key(session: Session) -> bytes:
    """Returns a key of the requests that must take effect in order of arrival.

    Those of a server concern one copy, whatever its incarnation.
    """
    return b"ps-%d" % session.task if session.role == "ps" else session.identity
