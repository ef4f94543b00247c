"""The fault kit: every fault lands, is counted, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from parameter_servers import becomes, kept_cluster
from transport_partners import COORDINATOR, PS, WORKER, Place
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors
from replicax.protocol import limits, messages
from replicax.protocol.tasks import Task
from replicax.testing import Faults, LocalCluster, Proxy, fill, small_disk
from replicax.testing.child import Child
from replicax.testing.faults import REPLIES, REQUESTS, Dice
from replicax.testing.splitter import Splitter, joined
from replicax.testing.supervisor import START_AGAIN, Backoff, Supervisor
from replicax.transport import addresses
from replicax.transport.channel import Channel

# An answer that does not come in so many seconds was lost for good.
SECONDS = 30.0


@pytest.fixture
def repeats_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost is repeated after 30 milliseconds, however long answers are waited for."""
    monkeypatch.setattr(limits, "RETRY", 0.03 / SECONDS)
    monkeypatch.setattr(limits, "MAX_RETRY", 0.15 / SECONDS)


class Between:
    """A proxy before an echoing server, and channels through it."""

    def __init__(self, place: Place, seed: int = 7) -> None:
        self._place = place
        self.handled: list[int] = []
        self._serving = place.serve(self._handle)
        service = self._serving.__enter__()
        where = f"{place.address}-proxy" if place.scheme == "ipc" else "127.0.0.1:0"
        self.proxy = Proxy(where, service.address, seed)

    def _handle(self, caller: Any, envelope: Any, buffers: Any) -> Any:
        if isinstance(envelope.body, messages.Ping):
            self.handled.append(envelope.body.settled)
        return envelope.body, buffers

    def channel(self, me: Task = COORDINATOR) -> Channel:
        keys = self._place.key(me.role)
        return Channel(addresses.resolve(self.proxy.address, None, keys), me, keys, peer=PS)

    def first_arrivals(self) -> list[int]:
        return list(dict.fromkeys(self.handled))

    def close(self) -> None:
        self.proxy.close()
        self._serving.__exit__(None, None, None)


@pytest.fixture
def ipc(tmp_path: Path) -> Iterator[Between]:
    between = Between(Place("ipc", tmp_path))
    yield between
    between.close()


@pytest.fixture
def tcp(tmp_path: Path) -> Iterator[Between]:
    between = Between(Place("tcp", tmp_path))
    yield between
    between.close()


def converse(channel: Channel, start: int, count: int, timeout: float = SECONDS) -> None:
    """Asks some questions, ten at a time, and checks every answer."""
    for first in range(start, start + count, 10):
        numbers = [channel.send(messages.Ping(first + i), [b"%d" % i]) for i in range(10)]
        for i, number in enumerate(numbers):
            answer = channel.receive(timeout)
            assert answer is not None, "an answer was lost for good"
            assert answer[:2] == (number, messages.Ping(first + i))
            assert bytes(answer[2][0]) == b"%d" % i


# Messages.


@pytest.mark.usefixtures("repeats_soon")
@pytest.mark.parametrize("fault", sorted({*REQUESTS, *REPLIES}))
def test_bar16_each_fault_lands_and_no_answer_is_lost_or_out_of_order(
    ipc: Between, fault: str
) -> None:
    with ipc.channel() as channel:
        converse(channel, 0, 10)
        ipc.proxy.harm(**{fault: 0.1})
        converse(channel, 10, 150)
        landed = ipc.proxy.landed
        assert landed[fault] >= 8, landed
        assert {name for name in (*REQUESTS, *REPLIES) if landed[name]} == {fault}
        ipc.proxy.heal()
        converse(channel, 160, 20)
        assert ipc.first_arrivals() == list(range(180))
        if fault in ("drop_replies", "duplicate_requests", "break_before_reply"):
            assert len(ipc.handled) > 180


