"""Servers that keep copies of each other: no acknowledged change is lost (bar 22)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from parameter_servers import STEADY, Desk, becomes, own_cluster
from parameter_store_client import exported, open_rows
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task, new_incarnation
from replicax.ps.client.cluster import Cluster
from replicax.ps.process import mirror_log, mirror_sender
from replicax.ps.process.mirror_copies import MirrorCopies
from replicax.ps.process.mirror_log import MirrorLog, State
from replicax.ps.process.parameter_server import ParameterServerTask
from replicax.ps.store import journal
from replicax.ps.store.journal import Entry
from replicax.ps.store.service import ParameterStore
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.service import Session

ADD = messages.Update(0, "assign_add", 0)
PUSH = messages.Exchange([messages.Push(1, [ADD])], [])
READ = messages.Exchange([], [messages.Read(0)])
ATTACH = messages.Attach(["inproc://a", "inproc://b"], {"mirror": True})
FENCE = Entry("coordinator", 1, 1, messages.Fence([5]))


def enveloped(body: Any, request: int = 1, job: str = "job") -> messages.Envelope:
    return messages.Envelope(job, 1, 1, request, [], body)


# The log, without anything around it.


class Logged:
    """A log in sync, and the numbers of the replies that were sent."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.log = MirrorLog(0, lambda c, envelope, *_: self.left.append(envelope.request), bool)
        self.log.attached("job", ATTACH, Entry("coordinator", 1, 1, ATTACH))
        assert self.log.needs_seed and self.log.state is State.UNREACHABLE
        assert self.log.end_seed(self.log.begin_seed()) and self.log.state is State.IN_SYNC

    def note(self, count: int = 1, num_bytes: int = 1) -> None:
        for _ in range(count):
            self.log.record(FENCE, [bytes(num_bytes)])

    def defer(self, session: Session, body: Any, request: int, **options: Any) -> bool:
        return self.log.defer(session, enveloped(body, request), (messages.Done(), ()), **options)

    def places(self) -> list[int]:
        batch = self.log.take(100, 1 << 20)
        assert batch is not None
        return list(range(batch.position, batch.position + len(batch.entries)))


A, B = Session(b"a", "worker", 0, 11), Session(b"b", "worker", 1, 12)


def test_bar22_answers_to_changes_wait_for_the_mirror_and_keep_their_order() -> None:
    desk = Logged()
    assert not desk.defer(A, READ, 1), "replies to reads are not deferred"
    desk.note()
    assert desk.defer(A, PUSH, 2)
    assert desk.defer(A, READ, 3), "behind the one before"
    assert desk.defer(A, PUSH, 4, is_error=True)
    assert not desk.defer(B, READ, 1)
    assert not desk.defer(B, messages.Ping(0), 2), "signs of life never wait"
    desk.note()
    assert desk.defer(B, PUSH, 5)
    first, second = desk.places()
    desk.log.confirm(first)
    assert desk.left == []
    desk.log.confirm(first + 1)
    assert desk.left == [2, 3, 4]
    desk.log.confirm(second + 1)
    assert desk.left == [2, 3, 4, 5]
    assert not desk.defer(A, READ, 6) and not desk.defer(B, PUSH, 7), "all is confirmed"
    assert desk.log.num_deferred == 0


def test_bar22_a_mirror_goes_on_where_it_is_or_gets_everything() -> None:
    desk = Logged()
    desk.note(3)
    first, *_ = desk.places()
    assert desk.log.take(100, 1 << 20) is None, "all is told"
    desk.log.mark_unreachable()
    assert desk.log.state is State.UNREACHABLE
    desk.note()
    assert desk.log.resume(first + 1)
    assert desk.places() == [first + 1, first + 2, first + 3]
    assert not desk.log.resume(first), "that was confirmed, and is gone"
    assert desk.log.needs_seed
    desk.note()
    assert desk.defer(A, PUSH, 1)
    assert desk.log.take(100, 1 << 20) is None, "a cut will stand for it"
    position = desk.log.begin_seed()
    desk.note()
    assert desk.defer(B, PUSH, 2)
    assert desk.log.end_seed(position)
    assert desk.left == [1], "what is in the cut is confirmed"
    assert desk.places() == [position]
    desk.log.confirm(position + 1)
    assert desk.left == [1, 2]


