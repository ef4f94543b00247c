"""What hostile tests need: a real task that is watched, raw connections, a proxy of bytes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm_starts
from transport_partners import RawPeer

from replicax.protocol import limits
from replicax.protocol.tasks import Role, Task
from replicax.transport import addresses
from replicax.transport import keys as key_files
from replicax.transport.channel import Channel

PROGRAMS = Path(__file__).parent / "programs"


def _client_hello() -> bytes:
    """Returns the first bytes of a TLS 1.3 handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


CLIENT_HELLO = _client_hello()


def claim(total: int, header: int = 20, priority: int = 0) -> bytes:
    """Returns the start of a message that claims to have so many bytes."""
    length = min(max(total, 1), limits.PIECE)
    return struct.pack("<IBBHIQ4x", length, priority, length == total, 0x7278, header, total)


class WatchedTask:
    """A task in a process of its own, whose every unpickling is written down."""

    def __init__(self, directory: Path, job: Any, protocol: str, **env: str) -> None:
        directory.chmod(0o700)
        self.task = Task(job, 0)
        self.keys: Path | None = None
        options = ["--protocol", protocol]
        where = f"ipc://{directory}/task"
        if protocol == "tcp":
            where = "127.0.0.1:0"
            self.keys = key_files.make(directory / "keys")
            options += ["--keys", str(self.keys)]
        self._audit = directory / "audit"
        self._log = directory / "log"
        reading, writing = os.pipe()
        cluster = {"cluster": {job: [where]}, "task": {"type": job, "index": 0}}
        # Tests look at its command line, and at all that it opens.
        with self._log.open("wb") as log, warm_starts.cold():
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAMS / "audited_serve.py"), "serve", *options]
                + ["--ready-fd", str(writing), "--die-with-parent", str(os.getpid())],
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps(cluster),
                    "AUDIT_FILE": str(self._audit),
                    "JAX_PLATFORMS": "cpu",
                    **env,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
            )
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.readline()
        assert said, self.log()
        self.address: str = json.loads(said)["address"]
        self.watched = psutil.Process(self.process.pid)
        self.forget()

    def __enter__(self) -> WatchedTask:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def unpickled(self) -> list[str]:
        """What pickle has looked up since the task listens."""
        return self._audit.read_text().split()

    def forget(self) -> None:
        """Counts from now on."""
        os.truncate(self._audit, 0)

    def figures(self) -> dict[str, Any]:
        """What must not grow: bytes of memory, file descriptors, threads."""
        return {
            "rss": self.watched.memory_info().rss,
            "fds": self.watched.num_fds(),
            "threads": self.watched.num_threads(),
        }

    def key(self, role: Role) -> key_files.Keys | None:
        return None if self.keys is None else key_files.load(self.keys, role)

    def channel(self, role: Role = "coordinator", address: str = "") -> Channel:
        keys = self.key(role)
        where = addresses.resolve(address or self.address, None, keys)
        return Channel(where, Task(role, 0), keys, peer=self.task)

    def dial(self) -> socket.socket:
        """A raw connection to where the task listens."""
        return dial(self.address)

    @contextlib.contextmanager
    def raw_peer(self, keys: key_files.Keys | None = None) -> Iterator[RawPeer]:
        """A raw connection that is not open yet; over TCP with the certificate of a worker."""
        keys = keys or self.key("worker")
        url = self.address if self.keys is None else f"tcp://{self.address}"
        with RawPeer(url, keys) as raw_peer:
            yield raw_peer


def dial(address: str) -> socket.socket:
    """A raw connection to an address as a cluster names it."""
    if address.startswith("ipc://"):
        raw = socket.socket(socket.AF_UNIX)
        try:
            # Waits while the listener has many to accept; with a timeout it would fail at once.
            raw.connect(address.removeprefix("ipc://"))
        except OSError:
            raw.close()
            raise
        raw.settimeout(60)
        return raw
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def seconds_until_closed(raw: socket.socket, most: float = 60.0) -> float:
    """Reads until the other side closes; fails if it does not in time."""
    begin = time.monotonic()
    raw.settimeout(most)
    try:
        while raw.recv(65_536):
            assert time.monotonic() - begin < most
    except (ConnectionResetError, BrokenPipeError):
        pass
    return time.monotonic() - begin


def check_promptness(seconds_of: Callable[[], float], bound: float) -> None:
    """Checks that something is over in time.

    On a machine with much else to do it may be late, though not each time: whatever waits for a
    timer of its own is.
    """
    found: list[float] = []
    while len(found) < 5:
        found.append(seconds_of())
        if found[-1] < bound:
            return
    raise AssertionError(f"it took {found} s, not less than {bound} s")


class ByteProxy:
    """Passes bytes between callers and a task, records what callers say, and may change it.

    Args:
      target: Where the task listens, `host:port`.
      change: Gets each piece that a session sent, and returns what is passed on.
    """

    def __init__(self, target: str, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self._target = target
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        # Per connection: what the session sent, piece by piece.
        self.sessions: list[list[bytes]] = []
        # The last connection to the task, to say more there than the session did.
        self.upstream: socket.socket | None = None
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="byte-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> ByteProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join(60)

    def _run(self) -> None:
        partners: dict[socket.socket, socket.socket] = {}
        records: dict[socket.socket, list[bytes]] = {}
        try:
            while True:
                ready, _, _ = select.select([self._listener, self._stopped, *partners], [], [])
                if self._stopped in ready:
                    return
                for one in ready:
                    if one is self._listener:
                        session, _ = self._listener.accept()
                        task = dial(self._target)
                        partners |= {session: task, task: session}
                        records[session] = []
                        self.sessions.append(records[session])
                        self.upstream = task
                    elif one in partners:
                        self._pass(one, partners, records)
        finally:
            for one in [*partners, self._listener, self._stopped]:
                one.close()

    def _pass(self, one: socket.socket, partners: dict[Any, Any], records: dict[Any, Any]) -> None:
        try:
            data = one.recv(1 << 20)
            if data and one in records:
                records[one].append(data)
                data = self._change(data)
            if data:
                partners[one].sendall(data)
                return
        except OSError:
            pass
        other = partners.pop(one)
        partners.pop(other, None)
        one.close()
        other.close()


@pytest.fixture(scope="session")
def watched_ps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedTask]:
    """A parameter server over TCP, which hostile tests share; none may harm it."""
    with WatchedTask(tmp_path_factory.mktemp("ps"), "ps", "tcp") as task:
        yield task


@pytest.fixture(scope="session")
def watched_ipc_ps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedTask]:
    """The same in a private directory."""
    with WatchedTask(tmp_path_factory.mktemp("ipc"), "ps", "ipc") as task:
        yield task


@pytest.fixture(scope="session")
def watched_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedTask]:
    """A worker over TCP."""
    with WatchedTask(tmp_path_factory.mktemp("worker"), "worker", "tcp") as task:
        yield task
