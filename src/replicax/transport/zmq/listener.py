"""The socket of a service: bound, guarded, bounded, and given back.

Note [Descriptors of forked children]
    A child that was forked holds the listening socket, its connections and the lock of its path,
    too. If the process ends and the child does not, peers would not see their connections
    close, and the next process could not listen at the same address. So the child closes them. It
    finds the sockets, which belong to ZeroMQ, by their address.
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
    """A bound ROUTER, with what belongs to it.

    Attributes:
      socket: The socket.
      authenticator: Who decides about keys; None where the place itself keeps strangers out.
      doorway: Who watches connections; None inside a process, where there are none.
      url: Where it is bound.
      address: The same for clusters; with the real port if the one asked for was 0.
    """

    def __init__(self, location: Location, task: Task, keys: Keys | None) -> None:
        self._location = location
        self._path_lock: addresses.PathLock | None = None
        self._has_name = False
        # As the kernel tells it: a path, or a host and a port.
        self._local: Any = location.path if location.scheme == "ipc" else None
        self.authenticator: Authenticator | None = None
        self.doorway: ConnectionGuard | None = None
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
        # Ending a context of its own waits until nothing listens any more; a shared one would go
        # on listening for a moment after the place was given free.
        self._context = context.acquire(is_private=location.scheme != "inproc")
        self.socket: zmq.Socket = self._context.socket(zmq.ROUTER)
        try:
            self._configure()
            if is_tcp and keys is not None:
                self.authenticator = Authenticator(self._context, keys)
                guard_server(self.socket, keys)
                self.socket.ipv6 = "[" in target
            if location.scheme != "inproc":
                self.doorway = ConnectionGuard(self.socket, task)
            self._bind(target)
            if self.doorway is not None:
                self.doorway.opened()
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
            # Hosts that vanish without a word: their connections are closed here as well.
            self.socket.tcp_keepalive = 1
            self.socket.tcp_keepalive_idle = self.socket.tcp_keepalive_intvl = 1
            self.socket.tcp_keepalive_cnt = 3
        # Sending to somebody who is gone, or reads nothing, is an error and not forgotten.
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
        """Gives everything back; what was sent gets a moment to leave."""
        if self.socket.closed:
            return
        _listeners.discard(self)
        if self._has_name:
            # At once: closing gives a name free only when ZeroMQ gets round to it.
            with contextlib.suppress(zmq.ZMQError):
                self.socket.unbind(self.url)
            context.free_name(self.url)
        if self.doorway is not None:
            self.doorway.close()
        self.socket.close()
        if self.authenticator is not None:
            self.authenticator.close()
        context.release(self._context)
        if self._path_lock is not None:
            self._path_lock.release()

    def leave_to_parent(self) -> None:
        """Closes what a forked child has inherited; the process that it came from keeps it."""
        if self._path_lock is not None:
            self._path_lock.leave_to_parent()
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
        listener.leave_to_parent()
    _listeners.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
