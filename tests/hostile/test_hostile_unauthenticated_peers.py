"""Callers without a key, with the wrong one, or with the wrong role, at real processes."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile_partners import (
    CLIENT_HELLO,
    WatchedTask,
    check_promptness,
    claim,
    seconds_until_closed,
)
from parameter_servers import Desk, becomes, own_cluster, tasks_of
from transport_partners import RawPeer

import replicax as rx
from replicax.protocol import codec, messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport import keys as key_files
from replicax.transport.channel import Channel


class Bomb:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


# Bar 40: what listens.


def _tcp_listeners(pids: set[int]) -> dict[int, set[str]]:
    """What `ss -ltnp` shows: the addresses at which processes listen, from /proc alone."""
    inodes: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":  # LISTEN
                inodes[f"socket:[{words[9]}]"] = words[1].rpartition(":")[0]
    found: dict[int, set[str]] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if (link := os.readlink(fd)) in inodes:
                    found.setdefault(pid, set()).add(inodes[link])
    return found


def _pids(cluster: Any) -> set[int]:
    own = {cluster.pid(job, index) for job, index in tasks_of(cluster)}
    return own | {c.pid for pid in own for c in psutil.Process(pid).children(recursive=True)}


def _compute(desk: Desk) -> None:
    """Has JAX compute in every process."""
    strategy = desk.strategy(keys=desk.cluster.keys_directory)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        variable = rx.Variable(1.0)
    values = [coordinator.schedule(lambda: variable.read_value() * 2) for _ in range(20)]
    assert coordinator.fetch(values) == [2] * 20


def test_bar40_no_process_of_a_cluster_listens_on_the_network(desk: Desk) -> None:
    _compute(desk)
    assert _tcp_listeners(_pids(desk.cluster) | {os.getpid()}) == {}


@pytest.mark.slow
def test_bar40_with_tcp_only_the_loopback_is_listened_on() -> None:
    with own_cluster(workers=1, ps=1, protocol="tcp") as desk:
        _compute(desk)
        expected = {desk.cluster.pid(job, i): {"0100007F"} for job, i in tasks_of(desk.cluster)}
        assert _tcp_listeners(_pids(desk.cluster) | {os.getpid()}) == expected


# Bar 41: a routable address without keys.


@pytest.mark.parametrize(
    "address",
    [
        "10.255.255.1:0",
        pytest.param("example.org:2222", marks=pytest.mark.slow),
        pytest.param("0.0.0.0:0", marks=pytest.mark.slow),
    ],
)
def test_bar41_no_routable_address_without_keys(address: str, tmp_path: Path) -> None:
    config = {"cluster": {"ps": [address]}, "task": {"type": "ps", "index": 0}}
    trace = """
import sys, time
events = []
sys.addaudithook(lambda e, a: events.append(e) if e in ("socket.bind", "socket.listen") else None)
from replicax.cli.main import app

def seconds():
    # Without the time in which other processes had the processor.
    with open("/proc/thread-self/schedstat") as file:
        return time.monotonic() - int(file.read().split()[1]) / 1e9

imported = seconds()
try:
    app(["serve"])
except SystemExit as error:
    import psutil
    listens = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    print(seconds() - imported, len(listens) + len(events))
    raise
