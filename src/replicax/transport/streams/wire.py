"""A connection over a socket that does not block: Unix sockets, and TCP with TLS 1.3.

There is no thread between the caller and the kernel: the thread that sends writes to the socket,
and the thread that waits for a message reads it. What the kernel does not take at once waits in a
queue, in pieces.

Note [Descriptors of forked children]
    A forked child inherits the sockets of its parent. If the parent ended before the child, peers
    would not see their connections close, and the next process could not listen at the same
    address. So the child closes them.
"""

from __future__ import annotations

import array
import collections
import contextlib
import os
import select
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Sequence

from replicax.foundation import errors
from replicax.protocol import limits
from replicax.protocol.codec import Part
from replicax.transport import base
from replicax.transport.keys import Identity
from replicax.transport.streams import frames

# Bytes that one read takes; each thread has one such buffer.
_READ = 128 * limits.KIB
# The buffers of one call; the kernel takes at most 1,024.
_MOST_BUFFERS = 512
_MOST_DESCRIPTORS = 2
_SPACE = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)

# What OpenSSL says of peers that do not use TLS, or another version of it.
_OTHER_PROTOCOLS = (
    "wrong version number",
    "http request",
    "unsupported protocol",
    "alert protocol version",
)

_buffers = threading.local()
# See Note [Descriptors of forked children].
opened: weakref.WeakSet[StreamWire] = weakref.WeakSet()


def _room() -> memoryview:
    """Returns the buffer of this thread for bytes whose length is not known yet."""
    try:
        return _buffers.room
    except AttributeError:
        _buffers.room = memoryview(bytearray(_READ))
        return _buffers.room


