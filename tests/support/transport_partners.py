"""Services, channels and raw peers for the tests of the transport."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from replicax.protocol import codec, messages
from replicax.protocol.tasks import Role, Task, library_version, python_version
from replicax.testing.splitter import Splitter, joined
from replicax.transport import addresses
from replicax.transport import keys as key_files
from replicax.transport.channel import Channel
from replicax.transport.service import Service, Session

PS = Task("ps", 0)
WORKER = Task("worker", 0)
COORDINATOR = Task("coordinator", 0)

ALL_BODIES: tuple[type[messages.Body], ...] = typing.get_args(messages.AnyBody)


def echo(session: Session, envelope: messages.Envelope, buffers: list[memoryview]) -> Any:
    """Answers with what came."""
    return envelope.body, buffers


class Place:
    """A place of one scheme, with the keys that it needs."""

    def __init__(self, scheme: str, directory: Path) -> None:
        self.scheme = scheme
        self.keys: Path | None = None
        name = random.getrandbits(40)
        self.address = f"inproc://test-{name:x}" if scheme == "inproc" else "127.0.0.1:0"
        if scheme == "ipc":
            directory.chmod(0o700)
            self.address = f"ipc://{directory}/{name:x}"
        if scheme == "tcp":
            self.keys = key_files.make(directory / "keys")

    def key(self, role: Role) -> key_files.Keys | None:
        return None if self.keys is None else key_files.load(self.keys, role)

    def resolve(self, role: Role) -> addresses.Location:
        return addresses.resolve(self.address, None, self.key(role))

    def fix_port(self) -> None:
        """Takes a port, so that sessions know it before somebody listens."""
        if self.scheme == "tcp":
            with self.serve():
                pass

    @contextlib.contextmanager
    def serve(
        self, handler: Callable[..., Any] = echo, task: Task = PS, **more: Any
    ) -> Iterator[Service]:
        with Service(
            self.resolve(task.role), task, handler, self.key(task.role), **more
        ) as service:
            self.address = service.address
            service.start()
            yield service

    def channel(self, me: Task = COORDINATOR, peer: Task = PS, **more: Any) -> Channel:
        return Channel(self.resolve(me.role), me, self.key(me.role), peer=peer, **more)


class RawPeer:
    """A raw connection, for messages and bytes that no task would send.

    Args:
      url: Where to connect to, `ipc://…` or `tcp://…`.
      keys: The certificates to connect with over TCP.
    """

    def __init__(self, url: str, keys: key_files.Keys | None = None) -> None:
        self.url = url
        self.keys = keys
        self.socket: Any = None
        self._splitter = Splitter()
        self._arrived: list[list[bytes]] = []

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.socket is not None:
            self.socket.close()

    def connect(self) -> None:
        if self.url.startswith("ipc://"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(10.0)
            self.socket.connect(self.url.removeprefix("ipc://"))
            return
        host, _, port = self.url.removeprefix("tcp://").rpartition(":")
        raw = socket.create_connection((host, int(port)), timeout=10.0)
        if self.keys is None:
            self.socket = raw
            return
        try:
            self.socket = self.keys.client_context().wrap_socket(raw)
        except OSError:
            raw.close()
            raise

    def send(self, body: messages.Body, buffers: Any = (), request: int = 1) -> None:
        self.send_parts(codec.encode("job", 1, 99, request, body, buffers))

    def send_parts(self, parts: Any) -> None:
        """Sends a message of given parts: a header, and pieces of a body."""
        self.socket.sendall(joined(parts))

    def hello(self, role: Role = "coordinator", **changes: Any) -> None:
        hello = messages.Hello(messages.VERSION, library_version(), python_version(), role, 0, 99)
        self.send(msgspec.structs.replace(hello, **changes))

    def receive(self, timeout: float = 30.0) -> Any:
        """Returns the next body; None at the timeout, or if the connection was closed."""
        self.socket.settimeout(timeout)
        try:
            while not self._arrived:
                data = self.socket.recv(1 << 16)
                if not data:
                    return None
                self._arrived += self._splitter.feed(data)
        except (TimeoutError, ConnectionError):
            return None
        return codec.decode(self._arrived.pop(0))[0].body

    def is_closed_within(self, timeout: float) -> bool:
        """Returns whether the other side closes the connection in time."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._arrived += self._splitter.feed(data)
        return False


def random_value(hint: Any, rng: random.Random, depth: int = 0) -> Any:
    """Makes an instance of a type that messages use."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return rng.choice(args)
    if origin in (types.UnionType, typing.Union):
        return random_value(rng.choice(args), rng, depth)
    num_items = 0 if depth > 2 else rng.randrange(4)
    if origin is list:
        return [random_value(args[0], rng, depth + 1) for _ in range(num_items)]
    if origin is tuple:
        return tuple(random_value(args[0], rng, depth + 1) for _ in range(num_items))
    if origin is dict:
        return {str(i): random_value(args[1], rng, depth + 1) for i in range(num_items)}
    if isinstance(hint, type) and issubclass(hint, messages.Body):
        return random_body(hint, rng, depth + 1)
    makers: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.randrange(-(1 << 63), 1 << 64),
        float: lambda: rng.uniform(-1e9, 1e9),
        str: lambda: "".join(rng.choices("aß✓ \n\0", k=rng.randrange(9))),
        bool: lambda: rng.random() < 0.5,
        bytes: lambda: rng.randbytes(rng.randrange(9)),
        type(None): lambda: None,
    }
    return makers[hint]()


def random_body(kind: type[messages.Body], rng: random.Random, depth: int = 0) -> messages.Body:
    """Makes a random message of some type."""
    hints = typing.get_type_hints(kind, None, vars(messages))
    return kind(*(random_value(hints[f], rng, depth) for f in kind.__struct_fields__))


@contextlib.contextmanager
def process(address: str, incarnation: int) -> Iterator[subprocess.Popen[str]]:
    """An echoing parameter server in a process of its own."""
    with subprocess.Popen(
        [sys.executable, __file__, address, str(incarnation)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


if __name__ == "__main__":
    with Service(
        addresses.resolve(sys.argv[1]), PS, echo, incarnation=int(sys.argv[2])
    ) as _service:
        _service.start()
        print("ready", flush=True)
        sys.stdin.read()
