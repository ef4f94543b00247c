"""Malformed messages, handshakes of wrong versions and roles, and unauthenticated peers."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from transport_partners import COORDINATOR, PS, WORKER, Place, RawPeer, random_body

from replicax import errors
from replicax.protocol import codec, limits, messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport import keys as key_files
from replicax.transport.channel import Channel
from replicax.transport.zmq.authenticator import guard_client

PING = messages.Ping(0)


class Reached:
    """A handler that remembers what reached it."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def __call__(self, session: Any, envelope: Any, buffers: Any) -> Any:
        self.bodies.append(envelope.body)
        return messages.Done(), buffers


@pytest.fixture
def reached() -> Reached:
    return Reached()


@pytest.fixture
def ipc(tmp_path: Path) -> Place:
    return Place("ipc", tmp_path)


@pytest.fixture
def tcp(tmp_path: Path) -> Place:
    return Place("tcp", tmp_path)


# Malformed messages.


def _malformed(rng: random.Random) -> Iterator[list[bytes]]:
    """Random, truncated and mutated messages, without end."""
    bodies = [messages.Exchange, messages.CreatePart, messages.Run, messages.Finished]
    while True:
        yield [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]
        body = random_body(rng.choice(bodies), rng)
        good = [bytes(f) for f in codec.encode("j", 1, 99, 1, body, [b"x" * rng.randrange(99)])]
        yield [good[0][: rng.randrange(len(good[0]))], *good[1:]]
        flipped = bytearray(good[0])
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        yield [bytes(flipped), *good[1:], b"more"]
        yield [b"\x96" + rng.randbytes(50)]
        yield [b"\xdd\xff\xff\xff\xff" * 10]  # an array of 2**32 - 1
        yield [b"\x91" * 5_000]


@pytest.mark.parametrize("is_known", [False, True], ids=["before", "after"])
def test_bar44_malformed_messages_do_nothing(
    ipc: Place, reached: Reached, caplog: pytest.LogCaptureFixture, is_known: bool
) -> None:
    process = psutil.Process()
    with (
        caplog.at_level(logging.WARNING),
        ipc.serve(reached) as service,
        RawPeer(service.url) as raw_peer,
        ipc.channel() as good,
    ):
        raw_peer.connect()
        if is_known:
            raw_peer.hello()
            assert type(raw_peer.receive()) is messages.Welcome
        good.request(PING, timeout=60)
        before = process.memory_info().rss
        num_fds = process.num_fds()
        stream = _malformed(random.Random(7))
        for i in range(1_000):
            raw_peer.socket.send_multipart(next(stream))
            while raw_peer.socket.poll(0):
                raw_peer.socket.recv_multipart()
            if i % 100 == 0:
                assert good.request(messages.Ping(i), timeout=60)[0] == messages.Done()
        assert good.request(PING, timeout=60)[0] == messages.Done()
        assert process.memory_info().rss - before < 5 << 20
        assert abs(process.num_fds() - num_fds) <= 2
    assert {type(b) for b in reached.bodies} == {messages.Ping}
    lines = [r for r in caplog.records if "dropped" in r.getMessage()]
    duration = lines[-1].created - lines[0].created
    assert 1 <= len(lines) <= duration + 2


def test_a_message_without_hello_is_told_so(ipc: Place, reached: Reached) -> None:
    with ipc.serve(reached) as service, RawPeer(service.url) as raw_peer:
        raw_peer.connect()
        for body in (PING, messages.ShipFunction("0" * 64)):
            raw_peer.send(body, [b"x" * 100_000])
            answer = raw_peer.receive()
            assert answer.code == "ProtocolError"
            assert answer.text.startswith("hello first")
    assert reached.bodies == []