def test_the_same_seed_throws_the_same_dice() -> None:
    faults = Faults(drop_requests=0.2, duplicate_requests=0.2, delay=0.1)

    def throws(seed: int) -> list[str]:
        dice = Dice(faults, seed)
        return [dice.throw("request", "Exchange") for _ in range(200)]

    assert throws(5) == throws(5) != throws(6)
    assert 20 <= throws(5).count("drop_requests") <= 60


@pytest.mark.usefixtures("repeats_soon")
def test_faults_happen_to_the_requests_that_are_named(ipc: Between) -> None:
    with ipc.channel() as channel:
        ipc.proxy.harm(drop_requests=0.2, drop_replies=0.2, only=("Exchange",))
        converse(channel, 0, 50)
        assert dict(ipc.proxy.landed) == {}
        for _ in range(12):
            channel.request(messages.Exchange([], []), timeout=SECONDS)
        assert ipc.proxy.landed["drop_requests"] + ipc.proxy.landed["drop_replies"] > 0


def test_faults_that_make_no_sense_are_refused(ipc: Between, tcp: Between) -> None:
    with refused(errors.InvalidArgumentError, "drop_requests"):
        ipc.proxy.harm(drop_requests=1.5)
    with refused(errors.InvalidArgumentError, "bytes_per_s"):
        ipc.proxy.harm(bytes_per_s=0)
    with refused(errors.UnsupportedError, "need tcp"):
        ipc.proxy.harm(flips=0.1)
    with refused(errors.UnsupportedError, "need ipc"):
        tcp.proxy.harm(drop_requests=0.1)
    with refused(errors.UnsupportedError, "need ipc"):
        tcp.proxy.cut(("worker", 0))


def test_no_shared_memory_goes_past_the_proxy(ipc: Between) -> None:
    data = np.random.default_rng(0).bytes(3 << 20)
    ipc.proxy.harm(bytes_per_s=100e6)
    with ipc.channel() as channel:
        for _ in range(2):
            _, received = channel.request(messages.Ping(0), [data, b"end"], timeout=60)
            assert bytes(received[0]) == data and bytes(received[1]) == b"end"
        connection = channel._connection
        assert connection is not None and connection.shared_memory is not None
        assert not connection.shared_memory.is_open


@pytest.mark.usefixtures("repeats_soon")
def test_questions_repeated_to_a_slow_server_spoil_no_shared_memory(tmp_path: Path) -> None:
    kept: dict[int, memoryview] = {}
    handled: list[int] = []

    def handle(caller: Any, envelope: Any, buffers: Any) -> Any:
        number = envelope.body.settled
        handled.append(number)
        if number % 5 == 0 and number not in kept:
            threading.Event().wait(0.15)
        kept.setdefault(number, buffers[0])
        return envelope.body, buffers

    place = Place("ipc", tmp_path)
    with place.serve(handle), place.channel() as channel:
        sent = [np.random.default_rng(i).bytes(200_000) for i in range(40)]
        for i, data in enumerate(sent):
            assert bytes(channel.request(messages.Ping(i), [data], timeout=SECONDS)[1][0]) == data
            if i % 2:
                # Its block is free, and may be used for the next one.
                kept[i - 1] = memoryview(bytes(kept[i - 1]))
        assert [bytes(kept[i]) for i in range(40)] == sent
    assert list(dict.fromkeys(handled)) == list(range(40)) and len(handled) > 44


def test_streams_are_cut_into_messages_wherever_they_are_split() -> None:
    sent = [[b"head"], [b"a", b"b" * 300], [b"\x00" * 70_000], [b"c", b"d" * 600_000]]
    stream = b"".join(map(joined, sent))
    rng = random.Random(3)
    for _ in range(20):
        splitter, found, position = Splitter(), [], 0
        while position < len(stream):
            size = rng.choice([1, 2, 9, 5_000, 100_000])
            found += splitter.feed(stream[position : position + size])
            position += size
        assert found == sent