def test_bar22_what_cannot_be_repeated_exactly_is_given_as_a_whole() -> None:
    desk = Logged()
    position = desk.log.begin_seed()
    desk.note()
    desk.log.mark_unrepeatable()
    assert desk.defer(A, PUSH, 1)
    assert not desk.log.end_seed(position), "it came while the cut was on its way"
    assert desk.left == []
    assert desk.log.end_seed(desk.log.begin_seed())
    assert desk.left == [1]


def test_bar22_little_is_kept_for_a_mirror_that_is_away() -> None:
    desk = Logged()
    desk.note(3, num_bytes=mirror_log._MOST_KEPT_BYTES // 2)
    assert not desk.log.needs_seed, "one that follows is told everything"
    desk.log.mark_unreachable()
    assert desk.log.needs_seed
    assert desk.log.end_seed(desk.log.begin_seed())
    desk.log.mark_unreachable()
    desk.note(mirror_log._MOST_KEPT)
    assert not desk.log.needs_seed
    desk.note()
    assert desk.log.needs_seed


def test_the_end_of_a_job_lets_answers_go() -> None:
    desk = Logged()
    desk.note()
    assert desk.defer(A, PUSH, 1)
    desk.log.job_ended()
    assert desk.left == [1] and desk.log.state is State.OFF and desk.log.target is None
    desk.note()
    assert not desk.defer(A, PUSH, 2)
    desk.log.attached("other", messages.Attach([], {}), FENCE)
    assert desk.log.target is None, "the job has no mirrors"


def test_too_many_answers_that_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_log, "_MOST_DEFERRED", 2)
    desk = Logged()
    desk.note()
    assert desk.defer(A, PUSH, 1) and desk.defer(B, PUSH, 2)
    with refused(errors.ResourceExhaustedError, "/job:ps/task:0"):
        desk.defer(A, PUSH, 3)


# A store and its copy, without sockets.


class Pair:
    """A store whose changes are told to a copy, when a test says so."""

    def __init__(self) -> None:
        self.log = MirrorLog(0, lambda *_: None, bool)
        self.store = ParameterStore(0, journal=self.log)
        self.copies = MirrorCopies(1)
        self.owner = Session(b"ps", "ps", 0, 77)
        self.sender = mirror_sender.MirrorSender(Task("ps", 0), self.store, None, 77, self.log)
        self.ask(ATTACH)

    def close(self) -> None:
        self.sender.close()
        self.copies.clear()

    def ask(
        self, body: Any, *buffers: Any, role: Any = "coordinator", life: int = 1, epoch: int = 1
    ) -> Any:
        views = [memoryview(np.ascontiguousarray(b).reshape(-1).view(np.uint8)) for b in buffers]
        answer, _ = self.store.handle(role, life, body, views, job="job", epoch=epoch, now=0.0)
        return answer

    def tell(
        self, body: Any, *buffers: Any, session: Session | None = None, job: str = "job"
    ) -> Any:
        target = self.log.target
        return self.copies.handle(session or self.owner, enveloped(body, 1, job), buffers, target)

    def seed(self, *, session: Session | None = None, is_first: bool = True) -> None:
        with tempfile.TemporaryFile() as file:
            position, attach, total = self.sender._cut_into(file, "job")
            file.seek(0)
            octets = file.read()
        half = total // 2
        for offset, piece in ((0, octets[:half]), (half, octets[half:])):
            seed = messages.Seed(position, offset, total, is_first, attach)
            for _ in range(2):  # Each may come twice.
                assert self.tell(seed, piece, session=session) == (messages.Done(), ())
        assert self.log.end_seed(position)

    def pass_on(self, *, most: int = 100, times: int = 1) -> int:
        """Tells the copy what is new; returns how far it is."""
        batch = self.log.take(most, 1 << 30)
        assert batch is not None
        body = messages.Replicate(batch.position, len(batch.entries))
        for _ in range(times):
            answer, _ = self.tell(body, journal.encode(batch.entries), *batch.buffers)
        self.log.confirm(answer.position)
        return answer.position

    def copy(self) -> ParameterStore:
        return self.copies._copies[0].store

    def is_equal(self) -> bool:
        return content(self.store) == content(self.copy())


def content(store: ParameterStore) -> tuple[Any, list[bytes]]:
    """All that a store holds, but for versions, which only grow."""
    cut = store.snapshot()
    assert cut is not None
    try:
        sections = [
            b"".join(piece.tobytes() for _, piece in cut.pieces(i))
            for i in range(len(cut.state.sections()))
        ]
        parts = [msgspec.structs.replace(part, version=0) for part in cut.state.parts]
        made = sorted(cut.state.made)
        return msgspec.structs.replace(cut.state, parts=parts, made=made), sections
    finally:
        cut.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def part(number: int, size: int = 3, dtype: str = "float32") -> messages.CreatePart:
    return messages.CreatePart(number, f"v{number}", (size,), dtype, messages.FromBuffer())