"""
    env = {k: v for k, v in os.environ.items() if k != "REPLICAX_KEYS"}

    def serve() -> float:
        done = subprocess.run(
            [sys.executable, "-c", trace],
            env={**env, "TF_CONFIG": json.dumps(config), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode in (1, 2), done.stderr
        seconds, num_listening = done.stdout.split()
        assert num_listening == "0"
        assert re.fullmatch(r"replicax: .*, but .*\n", done.stderr)
        return float(seconds)

    # 1 s, on a machine with nothing else to do.
    check_promptness(serve, 3.0)


# Bar 42: unauthenticated peers.


def _quiet(task: WatchedTask, before: str) -> None:
    """Nothing was unpickled, and at most a line per second was said."""
    assert task.unpickled() == []
    assert "Traceback" not in task.log()[len(before) :]


@pytest.mark.parametrize("kind", ["no TLS", "another cluster's", "another cluster's, trusting"])
def test_bar42_the_connection_of_an_unauthenticated_peer_is_closed_and_nothing_is_unpickled(
    watched_worker: WatchedTask, tmp_path: Path, kind: str
) -> None:
    before = watched_worker.log()
    bomb = pickle.dumps(Bomb(tmp_path / "mark"))
    other = key_files.make(tmp_path / "other")
    assert watched_worker.keys is not None
    if kind.endswith("trusting"):
        trusted = (watched_worker.keys / "worker" / "ca.crt").read_bytes()
        (other / "coordinator" / "ca.crt").write_bytes(trusted)
    keys = None if kind == "no TLS" else key_files.load(other, "coordinator")

    def call() -> float:
        begin = time.monotonic()
        with RawPeer(f"tcp://{watched_worker.address}", keys) as raw_peer:
            with contextlib.suppress(OSError):
                raw_peer.connect()
                raw_peer.hello()
                raw_peer.send(messages.ShipFunction(codec.fingerprint([bomb])), [bomb])
            assert raw_peer.socket is None or raw_peer.is_closed_within(60)
            return time.monotonic() - begin

    # 1 s, on a machine with nothing else to do.
    check_promptness(call, 3.0)
    assert not (tmp_path / "mark").exists()
    _quiet(watched_worker, before)
    becomes(lambda: "refused a connection" in watched_worker.log()[len(before) :], "a line")


_WRONG_ROLE = [
    messages.Attach([], {}),
    messages.Fence([7]),
    messages.CreatePart(1, "v", (1,), "float32", messages.FromBuffer()),
    messages.QueryJob(),
    messages.Detach(),
    messages.ShipFunction("0" * 64),
    messages.GetStacks(),
]


@pytest.mark.parametrize("body", _WRONG_ROLE, ids=lambda body: type(body).__name__)
def test_bar42_a_worker_that_orders_a_server_about_is_closed(
    watched_ps: WatchedTask, body: messages.Body
) -> None:
    before = watched_ps.log()

    def order() -> float:
        with watched_ps.raw_peer() as raw_peer:
            raw_peer.connect()
            raw_peer.hello("worker")
            assert type(raw_peer.receive()) is messages.Welcome
            begin = time.monotonic()
            raw_peer.send(body, [pickle.dumps(print)])
            assert raw_peer.receive().code == "PermissionDeniedError"
            assert raw_peer.is_closed_within(60)
            return time.monotonic() - begin

    # 1 s, on a machine with nothing else to do.
    check_promptness(order, 3.0)
    _quiet(watched_ps, before)


@pytest.mark.parametrize("role", ["worker", "ps"])
def test_bar42_only_the_coordinator_ships_code_to_a_worker(
    watched_worker: WatchedTask, tmp_path: Path, role: Any
) -> None:
    """The worker's own role, and that of a server, with their right keys."""
    before = watched_worker.log()
    bomb = pickle.dumps(Bomb(tmp_path / "mark"))
    sha = codec.fingerprint([bomb])

    def ship() -> float:
        with watched_worker.raw_peer(watched_worker.key(role)) as raw_peer:
            raw_peer.connect()
            begin = time.monotonic()
            raw_peer.hello(role)
            raw_peer.send(messages.Attach([], {}))
            raw_peer.send(messages.ShipFunction(sha), [bomb])
            raw_peer.send(messages.Run([messages.ClosureCall(1, 0, sha, [], 0)]))
            answers = [raw_peer.receive() for _ in range(4)]
            assert answers[0].code == "PermissionDeniedError"
            assert all(a.text.startswith("hello first") for a in answers[1:])
            assert raw_peer.is_closed_within(60)
            return time.monotonic() - begin

    # 1 s, on a machine with nothing else to do.
    check_promptness(ship, 3.0)
    assert not (tmp_path / "mark").exists()
    _quiet(watched_worker, before)