# Connections.


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_what_is_cut_is_silent_and_goes_on_when_it_is_mended(scheme: str, tmp_path: Path) -> None:
    between = Between(Place(scheme, tmp_path))
    try:
        with between.channel() as channel:
            converse(channel, 0, 10)
            between.proxy.cut()
            channel.send(messages.Ping(10))
            assert channel.receive(timeout=0.3) is None
            assert between.first_arrivals() == list(range(10))
            between.proxy.mend()
            answer = channel.receive(timeout=60)
            assert answer is not None and answer[1] == messages.Ping(10)
    finally:
        between.close()


def test_one_caller_is_cut_off_and_the_others_are_not(ipc: Between) -> None:
    with ipc.channel() as channel, ipc.channel(WORKER) as worker:
        converse(channel, 0, 10)
        read = messages.Exchange([], [])
        worker.request(read, timeout=60)
        assert sorted(c for c in ipc.proxy.callers if c) == [("coordinator", 0), ("worker", 0)]
        ipc.proxy.cut(("worker", 0))
        with pytest.raises(errors.DeadlineExceededError):
            worker.request(read, timeout=0.5)
        converse(channel, 10, 20)
        ipc.proxy.mend()
        assert worker.request(read, timeout=60)[0] == read


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
@pytest.mark.parametrize("is_reset", [False, True])
def test_bar25_broken_connections_come_back(scheme: str, is_reset: bool, tmp_path: Path) -> None:
    between = Between(Place(scheme, tmp_path))
    try:
        with between.channel() as channel:
            for i in range(8):
                converse(channel, i * 10, 10)
                assert between.proxy.blip(is_reset) >= 1
            assert between.proxy.landed["blips"] >= 8
            assert between.first_arrivals() == list(range(80))
    finally:
        between.close()


def test_bytes_trickle(tcp: Between) -> None:
    with tcp.channel() as channel:
        converse(channel, 0, 10)
        tcp.proxy.harm(bytes_per_s=200_000)
        start = time.monotonic()
        channel.request(messages.Ping(10), [bytes(50_000)], timeout=60)
        # There and back.
        assert time.monotonic() - start >= 0.4


@pytest.mark.usefixtures("repeats_soon")
def test_200_flipped_bits_make_no_wrong_value(tcp: Between) -> None:
    wrong: list[Any] = []
    answers = [0]

    def ask(index: int) -> None:
        rng = np.random.default_rng(index)
        with tcp.channel(Task("worker", index)) as channel:
            while tcp.proxy.landed["flips"] < 200:
                data = rng.bytes(500)
                body = messages.Exchange([], [messages.Read(index, int(rng.integers(1 << 40)))])
                try:
                    answer, received = channel.request(body, [data], timeout=SECONDS)
                except (errors.UnavailableError, errors.DeadlineExceededError):
                    continue
                answers[0] += 1
                if answer != body or bytes(received[0]) != data:
                    wrong.append((index, answer))

    tcp.proxy.harm(flips=0.2)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tcp.proxy.landed["flips"] >= 200 and answers[0] > 100


# Processes.


class Sight:
    """Looks at a process again and again: how often it was stopped, and how often not."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.stopped = self.running = 0

    def look(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            is_stopped = self._process.status() == psutil.STATUS_STOPPED
            self.stopped += is_stopped
            self.running += not is_stopped
            time.sleep(0.002)

    def is_mostly_stopped(self) -> bool:
        self.look(1.0)
        return self.stopped > self.running > 0


@pytest.fixture(scope="module")
def cluster(cold_starts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One server, which keeps snapshots."""
    kept = tmp_path_factory.mktemp("kept")
    with kept_cluster(workers=0, ps=1, snapshots=kept) as cluster:
        yield cluster
        # Closing ends a process that is stopped for most of the time.
        process = psutil.Process(cluster.pid("ps", 0))
        cluster.slow("ps", 0, throttle=0.1)
    assert not process.is_running()
    assert kept.exists()


