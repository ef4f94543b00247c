"""A model of `transport/connection.py`: a client connection that reconnects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from replicax.protocol import codec, error_replies, limits, messages
from replicax.protocol.tasks import library_version, python_version
from simulation.labels import label_of
from simulation.network import Network, Wire
from simulation.process import Process
from simulation.service import ListeningProcess

_REOPEN_S = 0.05
_RETRY_S = (0.01, 0.2)


class Listener(Protocol):
    """Receives the events of a connection."""

    def welcomed(self, welcome: messages.Welcome) -> None: ...

    def answered(self, envelope: messages.Envelope, buffers: list[memoryview]) -> None: ...

    def lost(self, reason: str) -> None: ...


class Connection:
    """A connection to one task that is opened again when it breaks.

    Attributes:
      is_ready: Whether the handshake is complete.
    """

    def __init__(
        self,
        network: Network,
        owner: Process,
        peer: ListeningProcess,
        incarnation: Callable[[], int],
        listener: Listener,
        first: Callable[[], int] = lambda: 0,
    ) -> None:
        self._network, self._owner, self._peer = network, owner, peer
        self._incarnation, self._listener, self._first = incarnation, listener, first
        self.is_ready = False
        self._wire: Wire | None = None
        self._peer_incarnation: int | None = None
        self._down_since: float | None = None
        self._is_closed = False

    def open(self) -> None:
        """Starts to connect."""
        if not self._is_closed:
            self._network.connect(self._owner, self._peer, self, self._peer)

    def send(self, frames: Sequence[Any], label: str) -> None:
        """Sends a message; it is lost while there is no connection."""
        if self._wire is not None:
            self._network.send(self._wire, frames, label, is_up=True)

    def mark_broken(self) -> None:
        """Treats the connection as broken."""
        if self._wire is not None:
            self._network.cut(self._wire)

    def close(self) -> None:
        """Closes the connection for good."""
        self._is_closed = True
        self.is_ready = False
        if self._wire is not None:
            self._network.cut(self._wire, is_noticed=False)
            self._wire = None

    # Events of the network.

    def opened(self, wire: Wire) -> None:
        """Handles an accepted connection; the process of the peer may be stopped."""
        if self._is_closed:
            self._network.cut(wire, is_noticed=False)
            return
        self._wire = wire
        self._down_since = None
        self._start_handshake()

    def refused(self) -> None:
        """Handles that no process listens there."""
        self._note_down()
        self._owner.later(self._owner.world.random.uniform(*_RETRY_S), self.open)

    def closed(self, wire: Wire) -> None:
        """Handles a broken connection."""
        if wire is self._wire:
            self._wire = None
            self.is_ready = False
            self._note_down()
            self._owner.later(_REOPEN_S, self.open)

    def received(self, wire: Wire, frames: list[bytes]) -> None:
        """Handles a message."""
        if wire is not self._wire:
            return
        envelope, buffers = codec.decode(frames)
        body = envelope.body
        if isinstance(body, messages.Welcome):
            self._peer_incarnation = body.incarnation
            self.is_ready = True
            self._listener.welcomed(body)
        elif error_replies.is_hello_first(body) or (
            self.is_ready and envelope.incarnation != self._peer_incarnation
        ):
            # The peer has dropped the session, or has a new incarnation.
            if self.is_ready:
                self._start_handshake()
        elif self.is_ready:
            self._listener.answered(envelope, buffers)

    def _start_handshake(self) -> None:
        self.is_ready = False
        me, incarnation = self._owner.task, self._incarnation()
        version, python = library_version(), python_version()
        hello = messages.Hello(
            messages.VERSION, version, python, me.role, me.index, incarnation, first=self._first()
        )
        self.send(codec.encode("", 0, incarnation, 0, hello), label_of(hello))

    def _note_down(self) -> None:
        if self._down_since is not None:
            return
        since = self._down_since = self._owner.world.now
        num_pauses = self._owner.num_pauses

        def check() -> None:
            if self._down_since != since or self._is_closed:
                return
            if self._owner.num_pauses != num_pauses:
                # It was stopped itself, and could not reach any task.
                self._down_since = None
                self._note_down()
            else:
                self._listener.lost("it could not be reached")

        self._owner.later(limits.RESET, check)
