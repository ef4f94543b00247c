"""Many connections to one task: what each costs, and that none leaves anything behind."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_partners import WatchedTask
from parameter_servers import becomes
from transport_partners import RawPeer

from replicax import errors
from replicax.protocol import limits, messages
from replicax.transport.channel import Channel

# Resets a connection when it is closed, so that its port is free at once.
_RESET = struct.pack("ii", 1, 0)


@pytest.fixture(params=["ipc", "tcp"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WatchedTask]:
    with WatchedTask(tmp_path, "ps", request.param) as watched:
        yield watched


@pytest.fixture(params=["ipc", "tcp"])
def shared_task(
    request: pytest.FixtureRequest, watched_ps: WatchedTask, watched_ipc_ps: WatchedTask
) -> WatchedTask:
    return watched_ps if request.param == "tcp" else watched_ipc_ps


def _is_served(channel: Channel) -> None:
    # A worker outside of a job is told so by the server itself: the request has arrived.
    with pytest.raises(errors.DistributeError, match="job"):
        channel.request(messages.Exchange([], []), timeout=30)


def _connect(task: WatchedTask, stack: contextlib.ExitStack | None = None) -> None:
    with task.raw_peer() as raw_peer:
        raw_peer.connect()
        raw_peer.hello("worker")
        assert type(raw_peer.receive()) is messages.Welcome
        if stack is not None:
            kept = stack.enter_context(RawPeer(raw_peer.url))
            kept.socket, raw_peer.socket = raw_peer.socket, None
        elif task.keys is not None:
            raw_peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


@pytest.mark.slow
def test_a_server_holds_1000_connections_of_at_most_64_kib(task: WatchedTask) -> None:
    with contextlib.ExitStack() as stack, task.channel("worker") as channel:
        _is_served(channel)
        for _ in range(100):
            _connect(task, stack)
        before = task.figures()
        for _ in range(900):
            _connect(task, stack)
        after = task.figures()
        assert after["fds"] - before["fds"] == 900
        per_connection = (after["rss"] - before["rss"]) / 900
        print(f"{per_connection / 1024:.1f} KiB per connection")
        assert per_connection <= 64 << 10
        _is_served(channel)
        assert after["threads"] == before["threads"]
    becomes(lambda: task.figures()["fds"] <= before["fds"] - 90, "the descriptors are back")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_left_of_100_000_connections(task: WatchedTask) -> None:
    # With TLS each of them takes a handshake.
    number = 100_000 if task.keys is None else 20_000
    with task.channel("worker") as channel:
        for _ in range(2_000):
            _connect(task)
        _is_served(channel)
        before = task.figures()
        for _ in range(number):
            _connect(task)
        _is_served(channel)
        becomes(lambda: task.figures()["fds"] <= before["fds"] + 2, "the descriptors are back")
        after = task.figures()
        assert after["threads"] == before["threads"]
        print(f"{(after['rss'] - before['rss']) >> 10} KiB more after {number:,} connections")
        assert after["rss"] - before["rss"] < 8 << 20


def test_a_half_open_connection_does_not_keep_the_others_waiting(
    shared_task: WatchedTask,
) -> None:
    """A peer that announces a large message and sends a part of it, and one that never reads."""
    task = shared_task
    with task.raw_peer() as half, task.raw_peer() as deaf, task.channel("worker") as channel:
        _is_served(channel)
        for raw_peer in (half, deaf):
            raw_peer.connect()
            raw_peer.hello("worker")
            assert type(raw_peer.receive()) is messages.Welcome
        total = 100 << 20
        start = struct.pack("<IBBHIQ4x", limits.PIECE, 0, 0, 0x7278, 20, total)
        half.socket.sendall(start + bytes(1_000))
        deaf.socket.settimeout(0.2)

        def flood() -> None:
            with contextlib.suppress(OSError):
                for i in range(2_000):
                    deaf.send(messages.Exchange([], [messages.Read(i, -1, False)]), request=i)

        thread = threading.Thread(target=flood)
        thread.start()
        for _ in range(20):
            _is_served(channel)
        thread.join()
        _is_served(channel)