def test_a_long_first_message_is_not_decoded(
    ipc: Place, reached: Reached, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded_by: set[str] = set()
    decode = codec.decode

    def watched(frames: Any) -> Any:
        decoded_by.add(threading.current_thread().name)
        return decode(frames)

    monkeypatch.setattr(codec, "decode", watched)
    with ipc.serve(reached) as service, RawPeer(service.url) as raw_peer:
        raw_peer.connect()
        raw_peer.hello(library="x" * limits.HELLO)
        assert raw_peer.receive().text.startswith("hello first")
    assert decoded_by == {threading.main_thread().name}


@pytest.mark.parametrize("size", [(1 << 31) + 1, 1 << 32, (1 << 63) - 1])
def test_bar45_a_huge_frame_closes_the_connection(ipc: Place, reached: Reached, size: int) -> None:
    """Speaks the wire format by hand, as ZeroMQ itself would not send such a length."""
    signature = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    with ipc.serve(reached), socket.socket(socket.AF_UNIX) as raw, ipc.channel() as good:
        good.request(PING, timeout=60)
        before = psutil.Process().memory_info().rss
        raw.settimeout(60)
        raw.connect(ipc.resolve("ps").path)
        raw.sendall(signature + b"\x04" + bytes([len(ready)]) + ready)
        raw.sendall(b"\x02" + size.to_bytes(8, "big") + b"x" * 1000)
        while raw.recv(4096):
            pass
        assert psutil.Process().memory_info().rss - before < 1 << 20
        assert good.request(PING, timeout=60)[0] == messages.Done()
    assert reached.bodies == [PING, PING]


def test_bar46_silent_connections_are_closed(
    tcp: Place, reached: Reached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE", 0.3)
    with tcp.serve(reached) as service:
        host, _, port = service.address.rpartition(":")
        silent = [socket.create_connection((host, int(port)), timeout=60) for _ in range(50)]
        with tcp.channel() as good:
            assert good.request(PING, timeout=60)[0] == messages.Done()
        for one in silent:
            while one.recv(100):  # the listener's own signature, then the end
                pass
            one.close()


# Versions.


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"version": messages.VERSION + 1}, f"protocol {messages.VERSION + 1}"),
        ({"version": messages.VERSION - 1}, f"protocol {messages.VERSION - 1}"),
        ({"python": "3.1"}, "Python 3.1"),
        ({"library": "77.8.9"}, "replicax 77.8.9"),
    ],
    ids=str,
)
def test_bar49_other_versions_are_refused_with_both(
    ipc: Place, reached: Reached, changes: Any, shown: str
) -> None:
    with ipc.serve(reached) as service, RawPeer(service.url) as raw_peer:
        raw_peer.connect()
        raw_peer.hello(**changes)
        answer = raw_peer.receive()
        assert answer.code == "ProtocolError"
        assert shown in answer.text
        assert f"protocol {messages.VERSION}, Python" in answer.text
        raw_peer.send(PING)
        assert raw_peer.receive().text.startswith("hello first")
    assert reached.bodies == []


