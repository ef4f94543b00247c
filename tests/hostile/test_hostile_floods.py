"""Floods: bytes without sense, sizes without measure, callers without a word."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hostile_partners import (
    CLIENT_HELLO,
    ByteProxy,
    WatchedTask,
    check_promptness,
    claim,
    dial,
    seconds_until_closed,
)
from parameter_servers import becomes
from transport_partners import Place, random_body

from replicax import errors
from replicax.protocol import codec, limits, messages
from replicax.transport.channel import Channel
from replicax.transport.connection_guard import PendingConnections

PING = messages.Ping(0)
MIB = 1 << 20


@pytest.fixture(params=["tcp", "ipc"])
def watched(
    request: pytest.FixtureRequest, watched_ps: WatchedTask, watched_ipc_ps: WatchedTask
) -> WatchedTask:
    return watched_ps if request.param == "tcp" else watched_ipc_ps


def served(channel: Channel) -> float:
    """Asks a good question; returns how long the answer took."""
    begin = time.monotonic()
    # A worker outside of a job is told so by the server itself: the question has arrived.
    with pytest.raises(errors.DistributeError, match="job"):
        channel.request(messages.Exchange([], []), timeout=30)
    return time.monotonic() - begin


@contextlib.contextmanager
def unharmed(task: WatchedTask, most_growth: int) -> Iterator[None]:
    """Checks that a task is as before, once what happened has been tidied up."""
    with task.channel("worker") as channel:
        served(channel)
        before = task.figures()
        yield
        served(channel)
        assert task.process.poll() is None
        becomes(lambda: abs(task.figures()["fds"] - before["fds"]) <= 2, "descriptors are back")
        after = task.figures()
        assert after["threads"] <= before["threads"]
        assert after["rss"] - before["rss"] < most_growth
        assert task.unpickled() == []


# Bar 44: malformed frames.


def _before_a_key(rng: random.Random) -> Iterator[bytes]:
    """What a raw connection may begin with, without end."""
    while True:
        yield rng.randbytes(rng.randrange(1, 300))
        yield CLIENT_HELLO[: rng.randrange(len(CLIENT_HELLO))]
        yield CLIENT_HELLO + rng.randbytes(rng.randrange(1, 300))
        # Records and messages of the right form, full of rubbish.
        yield b"\x16\x03\x01\x00\xc8" + rng.randbytes(200)
        yield CLIENT_HELLO + b"\x17\x03\x03\x00\x28" + rng.randbytes(40)
        flipped = bytearray(CLIENT_HELLO)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        yield bytes(flipped)
        yield claim(200) + rng.randbytes(192)
        yield claim(rng.randrange(1 << 12)) + rng.randbytes(90)


def _after_hello(rng: random.Random) -> Iterator[list[bytes]]:
    """Messages of a caller who is known, and has gone mad."""
    bodies = [messages.Exchange, messages.CreatePart, messages.Run, messages.Finished]
    while True:
        body = random_body(rng.choice(bodies), rng)
        good = [bytes(f) for f in codec.encode("j", 1, 99, 1, body, [b"x" * rng.randrange(99)])]
        flipped = bytearray(good[0])
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        yield [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]
        yield [good[0][: rng.randrange(len(good[0]))], *good[1:]]
        yield [bytes(flipped), *good[1:], b"more"]
        yield [good[0], *good[1:], *good[1:], b""]  # more buffers than it counts
        yield [b"\x91" * 50_000]  # deep
        yield [b"\xdd\xff\xff\xff\xff" * 10]  # an array of 2**32 - 1
        yield [
            b"\x97\xa0\x00\x00\x00\x91\xcf" + b"\xff" * 8 + b"\x91\xa4Ping\x90"
        ]  # a size of 2**64


def _flood_raw(task: WatchedTask, num_frames: int, good: Channel) -> float:
    worst = 0.0
    for i, data in zip(range(num_frames), _before_a_key(random.Random(44)), strict=False):
        with task.dial() as raw, contextlib.suppress(OSError):
            raw.sendall(data)
        if i % 100 == 0:
            worst = max(worst, served(good))
    return worst


def _flood_known(task: WatchedTask, num_frames: int, good: Channel) -> float:
    worst = 0.0
    stream = _after_hello(random.Random(45))
    sent = 0
    while sent < num_frames:
        # Each of them ends its connection; what follows it is not read.
        with task.raw_peer() as raw_peer, contextlib.suppress(OSError):
            raw_peer.connect()
            raw_peer.hello("worker")
            raw_peer.receive()
            for _ in range(50):
                sent += 1
                raw_peer.send_parts(next(stream))
        worst = max(worst, served(good))
    return worst


@pytest.mark.parametrize("when", ["before a key", "after hello"])
@pytest.mark.parametrize(
    "num_frames", [1_000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_bar44_malformed_parts_do_no_harm(watched: WatchedTask, when: str, num_frames: int) -> None:
    flood = _flood_raw if when == "before a key" else _flood_known
    with watched.channel("worker") as good:
        served(good)
        flood(watched, 50, good)  # what a process keeps once, it keeps from here on
        with unharmed(watched, 5 * MIB):
            assert flood(watched, num_frames, good) < 20.0
    assert "Traceback" not in watched.log()


def test_bar44_one_malformed_message_ends_its_connection(watched: WatchedTask) -> None:
    with watched.raw_peer() as raw_peer:
        raw_peer.connect()
        raw_peer.hello("worker")
        assert type(raw_peer.receive()) is messages.Welcome
        raw_peer.send_parts([b"\x97rubbish"])
        assert raw_peer.is_closed_within(60)


def test_wire_corruption_is_never_taken_for_a_value(watched_ps: WatchedTask) -> None:
    """Bits that flip between two tasks: the connection breaks, and no wrong byte arrives."""
    rng = random.Random(24)
    flips = 0

    def flip(data: bytes) -> bytes:
        nonlocal flips
        if len(data) < 1_000 or rng.random() < 0.7:
            return data
        flips += 1
        place = rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]

    value = rng.randbytes(4_000)
    part = messages.CreatePart(1, "v", (1_000,), "float32", messages.FromBuffer())
    with ByteProxy(watched_ps.address, flip) as proxy, watched_ps.channel() as direct:
        direct.job, direct.epoch = "flips", 1
        direct.request(messages.Attach([], {}), timeout=30)
        direct.request(part, [value], timeout=30)
        num_tries = 0
        # On a slow machine many tries are over before a byte that counts has passed.
        while num_tries < 40 or (flips < 10 and num_tries < 400):
            num_tries += 1
            with watched_ps.channel("worker", proxy.address) as channel:
                channel.job, channel.epoch = "flips", 1
                push = messages.Push(num_tries, [messages.Update(0, "assign", 1)])
                with contextlib.suppress(errors.DistributeError):
                    channel.request(messages.Exchange([push], []), [value], timeout=0.4)
        question = messages.Exchange([], [messages.Read(1, -1, False)])
        assert [bytes(b) for b in direct.request(question, timeout=30)[1]] == [value]
        direct.request(messages.Detach(), timeout=30)
    assert flips >= 10, "the bits have flipped"


# Bar 45: sizes.


@pytest.mark.parametrize("size", [(1 << 31) + (1 << 22), 1 << 32, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_bar45_a_size_beyond_the_limit_closes_at_once(
    watched: WatchedTask, size: int, when: str
) -> None:
    """As the first message, and after the handshake."""

    def send_claim() -> float:
        with watched.raw_peer() as raw_peer:
            raw_peer.connect()
            if when == "after":
                raw_peer.hello("worker")
                assert type(raw_peer.receive()) is messages.Welcome
            with contextlib.suppress(OSError):
                raw_peer.socket.sendall(claim(size) + b"x" * 1_000)
            begin = time.monotonic()
            assert raw_peer.is_closed_within(60)
            return time.monotonic() - begin

    send_claim()  # what a process keeps once, it keeps from here on
    with unharmed(watched, MIB):
        # 0.1 s, on a machine with nothing else to do.
        check_promptness(send_claim, 2.0)
    becomes(lambda: "is oversized" in watched.log(), "a line names the cause")


def test_bar45_no_memory_is_allocated_for_claimed_sizes(watched: WatchedTask) -> None:
    """Sizes that are allowed, of messages that do not come."""

    def claim_much() -> float:
        """Returns the memory of the task while it waits for what was claimed."""
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                raw_peer = stack.enter_context(watched.raw_peer())
                raw_peer.connect()
                raw_peer.hello("worker")
                assert type(raw_peer.receive()) is messages.Welcome
                raw_peer.socket.sendall(claim(limits.MESSAGE - 1) + b"x")
            with watched.channel("worker") as good:
                served(good)
            return watched.figures()["rss"]

    idle = watched.figures()["rss"]
    waiting = claim_much()  # what a process keeps once, it keeps from here on
    assert waiting - idle < 20 * MIB
    with unharmed(watched, 2 * MIB):
        assert claim_much() - waiting < 2 * MIB


def test_bar45_unauthenticated_peers_that_send_much_are_closed(watched_ps: WatchedTask) -> None:
    """An unauthenticated peer cannot fill the memory."""
    with unharmed(watched_ps, 300 * MIB), watched_ps.dial() as raw:
        raw.sendall(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff")
        piece, sent = bytes(64 << 10), 0
        with contextlib.suppress(OSError):
            while sent < 1 << 30:
                raw.sendall(piece)
                sent += len(piece)
        assert sent < 1 << 30


@pytest.mark.parametrize("size", [-1, 1 << 31, 1 << 32, 1 << 62])
def test_bar45_declared_sizes_of_envelopes_are_not_believed(
    watched: WatchedTask, size: int
) -> None:
    good = codec.encode("j", 1, 99, 1, messages.Exchange([], []), [b"xyz"])
    (envelope,) = [codec.decode(good)[0]]
    lying = codec._encoder.encode(
        messages.Envelope("j", 1, 99, 1, [size], envelope.body)  # type: ignore[arg-type]
    )
    with unharmed(watched, MIB), watched.raw_peer() as raw_peer:
        raw_peer.connect()
        raw_peer.hello("worker")
        assert type(raw_peer.receive()) is messages.Welcome
        raw_peer.send_parts([lying, b"xyz"])
        assert raw_peer.is_closed_within(60)


def test_bar45_what_is_too_large_is_an_error_of_the_sender(watched_ps: WatchedTask) -> None:
    page = np.zeros(1, np.uint8)
    large = np.lib.stride_tricks.as_strided(page, (limits.MESSAGE + 1,), (1,), writeable=False)
    with watched_ps.channel() as channel:
        with pytest.raises(errors.ResourceExhaustedError, match="Exchange has 2147483649"):
            channel.request(messages.Exchange([], []), [large], timeout=20)
        with pytest.raises(errors.ResourceExhaustedError, match="header of a message"):
            channel.request(messages.Attach(["x" * limits.HEADER], {}), timeout=20)


def test_bar45_nothing_is_ever_decompressed() -> None:
    """There is no bomb where there is no decompression. Data files are the user's own."""
    source = Path(codec.__file__).parents[1]
    words = ("gzip", "bz2", "lzma", "zstd", "brotli", "decompress")
    reads_data_files = {"input", "tensorflow_files", "tf"}
    found = {
        f"{path.relative_to(source)}: {word}"
        for path in source.rglob("*.py")
        for word in words
        if path.relative_to(source).parts[0] not in reads_data_files and word in path.read_text()
    }
    assert found == set()


