"""Which connections have not said yet who calls, and which of them must go."""

from __future__ import annotations

from collections.abc import Iterator

from replicax.protocol import limits


class PendingConnections:
    """Connections of strangers, by file descriptor. No sockets, no clock: it only decides.

    A stranger has `limits.HANDSHAKE` seconds to become a caller. There is room for
    `limits.PENDING_CONNECTIONS` of them: who came first goes first.

    Example:
      >>> visitors = PendingConnections()
      >>> visitors.arrived(20, now=0.0)
      >>> visitors.arrived(21, now=1.0)
      >>> visitors.forget(21)
      >>> visitors.must_go(now=0.0 + limits.HANDSHAKE)
      [20]
    """

    def __init__(self) -> None:
        # Until when each may stay, in the order in which they came.
        self._until: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._until))

    def arrived(self, fd: int, now: float) -> None:
        """Notes a new connection."""
        self._until.pop(fd, None)
        self._until[fd] = now + limits.HANDSHAKE

    def forget(self, fd: int) -> None:
        """Notes that a connection is closed, or that its caller is known now."""
        self._until.pop(fd, None)

    def dismiss(self, fd: int, at: float) -> None:
        """Notes that a connection must be closed soon, whoever it is."""
        self._until[fd] = min(at, self._until.get(fd, at))

    def must_go(self, now: float, room: int = limits.PENDING_CONNECTIONS) -> list[int]:
        """Takes out the connections that are to be closed now.

        Args:
          now: The monotonic time.
          room: How many may stay.
        """
        late = [fd for fd, until in self._until.items() if until <= now]
        for fd in late:
            del self._until[fd]
        crowd = list(self._until)[: max(0, len(self._until) - room)]
        for fd in crowd:
            del self._until[fd]
        return late + crowd
