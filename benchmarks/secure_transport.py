"""What the transport and encryption cost: throughput, round trips and handshakes.

Contestants: this project's channel and service, in two processes; and bare sockets of the same
kind, which exchange the same bytes. Cases: `stream` sends 64 MiB at a time over TCP with TLS 1.3
and waits for a short answer; `round trip` sends 1 KiB there and back, over TLS or a Unix socket;
`handshake` opens a new connection with TLS and sends one request.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_least, at_most, compete, main

CASES = ("stream", "round trip", "round trip, ipc", "handshake")
STREAM_BYTES = 64 << 20
ECHO_BYTES = 1 << 10
# Of the contract: GiB/s of a single stream, round trips in those of bare sockets, milliseconds.
LEAST_RATE, MOST_RATIO, MOST_HANDSHAKE_MS = 0.45, 1.5, 15.0

_SERVICE = """
import sys
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses, keys
from replicax.transport.service import Service
own = keys.load(sys.argv[1], "ps") if sys.argv[1] else None
where = addresses.resolve(sys.argv[2], None, own)
def handle(session, envelope, buffers):
    return messages.Done(), buffers if len(buffers) and len(buffers[0]) <= 1024 else ()
with Service(where, Task("ps", 0), handle, own) as service:
    service.start()
    print(service.address, flush=True)
    sys.stdin.read()
"""
# Answers a length and so many bytes with as many of them as fit into 1 KiB.
_BARE = """
import socket, sys
from replicax.transport import keys
own = keys.load(sys.argv[1], "ps") if sys.argv[1] else None
if own is None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[2].removeprefix("ipc://"))
else:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname() if own is None else "127.0.0.1:%d" % listener.getsockname()[1])
sys.stdout.flush()
room = memoryview(bytearray(8 + (64 << 20)))
while True:
    one, _ = listener.accept()
    if own is not None:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one = own.server_context().wrap_socket(one, server_side=True)
    while (got := one.recv_into(room)) > 0:
        size = 8 + int.from_bytes(room[:8], "little")
        while got < size:
            got += one.recv_into(room[got:size])
        one.sendall(room[8 : min(size, 8 + 1024)])
    one.close()
"""


@contextlib.contextmanager
def served(code: str, *arguments: str) -> Iterator[str]:
    """Runs a server in another process; gives its address."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip()
        finally:
            child.kill()


def best_of(step: Callable[[], Any], seconds: float) -> float:
    """Returns the seconds of the quickest of many steps."""
    step()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return best


def ours(case: str, seconds: float) -> dict[str, float]:
    from replicax.protocol import messages
    from replicax.protocol.tasks import Task
    from replicax.transport import addresses, keys
    from replicax.transport.channel import Channel

    with tempfile.TemporaryDirectory() as directory:
        made, address = _place(case, directory)
        own = keys.load(made, "coordinator") if made else None
        with served(_SERVICE, made, address) as found:
            where = addresses.resolve(found, None, own)

            def connected() -> Channel:
                return Channel(where, Task("coordinator", 0), own, peer=Task("ps", 0))

            def shake_hands() -> None:
                with connected() as new:
                    new.request(messages.Ping(0))

            if case == "handshake":
                return {"ms": 1e3 * best_of(shake_hands, seconds)}
            buffers = [bytes(STREAM_BYTES if case == "stream" else ECHO_BYTES)]
            with connected() as channel:
                best = best_of(lambda: channel.request(messages.Ping(0), buffers), seconds)
                return {"ms": 1e3 * best}


def _place(case: str, directory: str) -> tuple[str, str]:
    """Returns the directory of the certificates, and the address."""
    from replicax.transport import keys

    if case.endswith("ipc"):
        return "", f"ipc://{directory}/socket"
    return str(keys.make(f"{directory}/keys")), "127.0.0.1:0"


def bare(case: str, seconds: float) -> dict[str, float]:
    import socket

    from replicax.transport import keys

    with tempfile.TemporaryDirectory() as directory:
        made, address = _place(case, directory)
        own = keys.load(made, "coordinator") if made else None
        room = memoryview(bytearray(ECHO_BYTES))
        with served(_BARE, made, address) as found:

            def connected() -> Any:
                if own is None:
                    one = socket.socket(socket.AF_UNIX)
                    one.connect(found)
                    return one
                host, _, port = found.rpartition(":")
                one = socket.create_connection((host, int(port)))
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return own.client_context().wrap_socket(one)

            def request(one: Any, data: bytes) -> None:
                one.sendall(data)
                got = 0
                while got < ECHO_BYTES:
                    got += one.recv_into(room[got:])

            def shake_hands() -> None:
                with connected() as new:
                    request(new, data)

            size = STREAM_BYTES if case == "stream" else ECHO_BYTES
            data = size.to_bytes(8, "little") + bytes(size)
            if case == "handshake":
                return {"ms": 1e3 * best_of(shake_hands, seconds)}
            with connected() as one:
                return {"ms": 1e3 * best_of(lambda: request(one, data), seconds)}


CONTESTANTS = {"ours": ours, "bare": bare}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    found = compete(__name__, list(CONTESTANTS), CASES, settings, report)
    own, peer = ({c: found[name, c]["ms"] for c in CASES} for name in ("ours", "bare"))
    gib = 1e3 * STREAM_BYTES / (1 << 30)
    rate, plain = gib / own["stream"], gib / peer["stream"]
    what = "the transport / bare sockets"
    target, passed = at_least(LEAST_RATE, rate)
    texts = f"{rate:.2f} GiB/s", f"{plain:.2f} GiB/s"
    rows = [Row(what, "stream, TLS", *texts, rate / plain, f"{target} GiB/s", passed)]
    for case, kind in (("round trip", ", TLS"), ("round trip, ipc", "")):
        ratio = own[case] / peer[case]
        texts = f"{1e3 * own[case]:.3g} µs", f"{1e3 * peer[case]:.3g} µs"
        rows.append(Row(what, f"{case}{kind}", *texts, ratio, *at_most(MOST_RATIO, ratio)))
    target, passed = at_most(MOST_HANDSHAKE_MS, own["handshake"])
    texts = f"{own['handshake']:.3g} ms", f"{peer['handshake']:.3g} ms"
    ratio = own["handshake"] / peer["handshake"]
    rows.append(Row(what, "handshake, TLS", *texts, ratio, f"{target} ms", passed))
    return found, rows


if __name__ == "__main__":
    main(CONTESTANTS)
