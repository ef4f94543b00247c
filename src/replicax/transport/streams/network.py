"""Sockets: how a location is dialled and listened at, and how threads wait for them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import resource
import select
import socket
import sys
import weakref
from pathlib import Path

from replicax.foundation import errors, runtime
from replicax.protocol import limits
from replicax.transport import addresses, base, memory
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.streams.wire import StreamWire, TlsWire
from replicax.transport.wakeup import Wakeup

_log = logging.getLogger(__name__)

# Both are tried again by the caller after a pause.
_PENDING = (errno.EINPROGRESS, errno.EWOULDBLOCK)
# What `accept` raises for a connection that has failed while it waited; the listener has not.
_FAILED_EARLY = (
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENONET,
    errno.ENOPROTOOPT,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EPROTO,
)


class SocketNetwork:
    """The network of a process: sockets, and names inside of it."""

    def dial(self, location: Location, keys: Keys | None) -> base.Wire:
        """Starts to connect; what goes wrong is the `failure` of the wire."""
        if location.scheme == "inproc":
            return memory.dial(location.url)
        if location.scheme == "ipc":
            return _dial_path(location)
        if keys is None:
            raise errors.PermissionDeniedError(
                "TCP needs certificates",
                f"there are none for {location}",
                "Make them with `replicax keys make DIR` and set REPLICAX_KEYS=DIR.",
            )
        return _dial_tcp(location, keys)

    def listen(self, location: Location, keys: Keys | None) -> base.Listener:
        """Listens at a location."""
        if location.scheme == "inproc":
            return memory.MemoryListener(location.url)
        return SocketListener(location, keys)

    def poller(self) -> base.Poller:
        """Returns a poller."""
        return EpollPoller()

    def wakeup(self) -> base.Wakeup:
        """Returns what wakes a thread that polls."""
        return Wakeup()

    def now(self) -> float:
        """Returns the monotonic time in seconds."""
        return runtime.now()

    def wait(self, wire: base.Wire, wakeup: int | None, timeout: float) -> bool:
        """Waits until a wire has events, or another descriptor does; returns whether it has."""
        poll = select.poll()
        if wire.failure is None:
            poll.register(wire.fileno(), wire.events)
        if wakeup is not None:
            poll.register(wakeup, base.READ)
        # Rounded up: a wait of less than a millisecond would not wait.
        ready = poll.poll(int(timeout * 1e3) + 1 if timeout > 0 else 0)
        return wakeup is not None and any(fd == wakeup for fd, _ in ready)


# See Note [What a simulation replaces] in `foundation/runtime.py`.
NETWORK: base.Network = SocketNetwork()


class EpollPoller:
    """Waits for the events of many descriptors."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._events: dict[int, int] = {}

    def set(self, fd: int, events: int) -> None:
        """Polls a descriptor for events."""
        known = self._events.get(fd)
        if known == events:
            return
        self._events[fd] = events
        if known is None:
            self._epoll.register(fd, events)
        else:
            self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        """Stops polling a descriptor, which may be closed already."""
        if self._events.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def wait(self, timeout: float) -> list[int]:
        """Returns the descriptors with events."""
        return [fd for fd, _ in self._epoll.poll(timeout)]

    def close(self) -> None:
        """Closes the poller. Idempotent."""
        self._epoll.close()


def _dial_path(location: Location) -> StreamWire:
    connection = socket.socket(socket.AF_UNIX)
    wire = StreamWire(connection, name=location.address)
    try:
        connection.connect(location.path)
    except BlockingIOError:
        wire.close("the task has too many connections to accept")
    except FileNotFoundError:
        wire.close(base.NOTHING_LISTENS)
    except ConnectionRefusedError:
        wire.close(base.NOTHING_LISTENS)
    except OSError as error:
        wire.close(f"it cannot be reached: {error.strerror or error}")
    return wire


def _dial_tcp(location: Location, keys: Keys) -> TlsWire:
    host, port = addresses.host_and_port(location)
    try:
        ipaddress.ip_address(host)
        family, target = (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)
        problem = ""
    except ValueError:
        family, target, problem = _look_up(host, port)
    connection = socket.socket(family)
    set_options(connection)
    connection.setblocking(False)
    context = keys.client_context()
    wire = TlsWire(connection, context, False, keys.identify, True, location.address)
    code = 0 if problem else connection.connect_ex(target)
    if problem:
        wire.close(problem)
    elif code == errno.ECONNREFUSED:
        wire.close(base.NOTHING_LISTENS)
    elif code not in (0, *_PENDING):
        wire.close(f"it cannot be reached: {os.strerror(code)}")
    return wire


