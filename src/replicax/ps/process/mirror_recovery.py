"""How a parameter server that came back empty gets what it held from its mirror."""

from __future__ import annotations

import collections
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.process import snapshot_files
from replicax.ps.process.mirror_log import MirrorLog
from replicax.ps.store import jobs
from replicax.ps.store.service import ParameterStore
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.keys import Keys
from replicax.transport.sessions import Session

Request = tuple[Session, messages.Envelope, Sequence[memoryview]]

# A mirror that cannot be reached is waited for so long, and no longer than a lease.
_PATIENCE_S = 30.0
_RETRY_S = 0.1
_ANSWER_S = 60.0
_JOIN_S = 5.0

_log = logging.getLogger(__name__)


class Returning:
    """Lets requests to attach wait, while what they need is fetched.

    It has a thread of its own while there is something to fetch: the mirror may need the slow lane
    of this server at the same time, for its own return.

    Args:
      task: The server.
      store: What it holds: nothing, or an older snapshot.
      log: Is told from which place on the mirror follows.
      keys: What the server proves with who it is.
      incarnation: The life of its process.
      answer: Answers a request, when there is nothing more to wait for.
      reached: Called with the job when the mirror follows this process.
    """

    def __init__(
        self,
        task: Task,
        store: ParameterStore,
        log: MirrorLog,
        keys: Keys | None,
        incarnation: int,
        answer: Callable[[Request], None],
        reached: Callable[[str], None],
    ) -> None:
        self._task = task
        self._store = store
        self._log = log
        self._keys = keys
        self._incarnation = incarnation
        self._answer = answer
        self._reached = reached
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._requests: collections.deque[Request] = collections.deque()
        self._thread: threading.Thread | None = None

    def takes(self, request: Request) -> bool:
        """Takes a request that needs what the mirror has; False if it does not."""
        _, envelope, _ = request
        body = envelope.body
        if not isinstance(body, messages.Attach) or body.parts is None:
            return False
        if not jobs.is_mirrored(body) or self._store.marks().job == envelope.job:
            return False
        with self._lock:
            if self._ending.is_set():
                return False
            self._requests.append(request)
            if self._thread is None:
                name = f"replicax-ps-{self._task.index}-return"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        return True

    def close(self) -> None:
        """Ends the thread; requests that wait are not answered."""
        with self._lock:
            self._ending.set()
            thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._requests or self._ending.is_set():
                    self._thread = None
                    return
                request = self._requests.popleft()
            try:
                envelope = request[1]
                if self._store.marks().job != envelope.job:
                    self._fetch(envelope)
            except Exception:
                # The answer says what is missing then.
                _log.exception("%s could not fetch what it held", self._task)
            self._answer(request)

    def _fetch(self, envelope: messages.Envelope) -> None:
        """Restores the store from the mirror, if that has anything."""
        attach = envelope.body
        assert isinstance(attach, messages.Attach)
        mirror = (self._task.index + 1) % len(attach.servers)
        location = addresses.resolve(attach.servers[mirror], None, self._keys)
        peer = Task("ps", mirror)
        deadline_s = time.monotonic() + min(_PATIENCE_S, jobs.lease_of(attach))
        with (
            tempfile.TemporaryFile() as file,
            Channel(location, self._task, self._keys, self._incarnation, peer=peer) as channel,
        ):
            channel.job, channel.epoch = envelope.job, envelope.epoch
            channel.check_failure = self._given_up
            while not self._ending.is_set():
                try:
                    began_s = time.monotonic()
                    position = self._fetch_into(file, channel)
                    loaded, num_bytes = snapshot_files.read(file, f"The copy of {self._task}")
                    self._log.expect(envelope.job, position)
                    self._store.restore(loaded)
                    self._reached(envelope.job)
                    seconds = time.monotonic() - began_s
                    text = "%s has restored job %r from its mirror: %d bytes in %.1f s"
                    _log.info(text, self._task, envelope.job, num_bytes, seconds)
                    return
                except errors.NotFoundError:
                    _log.warning("%s has no copy on its mirror %s", self._task, peer)
                    return
                except errors.DistributeError as error:
                    if time.monotonic() >= deadline_s:
                        text = "%s could not fetch its copy from its mirror %s: %s"
                        _log.warning(text, self._task, peer, error)
                        return
                    channel.reset()
                    self._ending.wait(_RETRY_S)

    def _fetch_into(self, file: IO[bytes], channel: Channel) -> int:
        """Fetches a snapshot; returns the place of the first change that is not in it."""
        file.seek(0)
        file.truncate()
        offset = 0
        while True:
            found, buffers = channel.request(messages.FetchReplica(offset), timeout=_ANSWER_S)
            assert isinstance(found, messages.ReplicaPiece), found
            if not buffers or not buffers[0].nbytes:
                raise errors.DataLossError(f"{channel.peer} has sent less than it said.")
            offset += file.write(buffers[0])
            if offset >= found.total:
                file.flush()
                return found.position

    def _given_up(self) -> Exception | None:
        if self._ending.is_set():
            return errors.UnavailableError(f"{self._task} ends.")
        return None
