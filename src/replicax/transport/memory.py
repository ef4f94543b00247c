"""Wires inside a process, for tests: messages in queues, by name."""

from __future__ import annotations

import collections
import os
import sys
import threading
from collections.abc import Callable, Sequence

from replicax.foundation import errors
from replicax.protocol.codec import Part
from replicax.transport import addresses, base
from replicax.transport.keys import Identity
from replicax.transport.wakeup import Wakeup

_lock = threading.Lock()
_bound: dict[str, MemoryListener] = {}


class MemoryWire:
    """One end of a wire; see `base.Wire` for the attributes. Messages are copied."""

    def __init__(self) -> None:
        self.name = "this process"
        self.is_reached = self.is_open = False
        self.failure: str | None = None
        self.error: errors.DistributeError | None = None
        self.identity: Identity | None = None
        self.backlog = 0
        self._most = sys.maxsize
        self.on_change: Callable[[], None] | None = None
        self.other: MemoryWire | None = None
        self._wakeup = Wakeup()
        self._arrived: collections.deque[list[memoryview]] = collections.deque()
        self._is_ended = False

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self._wakeup.fd

    @property
    def events(self) -> int:
        """The events to poll for."""
        return base.READ

    def limit(self, most: int) -> None:
        """Sets the size of the largest message that is accepted."""
        self._most = most

    def handle(self) -> None:
        """Handles events."""
        self._wakeup.clear()
        if self._is_ended and not self._arrived:
            self.close(base.CLOSED)

    def receive(self) -> list[memoryview] | None:
        """Returns the next message."""
        if self._arrived:
            message = self._arrived.popleft()
            if sum(map(len, message)) > self._most:
                self.close("a message is oversized")
                raise errors.ProtocolError("A message inside the process is oversized.")
            return message
        if self._is_ended:
            self.close(base.CLOSED)
        return None

    def send(
        self, parts: Sequence[Part], is_urgent: bool = False, descriptors: Sequence[int] = ()
    ) -> None:
        """Puts a message into the queue of the other end."""
        other = self.other
        if self.failure is not None or other is None:
            return
        message = [memoryview(bytes(parts[0]))]
        if len(parts) > 1:
            message.append(memoryview(b"".join(parts[1:])))
        del is_urgent, descriptors  # Nothing waits here, and both ends have the descriptors.
        other._arrived.append(message)
        other._wakeup.set()

    def take_descriptors(self) -> list[int]:
        """Returns none: ends of one process need none."""
        return []

    def is_connected(self) -> bool:
        """Returns whether neither side has closed it."""
        return self.failure is None and not self._is_ended

    def close(self, reason: str = "this side has closed the connection") -> None:
        """Closes this end; the other one sees it after the messages before it."""
        if self.failure is not None:
            return
        self.failure = reason
        self.is_open = False
        other, self.other = self.other, None
        if other is not None:
            other._is_ended = True
            other._wakeup.set()
        if self.on_change is not None:
            self.on_change()
            self.on_change = None
        self._wakeup.close()


class MemoryListener:
    """A bound name."""

    def __init__(self, url: str) -> None:
        self.url = self.address = url
        self._wakeup = Wakeup()
        self._waiting: collections.deque[MemoryWire] = collections.deque()
        with _lock:
            if url in _bound:
                self._wakeup.close()
                raise addresses.in_use(url, str(os.getpid()))
            _bound[url] = self

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self._wakeup.fd

    def connect(self, wire: MemoryWire) -> None:
        """Adds a connection."""
        end = MemoryWire()
        wire.other, end.other = end, wire
        wire.is_open = end.is_open = wire.is_reached = end.is_reached = True
        self._waiting.append(end)
        self._wakeup.set()

    def accept(self) -> MemoryWire | None:
        """Returns the next connection; None if there is none."""
        if self._waiting:
            return self._waiting.popleft()
        self._wakeup.clear()
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """Releases the name. Idempotent."""
        with _lock:
            if _bound.get(self.url) is self:
                del _bound[self.url]
        while self._waiting:
            self._waiting.popleft().close()
        self._wakeup.close()


def dial(url: str) -> MemoryWire:
    """Connects to a name inside this process."""
    wire = MemoryWire()
    with _lock:
        listener = _bound.get(url)
        if listener is not None:
            listener.connect(wire)
    if listener is None:
        wire.close(base.NOTHING_LISTENS)
    return wire


def _reset_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _bound.clear()


os.register_at_fork(after_in_child=_reset_in_child)
