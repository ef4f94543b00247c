"""Closes connections that ZeroMQ itself would keep.

ZeroMQ closes connections that do not complete its own handshake. This module handles the other
cases: too many unauthenticated peers, unauthenticated peers that send much, peers that violate the
protocol, and a process that runs out of file descriptors. In the last case ZeroMQ would spin on
TCP, and abort the process on `ipc`, so the guard stops listening before.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import resource
import select
import socket as sockets
import struct
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from replicax.foundation import lazy
from replicax.protocol import limits
from replicax.transport.zmq import zmq_io

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

_log = logging.getLogger(__name__)

_numbers = itertools.count(1)
# The limit of queued events; ZeroMQ's I/O thread blocks when there are more.
_QUEUE = 10_000
# The position of tcpi_bytes_received in the TCP_INFO of the kernel.
_BYTES_RECEIVED = struct.Struct("=128xQ")


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

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._deadlines))

    def add(self, fd: int, now: float) -> None:
        """Adds a new connection."""
        self._deadlines.pop(fd, None)
        self._deadlines[fd] = now + limits.HANDSHAKE

    def discard(self, fd: int) -> None:
        """Removes a connection that is closed, or whose handshake is complete."""
        self._deadlines.pop(fd, None)

    def close_at(self, fd: int, at: float) -> None:
        """Schedules the closing of a connection, pending or not."""
        self._deadlines[fd] = min(at, self._deadlines.get(fd, at))

    def take_expired(self, now: float, limit: int = limits.PENDING_CONNECTIONS) -> list[int]:
        """Removes and returns the connections that must be closed now.

        Args:
          now: The monotonic time.
          limit: The number of connections that may stay.
        """
        expired = [fd for fd, deadline in self._deadlines.items() if deadline <= now]
        for fd in expired:
            del self._deadlines[fd]
        excess = list(self._deadlines)[: max(0, len(self._deadlines) - limit)]
        for fd in excess:
            del self._deadlines[fd]
        return expired + excess


class ConnectionGuard:
    """Guards the connections of a bound socket. Used by the thread of its service.

    Args:
      socket: A bound ROUTER.
      owner: The listening task, for the log.

    Attributes:
      monitor: Readable after a connect or a disconnect; the service then calls `observe`.
    """

    def __init__(self, socket: zmq.Socket, owner: object) -> None:
        self._socket = socket
        self._owner = owner
        self._pending = PendingConnections()
        self._endpoint = ""
        self._is_tcp = False
        # When to listen again; None while it listens.
        self._resume_at: float | None = None
        # Whether ZeroMQ has released the address after `unbind`.
        self._is_free = False
        self._failed_at = float("-inf")
        url = f"inproc://replicax-connection-guard-{next(_numbers)}"
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        socket.monitor(url, events)
        self.monitor: zmq.Socket = socket.context.socket(zmq.PAIR)
        self.monitor.linger = 0
        self.monitor.rcvhwm = _QUEUE
        self.monitor.connect(url)

    def start(self) -> None:
        """Reads the bound address; to be called after `bind`."""
        self._endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._is_tcp = self._endpoint.startswith("tcp:")

    def accept(self, part: zmq.Frame) -> tuple[int, int] | None:
        """Records a completed handshake; returns the connection of a part of its message.

        Returns:
          The descriptor, and the inode, since descriptors are reused.
        """
        fd = _descriptor(part)
        self._pending.discard(fd)
        try:
            return fd, os.fstat(fd).st_ino
        except OSError:  # Closed already.
            return fd, 0

    def is_open(self, connection: tuple[int, int]) -> bool:
        """Returns whether neither side has closed a connection."""
        fd, inode = connection
        poll = select.poll()
        try:
            if os.fstat(fd).st_ino != inode:
                return False
            poll.register(fd, select.POLLRDHUP)
            # Visible here before ZeroMQ has read the data before it.
            return not poll.poll(0)
        except OSError:
            return False

    def close_at(self, part: zmq.Frame, at: float) -> None:
        """Closes the connection of a part of a message at some time."""
        if (fd := _descriptor(part)) >= 0:
            self._pending.close_at(fd, at)

    def observe(self, now: float) -> None:
        """Handles the events of connections, and closes those that must be closed."""
        for _ in range(_QUEUE):
            if not zmq_io.has_message(self.monitor):
                break
            event, _ = self.monitor.recv_multipart(1)
            self._handle_event(*struct.unpack("=HI", event), now)
        most = _most_descriptors()
        reserved = min(
            most * limits.RESERVED["tcp" if self._is_tcp else "ipc"], limits.RESERVED_MOST
        )
        has_room = _free_descriptor() < most - reserved
        self._listen(has_room, now)
        for fd in self._pending.take_expired(now, limits.PENDING_CONNECTIONS if has_room else 0):
            _shut_down(fd, self._endpoint)
        if self._is_tcp:
            for fd in self._pending:
                if _num_received(fd, self._endpoint) > limits.PENDING_BYTES:
                    self._pending.discard(fd)
                    _shut_down(fd, self._endpoint)

    def _handle_event(self, event: int, value: int, now: float) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._pending.add(value, now)
        elif event == zmq.EVENT_DISCONNECTED:
            self._pending.discard(value)
        else:
            self._is_free = True

    def _listen(self, has_room: bool, now: float) -> None:
        """Stops listening while only the reserved descriptors are free."""
        if self._resume_at is None:
            if has_room:
                return
            _log.warning(
                "%s has no file descriptors for more connections; it stops listening until it has "
                "(see `ulimit -n`)",
                self._owner,
            )
            self._is_free = False
            self._socket.unbind(self._endpoint)
            self._resume_at = now + limits.PAUSE
        elif has_room and self._is_free and now >= self._resume_at:
            try:
                self._socket.bind(self._endpoint)
            except zmq.ZMQError as error:
                self._resume_at = now + limits.PAUSE
                if now - self._failed_at >= 1.0:
                    self._failed_at = now
                    _log.warning("%s cannot listen again: %s", self._owner, error)
            else:
                self._resume_at = None

    def close(self) -> None:
        """Closes the monitor; to be called before the socket is closed."""
        if not self.monitor.closed:
            # ZeroMQ's I/O thread may be blocked by a full queue, and would block the next call.
            for _ in range(_QUEUE):
                if not zmq_io.has_message(self.monitor):
                    break
                self.monitor.recv_multipart(1)
            self._socket.disable_monitor()
            self.monitor.close()


def _descriptor(part: zmq.Frame) -> int:
    """Returns the file descriptor of the connection of a part of a message; -1 without."""
    try:
        return int(part.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _most_descriptors() -> int:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def _free_descriptor() -> int:
    """Returns the smallest free descriptor: a lower bound of the number in use."""
    try:
        fd = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError:
        return _most_descriptors()
    os.close(fd)
    return fd


@contextlib.contextmanager
def _borrowed(fd: int, endpoint: str) -> Iterator[sockets.socket | None]:
    """Returns a socket object for a descriptor that ZeroMQ owns.

    None if it is not a connection to the endpoint: ZeroMQ may have closed it since, and the
    descriptor may belong to another file of this process.
    """
    try:
        one = sockets.socket(fileno=fd)
    except OSError:
        yield None
        return
    try:
        yield one if _is_connected_to(one, endpoint) else None
    finally:
        one.detach()


def _is_connected_to(one: sockets.socket, endpoint: str) -> bool:
    try:
        if one.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN):
            return False
        name = one.getsockname()
    except OSError:
        return False
    if one.family == sockets.AF_UNIX:
        return endpoint == f"ipc://{name}"
    return one.family in (sockets.AF_INET, sockets.AF_INET6) and (
        endpoint.rpartition(":")[2] == str(name[1])
    )


def _shut_down(fd: int, endpoint: str) -> None:
    """Shuts a connection down; ZeroMQ then closes it."""
    with _borrowed(fd, endpoint) as one, contextlib.suppress(OSError):
        if one is not None:
            one.shutdown(sockets.SHUT_RDWR)


def _num_received(fd: int, endpoint: str) -> int:
    """Returns the number of bytes received on a TCP connection."""
    with _borrowed(fd, endpoint) as one, contextlib.suppress(OSError):
        if one is not None:
            report = one.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _BYTES_RECEIVED.size)
            if len(report) == _BYTES_RECEIVED.size:
                return _BYTES_RECEIVED.unpack(report)[0]
    return 0
