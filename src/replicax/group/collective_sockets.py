"""The sockets of JAX's collectives on CPUs, which a process closes to end a wait in native code.

A program that waits for the data of a stopped process cannot be cancelled. But it ends with an
error when its connections close: the group closes them when a member is lost. Gloo opens one
listening socket when JAX starts, and every connection has the port of one of these at one end.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

# A numeric address and a port.
Endpoint = tuple[str, int]


def listening() -> set[Endpoint]:
    """Returns the TCP endpoints at which this process listens; none where /proc is missing."""
    return {_endpoint(s.getsockname()) for s in _tcp_sockets() if _is_listening(s)}


def interrupt(endpoints: set[Endpoint]) -> int:
    """Closes the connections of this process from or to some listening endpoints, for both sides.

    Returns:
      The number of closed connections.
    """
    count = 0
    for each in _tcp_sockets():
        with contextlib.suppress(OSError):
            ends = {_endpoint(each.getsockname()), _endpoint(each.getpeername())}
            if ends & endpoints:
                each.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yields duplicates of the TCP sockets of this process, each closed after its use."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                is_tcp = found.type == socket.SOCK_STREAM
                if is_tcp and found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found


def _is_listening(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _endpoint(name: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    # An IPv6 socket shows IPv4 peers in this form.
    return name[0].removeprefix("::ffff:"), name[1]
