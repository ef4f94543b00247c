"""What a parameter server process runs: a store behind a socket, with a lane for slow work."""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from replicax.foundation import errors
from replicax.parameter_server.service import ParameterStore
from replicax.transport import messages, refusals
from replicax.transport.addresses import Location
from replicax.transport.callers import Caller
from replicax.transport.keys import Keys
from replicax.transport.service import Service
from replicax.transport.tasks import Task

_log = logging.getLogger(__name__)

# What a caller may say while slow work of its own is going on: it concerns no part.
_AT_ANY_TIME = (messages.Ping, messages.Fence)
# Requests that wait in the slow lane; their buffers are in memory.
_LONGEST_LANE = 1_000
_JOIN_SECONDS = 5.0

_Request = tuple[Caller, messages.Envelope, Sequence[memoryview]]
_Answer = tuple[messages.Body, Sequence[Any]]


class ParameterServerTask:
    """One parameter server: it listens from `start` until it is closed.

    Filling a part of 5 GB, or compiling an optimizer, takes seconds. A thread of its own does
    such work, one request after the other, so that training and beats go on. Requests of one
    caller still take effect in the order in which they were sent.

    Args:
      index: Its index in the job.
      location: Where to listen; the place is taken at once.
      keys: What to prove with who listens.
    """

    def __init__(self, index: int, location: Location, *, keys: Keys | None = None) -> None:
        self._task = Task("ps", index)
        self._store = ParameterStore(index)
        self._ended = threading.Event()
        self._lane: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lane_thread = threading.Thread(
            target=self._work, name=f"replicax-ps-{index}-slow", daemon=True
        )
        # Requests in the lane, by connection. `_lock` protects it, and is never held while a
        # request is handled.
        self._lock = threading.Lock()
        self._waiting: collections.Counter[bytes] = collections.Counter()
        self._service = Service(location, self._task, self._handle, keys, on_idle=self._expire)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._service.address

    def start(self) -> None:
        """Begins to answer."""
        self._lane_thread.start()
        self._service.start()

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
        self._service.close()
        if self._lane_thread.ident is not None:
            self._lane_thread.join(_JOIN_SECONDS)

    def _handle(
        self, caller: Caller, envelope: messages.Envelope, buffers: Sequence[memoryview]
    ) -> _Answer | None:
        """Answers in the thread of the socket, or leaves the request to the lane."""
        if self._is_quick(caller.identity, envelope.body):
            return self._answer(caller, envelope, buffers)
        with self._lock:
            if self._waiting.total() >= _LONGEST_LANE:
                raise errors.ResourceExhaustedError(
                    errors.message(
                        f"{self._task} keeps at most {_LONGEST_LANE} slow requests waiting",
                        f"{caller} sent one more",
                        "Wait for answers before sending more.",
                    )
                )
            self._waiting[caller.identity] += 1
        self._lane.put((caller, envelope, buffers))
        return None

    def _is_quick(self, identity: bytes, body: messages.Body) -> bool:
        if isinstance(body, _AT_ANY_TIME):
            return True
        with self._lock:
            return not self._waiting[identity] and not isinstance(body, self._store.SLOW)

    def _answer(
        self, caller: Caller, envelope: messages.Envelope, buffers: Sequence[memoryview]
    ) -> _Answer:
        body, found = self._store.handle(
            caller.role,
            caller.incarnation,
            envelope.body,
            buffers,
            job=envelope.job,
            epoch=envelope.epoch,
            now=time.monotonic(),
        )
        if isinstance(body, messages.Pong):
            traffic = {
                "bytes_received": self._service.num_bytes_received,
                "bytes_sent": self._service.num_bytes_sent,
            }
            body = messages.Pong(body.progress, body.figures | traffic)
        return body, found

    def _work(self) -> None:
        """The lane: one request after the other, in order of arrival."""
        while (request := self._lane.get()) is not None:
            caller, envelope, buffers = request
            answer: _Answer
            try:
                answer = self._answer(caller, envelope, buffers)
            except Exception as error:
                if not isinstance(error, errors.DistributeError):
                    _log.exception("%s could not answer %s", self._task, caller)
                answer = refusals.from_error(error), ()
            # The answer goes first; then the way is free for quick requests of this caller.
            self._service.send(caller, *answer, request=envelope.request)
            with self._lock:
                self._waiting -= collections.Counter([caller.identity])

    def _expire(self, now: float) -> None:
        if self._store.expire(now):
            _log.warning("%s: the lease of its job ran out; its variables are gone", self._task)