SGD = exported(lambda g, v: v - 0.5 * g, open_rows(), open_rows())


@pytest.mark.parametrize("seed", range(4))
def test_bar22_random_histories_lead_to_an_equal_copy(pair: Pair, seed: int) -> None:
    """Parts, optimizers, closures that fail or come twice, fences, epochs, gradients that wait."""
    rng = random.Random(seed)
    arrays = np.random.default_rng(seed)
    settings = {"mirror": True, "aggregate": 3 if seed % 2 else None}
    attach = messages.Attach(ATTACH.servers, settings)
    epoch, settled = 1, 0
    pair.ask(attach)
    pair.seed()
    for number in range(3):
        pair.ask(part(number), arrays.normal(size=3).astype(np.float32))
    trained = [messages.TrainedPart(number, [], 0, False) for number in range(3)]
    pair.ask(messages.RegisterOptimizer(1, [], trained, 1), np.frombuffer(SGD, np.uint8))

    def push() -> None:
        # Some are settled, some parts do not exist, some come again.
        closure = rng.randrange(max(settled - 2, 1), settled + 15)
        value = np.random.default_rng(closure).normal(size=3).astype(np.float32)
        change: Any = messages.Update(0, "assign_add", closure % 5)
        if closure % 3 == 0:
            change = messages.Apply(0, 1, [messages.Gradient(closure % 5, False)])
        exchange = messages.Exchange([messages.Push(closure, [change])], [])
        pair.ask(exchange, value, role="worker", life=rng.randrange(20, 24), epoch=epoch)

    for step in range(100):
        kind = rng.choice(["push"] * 12 + ["ping", "fence", "rest", "part", "take"])
        with contextlib.suppress(errors.FencedError):
            if kind == "push":
                push()
            elif kind == "ping":
                settled += rng.randrange(5)
                pair.ask(messages.Ping(settled), epoch=epoch)
            elif kind == "fence" and rng.random() < 0.3:
                pair.ask(messages.Fence([rng.randrange(20, 23)]), epoch=epoch)
            elif kind == "rest":
                pair.ask(messages.FlushGradients(), epoch=epoch)
            elif kind == "part":
                pair.ask(part(3 + step), arrays.normal(size=3).astype(np.float32), epoch=epoch)
                pair.ask(messages.DropParts([3 + step - rng.randrange(2)]), epoch=epoch)
            elif kind == "take" and rng.random() < 0.3:
                epoch += 1
                settled = 0
                pair.ask(messages.Attach(ATTACH.servers, settings, [0]), epoch=epoch)
        if rng.random() < 0.3:
            with contextlib.suppress(AssertionError):  # There may be nothing new.
                pair.pass_on(most=rng.randrange(1, 9), times=rng.randrange(1, 3))
        if rng.random() < 0.03:
            pair.log.mark_unrepeatable()
            pair.seed()
            assert pair.is_equal()
    while pair.log.take(0, 0) is None and pair.log._next < pair.log._end:
        pair.pass_on(times=2)
    assert pair.is_equal()
    assert content(pair.store)[0].epoch == epoch


def test_bar22_a_value_that_changed_while_another_was_computed_from_it_is_not_trusted(
    pair: Pair,
) -> None:
    pair.ask(part(0), np.ones(3, np.float32))
    pair.seed()
    program = exported(lambda v: v * 2, open_rows())
    inner = pair.store._storage._initializer

    def slow(*args: Any) -> Any:
        compiled = inner(*args)
        pair.ask(PUSH, np.ones(3, np.float32), role="worker", life=20)
        return compiled

    spec = messages.CreatePart(1, "twice", (3,), "float32", messages.FromProgram([0], 0))
    pair.ask(spec, np.frombuffer(program, np.uint8))
    assert not pair.log.needs_seed, "nothing was changed"
    pair.store._storage._initializer = slow  # type: ignore[method-assign]
    spec = messages.CreatePart(2, "twice", (3,), "float32", messages.FromProgram([0], 0))
    pair.ask(spec, np.frombuffer(program, np.uint8))
    assert pair.log.needs_seed
    pair.seed()
    assert pair.is_equal()


