"""What a service keeps about peers without a handshake: their deadlines, and lines of the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from replicax.protocol import limits
from replicax.protocol.tasks import Task

_log = logging.getLogger(__name__)

# The kinds of events that are logged within a second.
_MOST_KINDS = 50


class PendingConnections:
    """The connections without a handshake, by file descriptor. Uses neither sockets nor a clock.

    A connection has `limits.HANDSHAKE` seconds to complete the handshake. At most
    `limits.PENDING_CONNECTIONS` may be pending: the oldest are closed first.

    Example:
      >>> pending = PendingConnections()
      >>> pending.add(20, now=0.0)
      >>> pending.add(21, now=1.0)
      >>> pending.discard(21)
      >>> pending.take_expired(now=0.0 + limits.HANDSHAKE)
      [20]
    """

    def __init__(self) -> None:
        # The deadline of each, in the order of arrival.
        self._deadlines: dict[int, float] = {}
        # Those that were rejected.
        self._rejected: set[int] = set()

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._deadlines))

    def add(self, fd: int, now: float) -> None:
        """Adds a new connection."""
        self.discard(fd)
        self._deadlines[fd] = now + limits.HANDSHAKE

    def discard(self, fd: int) -> None:
        """Removes a connection that is closed, or whose handshake is complete."""
        self._deadlines.pop(fd, None)
        self._rejected.discard(fd)

    def reject(self, fd: int, now: float) -> None:
        """Schedules the closing of a connection, pending or not, whose peer was told why."""
        at = now + limits.REJECTION
        self._deadlines[fd] = min(at, self._deadlines.get(fd, at))
        self._rejected.add(fd)

    def is_rejected(self, fd: int) -> bool:
        """Returns whether the peer was told why its connection is closed."""
        return fd in self._rejected

    def take_expired(self, now: float, limit: int = limits.PENDING_CONNECTIONS) -> list[int]:
        """Removes and returns the connections that must be closed now.

        Args:
          now: The monotonic time.
          limit: The number of connections that may stay.
        """
        deadlines = self._deadlines
        if not deadlines:
            return []
        expired = [fd for fd, deadline in list(deadlines.items()) if deadline <= now]
        for fd in expired:
            deadlines.pop(fd, None)
        excess = list(deadlines)[: max(0, len(deadlines) - limit)]
        for fd in excess:
            deadlines.pop(fd, None)
        return expired + excess


class LimitedLog:
    """Logs each kind of event at most once a second, with the number of those left out."""

    def __init__(self, task: Task) -> None:
        self._task = task
        # The last text of each kind, when it was logged, and how many were left out since.
        self._kinds: dict[str, tuple[str, float, int]] = {}

    def warning(self, kind: str, text: str, now: float) -> None:
        """Logs an event now, or counts it."""
        found = self._kinds.get(kind)
        if found is None and len(self._kinds) < _MOST_KINDS:
            _log.warning("%s %s", self._task, text)
            self._kinds[kind] = (text, now, 0)
        elif found is not None:
            self._kinds[kind] = (text, found[1], found[2] + 1)

    def flush(self, now: float) -> None:
        """Logs the numbers of events that were left out for a second."""
        for kind, (text, at, count) in list(self._kinds.items()):
            if now - at >= 1.0:
                del self._kinds[kind]
                if count:
                    _log.warning("%s %s (%d times)", self._task, text, count)
                    self._kinds[kind] = (text, now, 0)
