"""Malformed messages, handshakes of wrong versions and roles, and unauthenticated peers."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile_partners import ByteProxy, check_promptness, claim, dial, seconds_until_closed
from transport_partners import COORDINATOR, PS, WORKER, Place, RawPeer, random_body

from replicax import errors
from replicax.protocol import codec, limits, messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses, authority
from replicax.transport import keys as key_files
from replicax.transport.channel import Channel
from replicax.transport.service import Service

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
        ipc.channel() as good,
    ):
        good.request(PING, timeout=60)
        before = process.memory_info().rss
        num_fds = process.num_fds()
        stream = _malformed(random.Random(7))
        for i in range(500 if is_known else 30):
            # Each malformed message ends its connection.
            with RawPeer(service.url) as raw_peer, contextlib.suppress(OSError):
                raw_peer.connect()
                if is_known:
                    raw_peer.hello()
                raw_peer.send_parts(next(stream))
                assert raw_peer.receive() is None or is_known or raw_peer.is_closed_within(30)
            if i % 100 == 0:
                assert good.request(messages.Ping(i), timeout=60)[0] == messages.Done()
        assert good.request(PING, timeout=60)[0] == messages.Done()
        assert process.memory_info().rss - before < 5 << 20
        assert abs(process.num_fds() - num_fds) <= 2
    assert {type(b) for b in reached.bodies} == {messages.Ping}
    lines = [r for r in caplog.records if "dropped" in r.getMessage()]
    duration = lines[-1].created - lines[0].created
    # Of malformed streams, and of malformed messages in good ones.
    assert 1 <= len(lines) <= 2 * (duration + 2)


def test_a_message_without_hello_is_told_so(ipc: Place, reached: Reached) -> None:
    with ipc.serve(reached) as service, RawPeer(service.url) as raw_peer:
        raw_peer.connect()
        for body in (PING, messages.ShipFunction("0" * 64)):
            raw_peer.send(body, [b"x" * 1_000])
            answer = raw_peer.receive()
            assert answer.code == "ProtocolError"
            assert answer.text.startswith("hello first")
        assert raw_peer.is_closed_within(30)
    assert reached.bodies == []


def test_a_long_first_message_is_not_even_read(
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
        assert raw_peer.is_closed_within(30)
    assert decoded_by == set()


@pytest.mark.parametrize("size", [limits.HELLO + 1, (1 << 31) + 1, 1 << 32, (1 << 63) - 1])
def test_bar45_a_huge_message_closes_the_connection(
    ipc: Place, reached: Reached, size: int
) -> None:
    with ipc.serve(reached), socket.socket(socket.AF_UNIX) as raw, ipc.channel() as good:
        good.request(PING, timeout=60)
        before = psutil.Process().memory_info().rss
        raw.settimeout(60)
        raw.connect(ipc.resolve("ps").path)
        raw.sendall(claim(size) + b"x" * 1000)
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


class _FailingSocket:
    """A listening socket that has connections which failed before they were accepted."""

    def __init__(self, listening: socket.socket, numbers: list[int]) -> None:
        self._listening, self._numbers = listening, numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listening, name)

    def accept(self) -> Any:
        if self._numbers:
            number = self._numbers.pop()
            raise OSError(number, os.strerror(number))
        return self._listening.accept()


def test_connections_that_fail_before_they_are_accepted_do_not_end_the_listener(
    tcp: Place, reached: Reached
) -> None:
    numbers = [errno.EPROTO, errno.ENETDOWN, errno.EPERM, errno.ECONNABORTED]
    with Service(tcp.resolve("ps"), PS, reached, tcp.key("ps")) as service:
        listener: Any = service._listener
        listener._socket = _FailingSocket(listener._socket, numbers)
        tcp.address = service.address
        service.start()
        with tcp.channel() as good:
            assert good.request(PING, timeout=60)[0] == messages.Done()
    assert numbers == []


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
        assert raw_peer.is_closed_within(30)
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


# Certificates.


def _wrong(who: str, tcp: Place, directory: Path) -> Any:
    """Returns certificates that a server of the cluster must not accept; None for none."""
    if who == "none":
        return None
    if who == "expired":
        other = key_files.make(directory / "other")
        assert tcp.keys is not None
        # Of the right authority, and valid until yesterday.
        trusted, key = authority.load(tcp.keys)
        identity = key_files.load(tcp.keys, "coordinator").identity
        authority.issue(other / "coordinator", identity, (trusted, key), days=-1)
        files = [other / "coordinator" / name for name in ("ca.crt", "tls.crt", "tls.key")]
        (other / "coordinator" / "ca.crt").write_bytes((tcp.keys / "ps" / "ca.crt").read_bytes())
        return key_files.Keys(identity, *files)
    if who == "another job":
        assert tcp.keys is not None
        trusted, key = authority.load(tcp.keys)
        other = key_files.make(directory / "other", "other-job") / "coordinator"
        identity = key_files.load(other, "coordinator").identity
        authority.issue(other, identity, (trusted, key), days=1)
        (other / "ca.crt").write_bytes((tcp.keys / "ps" / "ca.crt").read_bytes())
        return key_files.load(other, "coordinator")
    other = key_files.make(directory / "other")
    assert tcp.keys is not None
    if who == "another authority, which it trusts":
        (other / "coordinator" / "ca.crt").write_bytes((tcp.keys / "ps" / "ca.crt").read_bytes())
    return key_files.load(other, "coordinator")


@pytest.mark.parametrize(
    ("who", "logged"),
    [
        ("none", "certificate"),
        ("another authority", "unknown ca|certificate"),
        ("another authority, which it trusts", "certificate"),
        ("expired", "expired"),
        ("another job", "certificate of replicax://other-job"),
    ],
)
def test_bar42_peers_without_the_right_certificate_are_refused(
    tcp: Place,
    tmp_path: Path,
    reached: Reached,
    caplog: pytest.LogCaptureFixture,
    who: str,
    logged: str,
) -> None:
    keys = _wrong(who, tcp, tmp_path)
    num_tries = 0

    def seconds_until_refused() -> float:
        nonlocal num_tries
        num_tries += 1
        begin = time.monotonic()
        if keys is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            with (
                dial(service.address) as raw,
                context.wrap_socket(raw) as wrapped,
                pytest.raises(ssl.SSLError, match="certificate required"),
            ):
                wrapped.recv(100)
        else:
            place = addresses.resolve(service.address, None, keys)
            with (
                Channel(place, COORDINATOR, keys, peer=PS) as channel,
                pytest.raises(errors.PermissionDeniedError, match="certificate"),
            ):
                channel.request(PING, timeout=60)
        return time.monotonic() - begin

    with tcp.serve(reached) as service:
        check_promptness(seconds_until_refused, 2.0)
        with tcp.channel() as good:
            assert good.request(PING, timeout=60)[0] == messages.Done()
    assert reached.bodies == [PING]
    lines = [r.getMessage() for r in caplog.records if "refused a connection" in r.getMessage()]
    assert 1 <= len(lines) <= num_tries
    assert all(re.search(f"from 127.0.0.1:.*({logged})", line) for line in lines)


def test_bar42_a_stream_that_was_changed_on_its_way_is_refused_with_the_reason(
    tcp: Place, reached: Reached, caplog: pytest.LogCaptureFixture
) -> None:
    is_bad = False

    def change(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if is_bad else data

    with tcp.serve(reached) as service, ByteProxy(service.address, change) as proxy:
        with RawPeer(f"tcp://{proxy.address}", tcp.key("worker")) as raw_peer:
            raw_peer.connect()
            raw_peer.hello("worker")
            assert type(raw_peer.receive()) is messages.Welcome
            is_bad = True
            raw_peer.send(PING)
            assert raw_peer.is_closed_within(30)
        with tcp.channel() as good:
            assert good.request(PING, timeout=60)[0] == messages.Done()
    assert reached.bodies == [PING]
    (line,) = [r.getMessage() for r in caplog.records if "has lost" in r.getMessage()]
    assert re.search("lost /job:worker/task:0 from 127.0.0.1:.*TLS connection failed", line)


def _run(service: Service, is_over: Callable[[], bool]) -> None:
    """Runs the events of a service that has no thread, until something is so."""
    deadline = time.monotonic() + 60
    while not is_over():
        assert time.monotonic() < deadline
        service.run_once(0.01)


def _connect(service: Service, raw_peer: RawPeer) -> None:
    thread = threading.Thread(target=raw_peer.connect)
    thread.start()
    _run(service, lambda: not thread.is_alive())


def test_a_peer_that_leaves_right_after_its_hello_leaves_no_session(
    tcp: Place, reached: Reached, caplog: pytest.LogCaptureFixture
) -> None:
    """The next connection gets the same descriptor."""
    with Service(tcp.resolve("ps"), PS, reached, tcp.key("ps")) as service:
        with RawPeer(service.url, tcp.key("worker")) as raw_peer:
            _connect(service, raw_peer)
            raw_peer.hello("worker")
        _run(service, lambda: not service._wires)
        with RawPeer(service.url, tcp.key("worker")) as raw_peer:
            _connect(service, raw_peer)
            raw_peer.hello("worker")
            _run(service, lambda: service.has_session("worker", 99))
            assert type(raw_peer.receive()) is messages.Welcome
    assert caplog.messages == []


def test_the_last_message_of_a_peer_that_leaves_is_handled(tcp: Place, reached: Reached) -> None:
    with Service(tcp.resolve("ps"), PS, reached, tcp.key("ps")) as service:
        with RawPeer(service.url, tcp.key("coordinator")) as raw_peer:
            _connect(service, raw_peer)
            raw_peer.hello()
            _run(service, lambda: service.has_session("coordinator", 99))
            assert type(raw_peer.receive()) is messages.Welcome
            raw_peer.send(messages.Detach())
        _run(service, lambda: not service._wires)
    assert reached.bodies == [messages.Detach()]


@pytest.mark.parametrize(
    ("data", "logged"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not use TLS 1.3"),
        (bytes(100), "does not use TLS 1.3"),
        (b"\x16\x03\x01\x00\x05hello", "the TLS handshake failed"),
        ("tls 1.2", "does not use TLS 1.3"),
    ],
    ids=["http", "zeros", "malformed", "downgrade"],
)
def test_bar42_what_is_not_tls_of_version_1_3_is_refused(
    tcp: Place, reached: Reached, caplog: pytest.LogCaptureFixture, data: Any, logged: str
) -> None:
    with tcp.serve(reached) as service, dial(service.address) as raw:
        if isinstance(data, bytes):
            raw.sendall(data)
            seconds_until_closed(raw)
        else:
            keys = tcp.key("coordinator")
            assert keys is not None
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.load_verify_locations(keys.ca)
            context.load_cert_chain(keys.certificate, keys.key)
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(ssl.SSLError, match="protocol version"):
                context.wrap_socket(raw)
        with tcp.channel() as good:
            assert good.request(PING, timeout=60)[0] == messages.Done()
    assert reached.bodies == [PING]
    assert [r for r in caplog.records if logged in r.getMessage()]


def test_bar42_garbage_after_the_handshake_is_refused(
    tcp: Place, reached: Reached, caplog: pytest.LogCaptureFixture
) -> None:
    with tcp.serve(reached) as service, RawPeer(service.url, tcp.key("worker")) as raw_peer:
        raw_peer.connect()
        raw_peer.socket.sendall(b"\xff" * 1_000)
        assert raw_peer.is_closed_within(30)
        with tcp.channel() as good:
            assert good.request(PING, timeout=60)[0] == messages.Done()
    assert reached.bodies == [PING]
    assert "a piece does not start as it must" in caplog.text


def test_bar42_a_certificate_cannot_claim_another_role(
    tcp: Place, reached: Reached, caplog: pytest.LogCaptureFixture
) -> None:
    with tcp.serve(reached) as service, RawPeer(service.url, tcp.key("worker")) as raw_peer:
        raw_peer.connect()
        raw_peer.hello("coordinator")
        answer = raw_peer.receive()
        assert answer.code == "PermissionDeniedError"
        assert "a coordinator with the certificate of a worker" in answer.text
        raw_peer.send(messages.CreatePart(1, "v", (1,), "float32", messages.FromBuffer()))
        assert raw_peer.receive().text.startswith("hello first")
        assert raw_peer.is_closed_within(30)
    assert reached.bodies == []
    (line,) = caplog.messages
    assert "refused /job:coordinator/task:0" in line


def test_bar42_a_certificate_cannot_claim_another_index(tmp_path: Path, reached: Reached) -> None:
    directory = key_files.make(tmp_path / "keys", counts={"worker": 2, "ps": 2})
    ps = key_files.load(directory, "ps", 0)
    worker = key_files.load(directory, "worker", 1)
    where = addresses.resolve("127.0.0.1:0", None, ps)
    with Service(where, PS, reached, ps) as service:
        service.start()
        where = addresses.resolve(service.address, None, worker)
        exchange = messages.Exchange([], [])
        with Channel(where, Task("worker", 1), worker, peer=PS) as channel:
            assert channel.request(exchange, timeout=60)[0] == messages.Done()
        with (
            Channel(where, Task("worker", 0), worker, peer=PS) as channel,
            pytest.raises(errors.PermissionDeniedError, match=r"certificate of replicax.*worker/1"),
        ):
            channel.request(exchange, timeout=60)
    with pytest.raises(errors.PermissionDeniedError, match=r"certificate of replicax://.*/ps/0"):
        Service(where, Task("ps", 1), reached, ps)
    assert reached.bodies == [exchange]


def test_a_peer_does_not_talk_to_a_server_with_the_certificate_of_another_role(
    tcp: Place, tmp_path: Path, reached: Reached
) -> None:
    """A worker's certificate cannot pose as a parameter server."""
    keys = tcp.key("worker")
    assert keys is not None
    with tcp.serve(reached, WORKER) as service:
        place = addresses.resolve(service.address, None, keys)
        with (
            Channel(place, COORDINATOR, tcp.key("coordinator"), peer=PS) as channel,
            pytest.raises(
                (errors.PermissionDeniedError, errors.UnavailableError), match="/job:ps/task:0"
            ),
        ):
            channel.request(PING, timeout=60)
    assert reached.bodies == []