def test_bar22_a_copy_that_differs_is_given_up(pair: Pair) -> None:
    pair.ask(part(0), np.zeros(3, np.float32))
    pair.seed()
    pair.copy()._storage._parts.clear()
    pair.ask(PUSH, np.ones(3, np.float32), role="worker", life=20)
    with refused(errors.DataLossError, "/job:ps/task:0"):
        pair.pass_on()
    with refused(errors.NotFoundError, "has no copy"):
        pair.tell(messages.Replicate(0, 0))
    pair.seed()
    assert pair.is_equal()


def test_bar22_a_gap_is_no_copy(pair: Pair) -> None:
    pair.ask(part(0), np.zeros(3, np.float32))
    pair.seed()
    for closure in (1, 2):
        pair.ask(
            messages.Exchange([messages.Push(closure, [ADD])], []),
            np.ones(3, np.float32),
            role="worker",
            life=20,
        )
    assert pair.log.take(1, 1) is not None, "the first is lost on its way"
    with refused(errors.DataLossError, "instead of 1 from position 1"):
        pair.pass_on()


def test_bar42_a_mirror_listens_to_one_server_of_its_job(pair: Pair) -> None:
    other = Session(b"x", "ps", 1, 78)
    with refused(errors.PermissionDeniedError, "the request is of"):
        pair.tell(messages.Replicate(0, 0), session=other)
    with refused(errors.UnavailableError, "attached to job 'job'"):
        pair.tell(messages.Replicate(0, 0), job="other")
    with refused(errors.NotFoundError, "has no copy"):
        pair.tell(messages.FetchReplica(0), job="other")
    with refused(errors.NotFoundError, "has no copy"):
        pair.tell(messages.Replicate(0, 0))
    with refused(errors.DataLossError, "starts at byte 5"):
        pair.tell(messages.Seed(0, 5, 10, True, ATTACH), b"x")
    pair.seed()
    for octets in (b"", b"\xff", b"\x91\x91\x00"):
        with refused(errors.DataLossError, "does not"):
            pair.tell(messages.Replicate(pair.log._end, 1), octets)
        pair.seed()


def test_bar22_a_damaged_snapshot_is_refused(pair: Pair) -> None:
    pair.ask(part(0), np.zeros(3, np.float32))
    with tempfile.TemporaryFile() as file:
        position, attach, total = pair.sender._cut_into(file, "job")
        file.seek(0)
        octets = bytearray(file.read())
    octets[-100] ^= 1
    with refused(errors.DataLossError, "differs"):
        pair.tell(messages.Seed(position, 0, total, True, attach), octets)
    pair.seed()
    assert pair.is_equal()


def test_bar22_a_process_that_was_replaced_is_not_followed(pair: Pair) -> None:
    pair.ask(part(0), np.zeros(3, np.float32))
    pair.seed()
    follower = Session(b"new", "ps", 0, 99)
    found, _ = pair.tell(messages.FetchReplica(0), session=follower)
    assert found.position == pair.log._end
    # The process from before wakes up, and goes on.
    pair.ask(PUSH, np.ones(3, np.float32), role="worker", life=20)
    with refused(errors.NotFoundError, "no copy of incarnation"):
        pair.pass_on()
    with refused(errors.FencedError, "was replaced by another process"):
        pair.seed(is_first=False)
    with refused(errors.NotFoundError, "no copy of incarnation"):
        pair.tell(messages.FetchReplica(100))


# Servers with sockets, in this process.


def is_in_sync(counters: Iterable[dict[str, Any]]) -> bool:
    """Whether every server has a mirror, and is one."""
    return all(f.get("mirror_state") == State.IN_SYNC and f["replicas"] == 1 for f in counters)


