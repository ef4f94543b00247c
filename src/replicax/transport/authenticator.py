"""Answers ZeroMQ when it asks whether a key may come in, and for which role it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicax.foundation import lazy
from replicax.transport import frames
from replicax.transport.keys import Keys

if TYPE_CHECKING:
    import zmq
    from zmq.utils import z85
else:
    zmq = lazy.module("zmq")
    z85 = lazy.module("zmq.utils.z85")

_URL = "inproc://zeromq.zap.01"
# With a domain a connection is refused when there is nobody to ask.
_DOMAIN = b"replicax"


class Authenticator:
    """The one authenticator of a context. Its owner polls `socket` and calls `answer`."""

    def __init__(self, context: zmq.Context, keys: Keys) -> None:
        self._keys = keys
        self._stamp = keys.stamp()
        self._roles = _roles(keys)
        self.socket: zmq.Socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_URL)

    def answer(self) -> None:
        """Answers the questions that wait."""
        if (stamp := self._keys.stamp()) != self._stamp:
            self._stamp, self._keys = stamp, self._keys.latest()
            self._roles = _roles(self._keys)
        while frames.has_message(self.socket):
            question = self.socket.recv_multipart()
            # version, number, domain, address, identity, mechanism, credentials
            role = None
            if len(question) == 7 and question[5] == b"CURVE" and question[2] == _DOMAIN:
                role = self._roles.get(question[6])
            status = [b"200", b"OK", role] if role else [b"400", b"unknown key", b""]
            self.socket.send_multipart([*question[:2], *status, b""])

    def close(self) -> None:
        """Answers no more."""
        self.socket.close()


def _roles(keys: Keys) -> dict[bytes, bytes]:
    return {z85.decode(k): r.encode() for r in keys.public_keys for k in keys.good(r)}


def guard_server(socket: zmq.Socket, keys: Keys) -> None:
    """Makes a socket accept only callers that have a key of the cluster."""
    socket.curve_server = True
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.zap_domain = _DOMAIN


def guard_client(socket: zmq.Socket, keys: Keys, server_key: bytes) -> None:
    """Makes a socket talk only to the holder of a key."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_serverkey = server_key