class StreamWire:
    """A `base.Wire` over a connected or connecting socket; see there for the attributes.

    Args:
      connection: The socket; it is set to not block.
      is_connecting: Whether the kernel is still connecting it.
      is_accepted: Whether this side has accepted the connection. It then stops reading while the
        other side does not read; the side that has opened a connection always reads, so that not
        both wait for each other.
      name: The other side, for the log.
    """

    def __init__(
        self,
        connection: socket.socket,
        is_connecting: bool = False,
        is_accepted: bool = False,
        name: str = "",
    ) -> None:
        connection.setblocking(False)
        self.name = name
        self.is_reached = self.is_open = not is_connecting
        self.failure: str | None = None
        self.error: errors.DistributeError | None = None
        self.identity: Identity | None = None
        self.on_change: Callable[[], None] | None = None
        self._known_events = 0
        self.backlog = 0
        self._socket = connection
        self._fd = connection.fileno()
        # Closing is a part of failing: the lock is taken again then.
        self._lock = threading.RLock()
        self._reader = frames.FrameReader()
        self._queues: tuple[collections.deque[list[Part]], collections.deque[list[Part]]]
        self._queues = (collections.deque(), collections.deque())
        # The piece that has left in part.
        self._current: list[Part] = []
        self._is_accepted = is_accepted
        # With the first message of a Unix socket.
        self._takes_descriptors = is_accepted and connection.family == socket.AF_UNIX
        self._descriptors: list[int] = []
        opened.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.failure or 'open'}>"

    def limit(self, most: int) -> None:
        """Sets the size of the largest message that is accepted."""
        self._reader.most = most

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self._fd

    @property
    def events(self) -> int:
        """The events to poll for."""
        if self._is_paused:
            return base.WRITE
        return base.READ | base.WRITE if self.backlog or not self.is_open else base.READ

    @property
    def _is_paused(self) -> bool:
        return self._is_accepted and self.backlog > limits.QUEUE_BYTES

    # Receiving.

    def receive(self) -> list[memoryview] | None:
        """Returns the next message that was read."""
        messages = self._reader.messages
        return messages.popleft() if messages else None

    def handle(self) -> None:
        """Handles events."""
        if self.failure is not None:
            return
        try:
            if self.is_open or self._connect():
                if self.backlog:
                    with self._lock:
                        self._flush()
                if not self._is_paused:
                    self._read()
        except (BlockingIOError, InterruptedError):
            pass
        except errors.ProtocolError as error:
            self.close(error.found)
            raise
        except OSError as error:
            self._fail(error)
        except BaseException:
            self.close("an exception interrupted it")
            raise
        if self._known_events != base.READ:
            self._report()

    def _connect(self) -> bool:
        """Continues to connect; returns whether the wire is open."""
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        with contextlib.suppress(OSError):
            self._socket.getpeername()
            self.is_reached = self.is_open = True
        return self.is_open

    def _read(self) -> None:
        """Reads what has arrived, at most one buffer of it."""
        reader = self._reader
        if len(reader.target):
            self._read_into_target()
            return
        room = _room()
        if self._takes_descriptors:
            num = self._read_with_descriptors(room)
        else:
            num = self._socket.recv_into(room)
        if not num:
            self.close(base.CLOSED)
            return
        reader.feed(room[:num])

    def _read_into_target(self) -> None:
        """Reads a large piece where it belongs, and what follows it."""
        reader = self._reader
        size = len(reader.target)
        room = _room()
        num = self._socket.recvmsg_into([reader.target, room])[0]
        if not num:
            self.close("the connection was closed within a message")
            return
        reader.advance(min(num, size))
        if num > size:
            reader.feed(room[: num - size])

    def _read_with_descriptors(self, room: memoryview) -> int:
        num, ancillary, _, _ = self._socket.recvmsg_into([room], _SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self._descriptors.extend(found)
        return num

    def take_descriptors(self) -> list[int]:
        """Returns the descriptors that came with messages; none is accepted afterwards."""
        found, self._descriptors = self._descriptors, []
        self._takes_descriptors = False
        return found

    # Sending.

    def send(
        self, parts: Sequence[Part], is_urgent: bool = False, descriptors: Sequence[int] = ()
    ) -> None:
        """Sends a message, without waiting."""
        pieces = frames.pack(parts, frames.URGENT if is_urgent else frames.NORMAL)
        with self._lock:
            if self.failure is not None:
                return
            try:
                if descriptors:
                    pieces[0] = self._send_descriptors(pieces[0], descriptors)
                if not self.backlog and self.is_open and len(pieces) == 1:
                    # The usual case: the kernel takes it all.
                    current = self._current = self._prepare(pieces[0])
                    size = len(current[0]) if len(current) == 1 else sum(map(len, current))
                    num = self._write(current)
                    if num == size:
                        self._current = []
                        return
                    self._drop(num)
                    self.backlog = size - num
                else:
                    self._queues[is_urgent].extend(pieces)
                    self.backlog += sum(len(part) for piece in pieces for part in piece)
                    self._flush()
            except OSError as error:
                self._fail(error)
            except BaseException:
                # A part of the message may have left: nothing can follow it.
                self.close("an exception interrupted it")
                raise
        if self.backlog:
            self._report()

    def _report(self) -> None:
        """Calls `on_change` if the events to poll for have changed."""
        if self.on_change is not None and self.failure is None:
            events = self.events
            if events != self._known_events:
                self._known_events = events
                self.on_change()

    def _send_descriptors(self, piece: list[Part], descriptors: Sequence[int]) -> list[Part]:
        try:
            num = socket.send_fds(self._socket, piece, descriptors)
        except BlockingIOError as error:
            raise OSError(error.errno, "the peer does not read") from error
        self._current = piece
        self._drop(num)
        self._current, rest = [], self._current
        return rest

    def _flush(self) -> None:
        """Writes what the kernel takes of the queued pieces; under the lock."""
        if not self.is_open:
            return
        normal, urgent = self._queues
        while self.backlog:
            if not self._current:
                self._current = self._prepare((urgent or normal).popleft())
            num = self._write(self._current)
            if not num:
                return
            self.backlog -= num
            self._drop(num)

    def _prepare(self, piece: list[Part]) -> list[Part]:
        """Returns the buffers that leave one after the other; nothing overtakes them then."""
        return piece

    def _write(self, buffers: list[Part]) -> int:
        """Writes some of the buffers; returns the number of bytes, 0 if the kernel takes none."""
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers[:_MOST_BUFFERS])
        except (BlockingIOError, InterruptedError):
            return 0

    def _drop(self, num: int) -> None:
        """Removes bytes that have left from the current piece."""
        current = list(self._current)
        while current and num >= len(current[0]):
            num -= len(current.pop(0))
        if num:
            current[0] = memoryview(current[0])[num:]
        self._current = current

    # The end.

    def is_connected(self) -> bool:
        """Returns whether neither side has closed it, also with unread messages."""
        if self.failure is not None:
            return False
        poll = select.poll()
        try:
            poll.register(self._fd, select.POLLRDHUP)
            return not poll.poll(0)
        except OSError:
            return False

    def _fail(self, error: OSError) -> None:
        if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
            self.close(base.NOTHING_LISTENS)
        elif isinstance(error, (ConnectionResetError, BrokenPipeError)):
            self.close(base.CLOSED)
        else:
            self.close(f"the connection failed: {error.strerror or error}")

    def close(self, reason: str = "this side has closed the connection") -> None:
        """Closes the socket. Idempotent."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
            self.is_open = False
            self.backlog = 0
            opened.discard(self)
            if self.on_change is not None:
                self.on_change()
                self.on_change = None
            self._socket.close()
            for fd in self._descriptors:
                os.close(fd)
            self._descriptors = []
            for queue in self._queues:
                queue.clear()
            self._current = []

    def close_in_child(self) -> None:
        """Closes the inherited socket in a forked child; the connection stays open."""
        self.failure = "it belongs to the process that this one was forked from"
        self._socket.close()


class TlsWire(StreamWire):
    """A wire over TCP with TLS 1.3 and certificates on both sides.

    Args:
      connection: The socket.
      context: The certificates of this side, and what it accepts.
      is_server: Whether this side has accepted the connection.
      identify: Returns what the certificate of the other side proves, or raises.
      is_connecting: Whether the kernel is still connecting it.
      name: The other side, for the log.
    """

    error: errors.DistributeError | None
    identity: Identity | None

    def __init__(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        is_server: bool,
        identify: Callable[[ssl.SSLSocket], Identity],
        is_connecting: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(connection, True, is_server, name)
        self._context = context
        self._is_server = is_server
        self._identify = identify
        self.is_reached = not is_connecting
        self._tls: ssl.SSLSocket | None = None
        self._has_read = False
        self._wants_write = is_connecting

    @property
    def events(self) -> int:
        """The events to poll for."""
        if self.is_open:
            return super().events
        return base.READ | base.WRITE if self._wants_write else base.READ

    def _connect(self) -> bool:
        if not self.is_reached:
            super()._connect()
            self.is_open = False
            if not self.is_reached:
                return False
        if self._tls is None:
            self._tls = self._socket = self._context.wrap_socket(
                self._socket, server_side=self._is_server, do_handshake_on_connect=False
            )
        self._wants_write = False
        try:
            self._tls.do_handshake()
            self.identity = self._identify(self._tls)
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._wants_write = True
            return False
        except errors.PermissionDeniedError as error:
            self.error = error
            self.close(error.found)
            return False
        self.is_open = True
        return True

    def _read(self) -> None:
        # Reading and writing use the same state.
        with self._lock:
            self._read_records()

    def _read_records(self) -> None:
        assert self._tls is not None
        reader = self._reader
        room = _room()
        num_read = 0
        # OpenSSL keeps the rest of a record, which polling does not show.
        while num_read < _READ or self._tls.pending():
            target = reader.target
            try:
                num = self._tls.recv_into(target if len(target) else room)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not num:
                self.close(base.CLOSED)
                return
            self._has_read = True
            num_read += num
            if len(target):
                reader.advance(num)
            else:
                reader.feed(room[:num])

    def _prepare(self, piece: list[Part]) -> list[Part]:
        # As few records as possible.
        return [b"".join(piece)] if len(piece) > 1 else piece

    def _write(self, buffers: list[Part]) -> int:
        assert self._tls is not None
        try:
            return self._tls.send(buffers[0])
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0

    def _fail(self, error: OSError) -> None:
        if isinstance(error, (ConnectionResetError, BrokenPipeError)) and self._tls is not None:
            # The other side may have said why before it closed the connection.
            try:
                self._tls.recv_into(_room())
            except ssl.SSLWantReadError:
                pass
            except OSError as reason:
                error = reason
        if isinstance(error, ssl.SSLEOFError) or not isinstance(error, ssl.SSLError):
            is_early = self.is_reached and not self._has_read
            if is_early and not isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                self.close("the connection was closed during the TLS handshake")
            else:
                super()._fail(error)
            return
        reason = describe(error, self.is_open)
        if not self._has_read and ("certificate" in reason or "TLS 1.3" in reason):
            # With TLS 1.3, a client reads after its own handshake that it was rejected.
            self.error = errors.PermissionDeniedError(
                f"Both sides of the connection to {self.name} must have valid certificates",
                reason,
                "Use certificates of the same `replicax keys make`, or of the same authority; see "
                "the log of that task.",
            )
        self.close(reason)


def describe(error: ssl.SSLError, was_open: bool = False) -> str:
    """Returns why a TLS handshake failed, or a connection after its handshake.

    Example:
      >>> describe(ssl.SSLError(1, "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca"))
      'the other side rejects the certificate: unknown ca'
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the other side is rejected: {error.verify_message}"
    text = str(error.strerror or error).lower()
    if any(words in text for words in _OTHER_PROTOCOLS):
        return f"the other side does not use TLS 1.3 ({_short(text)})"
    if "alert" in text and ("cert" in text or "unknown ca" in text):
        found = _short(text).partition("alert ")[2]
        return f"the other side rejects the certificate: {found}"
    if "did not return a certificate" in text:
        return "the other side has sent no certificate"
    return f"the TLS {'connection' if was_open else 'handshake'} failed: {_short(text)}"


def _short(text: str) -> str:
    return text.rpartition("] ")[2].partition(" (_ssl.c")[0]


def _after_fork_in_child() -> None:
    for wire in list(opened):
        wire.close_in_child()
    opened.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