class Servers:
    """Servers at places of this process, and their coordinator."""

    def __init__(
        self,
        count: int = 2,
        snapshots: Path | None = None,
        settings: dict[str, float] | None = None,
    ) -> None:
        self.snapshots = snapshots
        name = new_incarnation()
        self.places = [addresses.resolve(f"inproc://mirror-{name}-{i}") for i in range(count)]
        urls = [place.url for place in self.places]
        self.attach = messages.Attach(urls, {"mirror": True, **(settings or {})})
        self.tasks: list[ParameterServerTask | None] = [None] * count
        self.closures = itertools.count(1)
        self.channels = [
            Channel(place, Task("coordinator", 0), peer=Task("ps", i))
            for i, place in enumerate(self.places)
        ]
        for server, channel in enumerate(self.channels):
            channel.job, channel.epoch = "job", 1
            self.start(server)
        for server in range(count):
            answer = self.ask(server, self.attach)
            assert answer == messages.Attached(is_saved=True, is_restored=False)
        for server in range(count):
            spec = messages.CreatePart(0, "v", (1,), "int64", messages.Fill(bytes(8)))
            self.ask(server, spec)

    def start(self, server: int) -> None:
        assert self.tasks[server] is None
        directory = None if self.snapshots is None else self.snapshots / f"ps-{server}"
        task = ParameterServerTask(
            server, self.places[server], snapshots=directory, snapshot_every=600
        )
        task.start()
        self.tasks[server] = task

    def stop(self, server: int) -> None:
        self.task(server).close()
        self.tasks[server] = None

    def task(self, server: int) -> ParameterServerTask:
        task = self.tasks[server]
        assert task is not None
        return task

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for server, task in enumerate(self.tasks):
            if task is not None:
                self.stop(server)

    def ask(self, server: int, body: Any, *buffers: Any) -> Any:
        return self.channels[server].request(body, buffers, timeout=30)[0]

    def rejoin(self, server: int, parts: list[int] | None = None) -> Any:
        self.channels[server].reset()
        parts = [0] if parts is None else parts
        attach = messages.Attach(self.attach.servers, self.attach.settings, parts)
        return self.ask(server, attach)

    def post(self, server: int, closure: int | None = None) -> int:
        closure = next(self.closures) if closure is None else closure
        body = messages.Exchange([messages.Push(closure, [ADD])], [])
        self.channels[server].send(body, [np.ones(1, np.int64)])
        return closure

    def collect(self, server: int) -> None:
        found = self.channels[server].receive(30)
        assert found is not None and found[1] == messages.Exchanged([], [], 0), found

    def push(self, server: int) -> None:
        self.post(server)
        self.collect(server)

    def value(self, server: int) -> int:
        _, buffers = self.channels[server].request(READ, timeout=30)
        return int(np.frombuffer(buffers[0], np.int64)[0])

    def counters(self, server: int) -> dict[str, Any]:
        return self.ask(server, messages.Ping(0)).counters

    def seen(self, server: int) -> dict[str, Any]:
        """What it says of itself to who waits for nothing."""
        place = self.places[server]
        with Channel(place, Task("coordinator", 0), peer=Task("ps", server)) as other:
            other.job, other.epoch = "job", 1
            other.incarnation = self.channels[server].incarnation
            answer = other.request(messages.Ping(0), timeout=30)[0]
        assert isinstance(answer, messages.Pong)
        return dict(answer.counters)

    def in_sync(self) -> None:
        becomes(lambda: is_in_sync(map(self.counters, range(len(self.tasks)))), "in sync")


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


def test_bar22_a_server_that_comes_back_empty_has_all_that_was_acknowledged(
    servers: Servers,
) -> None:
    servers.in_sync()
    for server in (0, 1, 0):
        for _ in range(5):
            servers.push(server)
        before = servers.value(server)
        servers.stop(server)
        servers.start(server)
        assert servers.rejoin(server) == messages.Attached(is_saved=True, is_restored=True)
        assert servers.value(server) == before
        servers.push(server)
        assert servers.value(server) == before + 1
        # The copy of the other server was lost with the process: it is seeded again.
        servers.in_sync()
        counters = servers.counters(server)
        assert counters["replicas"] == 1 and counters["replica_bytes"] == 8
        assert counters["mirror_lag"] == 0


def test_bar22_changes_wait_for_a_mirror_that_is_away_and_reads_do_not(servers: Servers) -> None:
    servers.in_sync()
    servers.push(0)
    servers.stop(1)
    lost = servers.post(0)
    with Channel(servers.places[0], Task("coordinator", 0), peer=Task("ps", 0)) as other:
        other.job, other.epoch = "job", 1
        _, buffers = other.request(READ, timeout=30)
        assert int(np.frombuffer(buffers[0], np.int64)[0]) == 2, "made, and read by others"
        ping = other.request(messages.Ping(0), timeout=30)[0]
        assert isinstance(ping, messages.Pong) and ping.counters["mirror_lag"] >= 1
        other.request(messages.Fence([5]), timeout=30)
    assert servers.channels[0].receive(0.3) is None, "not acknowledged"
    assert servers.channels[0].num_in_flight() == 1
    servers.start(1)
    servers.rejoin(1)
    servers.collect(0)
    # It was acknowledged, so it outlives its server, and counts once.
    servers.stop(0)
    servers.start(0)
    servers.rejoin(0)
    assert servers.value(0) == 2
    servers.post(0, lost)
    servers.collect(0)
    assert servers.value(0) == 2