def test_bar42_the_coordinator_itself_is_heard_and_unpickling_is_seen(
    watched_worker: WatchedTask, tmp_path: Path
) -> None:
    """The other side of the tests above: they could find something."""
    bomb = pickle.dumps(Bomb(tmp_path / "mark"))
    sha = codec.fingerprint([bomb])
    with watched_worker.channel() as channel:
        channel.job, channel.epoch = "job", 1
        channel.request(messages.Attach([], {}), timeout=30)
        channel.send(messages.ShipFunction(sha), [bomb])
        channel.send(messages.Run([messages.ClosureCall(1, 0, sha, [], 0)]))
        becomes((tmp_path / "mark").exists, "the worker runs what its coordinator ships")
        assert any("mkdir" in name for name in watched_worker.unpickled())
        channel.send(messages.Detach())
    watched_worker.forget()


def test_bar42_many_unauthenticated_peers_are_few_lines(watched_ps: WatchedTask) -> None:
    before = watched_ps.log()
    begin = time.monotonic()
    for i in range(200):
        with watched_ps.dial() as raw:
            raw.sendall((CLIENT_HELLO, claim(9), b"GET / HTTP/1.1\r\n\r\n", bytes(64))[i % 4])
    with watched_ps.raw_peer() as known:
        known.connect()
        known.hello("worker")
        with contextlib.suppress(OSError):
            for _ in range(200):
                known.send_parts([b"rubbish"])
        with watched_ps.channel("worker") as good, pytest.raises(rx.errors.DistributeError):
            good.request(messages.Exchange([], []), timeout=20)
    said = watched_ps.log()[len(before) :].splitlines()
    # One line a second and cause: no TLS, a broken handshake, none, and malformed messages.
    assert len(said) <= 4 * (time.monotonic() - begin + 2)


# Bar 49: versions, at a real task.


@pytest.mark.parametrize(
    "changes",
    [
        {"version": messages.VERSION + 1},
        {"version": messages.VERSION - 1},
        {"python": "3.99"},
        {"library": "77.0.0"},
    ],
    ids=str,
)
def test_bar49_other_versions_are_closed_with_both_named(
    watched_ps: WatchedTask, changes: dict[str, Any]
) -> None:
    (theirs,) = changes.values()

    def call() -> float:
        with watched_ps.raw_peer() as raw_peer:
            raw_peer.connect()
            begin = time.monotonic()
            raw_peer.hello("worker", **changes)
            text = raw_peer.receive().text
            seconds = time.monotonic() - begin
            assert f" {theirs}" in text
            assert f"protocol {messages.VERSION}, Python {sys.version_info[0]}." in text
            assert f"replicax {rx.__version__}" in text
            assert raw_peer.is_closed_within(60)
            return seconds

    # 1 s, on a machine with nothing else to do.
    check_promptness(call, 3.0)


def test_bar49_an_envelope_with_more_fields_is_no_hello(watched_ipc_ps: WatchedTask) -> None:
    """Where a future version has other fields, the first byte says so."""
    good = codec.encode("", 0, 1, 0, messages.Ping(0))[0]
    with watched_ipc_ps.raw_peer() as raw_peer:
        raw_peer.connect()
        raw_peer.send_parts([bytes([good[0] + 1]) + good[1:] + b"\xc0"])
        assert raw_peer.is_closed_within(60)

    def say_hello() -> float:
        with watched_ipc_ps.dial() as raw:
            raw.sendall(b"hello, is anybody there?")
            return seconds_until_closed(raw)

    check_promptness(say_hello, 3.0)


@pytest.fixture
def greedy_channel(watched_ps: WatchedTask) -> Iterator[Channel]:
    keys = watched_ps.key("ps")
    place = addresses.resolve(watched_ps.address, None, keys)
    with Channel(place, Task("ps", 1), keys, peer=watched_ps.task) as channel:
        yield channel


@pytest.mark.parametrize(
    "body",
    [messages.Ping(0), messages.Attach([], {}), messages.Fence([1]), messages.Exchange([], [])],
    ids=lambda body: type(body).__name__,
)
def test_bar42_a_server_may_not_order_another_server_about(
    greedy_channel: Channel, body: messages.Body
) -> None:
    with pytest.raises(
        rx.errors.PermissionDeniedError, match=r"a ps (connected|only the requests)"
    ):
        greedy_channel.request(body, timeout=20)
