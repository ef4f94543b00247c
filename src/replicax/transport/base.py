"""The seam under channel, client pool and service: what carries messages, and tells the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from replicax.foundation import errors
from replicax.protocol.codec import Part
from replicax.transport.addresses import Location
from replicax.transport.keys import Identity, Keys

# The events of a poll.
READ, WRITE = 1, 4
# The failures of a wire to an address where no task listens, and of one that its peer has closed.
NOTHING_LISTENS = "nothing listens there"
CLOSED = "the connection was closed"


class Wire(Protocol):
    """A connection that carries messages. One thread reads it; any thread may send.

    Attributes:
      name: The other side, for the log.
      is_reached: Whether the other side, or its kernel, has accepted the connection.
      is_open: Whether both sides are connected and authenticated.
      failure: Why it was closed; None while it may carry messages.
      error: The error for a connection that fails again however often it is tried.
      identity: What the other side has proven; None where the medium keeps others out.
      backlog: The bytes that were sent and have not left yet.
      on_change: Called by any thread when `events` changes, and before the descriptor is closed.
    """

    name: str
    is_reached: bool
    is_open: bool
    failure: str | None
    error: errors.DistributeError | None
    identity: Identity | None
    backlog: int
    on_change: Callable[[], None] | None

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        ...

    @property
    def events(self) -> int:
        """The events to poll for."""
        ...

    def limit(self, most: int) -> None:
        """Sets the size of the largest message that is accepted; larger ones close the wire."""

    def handle(self) -> None:
        """Handles events: connects, sends what waits, and reads what has arrived."""

    def receive(self) -> list[memoryview] | None:
        """Returns the header and the body of the next message that was read; None without."""

    def send(
        self, parts: Sequence[Part], is_urgent: bool = False, descriptors: Sequence[int] = ()
    ) -> None:
        """Sends a message, without waiting; an urgent one overtakes those that wait."""

    def take_descriptors(self) -> list[int]:
        """Returns the descriptors that came with messages; the caller closes them."""
        ...

    def is_connected(self) -> bool:
        """Returns whether neither side has closed it, also with unread messages."""
        ...

    def close(self, reason: str = "this side has closed the connection") -> None:
        """Closes it. Idempotent."""


class Listener(Protocol):
    """Accepts wires at `address`."""

    url: str
    address: str

    def fileno(self) -> int: ...
    def accept(self) -> Wire | None: ...
    def close(self) -> None: ...


class Poller(Protocol):
    """Waits for the events of many descriptors."""

    def set(self, fd: int, events: int) -> None: ...
    def remove(self, fd: int) -> None: ...
    def wait(self, timeout: float) -> list[int]: ...
    def close(self) -> None: ...


class Wakeup(Protocol):
    """Wakes the thread that waits for it, or polls its descriptor, from any thread."""

    fd: int

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, seconds: float) -> bool: ...
    def close(self) -> None: ...


class Network(Protocol):
    """Makes wires, and is their clock."""

    def dial(self, location: Location, keys: Keys | None) -> Wire: ...
    def listen(self, location: Location, keys: Keys | None) -> Listener: ...
    def poller(self) -> Poller: ...
    def wakeup(self) -> Wakeup: ...
    def now(self) -> float: ...
    def wait(self, wire: Wire, wakeup: int | None, timeout: float) -> bool: ...