def test_bar22_the_next_coordinator_finds_what_a_restarted_server_has_on_its_mirror(
    servers: Servers,
) -> None:
    servers.in_sync()
    servers.push(0)
    # No coordinator attaches it after its restart.
    servers.stop(0)
    servers.start(0)
    cluster = Cluster(servers.places, [], dict(servers.attach.settings), job="job")
    try:
        cluster.attach()
        assert cluster.is_resumed
        body, values = cluster.channels[0].request(READ, timeout=30)
        assert isinstance(body, messages.Exchanged)
        assert np.frombuffer(values[0], np.int64) == [1]
        # Its closures count from there, also those that only the restarted server has seen.
        assert cluster.next_closure() == 2
    finally:
        cluster.close()


def test_bar22_a_silent_mirror_counts_as_away_however_much_is_changed() -> None:
    servers = Servers(settings={"mirror_answer": 0.5})
    try:
        servers.in_sync()
        mirror = servers.task(1)._copies
        handle, mirror.handle = mirror.handle, lambda *_: None  # type: ignore[method-assign]
        states = set()

        def is_alone() -> bool:
            # Something new to tell, more often than the mirror has time.
            servers.post(0)
            time.sleep(0.05)
            counters = servers.seen(0)
            states.add(State(int(counters["mirror_state"])))
            return counters["mirror_unconfirmed_s"] > 1.5

        becomes(is_alone, "it is alone")
        assert State.UNREACHABLE in states
        assert servers.counters(1)["mirror_unconfirmed_s"] == 0, "the other direction is fine"
        mirror.handle = handle  # type: ignore[method-assign]
        becomes(lambda: servers.seen(0)["mirror_unconfirmed_s"] == 0, "it is not alone")
        servers.in_sync()
    finally:
        servers.close()


def test_bar22_a_mirror_that_goes_silent_while_it_is_given_everything_is_away() -> None:
    servers = Servers(settings={"mirror_answer": 0.3})
    try:
        mirror = servers.task(1)._copies
        handle = mirror.handle

        def no_seed(session: Any, envelope: Any, *rest: Any) -> Any:
            is_seed = isinstance(envelope.body, messages.Seed)
            return None if is_seed else handle(session, envelope, *rest)

        mirror.handle = no_seed  # type: ignore[method-assign]
        mirror.clear()
        becomes(lambda: servers.seen(0)["mirror_unconfirmed_s"] > 1.0, "it is alone")
        mirror.handle = handle  # type: ignore[method-assign]
        servers.in_sync()
        assert servers.counters(0)["mirror_unconfirmed_s"] == 0
    finally:
        servers.close()


@pytest.mark.parametrize("seconds", [0, -1.0, "5", True, float("inf"), float("nan")])
def test_bad_times_for_the_answer_of_a_mirror_are_refused(seconds: Any) -> None:
    attach = messages.Attach(ATTACH.servers, {"mirror": True, "mirror_answer": seconds})
    with refused(errors.InvalidArgumentError, "'mirror_answer'"):
        ParameterStore(0).handle("coordinator", 1, attach, job="job", epoch=1, now=0.0)


def test_bar22_what_was_not_acknowledged_may_be_made_again(servers: Servers) -> None:
    """Both directions at once: each is the mirror of the other."""
    servers.in_sync()
    servers.push(1)
    closures = [servers.post(0) for _ in range(20)]
    servers.post(1)
    servers.stop(0)
    servers.start(0)
    servers.rejoin(0)
    servers.collect(1)
    assert servers.value(1) == 2
    assert 0 <= servers.value(0) <= 20
    for closure in closures:
        servers.post(0, closure)
        servers.collect(0)
    assert servers.value(0) == 20


