"""Recovers the state of a restarted parameter server from its mirror."""

from __future__ import annotations

import collections
import logging
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from replicax.foundation import errors, runtime
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.process import snapshot_files
from replicax.ps.process.mirror_log import MirrorLog
from replicax.ps.store import jobs
from replicax.ps.store.service import ParameterStore
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.keys import Keys
from replicax.transport.service import Session

Request = tuple[Session, messages.Envelope, Sequence[memoryview]]

# How long to retry an unreachable mirror, at most as long as a lease.
_UNREACHABLE_S = 30.0
_RETRY_S = 0.1
_REPLY_S = 60.0
_JOIN_S = 5.0

_log = logging.getLogger(__name__)


class MirrorRecovery:
    """Defers `Attach` requests while the state that they need is fetched from the mirror.

    It has its own thread while it fetches: the mirror may need the slow-request queue of this
    server at the same time, for its own recovery.

    Args:
      task: The server.
      store: Its store: empty, or restored from an older snapshot.
      log: Records the position from which the mirror continues.
      keys: The certificates of this task.
      incarnation: The incarnation of this process.
      respond: Handles a deferred request.
      set_reached: Called with the job when the mirror follows this process.
    """

    def __init__(
        self,
        task: Task,
        store: ParameterStore,
        log: MirrorLog,
        keys: Keys | None,
        incarnation: int,
        respond: Callable[[Request], None],
        set_reached: Callable[[str], None],
    ) -> None:
        self._task = task
        self._store = store
        self._log = log
        self._keys = keys
        self._incarnation = incarnation
        self._respond = respond
        self._set_reached = set_reached
        self._closing = runtime.Event()
        self._lock = runtime.Lock()
        self._requests: collections.deque[Request] = collections.deque()
        self._thread: runtime.Thread | None = None

    def defer(self, request: Request) -> bool:
        """Defers a request that needs the state of the mirror; False for all others."""
        _, envelope, _ = request
        body = envelope.body
        if not isinstance(body, messages.Attach) or body.parts is None:
            return False
        if not jobs.is_mirrored(body) or self._store.change_counts().job == envelope.job:
            return False
        with self._lock:
            if self._closing.is_set():
                return False
            self._requests.append(request)
            if self._thread is None:
                name = f"replicax-ps-{self._task.index}-recovery"
                self._thread = runtime.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        return True

    def close(self) -> None:
        """Stops the thread; deferred requests get no reply."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._requests or self._closing.is_set():
                    self._thread = None
                    return
                request = self._requests.popleft()
            try:
                envelope = request[1]
                if self._store.change_counts().job != envelope.job:
                    self._fetch(envelope)
            except Exception:
                # The reply names what is missing then.
                _log.exception("%s could not recover from its mirror", self._task)
            self._respond(request)

    def _fetch(self, envelope: messages.Envelope) -> None:
        """Restores the store from its copy on the mirror, if there is one."""
        attach = envelope.body
        assert isinstance(attach, messages.Attach)
        mirror = (self._task.index + 1) % len(attach.servers)
        location = addresses.resolve(attach.servers[mirror], None, self._keys)
        peer = Task("ps", mirror)
        deadline_s = runtime.now() + min(_UNREACHABLE_S, jobs.lease_of(attach))
        with (
            tempfile.TemporaryFile() as file,
            Channel(location, self._task, self._keys, self._incarnation, peer=peer) as channel,
        ):
            channel.job, channel.epoch = envelope.job, envelope.epoch
            channel.check_failure = self._failure
            while not self._closing.is_set():
                try:
                    began_s = runtime.now()
                    position = self._fetch_into(file, channel)
                    loaded, num_bytes = snapshot_files.read(file, f"The copy of {self._task}")
                    self._log.expect(envelope.job, position)
                    self._store.restore(loaded)
                    self._set_reached(envelope.job)
                    seconds = runtime.now() - began_s
                    text = "%s has restored job %r from its mirror: %d bytes in %.1f s"
                    _log.info(text, self._task, envelope.job, num_bytes, seconds)
                    return
                except errors.NotFoundError:
                    _log.warning("%s has no copy on its mirror %s", self._task, peer)
                    return
                except errors.DistributeError as error:
                    if runtime.now() >= deadline_s:
                        text = "%s could not fetch its copy from its mirror %s: %s"
                        _log.warning(text, self._task, peer, error)
                        return
                    channel.reset()
                    self._closing.wait(_RETRY_S)

    def _fetch_into(self, file: IO[bytes], channel: Channel) -> int:
        """Fetches a snapshot; returns the position of the first entry that is not in it."""
        file.seek(0)
        file.truncate()
        offset = 0
        while True:
            found, buffers = channel.request(messages.FetchReplica(offset), timeout=_REPLY_S)
            assert isinstance(found, messages.ReplicaPiece), found
            if not buffers or not buffers[0].nbytes:
                raise errors.DataLossError(f"{channel.peer} sent {offset} of {found.total} bytes.")
            offset += file.write(buffers[0])
            if offset >= found.total:
                file.flush()
                return found.position

    def _failure(self) -> Exception | None:
        if self._closing.is_set():
            return errors.UnavailableError(f"{self._task} is shutting down.")
        return None