def _look_up(host: str, port: int) -> tuple[int, tuple[str, int], str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        text = f"the name {host!r} is not known ({error.strerror or error})"
        return socket.AF_INET, ("", port), text
    return found[0], (str(found[4][0]), port), ""


def set_options(connection: socket.socket) -> None:
    """Sends small messages at once, and closes connections to hosts that have vanished."""
    for level, name, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, limits.KEEPALIVE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, limits.KEEPALIVE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.USER_TIMEOUT * 1e3)),
    ):
        connection.setsockopt(level, name, value)


class SocketListener:
    """A bound socket, at a path or at a TCP address.

    Attributes:
      url: The bound URL.
      address: The same for clusters; with the real port if port 0 was requested.
    """

    def __init__(self, location: Location, keys: Keys | None) -> None:
        self.url = location.url
        self.address = location.address
        self._location = location
        self._keys = keys
        self._path_lock: addresses.PathLock | None = None
        self._is_closed = False
        self._logged_at = -1.0
        if location.scheme == "ipc":
            self._path_lock = addresses.PathLock(location.path)
            self._socket = socket.socket(socket.AF_UNIX)
            target: object = location.path
        else:
            if keys is None:
                raise errors.PermissionDeniedError(
                    "A task must have certificates to listen on TCP",
                    "it has none",
                    "Make them with `replicax keys make DIR` and set REPLICAX_KEYS=DIR.",
                )
            keys.server_context()  # Errors of certificates are raised here, not in the loop.
            host, port = addresses.numeric(location)
            self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            target = (host, port)
        try:
            self._bind(target)
        except BaseException:
            self.close()
            raise
        _listeners.add(self)

    def _bind(self, target: object) -> None:
        try:
            self._socket.setblocking(False)
            self._socket.bind(target)  # type: ignore[arg-type]
            self._socket.listen(limits.BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise addresses.in_use(self.address) from error
            raise errors.InvalidArgumentError(
                f"{self.address!r} must be an address of this host",
                f"it cannot be bound ({error.strerror or error})",
                "Correct the cluster specification.",
            ) from error
        if self._location.scheme == "tcp":
            host = self.address.rpartition(":")[0]
            self.address = f"{host}:{self._socket.getsockname()[1]}"
            self.url = f"tcp://{self.address}"

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self._socket.fileno()

    def accept(self) -> base.Wire | None:
        """Returns the next connection; None if there is none.

        Raises:
          ResourceExhaustedError: The process has no descriptors for connections.
        """
        try:
            connection, name = self._socket.accept()
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            if error.errno in _FAILED_EARLY:
                return None
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise self._exhausted() from error
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = sys.maxsize if most == resource.RLIM_INFINITY else most
        if connection.fileno() >= most - min(most * limits.RESERVED, limits.RESERVED_MOST):
            connection.close()
            raise self._exhausted()
        if self._location.scheme == "ipc":
            return StreamWire(connection, is_accepted=True, name="a process of this host")
        assert self._keys is not None
        set_options(connection)
        shown = f"{name[0]}:{name[1]}"
        context = self._keys.server_context()
        return TlsWire(connection, context, True, self._keys.identify, name=shown)

    def _exhausted(self) -> errors.ResourceExhaustedError:
        return errors.ResourceExhaustedError(
            f"{self.address} has no file descriptors for more connections; it accepts none until "
            "it has (see `ulimit -n`)"
        )

    def close(self) -> None:
        """Closes the socket and releases its address. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        _listeners.discard(self)
        self._socket.close()
        if self._path_lock is not None:
            self._path_lock.release()

    def close_in_child(self) -> None:
        """Closes the inherited descriptors in a forked child; its parent keeps them."""
        self._is_closed = True
        self._socket.close()
        if self._path_lock is not None:
            self._path_lock.close_in_child()


# See Note [Descriptors of forked children] in `wire.py`.
_listeners: weakref.WeakSet[SocketListener] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for listener in list(_listeners):
        listener.close_in_child()
    _listeners.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def accepts_connections(address: str | Path, timeout: float = 0.25) -> bool:
    """Returns whether something listens at `host:port`, or at the path of a socket."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(address, Path):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(timeout)
                probe.connect(str(address))
                return True
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout):
            return True
    return False
