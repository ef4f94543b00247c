"""Watches who comes to a listener, and closes connections: what ZeroMQ itself does not do.

ZeroMQ cuts off callers that do not finish its own handshake. Everything else is left to this
module: too many strangers, strangers that send a lot, peers that break the rules, and a process
that runs out of file descriptors. In the last case ZeroMQ would turn in circles on TCP, and abort
the process on `ipc`; so it is told to stop listening before.
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
from replicax.transport.zmq.pending_connections import PendingConnections

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

_log = logging.getLogger(__name__)

_numbers = itertools.count(1)
# Events that wait; ZeroMQ's own thread waits when there are more.
_QUEUE = 10_000
# Where the kernel's report on a TCP connection says how many bytes have come.
_BYTES_RECEIVED = struct.Struct("=128xQ")


class ConnectionGuard:
    """The place where a bound socket takes connections. Used by the thread of its service.

    Args:
      socket: A bound ROUTER.
      owner: Who listens, for the log.

    Attributes:
      monitor: Readable when somebody came or went; the owner then calls `observe`.
    """

    def __init__(self, socket: zmq.Socket, owner: object) -> None:
        self._socket = socket
        self._owner = owner
        self._visitors = PendingConnections()
        self._endpoint = ""
        self._is_tcp = False
        # When to listen again; None while it listens.
        self._resume_at: float | None = None
        # Whether ZeroMQ has given the place free after it was told to.
        self._is_free = False
        self._failed_at = float("-inf")
        url = f"inproc://replicax-doorway-{next(_numbers)}"
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        socket.monitor(url, events)
        self.monitor: zmq.Socket = socket.context.socket(zmq.PAIR)
        self.monitor.linger = 0
        self.monitor.rcvhwm = _QUEUE
        self.monitor.connect(url)

    def opened(self) -> None:
        """Notes where the socket is bound; call it once it is."""
        self._endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._is_tcp = self._endpoint.startswith("tcp:")

    def admit(self, frame: zmq.Frame) -> tuple[int, int] | None:
        """Notes that the caller who sent a frame is known; returns its connection.

        That is the descriptor, and the inode, as descriptors are used again.
        """
        fd = _descriptor(frame)
        self._visitors.forget(fd)
        try:
            return fd, os.fstat(fd).st_ino
        except OSError:  # It is closed already.
            return fd, 0

    def is_open(self, connection: tuple[int, int]) -> bool:
        """Tells whether neither side has closed a connection."""
        fd, inode = connection
        poll = select.poll()
        try:
            if os.fstat(fd).st_ino != inode:
                return False
            poll.register(fd, select.POLLRDHUP)
            # Seen here before ZeroMQ has read what came before it.
            return not poll.poll(0)
        except OSError:
            return False

    def dismiss(self, frame: zmq.Frame, at: float) -> None:
        """Closes the connection that a frame came from, at some time."""
        if (fd := _descriptor(frame)) >= 0:
            self._visitors.dismiss(fd, at)

    def observe(self, now: float) -> None:
        """Takes note of who came and went, and closes what must be closed."""
        for _ in range(_QUEUE):
            if not zmq_io.has_message(self.monitor):
                break
            event, _ = self.monitor.recv_multipart(1)
            self._note(*struct.unpack("=HI", event), now)
        most = _most_descriptors()
        reserved = min(
            most * limits.RESERVED["tcp" if self._is_tcp else "ipc"], limits.RESERVED_MOST
        )
        has_room = _free_descriptor() < most - reserved
        self._listen(has_room, now)
        for fd in self._visitors.must_go(now, limits.PENDING_CONNECTIONS if has_room else 0):
            _cut(fd, self._endpoint)
        if self._is_tcp:
            for fd in self._visitors:
                if _num_received(fd, self._endpoint) > limits.PENDING_BYTES:
                    self._visitors.forget(fd)
                    _cut(fd, self._endpoint)

    def _note(self, event: int, value: int, now: float) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._visitors.arrived(value, now)
        elif event == zmq.EVENT_DISCONNECTED:
            self._visitors.forget(value)
        else:
            self._is_free = True

    def _listen(self, has_room: bool, now: float) -> None:
        """Stops to listen while the process needs its last descriptors for itself."""
        if self._resume_at is None:
            if has_room:
                return
            _log.warning(
                "%s has no file descriptors for more callers; it listens again when it has "
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
        """Watches no more; call it before the socket is closed."""
        if not self.monitor.closed:
            # ZeroMQ's thread may wait for room here, and would make the next call wait for it.
            for _ in range(_QUEUE):
                if not zmq_io.has_message(self.monitor):
                    break
                self.monitor.recv_multipart(1)
            self._socket.disable_monitor()
            self.monitor.close()


def _descriptor(frame: zmq.Frame) -> int:
    """Returns the file descriptor of the connection that a frame came from; -1 without."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _most_descriptors() -> int:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def _free_descriptor() -> int:
    """Returns the smallest free descriptor: so many are in use, at least."""
    try:
        fd = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError:
        return _most_descriptors()
    os.close(fd)
    return fd


@contextlib.contextmanager
def _lent(fd: int, endpoint: str) -> Iterator[sockets.socket | None]:
    """Gives a socket for a descriptor that stays ZeroMQ's.

    None if it is no connection to the endpoint: ZeroMQ may have closed it since, and the number
    may belong to another file of this process.
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


def _cut(fd: int, endpoint: str) -> None:
    """Ends a connection; ZeroMQ finds it closed, and tidies up."""
    with _lent(fd, endpoint) as one, contextlib.suppress(OSError):
        if one is not None:
            one.shutdown(sockets.SHUT_RDWR)


def _num_received(fd: int, endpoint: str) -> int:
    """Returns how many bytes have come through a TCP connection."""
    with _lent(fd, endpoint) as one, contextlib.suppress(OSError):
        if one is not None:
            report = one.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _BYTES_RECEIVED.size)
            if len(report) == _BYTES_RECEIVED.size:
                return _BYTES_RECEIVED.unpack(report)[0]
    return 0
