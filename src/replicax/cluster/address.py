"""Parses the addresses of tasks."""

from __future__ import annotations

import dataclasses
import ipaddress
import re

from replicax.foundation import errors

# Schemes whose address is a path or a name on this machine, without a port.
_LOCAL_SCHEMES = ("ipc", "inproc")
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
_DOTTED_NUMBERS = re.compile(r"[0-9.]+")
_MAX_PORT = 65535


@dataclasses.dataclass(frozen=True)
class Address:
    """A parsed address.

    Attributes:
      scheme: The part before `://`; None without.
      host: The host, without brackets; the path of `ipc`, the name of `inproc`.
      port: The port; None where the scheme has none.
    """

    scheme: str | None
    host: str
    port: int | None

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        return self.scheme in _LOCAL_SCHEMES

    @property
    def endpoint(self) -> tuple[str, int | None] | None:
        """The part that must be unique; None if the server selects it.

        It does for port 0, `ipc://*` and a path that ends in a slash.
        """
        if self.is_local:
            return None if self.host == "*" or self.host.endswith("/") else (self.host, None)
        return (self.host.lower(), self.port) if self.port else None


def parse(text: str, task: str) -> Address:
    """Parses an address.

    Args:
      text: `host:port`, `[v6]:port`, `ipc://path`, or one of those behind a `scheme://`.
      task: The task that has the address, for the error message.

    >>> parse("tcp://[::1]:2222", "/job:ps/task:0")
    Address(scheme='tcp', host='::1', port=2222)
    """
    match = _SCHEME.fullmatch(text)
    scheme = match.group("scheme").lower() if match else None
    rest = match.group("rest") if match else text
    if scheme in _LOCAL_SCHEMES:
        if not rest or not rest.isprintable():
            raise _malformed(text, task, "it has no path that can be printed")
        return Address(scheme, rest, None)
    host, colon, port = rest.rpartition(":")
    if not colon:
        raise _malformed(text, task, "it has no port")
    # `isdigit` alone also accepts digits of other scripts.
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= _MAX_PORT):
        raise _malformed(text, task, f"its port is no number from 0 to {_MAX_PORT}")
    return Address(scheme, _host(host, text, task), int(port))


def join(host: str, port: int | str) -> str:
    """Joins a host and a port to an address.

    >>> join("10.0.0.1", 2222), join("fd00::1", 2222)
    ('10.0.0.1:2222', '[fd00::1]:2222')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_layer(text: str, rpc_layer: str | None) -> str:
    """Puts `rpc_layer://` before an address without a scheme.

    >>> with_layer("ps0:2222", "tcp"), with_layer("ipc:///tmp/ps0", "tcp")
    ('tcp://ps0:2222', 'ipc:///tmp/ps0')
    """
    return f"{rpc_layer}://{text}" if text and rpc_layer and "://" not in text else text


def _host(host: str, text: str, task: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            raise _malformed(text, task, "there is no IPv6 address between its brackets") from None
    if ":" in host:
        raise _malformed(text, task, "its host contains a colon; IPv6 needs brackets, [::1]:2222")
    if _DOTTED_NUMBERS.fullmatch(host):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _malformed(text, task, "its host is no IPv4 address") from None
    if not _HOST_NAME.fullmatch(host):
        raise _malformed(text, task, "its host is no host name")
    return host


def _malformed(text: str, task: str, reason: str) -> errors.InvalidArgumentError:
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    return errors.InvalidArgumentError(
        f"The address of {task} must be a host and a port, or a path",
        f"it is {shown!r}: {reason}",
        "Write 'host:2222', '[::1]:2222' or 'ipc:///path/to/socket'.",
    )
