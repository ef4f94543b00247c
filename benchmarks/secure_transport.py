"""What encryption costs: throughput, round trips and handshakes over TCP with CURVE.

Contestants: this project's channel and service, in two processes; and bare ZeroMQ sockets on
loopback TCP without any security, which exchange the same bytes. Cases: `stream` sends 64 MiB at
a time and waits for a short answer; `round trip` a question of some bytes; `handshake` opens a new
connection and sends one request.
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

CASES = ("stream", "round trip", "handshake")
STREAM_BYTES = 64 << 20
# Of the contract: GiB/s of a single stream, microseconds more per round trip, milliseconds.
LEAST_RATE, MOST_ADDED_US, MOST_HANDSHAKE_MS = 0.45, 80.0, 15.0

_SECURE = """
import sys
from replicax.protocol import messages
from replicax.transport import addresses, keys
from replicax.transport.service import Service
from replicax.protocol.tasks import Task
own = keys.load(sys.argv[1], "ps")
where = addresses.resolve("127.0.0.1:0", "tcp", own)
with Service(where, Task("ps", 0), lambda *_: (messages.Done(), ()), own) as service:
    service.start()
    print(service.address, flush=True)
    sys.stdin.read()
"""
_BARE = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
print("127.0.0.1:%d" % socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
poller = zmq.Poller()
poller.register(socket, zmq.POLLIN)
poller.register(sys.stdin.fileno(), zmq.POLLIN)
while socket in dict(poller.poll()):
    frames = socket.recv_multipart(copy=False)
    socket.send_multipart([frames[0], b"done"])
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
        made = keys.make(f"{directory}/keys")
        own = keys.load(made, "coordinator")
        with served(_SECURE, str(made)) as address:
            where = addresses.resolve(address, "tcp", own)

            def connected() -> Channel:
                return Channel(where, Task("coordinator", 0), own, peer=Task("ps", 0))

            def shake_hands() -> None:
                with connected() as new:
                    new.request(messages.Ping(0))

            if case == "handshake":
                # The context, which all connections of a process share, exists already.
                with connected() as other:
                    other.request(messages.Ping(0))
                    return {"ms": 1e3 * best_of(shake_hands, seconds)}
            buffers = [bytes(STREAM_BYTES)] if case == "stream" else []
            with connected() as channel:
                best = best_of(lambda: channel.request(messages.Ping(0), buffers), seconds)
                return {"ms": 1e3 * best}


def bare(case: str, seconds: float) -> dict[str, float]:
    import zmq

    context = zmq.Context()
    with served(_BARE) as address:

        def connected() -> Any:
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(f"tcp://{address}")
            return socket

        def request(socket: Any, data: bytes) -> None:
            socket.send(data, copy=len(data) < 1 << 19)
            socket.recv()

        def shake_hands() -> None:
            with connected() as new:
                request(new, bytes(64))

        with connected() as socket:
            size = STREAM_BYTES if case == "stream" else 64
            data = bytes(size)
            step = shake_hands if case == "handshake" else lambda: request(socket, data)
            found = {"ms": 1e3 * best_of(step, seconds)}
    context.term()
    return found


CONTESTANTS = {"ours": ours, "bare": bare}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    found = compete(__name__, list(CONTESTANTS), CASES, settings, report)
    own, peer = ({c: found[name, c]["ms"] for c in CASES} for name in ("ours", "bare"))
    gib = 1e3 * STREAM_BYTES / (1 << 30)
    rate, plain = gib / own["stream"], gib / peer["stream"]
    added = 1e3 * (own["round trip"] - peer["round trip"])
    what = "CURVE over TCP / bare ZeroMQ"
    target, passed = at_least(LEAST_RATE, rate)
    rows = [
        Row(
            what,
            "single stream",
            f"{rate:.2f} GiB/s",
            f"{plain:.2f} GiB/s",
            rate / plain,
            f"{target} GiB/s",
            passed,
        )
    ]
    for case, unit, value, other, limit, measured in (
        (
            "round trip",
            "µs",
            1e3 * own["round trip"],
            1e3 * peer["round trip"],
            MOST_ADDED_US,
            added,
        ),
        ("handshake", "ms", own["handshake"], peer["handshake"], MOST_HANDSHAKE_MS, None),
    ):
        judged = value if measured is None else measured
        target, passed = at_most(limit, judged)
        sign = "" if measured is None else "added "
        texts = f"{value:.3g} {unit}", f"{other:.3g} {unit}"
        rows.append(Row(what, case, *texts, value / other, f"{sign}{target} {unit}", passed))
    return found, rows


if __name__ == "__main__":
    main(CONTESTANTS)