def test_bar49_a_channel_raises_what_the_versions_are(
    ipc: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicax.transport.service.library_version", lambda: "99.1.0")
    with (
        ipc.serve(),
        ipc.channel() as channel,
        pytest.raises(errors.ProtocolError, match=r"replicax 99\.1\.0"),
    ):
        channel.request(PING, timeout=60)


def test_patch_versions_may_differ(ipc: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from replicax.protocol.tasks import library_version

    minor = library_version().rpartition(".")[0]
    monkeypatch.setattr("replicax.transport.service.library_version", lambda: f"{minor}.999")
    with ipc.serve(), ipc.channel() as channel:
        channel.request(PING, timeout=60)


# Roles.

_FORBIDDEN = [
    (WORKER, PS, messages.CreatePart(1, "v", (1,), "float32", messages.FromBuffer())),
    (WORKER, PS, messages.Attach([], {})),
    (WORKER, PS, messages.Fence([1])),
    (WORKER, PS, messages.ShipFunction("0" * 64)),
    (WORKER, PS, messages.Replicate(0, 0)),
    (WORKER, PS, messages.FetchReplica(0)),
    (COORDINATOR, PS, messages.FetchReplica(0)),
    (Task("ps", 1), PS, messages.Fence([1])),
    (Task("ps", 1), PS, messages.Exchange([], [])),
    (COORDINATOR, PS, messages.ShipFunction("0" * 64)),
    (COORDINATOR, PS, messages.Finished([])),
    (COORDINATOR, WORKER, messages.Exchange([], [])),
]


@pytest.mark.parametrize("scheme", ["inproc", "ipc", "tcp"])
@pytest.mark.parametrize(("me", "peer", "body"), _FORBIDDEN, ids=lambda x: type(x).__name__)
def test_bar42_a_role_may_ask_only_what_is_its_own(
    tmp_path: Path, reached: Reached, scheme: str, me: Task, peer: Task, body: messages.Body
) -> None:
    place = Place(scheme, tmp_path)
    with place.serve(reached, peer), place.channel(me, peer) as channel:
        with pytest.raises(errors.PermissionDeniedError, match=f"{me} sent {type(body).__name__}"):
            channel.request(body, [b"payload"], timeout=60)
        assert reached.bodies == []


@pytest.mark.parametrize(
    ("me", "peer"), [(WORKER, Task("worker", 1)), (PS, WORKER), (Task("ps", 1), WORKER)]
)
def test_bar42_some_roles_may_not_call_at_all(
    ipc: Place, reached: Reached, me: Task, peer: Task
) -> None:
    with (
        ipc.serve(reached, peer),
        ipc.channel(me, peer) as channel,
        pytest.raises(errors.PermissionDeniedError, match=f"a {me.role} connected"),
    ):
        channel.request(PING, timeout=60)
    assert reached.bodies == []


# Keys.


@pytest.mark.parametrize("who", ["no key", "new key", "keys of another cluster"])
def test_bar42_peers_without_a_known_key_are_refused(
    tcp: Place, tmp_path: Path, reached: Reached, who: str
) -> None:
    with tcp.serve(reached) as service, RawPeer(service.url) as raw_peer:
        if who != "no key":
            other = key_files.load(key_files.make(tmp_path / "other"), "coordinator")
            ours = tcp.key("worker")
            assert ours is not None
            server = ours.public_keys["ps"] if who == "new key" else other.public_keys["ps"]
            guard_client(raw_peer.socket, other, server)
        monitor = raw_peer.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
        )
        raw_peer.connect()
        # When it was refused before it could speak, ZeroMQ has no connection to send to.
        with contextlib.suppress(zmq.Again):
            raw_peer.hello()
        assert monitor.poll(60_000)
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        raw_peer.socket.disable_monitor()
        monitor.close()
        assert raw_peer.receive(0.2) is None
        with tcp.channel() as good:
            assert good.request(PING, timeout=60)[0] == messages.Done()
    assert reached.bodies == [PING]


def test_bar42_a_key_cannot_claim_another_role(tcp: Place, reached: Reached) -> None:
    keys = tcp.key("worker")
    assert keys is not None
    with tcp.serve(reached) as service, RawPeer(service.url) as raw_peer:
        guard_client(raw_peer.socket, keys, keys.public_keys["ps"])
        raw_peer.connect()
        raw_peer.hello("coordinator")
        answer = raw_peer.receive()
        assert answer.code == "PermissionDeniedError"
        assert "a coordinator with the key of a worker" in answer.text
        raw_peer.send(messages.CreatePart(1, "v", (1,), "float32", messages.FromBuffer()))
        assert raw_peer.receive().text.startswith("hello first")
    assert reached.bodies == []


def test_a_channel_with_unknown_keys_is_told_so(tcp: Place, tmp_path: Path) -> None:
    other = key_files.load(key_files.make(tmp_path / "other"), "coordinator")
    ours = tcp.key("coordinator")
    assert ours is not None
    mixed = key_files.Keys("coordinator", other.public, other.secret, ours.public_keys)
    with tcp.serve() as service:
        place = addresses.resolve(service.address, None, mixed)
        with (
            Channel(place, COORDINATOR, mixed, peer=PS) as channel,
            pytest.raises(errors.PermissionDeniedError, match=r"/job:ps/task:0 .*keys"),
        ):
            channel.request(PING, timeout=60)


def test_a_peer_does_not_talk_to_a_server_without_the_right_key(
    tcp: Place, tmp_path: Path, reached: Reached
) -> None:
    """A worker's key cannot pose as a parameter server."""
    keys = tcp.key("worker")
    assert keys is not None
    with tcp.serve(reached, WORKER) as service:
        place = addresses.resolve(service.address, None, keys)
        with (
            Channel(place, COORDINATOR, tcp.key("coordinator"), peer=PS) as channel,
            pytest.raises(errors.PermissionDeniedError, match="/job:ps/task:0"),
        ):
            channel.request(PING, timeout=60)
    assert reached.bodies == []