def test_bar10_a_slow_process_runs_for_a_part_of_the_time(cluster: LocalCluster) -> None:
    process = psutil.Process(cluster.pid("ps", 0))
    with refused(errors.InvalidArgumentError, "throttle"):
        cluster.slow("ps", 0, throttle=0)
    cluster.slow("ps", 0, throttle=0.2)
    # The throttling thread may be delayed at any time.
    becomes(Sight(process).is_mostly_stopped, "it is stopped for most of the time")
    cluster.slow("ps", 0, throttle=1)
    assert process.status() != psutil.STATUS_STOPPED
    cluster.slow("ps", 0, throttle=0.1)
    cluster.cont("ps", 0)
    sight = Sight(process)
    sight.look(0.3)
    assert sight.stopped == 0 < sight.running
    with refused(errors.InvalidArgumentError, "called through a proxy"):
        cluster.cut("ps", 0)


def test_a_server_can_lose_its_snapshots(cluster: LocalCluster) -> None:
    kept = cluster.snapshots_directory
    command = psutil.Process(cluster.pid("ps", 0)).cmdline()
    assert command[command.index("--snapshots") + 1] == str(kept)
    assert command[command.index("--snapshot-every") + 1] == "1"
    assert kept is not None
    (kept / "ps-0").mkdir(exist_ok=True)
    (kept / "ps-0" / "mark").touch()
    cluster.restart("ps", 0, empty=True)
    assert not (kept / "ps-0" / "mark").exists()


class Ending(Child):
    """A child whose processes end with some code."""

    code = START_AGAIN

    def spawn(self, options: Any = (), env: Any = None) -> None:
        self.close_pipe()
        ending = f"import os; os.kill(os.getpid(), 9) if {self.code} < 0 else os._exit({self.code})"
        self._process = subprocess.Popen([sys.executable, "-S", "-c", ending])
        # Last: the count uses the newest.
        self.pids = [*getattr(self, "pids", []), 0]


def test_processes_that_ask_for_it_are_started_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "FIRST_S", 0.01)
    children = [Ending("worker", i, tmp_path / str(i)) for i in range(4)]
    for child, code in zip(children, (START_AGAIN, -9, 0, 1), strict=True):
        child.code = code
        child.spawn()

    def start(child: Child, pid: int) -> None:
        assert child.pid == pid
        child.spawn((), {})

    supervisor = Supervisor(children, start)
    becomes(lambda: len(children[0].pids) == 1 + Backoff.MOST, "five restarts")
    becomes(lambda: children[0].exit_code == START_AGAIN, "the last one ends")
    supervisor.end()
    assert [len(child.pids) for child in children[1:]] == [1, 1, 1]
    assert [child.exit_code for child in children[1:]] == [-9, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"snapshot_every": 0}, "snapshot_every"), ({"proxied": "ps"}, "proxied")],
)
def test_arguments_of_the_kit_are_checked(arguments: dict[str, Any], words: str) -> None:
    with refused(errors.InvalidArgumentError, words):
        LocalCluster(**arguments)


# Disks.


def _can_mount() -> bool:
    try:
        with small_disk(4096):
            return True
    except errors.PermissionDeniedError:
        return False


if _can_mount():

    def test_bar37_a_small_disk_is_full_and_free_again() -> None:
        with small_disk(1 << 20) as disk:
            assert os.path.ismount(disk)
            (disk / "before").write_bytes(bytes(1000))
            with fill(disk) as taken:
                assert taken > 900_000
                with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                    (disk / "more").write_bytes(bytes(100_000))
            (disk / "more").write_bytes(bytes(100_000))
            with fill(disk, spare=65_536):
                (disk / "a little").write_bytes(bytes(30_000))
            assert (disk / "before").read_bytes() == bytes(1000)
        assert not disk.exists()


def test_a_disk_that_cannot_be_made_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(rx.errors.InvalidArgumentError, "positive"), small_disk(0):
        pass
    monkeypatch.setenv("PATH", "")
    with refused(rx.errors.PermissionDeniedError, "SYS_ADMIN"), small_disk(1 << 20):
        pass
