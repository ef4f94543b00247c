"""Authenticates CURVE keys for ZeroMQ (ZAP): maps public keys to roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicax.foundation import lazy
from replicax.protocol.tasks import Role
from replicax.transport.keys import Keys
from replicax.transport.zmq import zmq_io

if TYPE_CHECKING:
    import zmq
    from zmq.utils import z85
else:
    zmq = lazy.module("zmq")
    z85 = lazy.module("zmq.utils.z85")

_URL = "inproc://zeromq.zap.01"
# With a domain, ZeroMQ rejects connections while there is no authenticator.
_DOMAIN = b"replicax"


class Authenticator:
    """The one authenticator of a context. Its owner polls `socket` and calls `reply`."""

    def __init__(self, context: zmq.Context, keys: Keys) -> None:
        self._known = KnownKeys(keys)
        self.socket: zmq.Socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_URL)

    def reply(self) -> None:
        """Replies to the waiting requests."""
        self._known.refresh()
        while zmq_io.has_message(self.socket):
            request = self.socket.recv_multipart()
            # version, number, domain, address, identity, mechanism, credentials
            role = None
            if len(request) == 7 and request[5] == b"CURVE" and request[2] == _DOMAIN:
                role = self._known.role_of(z85.encode(request[6]))
            status = [b"200", b"OK", role.encode()] if role else [b"400", b"unknown key", b""]
            self.socket.send_multipart([*request[:2], *status, b""])

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()


class KnownKeys:
    """The accepted public keys, and the role of each.

    >>> known = KnownKeys(Keys("ps", b"p" * 40, b"", {"ps": b"p" * 40, "worker": b"w" * 40}))
    >>> known.role_of(b"w" * 40), known.role_of(b"x" * 40)
    ('worker', None)
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._stamp = keys.stamp()
        self._roles = _roles(keys)

    def refresh(self) -> None:
        """Reloads keys that were renewed or retired."""
        if (stamp := self._keys.stamp()) != self._stamp:
            self._stamp, self._keys = stamp, self._keys.latest()
            self._roles = _roles(self._keys)

    def role_of(self, key: bytes) -> Role | None:
        """Returns the role of a public key; None for an unknown one."""
        return self._roles.get(key)


def _roles(keys: Keys) -> dict[bytes, Role]:
    return {key: role for role in keys.public_keys for key in keys.accepted(role)}


def guard_server(socket: zmq.Socket, keys: Keys) -> None:
    """Makes a socket accept only peers with a key of the cluster."""
    socket.curve_server = True
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.zap_domain = _DOMAIN


def guard_client(socket: zmq.Socket, keys: Keys, server_key: bytes) -> None:
    """Makes a socket connect only to the owner of a key."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_serverkey = server_key
