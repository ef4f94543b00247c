"""One connection to one task: its socket, how it is doing, and the greeting on it.

A connection is used by one thread at a time; a channel or the hub sees to that. When it breaks,
the socket is thrown away with everything that waits in it, and a new one says hello again: the
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

# Seconds between attempts to reach a peer, first and at most; each time in vain they double.
_RETRY = (0.01, 0.2)
# Seconds between two sockets for one peer that lets callers in and drops them later.
_REOPEN = 0.05
_NEVER_MS = 3_600_000
# So many handshakes must fail in a row, with each good key, before keys are looked at; and
# the seconds between two looks.
_FAILURES = 3
_EXPLAIN_S = 5.0

_monitor_numbers = itertools.count(1)


class Connection:
    """One connection to one task.

    Attributes:
      peer: The task at the other end, as the caller knows it.
      is_ready: Whether the peer has answered the greeting.
      incarnation: Which life of the peer answered last; None before the first answer.
      down_since: Since when the peer cannot be reached; None while it can, or may.
      refusal: Why the peer, or this side, refuses to talk; None while it does not.
      first: The number of the next question, or of the oldest that has no answer, if each has
        the number after the last one; 0 if not.
    """

    def __init__(
        self,
        location: Location,
        me: Task,
        peer: Task,
        keys: Keys | None,
        incarnation: int,
        uses_lane: bool = False,
    ) -> None:
        self.location = location
        self.me = me
        self.peer = peer
        self.my_incarnation = incarnation
        self.is_ready = False
        self.incarnation: int | None = None
        self.down_since: float | None = None
        self.refusal: errors.DistributeError | None = None
        self.reason = "it cannot be reached"
        self.first = 0
        # Memory that is shared with the peer; only on one machine.
        self.lane = SharedMemoryClient() if uses_lane and location.scheme == "ipc" else None
        self._keys = keys
        self._context: zmq.Context | None = None
        self._opened_at = 0.0
        self._observed_at = 0.0
        self._is_refused = False
        self._pause_s = _RETRY[0]
        self._reopen_at: float | None = None
        self._has_handshake = False
        # How often there was no handshake: another key may do.
        self._num_failures = 0
        self._num_good_keys = 1
        # How often in a row, and when it was last looked at whether keys are the reason.
        self._num_in_a_row = 0
        self._explained_at = -_EXPLAIN_S
        # Which listener at an in-process name this connection belongs to.
        self._generation: int | None = None
        self.socket: Any = None
        self._monitor: Any = None
        self.pollables: list[tuple[Any, int]] = []

    # Opening and closing.

    def open(self, now: float) -> None:
        """Starts to connect and puts the greeting first."""
        if self._context is None:
            self._context = context.acquire()
        socket = self._context.socket(zmq.DEALER)
        self.socket = socket
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = limits.QUEUE
        socket.maxmsgsize = limits.MESSAGE
        socket.handshake_ivl = int(limits.HANDSHAKE * 1e3)
        # One socket is one attempt. ZeroMQ would go on by itself, also when nobody uses the
        # connection, and keep all that happens to it for whoever looks next. Were it told never
        # to, it would throw away what had come before the connection broke.
        socket.reconnect_ivl = _NEVER_MS
        self.pollables = [(socket, 1)]
        if self.location.scheme == "tcp":
            self._guard(socket)
        if self.location.scheme != "inproc":
            self._watch(socket)
        self._opened_at = now
        self._reopen_at = None
        self._has_handshake = False
        self.is_ready = False
        self._generation = context.generation(self.location.url)
        socket.connect(self.location.url)
        self.greet()

    def _guard(self, socket: zmq.Socket) -> None:
        if self._keys is None:
            raise errors.PermissionDeniedError(
                "TCP needs keys",
                f"there are none to call {self.peer} at {self.location}",
                "Make them with `replicax keys make DIR` and set REPLICAX_KEYS=DIR.",
            )
        socket.ipv6 = "[" in self.location.url
        # Hosts that vanish without a word; see RESET for those that say one.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = 1
        socket.tcp_keepalive_cnt = 3
        # A peer may have an older key, or a newer one, when keys are being renewed.
        good = self._keys.latest().good(self.peer.role)
        self._num_good_keys = len(good)
        authenticator.guard_client(socket, self._keys, good[self._num_failures % len(good)])

    def _watch(self, socket: zmq.Socket) -> None:
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

    def greet(self) -> None:
        """Says hello; the connection is ready when the answer is there."""
        self.is_ready = False
        hello = messages.Hello(
            messages.VERSION,
            library_version(),
            python_version(),
            self.me.role,
            self.me.index,
            self.my_incarnation,
            "" if self.lane is None else self.lane.offer(),
            self.first,
        )
        self.send(codec.encode("", 0, self.my_incarnation, 0, hello))

    def close(self, linger: float = 0.0) -> None:
        """Ends the connection; what was sent is given `linger` seconds to leave."""
        self._drop_socket(linger)
        if self.lane is not None:
            self.lane.close()
            self.lane = None
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

    def send(self, message: list[Any]) -> None:
        """Sends a message. If it cannot leave, the connection is taken as broken."""
        try:
            zmq_io.send(self.socket, message, self.location.scheme != "inproc")
        except zmq.Again:
            self.distrust()
        except BaseException:
            # Half a message may be in the socket: nothing sensible can follow it.
            self.distrust()
            raise

    def distrust(self) -> None:
        """Takes the connection as broken: `observe` opens a new one."""
        self.is_ready = False
        self._reopen_at = 0.0

    def receive(self) -> tuple[messages.Envelope, list[memoryview]] | None:
        """Returns the next message that came, without waiting.

        A `Welcome` is returned too: whatever was not answered before it must be sent again.
        """
        while self.socket is not None and zmq_io.has_message(self.socket):
            try:
                envelope, buffers = codec.decode(
                    zmq_io.receive(self.socket), None if self.lane is None else self.lane.reader
                )
            except errors.ProtocolError as error:
                _log.warning("%s sent something that is no message: %s", self.peer, error)
                continue
            except BaseException:
                self.distrust()
                raise
            body = envelope.body
            if type(body) is messages.Welcome:
                self._accept(body)
                return envelope, buffers
            if error_replies.is_hello_first(body) or (
                self.is_ready and envelope.incarnation != self.incarnation
            ):
                # The peer has forgotten this connection, or has begun a new life behind it.
                if self.is_ready:
                    self.greet()
                continue
            if self.is_ready:
                return envelope, buffers
            if type(body) is messages.ErrorReply and envelope.request == 0:
                self.refusal = error_replies.to_error(body)
                return None
        return None

    def _accept(self, welcome: messages.Welcome) -> None:
        found = Task(welcome.role, welcome.task)
        if found != self.peer:
            self.refusal = errors.UnavailableError(
                f"{self.peer} must listen at {self.location}",
                f"{found} does",
                "Correct the cluster specification.",
            )
            return
        self.incarnation = welcome.incarnation
        if self.lane is not None:
            self.lane.is_open = welcome.has_shared_memory
        self.is_ready = True
        self.down_since = None
        self.refusal = None

    # Health.

    def observe(self, now: float) -> None:
        """Takes note of what happened to the connection, and opens a new one if it broke."""
        gap, self._observed_at = now - self._observed_at, now
        if self.down_since is not None and gap > limits.RESET / 2:
            # This process was stopped or busy: nobody could be reached meanwhile.
            self.down_since += gap
        if self.location.scheme == "inproc":
            self._observe_name(now)
        while self._monitor is not None and zmq_io.has_message(self._monitor):
            event, _ = self._monitor.recv_multipart(1)
            self._note(struct.unpack("=HI", event)[0], now)
        if self._reopen_at is not None and now >= self._reopen_at:
            self._drop_socket(0.0)
            self.open(now)

    def _note(self, event: int, now: float) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_handshake = True
            self.down_since = None
            self._is_refused = False
            self._pause_s = _RETRY[0]
            self._num_in_a_row = 0
            return
        if event == zmq.EVENT_CLOSED:
            self.reason = "nobody listens there"
            # Tried anew since it broke: whoever was there has ended, and need not be waited for.
            was_met = self.incarnation is not None and self.down_since is not None
            self._is_refused = was_met and self._opened_at >= (self.down_since or 0.0)
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
                if self._num_in_a_row >= _FAILURES * self._num_good_keys:
                    self._explain(now)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = errors.PermissionDeniedError(
                f"{self.peer} at {self.location} lets in only keys that it knows",
                f"it does not know that of {self.me}",
                "Use the keys of the same `replicax keys make` for all tasks.",
            )
        else:
            # Also if a good connection brought what cannot be deciphered. ZeroMQ ends it.
            self.reason = "the handshake failed; its keys may be others than ours"
        self.is_ready = False
        if self.down_since is None:
            self.down_since = now

    def _explain(self, now: float) -> None:
        """Refuses to go on if keys are the reason why the peer cannot be reached."""
        if now - self._explained_at >= _EXPLAIN_S:
            self._explained_at = now
            self.refusal = probe.explain_failure(self.peer, self.location, self.me)

    def _try_later(self, now: float) -> None:
        self._reopen_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY[1])

    def _observe_name(self, now: float) -> None:
        current = context.generation(self.location.url)
        if self._generation is None and self.is_ready:
            self._generation = current
        if current is None:
            self.reason = "nobody listens there"
            self.is_ready = False
            if self.down_since is None:
                self.down_since = now
        elif current != self._generation:
            self._reopen_at = now
        elif not self.is_ready:
            self.down_since = None

    def is_lost(self, now: float) -> bool:
        """Says whether the peer has ended, or is away for longer than a connection may break."""
        if self._is_refused:
            return True
        return self.down_since is not None and now - self.down_since >= limits.RESET

    def next_check(self, now: float) -> float:
        """Returns the seconds after which `observe` must be called although nothing came."""
        due = limits.DEADLINE
        if self.down_since is not None:
            due = self.down_since + limits.RESET - now
        if self._reopen_at is not None:
            due = min(due, self._reopen_at - now)
        if self.location.scheme == "inproc":
            due = min(due, _REOPEN)
        return max(due, 0.0)
