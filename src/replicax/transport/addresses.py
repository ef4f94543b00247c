"""Resolves the addresses of a cluster to socket URLs.

Tasks on one host use sockets in a directory that only their user can enter. All other connections
use TCP with TLS 1.3, between tasks that have certificates.
"""

from __future__ import annotations

import dataclasses
import fcntl
import ipaddress
import os
import secrets
import socket
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from replicax.foundation import errors, private_directories
from replicax.transport.keys import Keys

Scheme = Literal["ipc", "tcp", "inproc"]

# The size of a socket path in the kernel, without the terminating zero.
_MAX_PATH = 106


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """An address to bind or to connect to.

    Attributes:
      scheme: The kind of socket.
      url: The URL; `resolve` accepts it as an address, too.
      address: The address in the cluster.
    """

    scheme: Scheme
    url: str
    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def path(self) -> str:
        """The file of an `ipc` socket."""
        return self.url.removeprefix("ipc://")


def resolve(address: str, protocol: str | None = None, keys: Keys | None = None) -> Location:
    """Resolves an address.

    Args:
      address: `host:port`, `[v6 host]:port`, `ipc://path`, `inproc://name` or `tcp://host:port`.
      protocol: "tcp" to use TCP also on one host; None, "grpc" and "ipc" choose by the address.
      keys: The certificates of this task; required for TCP.

    Raises:
      InvalidArgumentError: The address is malformed, or a wildcard.
      PermissionDeniedError: TCP without keys, or a directory that others can enter.

    Example:
      >>> resolve("inproc://ps0").url
      'inproc://ps0'
      >>> resolve("example.org:2222")
      Traceback (most recent call last):
        ...
      replicax.errors.PermissionDeniedError: Tasks that others on the network can ...
    """
    if protocol not in (None, "grpc", "ipc", "tcp"):
        raise errors.InvalidArgumentError(
            "The protocol must be None, 'grpc', 'ipc' or 'tcp'",
            f"{protocol!r} was given",
            "Leave it out to choose by the address.",
        )
    scheme, _, rest = address.partition("://")
    if not rest:
        scheme, rest = "", address
    if scheme == "inproc":
        return Location("inproc", address, address)
    if scheme == "ipc":
        return _at_path(rest, address)
    if scheme not in ("", "grpc", "tcp"):
        raise _malformed(address)
    host, port = _host_and_port(rest, address)
    is_tcp = "tcp" in (protocol, scheme) or (keys is not None and protocol != "ipc")
    if _is_loopback(host) and not is_tcp:
        name = f"port-{port}" if port else f"any-{secrets.token_hex(8)}"
        path = str(private_directories.of_user() / f"{name}.sock")
        return _at_path(path, address if port else f"ipc://{path}")
    if keys is None:
        raise _needs_keys(address)
    shown = f"[{host}]" if ":" in host else host
    return Location("tcp", f"tcp://{shown}:{port}", f"{shown}:{port}")


def _host_and_port(text: str, address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _malformed(address) from error
    if parts.path or parts.query or parts.fragment or parts.username is not None or port is None:
        raise _malformed(address)
    if host is None or host == "*" or _is_wildcard(host):
        raise errors.InvalidArgumentError(
            "A task must listen at one address",
            f"{address!r} means every interface of the host",
            "Name the interface, such as '10.0.0.5:2222', or use localhost.",
        )
    return host, port


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _malformed(address: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        "An address is 'host:port', '[v6 host]:port' or 'ipc://path'",
        f"{address!r} was given",
        "Correct the cluster specification.",
    )


def _needs_keys(address: str) -> errors.PermissionDeniedError:
    return errors.PermissionDeniedError(
        "Tasks that others on the network can reach must have certificates",
        f"there are none for {address!r}",
        "Make them with `replicax keys make DIR`, copy DIR to each host, and set "
        "REPLICAX_KEYS=DIR.",
    )


def _at_path(path: str, address: str) -> Location:
    if not path.startswith("/") or len(os.fsencode(path)) > _MAX_PATH:
        raise errors.InvalidArgumentError(
            f"The path of a socket must be absolute and have at most {_MAX_PATH} bytes",
            f"{path!r} was given",
            "Use a shorter directory; XDG_RUNTIME_DIR or TMPDIR set the usual one.",
        )
    private_directories.require_private(Path(path).parent)
    return Location("ipc", f"ipc://{path}", address)


class PathLock:
    """Locks the path of an `ipc` socket; the kernel releases it when the process ends."""

    def __init__(self, path: str) -> None:
        self._socket_path = path
        self._path = f"{path}.lock"
        while True:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                pid = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
                os.close(self._fd)
                raise in_use(f"ipc://{path}", pid) from error
            # The last holder may have removed the file after it was opened here.
            if self._is_current():
                break
            os.close(self._fd)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        # Left behind by a killed process: a running one would hold the lock.
        Path(path).unlink(missing_ok=True)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def close_in_child(self) -> None:
        """Closes the descriptor in a forked child; the lock stays with the other process."""
        os.close(self._fd)

    def release(self) -> None:
        """Releases the path; the socket must be closed."""
        Path(self._socket_path).unlink(missing_ok=True)
        Path(self._path).unlink(missing_ok=True)
        os.close(self._fd)


def in_use(address: str, pid: str = "") -> errors.AddressInUseError:
    """Returns the error for an address where another process listens."""
    holder = f"process {pid} listens there" if pid else "another process listens there"
    return errors.AddressInUseError(
        f"The address {address!r} must be free",
        holder,
        "Stop it, or choose another port; port 0 takes any.",
    )


def host_and_port(location: Location) -> tuple[str, int]:
    """Returns the host and the port of a TCP location.

    >>> host_and_port(Location("tcp", "tcp://[::1]:80", "[::1]:80"))
    ('::1', 80)
    """
    return _host_and_port(location.url.removeprefix("tcp://"), location.address)


def numeric(location: Location) -> tuple[str, int]:
    """Returns the numeric host, which `bind` requires, and the port of a TCP location."""
    host, port = host_and_port(location)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise errors.InvalidArgumentError(
            "The address of a task must be one of this host",
            f"{host!r} is not known ({error.strerror or error})",
            "Correct the cluster specification or the name service.",
        ) from error
    if _is_wildcard(str(found)):
        raise _malformed(location.address)
    return str(found), port
