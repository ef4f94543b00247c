"""The listening socket of a service, with its authenticator and its connection guard.

Note [Descriptors of forked children]
    A forked child inherits the listening socket, its connections and the lock of its path. If the
    process ended before the child, peers would not see their connections close, and the next
    process could not listen at the same address. So the child closes them. It finds the sockets,
    which belong to ZeroMQ, by their address.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import weakref
from typing import TYPE_CHECKING, Any

from replicax.foundation import errors, lazy
from replicax.protocol import limits
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.zmq import context
from replicax.transport.zmq.authenticator import Authenticator, guard_server
from replicax.transport.zmq.connection_guard import ConnectionGuard

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")


# See Note [Descriptors of forked children].
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


class Listener:
    """A bound ROUTER socket.

    Attributes:
      socket: The socket.
      authenticator: Authenticates keys; None where the file system restricts access.
      guard: Guards connections; None inside a process, where there are none.
      url: The bound URL.
      address: The same for clusters; with the real port if port 0 was requested.
    """

    def __init__(self, location: Location, task: Task, keys: Keys | None) -> None:
        self._location = location
        self._path_lock: addresses.PathLock | None = None
        self._has_name = False
        # As `getsockname` returns it: a path, or a host and a port.
        self._local: Any = location.path if location.scheme == "ipc" else None
        self.authenticator: Authenticator | None = None
        self.guard: ConnectionGuard | None = None
        self.url = location.url
        self.address = location.address
        is_tcp = location.scheme == "tcp"
        if is_tcp and (keys is None or keys.role != task.role):
            raise errors.PermissionDeniedError(
                f"{task} must have the keys of a {task.role} to listen on TCP",
                "it has none" if keys is None else f"it has those of a {keys.role}",
                "Make keys with `replicax keys make DIR` and set REPLICAX_KEYS=DIR.",
            )
        target = addresses.numeric(location) if is_tcp else location.url
        # Terminating a private context waits until the socket is closed; a shared one would listen
        # for a moment after the address was released.
        self._context = context.acquire(is_private=location.scheme != "inproc")
        self.socket: zmq.Socket = self._context.socket(zmq.ROUTER)
        try:
            self._configure()
            if is_tcp and keys is not None:
                self.authenticator = Authenticator(self._context, keys)
                guard_server(self.socket, keys)
                self.socket.ipv6 = "[" in target
            if location.scheme != "inproc":
                self.guard = ConnectionGuard(self.socket, task)
            self._bind(target)
            if self.guard is not None:
                self.guard.start()
        except BaseException:
            self.close()
            raise
        if is_tcp:
            self._read_port()
        if location.scheme != "inproc":
            _listeners.add(self)

    def _configure(self) -> None:
        self.socket.linger = int(limits.LINGER * 1e3)
        self.socket.sndhwm = self.socket.rcvhwm = limits.QUEUE
        self.socket.maxmsgsize = limits.MESSAGE
        self.socket.handshake_ivl = int(limits.HANDSHAKE * 1e3)
        if self._location.scheme == "tcp":
            self.socket.backlog = limits.BACKLOG
            # Closes connections of hosts that vanish without closing them.
            self.socket.tcp_keepalive = 1
            self.socket.tcp_keepalive_idle = self.socket.tcp_keepalive_intvl = 1
            self.socket.tcp_keepalive_cnt = 3
        # Sending to a peer that has disconnected, or does not read, is an error.
        self.socket.router_mandatory = True

    def _bind(self, target: str) -> None:
        if self._location.scheme == "ipc":
            self._path_lock = addresses.PathLock(self._location.path)
        elif self._location.scheme == "inproc":
            self._has_name = context.bind_name(self.url)
            if not self._has_name:
                raise addresses.in_use(self.url, str(os.getpid()))
        try:
            self.socket.bind(target)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise addresses.in_use(self.address) from error
            raise errors.InvalidArgumentError(
                f"{self.address!r} must be an address of this host",
                f"it cannot be bound ({error})",
                "Correct the cluster specification.",
            ) from error

    def _read_port(self) -> None:
        endpoint = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0").removeprefix("tcp://")
        numeric, _, port = endpoint.rpartition(":")
        self._local = numeric.strip("[]"), int(port)
        host = self.address.rpartition(":")[0]
        self.address = f"{host}:{port}"
        self.url = f"tcp://{self.address}"

    def close(self) -> None:
        """Closes the socket and releases its address; sent messages get a moment to leave."""
        if self.socket.closed:
            return
        _listeners.discard(self)
        if self._has_name:
            # At once: closing releases the name asynchronously.
            with contextlib.suppress(zmq.ZMQError):
                self.socket.unbind(self.url)
            context.free_name(self.url)
        if self.guard is not None:
            self.guard.close()
        self.socket.close()
        if self.authenticator is not None:
            self.authenticator.close()
        context.release(self._context)
        if self._path_lock is not None:
            self._path_lock.release()

    def close_in_child(self) -> None:
        """Closes the inherited descriptors in a forked child; its parent keeps them."""
        if self._path_lock is not None:
            self._path_lock.close_in_child()
        for fd in _open_sockets():
            if _address_of(fd) == self._local:
                os.close(fd)


def _open_sockets() -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # Not on Linux.
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(int(name))
    return found


def _address_of(fd: int) -> Any:
    """Returns the local address of a socket: a path, or a host and a port."""
    try:
        opened = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        name = opened.getsockname()
    except OSError:
        name = None
    finally:
        opened.detach()
    return name[:2] if isinstance(name, tuple) else name


def _after_fork_in_child() -> None:
    for listener in list(_listeners):
        listener.close_in_child()
    _listeners.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
