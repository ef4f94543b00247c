"""Explains failed connections: probes a listener without keys.

ZeroMQ reports only that a handshake failed, or that nothing listens. Whether keys are the reason is
visible in the first bytes of a listener, before it checks any: the ZMTP 3 signature names its
security mechanism.
"""

from __future__ import annotations

import contextlib
import os
import socket

from replicax.foundation import errors
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport.addresses import Location

_LENGTH = 64
# Signature, version 3.1, mechanism, role and filler. A listener with another mechanism closes the
# connection before it has sent all of its own.
_START = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = b"CURVE".ljust(20, b"\x00")
_SIGNATURE = (_START + b"\x03\x01" + _MECHANISM).ljust(_LENGTH, b"\x00")
# Listeners send the signature immediately.
_TIMEOUT_S = 0.25


def explain_failure(
    peer: Task, location: Location, me: Task
) -> errors.PermissionDeniedError | None:
    """Returns the error for a connection that fails because of keys; None for other reasons.

    To be called when the peer is unreachable, or closes connections during handshakes. May block
    for a quarter of a second.
    """
    if location.scheme == "tcp":
        if listens_with_keys(location.address):
            return _wrong_keys(peer, location, me)
        if _listens_without_keys(location.address):
            return _needless_keys(peer, location)
        return None
    has_port = location.scheme == "ipc" and not location.address.startswith("ipc://")
    if has_port and listens_with_keys(location.address):
        return _missing_keys(peer, location)
    return None


def listens_with_keys(address: str) -> bool:
    """Returns whether a ZeroMQ socket that requires keys listens at `host:port`."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        target = host.strip("[]"), int(port)
        with socket.create_connection(target, timeout=_TIMEOUT_S) as connection:
            connection.sendall(_SIGNATURE)
            found = b""
            while len(found) < _LENGTH and (piece := connection.recv(_LENGTH - len(found))):
                found += piece
            return found[:1] == _START[:1] and found[12:32] == _MECHANISM
    return False


def _listens_without_keys(address: str) -> bool:
    """Returns whether a task of this user listens for `host:port` at a path of this machine."""
    try:
        path = addresses.resolve(address, "ipc").path
    except errors.DistributeError:  # Not an address of this machine.
        return False
    if not os.path.exists(path):
        return False
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.settimeout(_TIMEOUT_S)
        probe.connect(path)
        return True
    return False


def _wrong_keys(peer: Task, location: Location, me: Task) -> errors.PermissionDeniedError:
    return errors.PermissionDeniedError(
        f"{me} and {peer} at {location} must have keys of the same `replicax keys make`",
        "it listens there, and the handshake fails: their keys do not match",
        "Copy the directory of keys of the cluster to this host, and pass `keys=DIR` or set "
        "REPLICAX_KEYS=DIR.",
    )


def _missing_keys(peer: Task, location: Location) -> errors.PermissionDeniedError:
    return errors.PermissionDeniedError(
        f"{peer} at {location} accepts only connections with keys",
        "this process has none",
        "Pass `keys=DIR` or set REPLICAX_KEYS=DIR, with the keys of the cluster.",
    )


def _needless_keys(peer: Task, location: Location) -> errors.PermissionDeniedError:
    return errors.PermissionDeniedError(
        f"{peer} at {location} and this process must both have keys, or both have none",
        "it was started without keys, and is reachable only for processes of this user on this "
        "machine; this process has keys",
        "Start it with the keys of the cluster, or unset REPLICAX_KEYS here.",
    )
