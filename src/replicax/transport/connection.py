"""One connection to one task, on the side that opens it: its wire, its health, and the handshake.

One thread at a time handles the events of a connection, which a channel or a client pool ensures.
When it breaks, its wire is dropped with all queued messages, and a new one repeats the handshake:
the first message on a wire is always `Hello`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from replicax.foundation import errors
from replicax.protocol import codec, error_replies, limits, messages
from replicax.protocol.tasks import Task, library_version, python_version
from replicax.transport import addresses, base
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.shared_memory import SharedMemoryClient
from replicax.transport.streams import network as streams

_log = logging.getLogger(__name__)

# The first and the largest interval between attempts to connect, in seconds; it doubles.
_RETRY = (0.01, 0.2)
# Seconds between two wires to a peer that accepts connections and closes them later.
_REOPEN = 0.05
# Seconds between two attempts to find out whether a task cannot be reached because one side has
# certificates and the other has none; and until a host that has vanished is tried again.
_EXPLAIN_S = 5.0


class Connection:
    """One connection to one task.

    Attributes:
      peer: The task to connect to.
      wire: The wire; None before `open` and after `close`.
      is_ready: Whether the handshake is complete.
      incarnation: The incarnation of the peer at the last handshake; None before the first.
      down_since: The time since which the peer is unreachable; None while it is not.
      error: The error with which the peer, or this side, rejected the connection.
      first: The number of the oldest request without a reply, or of the next one, if requests are
        numbered consecutively; else 0.
      shared_memory: The memory that is shared with a peer on the same machine.
    """

    def __init__(
        self,
        location: Location,
        me: Task,
        peer: Task,
        keys: Keys | None,
        incarnation: int,
        shares_memory: bool = False,
        network: base.Network | None = None,
    ) -> None:
        self.location = location
        self.me = me
        self.peer = peer
        self.my_incarnation = incarnation
        self.is_ready = False
        self.incarnation: int | None = None
        self.down_since: float | None = None
        self.error: errors.DistributeError | None = None
        self._reason = "it cannot be reached"
        self.first = 0
        is_local = location.scheme == "ipc"
        self.shared_memory = SharedMemoryClient() if shares_memory and is_local else None
        self.wire: base.Wire | None = None
        self._network = network or streams.NETWORK
        self._keys = keys
        self._opened_at = 0.0
        self._observed_at = 0.0
        # Whether nothing listens where the peer was connected: its process has ended.
        self._is_refused = False
        # Whether the peer has accepted the wire, and the handshake has begun.
        self._was_open = False
        self._pause_s = _RETRY[0]
        self._reopen_at: float | None = None
        self._explained_at = -_EXPLAIN_S

    # Opening and closing.

    def open(self, now: float) -> None:
        """Starts to connect and sends the handshake first."""
        self._opened_at = self._observed_at = now
        self._reopen_at = None
        self._was_open = self.is_ready = False
        wire = self.wire = self._network.dial(self.location, self._keys)
        memory = self.shared_memory
        hello = messages.Hello(
            messages.VERSION,
            library_version(),
            python_version(),
            self.me.role,
            self.me.index,
            self.my_incarnation,
            memory is not None,
            self.first,
        )
        descriptors: Sequence[int] = () if memory is None else memory.offer()
        message = codec.encode("", 0, self.my_incarnation, 0, hello)
        wire.send(message, descriptors=descriptors)
        if wire.failure is not None:
            self._handle_failure(wire, now)

    def close(self, linger: float = 0.0) -> None:
        """Closes the connection; sent messages get `linger` seconds to leave."""
        wire, self.wire = self.wire, None
        self.is_ready = False
        if wire is not None:
            end = self._network.now() + linger
            while wire.backlog and wire.is_open and (left := end - self._network.now()) > 0:
                self._network.wait(wire, None, min(left, 0.05))
                try:
                    wire.handle()
                except errors.ProtocolError:
                    break
            wire.close()
        if self.shared_memory is not None:
            self.shared_memory.close()
            self.shared_memory = None

    # Messages.

    def send(self, message: Sequence[codec.Part], is_urgent: bool = False) -> None:
        """Sends a message; nothing is sent on a wire that has broken."""
        if self.wire is not None:
            self.wire.send(message, is_urgent)

    def mark_broken(self) -> None:
        """Marks the connection as broken: `observe` opens a new one."""
        self.is_ready = False
        self._reopen_at = 0.0

    def handle(self) -> None:
        """Handles the events of the wire; `receive` then returns what has arrived."""
        if self.wire is None:
            return
        try:
            self.wire.handle()
        except errors.ProtocolError as error:
            _log.warning("%s sent a malformed stream: %s", self.peer, error)

    def receive(self) -> tuple[messages.Envelope, list[memoryview]] | None:
        """Returns the next message that has arrived, without blocking.

        After a `Welcome`, which is returned, too, requests without a reply must be sent again.
        """
        while (wire := self.wire) is not None and (message := wire.receive()) is not None:
            memory = self.shared_memory
            try:
                envelope, buffers = codec.decode(message, None if memory is None else memory.reader)
            except errors.ProtocolError as error:
                _log.warning("%s sent a malformed message: %s", self.peer, error)
                continue
            body = envelope.body
            if self.is_ready:
                is_first = type(body) is messages.ErrorReply and error_replies.is_hello_first(body)
                if envelope.incarnation == self.incarnation and not is_first:
                    return envelope, buffers
                # The peer has dropped the session, or has started a new incarnation.
                self.mark_broken()
                return None
            if self._reopen_at is not None:
                return None
            if type(body) is messages.Welcome:
                self._accept(body, wire)
                return envelope, buffers
            if type(body) is messages.ErrorReply and envelope.request == 0:
                self.error = error_replies.to_error(body)
                return None
        return None

    def _accept(self, welcome: messages.Welcome, wire: base.Wire) -> None:
        found = Task(welcome.role, welcome.task)
        if found != self.peer:
            self.error = errors.UnavailableError(
                f"{self.peer} must listen at {self.location}",
                f"{found} listens there",
                "Correct the cluster specification.",
            )
            return
        identity = wire.identity
        if identity is not None and not identity.is_of(self.peer.role, self.peer.index):
            self.error = errors.PermissionDeniedError(
                f"{self.peer} at {self.location} must have the certificate of that task",
                f"it has the certificate of {identity}",
                "Start it with its own certificate, or correct the cluster specification.",
            )
            return
        self.incarnation = welcome.incarnation
        if self.shared_memory is not None:
            self.shared_memory.is_open = welcome.has_shared_memory
        self.is_ready = True
        self.down_since = None
        self.error = None

    # Health.

    def observe(self, now: float) -> None:
        """Notices that the wire has closed, and opens a new one when it is time.

        A rejected connection is not opened again: the caller, who sees its error, decides that.
        """
        gap, self._observed_at = now - self._observed_at, now
        if self.down_since is not None and gap > limits.RESET / 2:
            # This process was stopped or busy, and could not connect meanwhile.
            self.down_since += gap
        wire = self.wire
        if wire is not None and self._reopen_at is None:
            if wire.failure is not None:
                self._handle_failure(wire, now)
            elif wire.is_open and not self._was_open:
                self._was_open = True
                self._is_refused = False
                self._pause_s = _RETRY[0]
            elif not self.is_ready and now - self._opened_at >= limits.HANDSHAKE:
                wire.close(f"the handshake took longer than {limits.HANDSHAKE:g} s")
                self._handle_failure(wire, now)
        if self._reopen_at is not None and now >= self._reopen_at and self.error is None:
            if self.wire is not None:
                self.wire.close()
            self.open(now)

    def _handle_failure(self, wire: base.Wire, now: float) -> None:
        self.is_ready = False
        self._reason = wire.failure or self._reason
        if self.error is None:
            self.error = wire.error
        if self._was_open:
            self._reopen_at = max(now, self._opened_at + _REOPEN)
        else:
            # Tried again since the connection broke, and nothing listens: the process has ended.
            was_connected = self.incarnation is not None and self.down_since is not None
            is_after = self._opened_at >= (self.down_since or 0.0)
            self._is_refused = was_connected and is_after and self._reason == base.NOTHING_LISTENS
            self._reopen_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _RETRY[1])
            if self.error is None and now - self._explained_at >= _EXPLAIN_S:
                self._explained_at = now
                self.error = self._explain()
        if self.down_since is None:
            self.down_since = now

    def _explain(self) -> errors.PermissionDeniedError | None:
        """Returns the error if one side has certificates and the other has none."""
        if self._reason != base.NOTHING_LISTENS:
            return None
        location = self.location
        if location.scheme == "tcp":
            try:
                path = Path(addresses.resolve(location.address, "ipc").path)
            except errors.DistributeError:  # Not an address of this machine.
                return None
            if not path.exists() or not streams.accepts_connections(path):
                return None
            return errors.PermissionDeniedError(
                f"{self.peer} at {location} and this process must both have certificates, or none",
                "it was started without, and is reachable only for processes of this user on this "
                "machine; this process has a certificate",
                "Start it with the certificates of the cluster, or unset REPLICAX_KEYS here.",
            )
        has_port = location.scheme == "ipc" and not location.address.startswith("ipc://")
        if not has_port or not streams.accepts_connections(location.address):
            return None
        return errors.PermissionDeniedError(
            f"{self.peer} at {location} accepts only connections with a certificate",
            "this process has none",
            "Pass `keys=DIR` or set REPLICAX_KEYS=DIR, with the certificates of the cluster.",
        )

    @property
    def reason(self) -> str:
        """Why the peer is unreachable."""
        wire = self.wire
        if wire is not None and wire.failure is None and wire.is_reached and not self.is_ready:
            return "it accepts connections, but does not complete the handshake"
        return self._reason

    def is_lost(self, now: float) -> bool:
        """Returns whether the peer has ended, or is unreachable for longer than `limits.RESET`."""
        if self._is_refused:
            return True
        if self.down_since is None or now - self.down_since < limits.RESET:
            return False
        # A peer that has accepted the connection may be busy: it has the time of a handshake.
        wire = self.wire
        return wire is None or wire.failure is not None or not wire.is_reached

    def next_check(self, now: float) -> float:
        """Returns the seconds after which `observe` must be called without an event."""
        if self._reopen_at is None and self.down_since is None and self.is_ready:
            return limits.DEADLINE
        if self._reopen_at is not None:
            return max(self._reopen_at - now, 0.0)
        due = self._opened_at + limits.HANDSHAKE - now
        if self.down_since is not None and (self.wire is None or not self.wire.is_reached):
            due = min(due, self.down_since + limits.RESET - now)
        return max(due, 0.0)