def test_bar22_fences_optimizers_and_epochs_come_back_too(servers: Servers) -> None:
    servers.in_sync()
    spec = messages.CreatePart(1, "w", (2,), "float32", messages.Fill(bytes(4)))
    servers.ask(0, spec)
    trained = [messages.TrainedPart(1, [], 0, False)]
    servers.ask(0, messages.RegisterOptimizer(1, [], trained, 1), SGD)
    servers.ask(0, messages.Fence([21]))
    for channel in servers.channels:
        channel.epoch = 2
    for server, parts in enumerate(([0, 1], [0])):
        servers.rejoin(server, parts)
    apply = messages.Apply(0, 1, [messages.Gradient(1, False)])
    exchange = messages.Exchange([messages.Push(1, [apply])], [messages.Read(1)])
    servers.ask(0, exchange, np.ones(2, np.float32))
    servers.stop(0)
    servers.start(0)
    with refused(errors.PSIncarnationError, "restarted without 1 parts: 9"):
        servers.rejoin(0, [0, 9])
    servers.rejoin(0, [0, 1])
    exchange = messages.Exchange([messages.Push(2, [apply])], [messages.Read(1)])
    _, buffers = servers.channels[0].request(exchange, [np.ones(2, np.float32)], timeout=30)
    assert np.frombuffer(buffers[0], np.float32).tolist() == [-1.0, -1.0]
    with Channel(servers.places[0], Task("worker", 0), None, 21, peer=Task("ps", 0)) as worker:
        worker.job, worker.epoch = "job", 2
        with refused(errors.FencedError, "21 was declared dead"):
            worker.request(READ, timeout=30)
        worker.incarnation, worker.epoch = 22, 1
        worker.reset()
        with refused(errors.FencedError, "epoch 1"):
            worker.request(READ, timeout=30)


def test_bar22_both_at_once_are_lost_and_say_so(servers: Servers) -> None:
    servers.in_sync()
    for server in (0, 1):
        servers.stop(server)
    for server in (0, 1):
        servers.start(server)
    for server in (0, 1):
        with refused(errors.PSIncarnationError, "it holds no job"):
            servers.rejoin(server)


def test_bar21_bar22_the_mirror_is_newer_than_snapshots_which_are_there_if_it_is_not(
    tmp_path: Path,
) -> None:
    servers = Servers(snapshots=tmp_path)
    try:
        servers.in_sync()
        becomes(lambda: servers.counters(0)["snapshot_number"] >= 1, "a snapshot of the part")
        saved = tmp_path / "ps-0"
        becomes(lambda: list(saved.glob("snapshot-*/manifest.json")), "a snapshot")
        shutil.copytree(saved, tmp_path / "kept")
        for _ in range(3):
            servers.push(0)
        for both in (False, True):
            servers.stop(0)
            # The end of the process has saved everything; put back what a kill would leave.
            for path in saved.glob("snapshot-*"):
                shutil.rmtree(path)
            for path in (tmp_path / "kept").glob("snapshot-*"):
                shutil.copytree(path, saved / path.name)
            if both:
                servers.stop(1)
                servers.start(1)
            servers.start(0)
            assert servers.rejoin(0).is_restored
            assert servers.value(0) == (0 if both else 3)
            servers.rejoin(1)
            servers.in_sync()
        servers.push(0)
        assert servers.value(0) == 1
    finally:
        servers.close()


def test_bar22_three_servers_make_a_ring() -> None:
    servers = Servers(3)
    try:
        servers.in_sync()
        for server in (2, 0, 1):
            servers.push(server)
            servers.stop(server)
            servers.start(server)
            servers.rejoin(server)
            assert servers.value(server) == 1
            servers.in_sync()
    finally:
        servers.close()


