"""Carries the connections to the coordination service of JAX over the control channel.

JAX's service has no authentication, and a client that loses its connection to it aborts the
process. So the service listens on a socket in the private directory of the user; each member gives
JAX such a socket of its own, and the bytes go over the control channel, which has keys. A member
never closes the connection on JAX's side: after the loss of the chief it only becomes silent.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from pathlib import Path

from replicax.foundation import private_directories
from replicax.group.links import Link
from replicax.protocol import messages
from replicax.transport import addresses
from replicax.transport.wakeup import Wakeup

_log = logging.getLogger(__name__)

_PIECE = 1 << 16
_SEND_S = 30.0
_CONNECT_S = 60.0
# No start of JAX takes as long.
_OLD_S = 3600.0


class _Connection:
    """One connection to JAX, and the numbers of its messages in both directions."""

    def __init__(self, opened: socket.socket, index: int, number: int) -> None:
        self.socket = opened
        self.index = index
        self.number = number
        self.num_sent = self.num_received = 0


class Tunnel:
    """One end of the connections; a thread of its own moves the bytes.

    Args:
      link: The control channel.
      index: The index of this member; that of the chief connects to the service.

    Attributes:
      address: The address for JAX: of the service on the chief, of this tunnel on others.
    """

    def __init__(self, link: Link, index: int) -> None:
        self._link = link
        self._is_host = index == 0
        directory = private_directories.of_user()
        _remove_old_files(directory)
        self._path = directory / f"jax-{os.getpid()}-{secrets.token_hex(4)}.sock"
        addresses.resolve(f"ipc://{self._path}")  # Raises if the path is too long.
        self.address = f"unix:{self._path}"
        self._received: collections.deque[tuple[int, messages.CoordinationBytes, bytes]]
        self._received = collections.deque()
        self._connections: dict[tuple[int, int], _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup.fd, selectors.EVENT_READ, None)
        self._listener: socket.socket | None = None
        if not self._is_host:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(self._path))
            self._listener.listen()
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._is_closing = False
        link.on_bytes = self._on_bytes
        self._thread = threading.Thread(target=self._run, name="replicax-tunnel", daemon=True)
        self._thread.start()

    def hide(self) -> None:
        """Removes the file of the socket: all connections are open."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the thread. The connections of members stay open until the process ends."""
        self._is_closing = True
        self._wakeup.set()
        self._thread.join(_SEND_S)
        self.hide()

    def _on_bytes(self, index: int, body: messages.CoordinationBytes, data: bytes) -> None:
        self._received.append((index, body, data))
        self._wakeup.set()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for key, _ in self._selector.select(1.0):
                    if isinstance(key.data, _Connection):
                        self._read(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                self._wakeup.clear()
                while self._received and not self._is_closing:
                    self._write(*self._received.popleft())
        except Exception:
            _log.exception("The connection to the coordination service of JAX failed")
        finally:
            self._release()

    def _release(self) -> None:
        self._selector.close()
        for connection in self._connections.values():
            if self._is_host:
                connection.socket.close()
            else:
                connection.socket.detach()  # JAX would abort the process.
        if self._listener is not None:
            self._listener.close()
        self._wakeup.close()

    def _accept(self) -> None:
        assert self._listener is not None
        opened, _ = self._listener.accept()
        self._add(opened, 0, len(self._connections))

    def _add(self, opened: socket.socket, index: int, number: int) -> _Connection:
        opened.settimeout(_SEND_S)
        connection = _Connection(opened, index, number)
        self._connections[index, number] = connection
        self._selector.register(opened, selectors.EVENT_READ, connection)
        return connection

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_PIECE)
        except OSError:
            data = b""
        body = messages.CoordinationBytes(connection.number, connection.num_sent)
        connection.num_sent += 1
        if not data:
            self._selector.unregister(connection.socket)
        if data or not self._is_host:
            self._link.send_bytes(connection.index, body, data)

    def _write(self, index: int, body: messages.CoordinationBytes, data: bytes) -> None:
        connection = self._connections.get((index, body.connection))
        if connection is None and self._is_host and body.number == 0 and data:
            opened = self._connect()
            connection = None if opened is None else self._add(opened, index, body.connection)
        if connection is None or connection.num_received != body.number:
            # Bytes were lost with the control channel: what follows would be nonsense to JAX.
            return
        connection.num_received += 1
        with contextlib.suppress(OSError):
            if data:
                connection.socket.sendall(data)
            elif self._is_host:
                connection.socket.shutdown(socket.SHUT_WR)

    def _connect(self) -> socket.socket | None:
        """Connects to the service, which may be starting."""
        end = time.monotonic() + _CONNECT_S
        while time.monotonic() < end and not self._is_closing:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                opened.connect(str(Path(self._path)))
                return opened
            except OSError:
                opened.close()
                time.sleep(0.01)
        return None


def _remove_old_files(directory: Path) -> None:
    """Removes the files of processes that were killed while JAX started."""
    for path in directory.glob("jax-*.sock"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _OLD_S:
                path.unlink()
