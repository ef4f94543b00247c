"""One connection to one task: its socket, its health, and the handshake on it.

A connection is used by one thread at a time, which a channel or a client pool ensures. When it
breaks, its socket is dropped with all queued messages, and a new one repeats the handshake: the
first message on a connection is always `Hello`.
"""

from __future__ import annotations

import itertools
import logging
import struct
from typing import TYPE_CHECKING, Any

from replicax.foundation import errors, lazy
from replicax.protocol import codec, error_replies, limits, messages
from replicax.protocol.tasks import Task, library_version, python_version
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.shared_memory import SharedMemoryClient
from replicax.transport.zmq import authenticator, context, probe, zmq_io

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

_log = logging.getLogger(__name__)

# The first and the largest interval between attempts to connect, in seconds; it doubles.
_RETRY = (0.01, 0.2)
# Seconds between two sockets for a peer that accepts connections and closes them later.
_REOPEN = 0.05
_NEVER_MS = 3_600_000
# The number of failed handshakes in a row, with each accepted key, before keys are probed, and the
# seconds between two probes.
_FAILURES = 3
_EXPLAIN_S = 5.0

_monitor_numbers = itertools.count(1)


class Connection:
    """One connection to one task.

    Attributes:
      peer: The task to connect to.
      is_ready: Whether the handshake is complete.
      incarnation: The incarnation of the peer at the last handshake; None before the first.
      down_since: The time since which the peer is unreachable; None while it is not.
      error: The error with which the peer, or this side, rejected the connection.
      reason: Why the peer is unreachable.
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
    ) -> None:
        self.location = location
        self.me = me
        self.peer = peer
        self.my_incarnation = incarnation
        self.is_ready = False
        self.incarnation: int | None = None
        self.down_since: float | None = None
        self.error: errors.DistributeError | None = None
        self.reason = "it cannot be reached"
        self.first = 0
        is_local = location.scheme == "ipc"
        self.shared_memory = SharedMemoryClient() if shares_memory and is_local else None
        self._keys = keys
        self._context: zmq.Context | None = None
        self._opened_at = 0.0
        self._observed_at = 0.0
        self._is_refused = False
        self._pause_s = _RETRY[0]
        self._reopen_at: float | None = None
        self._has_handshake = False
        # The number of failed handshakes, which selects the next key of the peer.
        self._num_failures = 0
        self._num_accepted_keys = 1
        # The number of failures in a row, and the time of the last probe.
        self._num_in_a_row = 0
        self._explained_at = -_EXPLAIN_S
        # The generation of the listener at an in-process name.
        self._generation: int | None = None
        self.socket: Any = None
        self._monitor: Any = None
        self.pollables: list[tuple[Any, int]] = []

    # Opening and closing.

    def open(self, now: float) -> None:
        """Starts to connect and sends the handshake first."""
        if self._context is None:
            self._context = context.acquire()
        socket = self._context.socket(zmq.DEALER)
        self.socket = socket
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = limits.QUEUE
        socket.maxmsgsize = limits.MESSAGE
        socket.handshake_ivl = int(limits.HANDSHAKE * 1e3)
        # One socket is one attempt. ZeroMQ would reconnect by itself, also an unused connection,
        # and queue the events. With reconnects disabled it would drop messages that arrived
        # before the connection broke.
        socket.reconnect_ivl = _NEVER_MS
        self.pollables = [(socket, 1)]
        if self.location.scheme == "tcp":
            self._set_keys(socket)
        if self.location.scheme != "inproc":
            self._monitor_events(socket)
        self._opened_at = now
        self._reopen_at = None
        self._has_handshake = False
        self.is_ready = False
        self._generation = context.generation(self.location.url)
        socket.connect(self.location.url)
        self.start_handshake()

    def _set_keys(self, socket: zmq.Socket) -> None:
        if self._keys is None:
            raise errors.PermissionDeniedError(
                "TCP needs keys",
                f"there are none for {self.peer} at {self.location}",
                "Make them with `replicax keys make DIR` and set REPLICAX_KEYS=DIR.",
            )
        socket.ipv6 = "[" in self.location.url
        # Detects hosts that vanish without closing their connections.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = 1
        socket.tcp_keepalive_cnt = 3
        # The peer may have an older key, or a newer one, while keys are renewed.
        accepted = self._keys.latest().accepted(self.peer.role)
        self._num_accepted_keys = len(accepted)
        server_key = accepted[self._num_failures % len(accepted)]
        authenticator.guard_client(socket, self._keys, server_key)

    def _monitor_events(self, socket: zmq.Socket) -> None:
        events = (
            zmq.EVENT_CLOSED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        url = f"inproc://replicax-monitor-{next(_monitor_numbers)}"
        socket.monitor(url, events)
        assert self._context is not None
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.connect(url)
        self.pollables.append((self._monitor, 1))

    def start_handshake(self) -> None:
        """Sends `Hello`; the connection is ready when the reply has arrived."""
        self.is_ready = False
        hello = messages.Hello(
            messages.VERSION,
            library_version(),
            python_version(),
            self.me.role,
            self.me.index,
            self.my_incarnation,
            "" if self.shared_memory is None else self.shared_memory.offer(),
            self.first,
        )
        self.send(codec.encode("", 0, self.my_incarnation, 0, hello))

    def close(self, linger: float = 0.0) -> None:
        """Closes the connection; sent messages get `linger` seconds to leave."""
        self._drop_socket(linger)
        if self.shared_memory is not None:
            self.shared_memory.close()
            self.shared_memory = None
        if self._context is not None:
            used, self._context = self._context, None
            context.release(used)

    def _drop_socket(self, linger: float) -> None:
        self.is_ready = False
        self.pollables = []
        if self.socket is None:
            return
        if self._monitor is not None:
            self.socket.monitor(None, 0)
            self._monitor.close()
            self._monitor = None
        self.socket.close(int(linger * 1e3))
        self.socket = None

    # Messages.

    def send(self, message: list[codec.Part]) -> None:
        """Sends a message. If the queue is full, the connection counts as broken."""
        try:
            zmq_io.send(self.socket, message, self.location.scheme != "inproc")
        except zmq.Again:
            self.mark_broken()
        except BaseException:
            # A part of the message may be queued: no other message can follow it.
            self.mark_broken()
            raise

    def mark_broken(self) -> None:
        """Marks the connection as broken: `observe` opens a new one."""
        self.is_ready = False
        self._reopen_at = 0.0

    def receive(self) -> tuple[messages.Envelope, list[memoryview]] | None:
        """Returns the next message that has arrived, without blocking.

        After a `Welcome`, which is returned, too, requests without a reply must be sent again.
        """
        while self.socket is not None and zmq_io.has_message(self.socket):
            try:
                memory = self.shared_memory
                reader = None if memory is None else memory.reader
                envelope, buffers = codec.decode(zmq_io.receive(self.socket), reader)
            except errors.ProtocolError as error:
                _log.warning("%s sent a malformed message: %s", self.peer, error)
                continue
            except BaseException:
                self.mark_broken()
                raise
            body = envelope.body
            if type(body) is messages.Welcome:
                self._accept(body)
                return envelope, buffers
            is_new = self.is_ready and envelope.incarnation != self.incarnation
            is_error = type(body) is messages.ErrorReply
            if is_new or (is_error and error_replies.is_hello_first(body)):
                # The peer has dropped the session, or has started a new incarnation.
                if self.is_ready:
                    self.start_handshake()
                continue
            if self.is_ready:
                return envelope, buffers
            if type(body) is messages.ErrorReply and envelope.request == 0:
                self.error = error_replies.to_error(body)
                return None
        return None

    def _accept(self, welcome: messages.Welcome) -> None:
        found = Task(welcome.role, welcome.task)
        if found != self.peer:
            self.error = errors.UnavailableError(
                f"{self.peer} must listen at {self.location}",
                f"{found} listens there",
                "Correct the cluster specification.",
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
        """Handles the events of the connection, and opens a new one if it broke."""
        gap, self._observed_at = now - self._observed_at, now
        if self.down_since is not None and gap > limits.RESET / 2:
            # This process was stopped or busy, and could not connect meanwhile.
            self.down_since += gap
        if self.location.scheme == "inproc":
            self._observe_name(now)
        while self._monitor is not None and zmq_io.has_message(self._monitor):
            event, _ = self._monitor.recv_multipart(1)
            self._handle_event(struct.unpack("=HI", event)[0], now)
        if self._reopen_at is not None and now >= self._reopen_at:
            self._drop_socket(0.0)
            self.open(now)

    def _handle_event(self, event: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_handshake = True
            self.down_since = None
            self._is_refused = False
            self._pause_s = _RETRY[0]
            self._num_in_a_row = 0
            return
        if event == zmq.EVENT_CLOSED:
            self.reason = "nothing listens there"
            # Tried again since the connection broke: the process has ended.
            was_connected = self.incarnation is not None and self.down_since is not None
            self._is_refused = was_connected and self._opened_at >= (self.down_since or 0.0)
            self._try_later(now)
            self._explain(now)
        elif event == zmq.EVENT_DISCONNECTED:
            self.reason = "the connection was closed"
            if self._has_handshake:
                self._reopen_at = max(now, self._opened_at + _REOPEN)
            else:
                self._num_failures += 1
                self._num_in_a_row += 1
                self._try_later(now)
                if self._num_in_a_row >= _FAILURES * self._num_accepted_keys:
                    self._explain(now)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.error = errors.PermissionDeniedError(
                f"{self.peer} at {self.location} accepts only the keys of its cluster",
                f"that of {self.me} is not one of them",
                "Use the keys of the same `replicax keys make` for all tasks.",
            )
        else:
            # Also after a message that cannot be decrypted: ZeroMQ closes the connection.
            self.reason = "the handshake failed; its keys may differ from ours"
        self.is_ready = False
        if self.down_since is None:
            self.down_since = now

    def _explain(self, now: float) -> None:
        """Sets `error` if the peer is unreachable because of its keys or ours."""
        if now - self._explained_at >= _EXPLAIN_S:
            self._explained_at = now
            self.error = probe.explain_failure(self.peer, self.location, self.me)

    def _try_later(self, now: float) -> None:
        self._reopen_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY[1])

    def _observe_name(self, now: float) -> None:
        current = context.generation(self.location.url)
        if self._generation is None and self.is_ready:
            self._generation = current
        if current is None:
            self.reason = "nothing listens there"
            self.is_ready = False
            if self.down_since is None:
                self.down_since = now
        elif current != self._generation:
            self._reopen_at = now
        elif not self.is_ready:
            self.down_since = None

    def is_lost(self, now: float) -> bool:
        """Returns whether the peer has ended, or is unreachable for longer than `limits.RESET`."""
        if self._is_refused:
            return True
        return self.down_since is not None and now - self.down_since >= limits.RESET

    def next_check(self, now: float) -> float:
        """Returns the seconds after which `observe` must be called without an event."""
        due = limits.DEADLINE
        if self.down_since is not None:
            due = self.down_since + limits.RESET - now
        if self._reopen_at is not None:
            due = min(due, self._reopen_at - now)
        if self.location.scheme == "inproc":
            due = min(due, _REOPEN)
        return max(due, 0.0)