def test_bar22_a_server_that_was_replaced_acknowledges_nothing_more(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    servers.in_sync()
    follower = Channel(servers.places[1], Task("ps", 0), peer=Task("ps", 1))
    with follower:
        follower.job = "job"
        follower.request(messages.FetchReplica(0), timeout=30)
    # The process from before still answers at its place.
    servers.post(0)
    becomes(lambda: "was replaced" in caplog.text, "it knows")
    assert servers.channels[0].receive(0.2) is None
    assert servers.task(0)._log.state is State.FENCED


def test_the_end_of_a_job_ends_its_copies(servers: Servers) -> None:
    servers.in_sync()
    stores = [servers.task(i)._copies for i in range(2)]
    assert all(copies.counters()["replicas"] == 1 for copies in stores)
    for server in (0, 1):
        servers.ask(server, messages.Detach())
        assert stores[server].counters() == {"replicas": 0, "replica_bytes": 0}
    for server, channel in enumerate(servers.channels):
        channel.job = "next"
        assert not servers.ask(server, messages.Attach([], {})).is_saved
        assert "mirror_state" not in servers.counters(server)


def test_bar22_large_parts_are_given_in_pieces(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_sender, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr("replicax.ps.process.mirror_copies.PIECE_BYTES", 1 << 16)
    servers.in_sync()
    value = np.random.default_rng(0).normal(size=200_000)
    spec = messages.CreatePart(1, "w", value.shape, "float64", messages.FromBuffer())
    servers.ask(0, spec, value)
    for server in (1, 0):
        servers.stop(server)
        servers.start(server)
        servers.rejoin(server, [0])
        servers.in_sync()
    _, buffers = servers.channels[0].request(messages.Exchange([], [messages.Read(1)]), timeout=30)
    assert np.array_equal(np.frombuffer(buffers[0]), value)


def test_a_mirror_needs_two_servers() -> None:
    spec = rx.train.ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2"]})
    resolver = rx.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0)
    for mirror in (True, "yes"):
        with refused(errors.InvalidArgumentError, "two parameter servers"):
            rx.ParameterServerStrategy(resolver, mirror=mirror)  # type: ignore[arg-type]
    store = ParameterStore(0)
    for attach in (
        messages.Attach(["inproc://a"], {"mirror": True}),
        messages.Attach(ATTACH.servers, {"mirror": 1}),
    ):
        with refused(errors.InvalidArgumentError, "'mirror'"):
            store.handle("coordinator", 1, attach, job="job", epoch=1, now=0.0)


# Real processes.


def check_kills(desk: Desk, times: int) -> None:
    """Kills servers in turn, in the midst of work; every closure counts once on each server."""
    strategy = desk.strategy(mirror=True)
    # A process may take long to start on a machine that has more to do.
    coordinator = desk.coordinator(strategy, timing=dataclasses.replace(STEADY, return_s=90.0))
    with strategy.scope():
        counters = [rx.Variable(np.zeros((), np.int64)) for _ in range(2)]
    assert [v.device.split("task:")[1][0] for v in counters] == ["0", "1"]

    def step() -> None:
        for counter in counters:
            counter.assign_add(1)

    def server_counters(server: int) -> dict[str, Any]:
        return strategy.extended.cluster.request(server, messages.Ping(0)).counters

    num_closures = 0

    def freezes_in_the_midst_of_work() -> bool:
        """Freezes the workers if they have something to do; returns whether they had."""
        nonlocal num_closures
        for _ in range(200):
            coordinator.schedule(step)
        num_closures += 200
        before = int(counters[0].numpy())
        becomes(lambda: counters[0].numpy() > before or coordinator.done(), "work under way")
        for worker in range(2):
            desk.cluster.stop("worker", worker)
        if not coordinator.done():
            return True
        for worker in range(2):
            desk.cluster.cont("worker", worker)
        return False

    for life in range(times):
        becomes(lambda: is_in_sync(map(server_counters, range(2))), "mirrors in sync", 60)
        becomes(freezes_in_the_midst_of_work, "work under way")
        desk.cluster.kill("ps", life % 2)
        assert not coordinator.done(), "killed in the midst of work"
        for worker in range(2):
            desk.cluster.cont("worker", worker)
        desk.cluster.restart("ps", life % 2)
        coordinator.join(timeout=90)
        assert [int(v.numpy()) for v in counters] == [num_closures] * 2


def test_bar22_killed_servers_lose_no_closure() -> None:
    with own_cluster(workers=2, ps=2) as desk:
        check_kills(desk, 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_bar22_twenty_kills_lose_no_closure() -> None:
    with own_cluster(workers=2, ps=2) as desk:
        check_kills(desk, 20)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_bar22_a_line_between_two_mirrors_that_stays_cut_ends_the_job() -> None:
    """Each of them answers everybody else, so that closures would be tried again for ever."""
    with own_cluster(workers=2, ps=2, proxied=("ps",)) as desk:
        strategy = desk.strategy(mirror=True)
        strategy.extended.cluster.settings["mirror_answer"] = 2.0
        quick = dataclasses.replace(STEADY, data_s=2.0, blame_s=10.0, return_s=15.0)
        coordinator = desk.coordinator(strategy, timing=quick)
        with strategy.scope():
            counters = [rx.Variable(np.zeros((), np.int64)) for _ in range(2)]

        def step() -> None:
            for counter in counters:
                counter.assign_add(1)

        coordinator.schedule(step)
        coordinator.join(timeout=60)
        desk.cluster.cut("ps", 1, caller=("ps", 0))
        for _ in range(20):
            coordinator.schedule(step)
        with pytest.raises(errors.PSUnavailableError) as raised:
            coordinator.join(timeout=120)
        assert "/job:ps/task:0 is lost" in str(raised.value)
        assert "its mirror /job:ps/task:1" in str(raised.value)