# Bar 46: silence.


def test_pending_connections_are_closed_when_late_or_too_many() -> None:
    pending = PendingConnections()
    for fd in range(10):
        pending.add(fd, now=float(fd))
    pending.discard(3)
    assert pending.take_expired(now=limits.HANDSHAKE + 1.5) == [0, 1]
    assert pending.take_expired(now=limits.HANDSHAKE + 1.5, limit=4) == [2, 4, 5]
    pending.reject(9, now=7.0 - limits.REJECTION)
    pending.reject(77, now=8.0 - limits.REJECTION)  # a peer that violates the protocol
    assert pending.take_expired(now=8.0) == [9, 77]
    assert [pending.is_rejected(fd) for fd in (9, 77, 6)] == [True, True, False]
    pending.add(6, now=100.0)  # the number is used again
    assert pending.take_expired(now=limits.HANDSHAKE + 50.0) == [7, 8]
    assert list(pending) == [6] and len(pending) == 1


class Dribble:
    """Connections that never finish a handshake: half say nothing, half a byte now and then."""

    def __init__(self, address: str, num_each: int) -> None:
        self.all = [dial(address) for _ in range(2 * num_each)]
        self._dribbling = self.all[:num_each]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        place = 0
        while not self._stop.wait(0.1):
            for one in self._dribbling:
                with contextlib.suppress(OSError):
                    one.send(CLIENT_HELLO[place : place + 1])
            place = (place + 1) % 60

    def wait_closed(self, deadline: float) -> None:
        for one in self.all:
            seconds_until_closed(one, max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for one in self.all:
            one.close()


def _connect_seconds(place: Place) -> float:
    begin = time.monotonic()
    with place.channel() as good:
        assert good.request(PING, timeout=60)[0] == PING
    return time.monotonic() - begin


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_bar46_silent_and_slow_peers_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    num_each = 500
    monkeypatch.setattr(limits, "HANDSHAKE", 1.0)
    place = Place(scheme, tmp_path)
    with place.serve() as service:
        begin = time.monotonic()
        crowd = Dribble(service.address, num_each)
        try:
            waits = [_connect_seconds(place) for _ in range(5)]
            # T_handshake + 1 s, on a machine with nothing else to do; or never.
            crowd.wait_closed(time.monotonic() + 30.0)
            closed_s = time.monotonic() - begin
            waits.append(_connect_seconds(place))
        finally:
            crowd.close()
        print(f"{2 * num_each} closed after {closed_s:.2f} s, served in {max(waits):.3f} s")
        assert max(waits) < 20.0, "1 s, on a machine with nothing else to do"


def test_bar46_a_peer_that_never_says_hello_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE", 0.5)
    place = Place("ipc", tmp_path)
    with place.serve() as service, dial(service.url) as raw:
        raw.sendall(claim(100)[:10])
        seconds_until_closed(raw, 30.0)
        # Who has said hello may be silent for as long as it likes.
        with place.channel() as quiet:
            quiet.request(PING, timeout=20)
            connection = quiet._connection
            with dial(service.url) as another:
                seconds_until_closed(another)
            assert quiet.request(PING, timeout=20)[0] == PING
            assert quiet._connection is connection


def test_bar46_the_oldest_pending_connection_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE", 60.0)
    place = Place("tcp", tmp_path)
    with place.serve() as service, contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(dial(service.address))
            for _ in range(limits.PENDING_CONNECTIONS + 20)
        ]
        for one in crowd[:20]:
            seconds_until_closed(one)
        crowd[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            crowd[-1].recv(100)
        assert _connect_seconds(place) < limits.HANDSHAKE / 2


# Running out of file descriptors.


def _crowd_in(task: WatchedTask, crowd: list[socket.socket], most: int) -> None:
    """Opens connections, some hundreds per second, until the task listens no more."""
    for _ in range(most // 5):
        if "no file descriptors" in task.log():
            break
        assert task.process.poll() is None, task.log()
        for _ in range(5):
            with contextlib.suppress(OSError):
                crowd.append(dial(task.address))
        time.sleep(0.01)


@pytest.mark.parametrize("protocol", [pytest.param("tcp", marks=pytest.mark.slow), "ipc"])
def test_bar46_a_task_without_descriptors_waits_quietly_and_recovers(
    tmp_path: Path, protocol: str
) -> None:
    with WatchedTask(tmp_path, "ps", protocol) as task, task.channel("worker") as good:
        served(good)
        crowd: list[socket.socket] = []
        try:
            used = task.figures()["fds"]
            _, hard = resource.prlimit(task.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(task.process.pid, resource.RLIMIT_NOFILE, (used + 100, hard))
            _crowd_in(task, crowd, 500)
            becomes(lambda: "no file descriptors" in task.log(), "it notices")
            assert task.process.poll() is None
            before, begin = task.watched.cpu_times(), time.monotonic()
            time.sleep(0.5)  # a span to measure, not to wait for something
            after, end = task.watched.cpu_times(), time.monotonic()
            spent = sum(after[:2]) - sum(before[:2])
            assert spent < (end - begin) / 2, "it turns in circles"
            served(good)  # who was there before is served all the time
        finally:
            for one in crowd:
                one.close()
        begin = time.monotonic()
        with task.channel("worker") as new:
            served(new)
        assert time.monotonic() - begin < 20.0, "2 s, on a machine with nothing else to do"
        assert task.process.poll() is None
