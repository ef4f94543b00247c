"""Ports that belong to a group before its tasks listen on them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from replicax.foundation import errors


class ReservedPorts:
    """Ports of one address, which no other process gets while they are reserved.

    A port that is only looked up may be taken by another process before a task listens on it. These
    are bound here, without listening, and stay bound. The kernel lets a task bind such a port if
    both ends set SO_REUSEADDR, as the tasks of replicax and gRPC do. It does not select it for a
    process that asks for any port.

    Args:
      wanted: The number of ports; or the ports themselves, 0 for any.
      host: The address.

    Raises:
      AddressInUseError: Another process has one of them.

    Example:
      >>> reserved = ReservedPorts(2)
      >>> len(set(reserved.ports))
      2
      >>> reserved.close()
    """

    def __init__(self, wanted: int | Sequence[int], host: str = "127.0.0.1") -> None:
        ports = [0] * wanted if isinstance(wanted, int) else wanted
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sockets: list[socket.socket] = []
        try:
            for port in ports:
                one = socket.socket(family, socket.SOCK_STREAM)
                self._sockets.append(one)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                _bind(one, host, port)
        except BaseException:
            self.close()
            raise
        self.ports: tuple[int, ...] = tuple(s.getsockname()[1] for s in self._sockets)

    def close(self) -> None:
        """Releases the ports. Idempotent."""
        while self._sockets:
            self._sockets.pop().close()


def _bind(one: socket.socket, host: str, port: int) -> None:
    try:
        one.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise errors.AddressInUseError(
            f"Port {port} of {host} is used by another process. End it, or start the job again: it "
            "gets new ports."
        ) from error
