"""Snapshots of parameter servers that are real processes: killed, stopped, out of room, left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from vocabulary import refused

from replicax.cli.main import app
from replicax.foundation import errors
from replicax.process.server import Server
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport.channel import Channel

CLUSTER = {"ps": ["localhost:7101"], "worker": ["localhost:7102"]}
ADD = messages.Update(0, "assign_add", 0)


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers of this test meet no others; the name is short, as those of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="rx-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield


def becomes(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


class Coordinator:
    """The coordinator of a job on one server, whose processes come and go."""

    def __init__(self, *, size: int = 4) -> None:
        self.size = size
        location = addresses.resolve("localhost:7101", None, None)
        self.channel = Channel(location, Task("coordinator", 0), None, peer=Task("ps", 0))
        self.channel.job, self.channel.epoch = "test", 1

    def ask(self, body: messages.Body, *buffers: Any) -> Any:
        return self.channel.request(body, buffers, timeout=60)[0]

    def attach(self, parts: list[int] | None = None, **settings: Any) -> Any:
        """Attaches a server that may still be starting; its last life may be the one that ends."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return self.ask(messages.Attach([], settings, parts))
            except errors.UnavailableError as error:
                if "restarted without" in str(error) or time.monotonic() > deadline:
                    raise
                self.channel.reset()
                time.sleep(0.02)

    def create(self) -> None:
        """Makes a part of some size, and one number."""
        for part, size in enumerate((self.size, 1)):
            spec = messages.CreatePart(part, "v", (size,), "int64", messages.Fill(bytes(8)))
            self.ask(spec)

    def push(self, closure: int) -> None:
        changes: list[Any] = [messages.Update(i, "assign_add", i) for i in range(2)]
        exchange = messages.Exchange([messages.Push(closure, changes)], [])
        ones = [np.ones(size, np.int64) for size in (self.size, 1)]
        answer = self.ask(exchange, *ones)
        assert answer.failures == []

    def read(self) -> int:
        """Returns the number, which all elements must have."""
        body = messages.Exchange([], [messages.Read(0), messages.Read(1)])
        _, buffers = self.channel.request(body, timeout=60)
        values = [np.frombuffer(buffer, np.int64) for buffer in buffers]
        found = {value.min() for value in values} | {value.max() for value in values}
        assert len(found) == 1
        return int(found.pop())

    def counters(self) -> dict[str, float]:
        return self.ask(messages.Ping(0)).counters

    def saved(self) -> None:
        """Waits until there is a snapshot that began after this moment."""
        since_s = time.monotonic()

        def is_younger() -> bool:
            # Something is new, though one that holds all the rest may have begun just before.
            self.ask(messages.Fence([7]))
            seconds = time.monotonic() - since_s
            return 0 <= self.counters()["snapshot_age_s"] < seconds

        becomes(is_younger, "a snapshot")


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = Coordinator()
    yield coordinator
    coordinator.channel.close()


@contextlib.contextmanager
def serving(
    directory: Path, *options: str, limit: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own."""
    config = {"cluster": CLUSTER, "task": {"type": "ps", "index": 0}}
    command = [*limit, sys.executable, "-m", "replicax", "serve", "--snapshots", str(directory)]
    with subprocess.Popen(
        [*command, *options],
        env={**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ps 0 serves at")
            yield process
        finally:
            process.kill()


def server(directory: Path, **options: Any) -> Server:
    """A server in this process."""
    return Server(CLUSTER, "ps", 0, snapshots=directory, **options)


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "ps-0").glob("snapshot-*"))


def test_bar21_bar23_a_killed_server_comes_back_with_what_it_had(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    with serving(tmp_path, "--snapshot-every", "600") as process:
        answer = coordinator.attach()
        assert answer == messages.Attached(is_saved=True, is_restored=False)
        coordinator.create()
        # What was made is saved at once; what was added only after 600 s.
        becomes(lambda: coordinator.counters()["snapshot_number"] >= 1, "a snapshot")
        becomes(lambda: coordinator.counters()["snapshot_age_s"] > 1.0, "quiet")
        counters = coordinator.counters()
        assert counters["snapshot_bytes"] > 40 and counters["snapshot_failures"] == 0
        coordinator.push(1)
        process.kill()
    with serving(tmp_path) as process:
        channel = coordinator.channel
        channel.reset()
        for body in (messages.Ping(0), messages.Exchange([], [messages.Read(0)])):
            with refused(errors.PSIncarnationError, "waiting for its coordinator"):
                coordinator.ask(body)
        with refused(errors.PSIncarnationError, "restarted without 1 parts: 7"):
            coordinator.attach([0, 7])
        answer = coordinator.attach([0, 1])
        assert answer == messages.Attached(is_saved=True, is_restored=True)
        assert coordinator.read() == 0
        for closure in (1, 1, 2):
            coordinator.push(closure)
        assert coordinator.read() == 2
        # A clean end saves the rest.
        process.terminate()
        assert process.wait(60) == 0
    with server(tmp_path):
        coordinator.channel.reset()
        coordinator.attach([0, 1])
        assert coordinator.read() == 2
        coordinator.push(2)
        coordinator.push(3)
        assert coordinator.read() == 3


def test_a_job_that_is_let_go_leaves_no_snapshots(tmp_path: Path, coordinator: Coordinator) -> None:
    with server(tmp_path, snapshot_every=0.1):
        coordinator.attach()
        coordinator.create()
        coordinator.push(1)
        coordinator.saved()
        assert files_in(tmp_path)
        coordinator.ask(messages.Detach())
        becomes(lambda: files_in(tmp_path) == [], "snapshots removed")
        assert not list((tmp_path / "ps-0").glob("promise*"))
    with server(tmp_path):
        coordinator.channel.reset()
        assert coordinator.ask(messages.QueryJob()).job == ""


def test_bar30_a_killed_server_still_obeys_the_coordinator_that_has_taken_it_over(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    with serving(tmp_path, "--snapshot-every", "600") as process:
        coordinator.attach()
        coordinator.create()
        becomes(lambda: coordinator.counters()["snapshot_number"] >= 1, "a snapshot")
        newer = Coordinator()
        newer.channel.epoch = 2
        newer.attach([])
        process.kill()
    with serving(tmp_path):
        coordinator.channel.reset()
        with pytest.raises(errors.FencedError, match="accepts epoch 2 of job 'test'"):
            coordinator.attach([0, 1])
        assert newer.attach([0, 1]).is_restored
        newer.channel.close()


def test_another_job_does_not_mix_with_the_snapshots_of_the_last(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    with server(tmp_path):
        coordinator.attach()
        coordinator.create()
        becomes(lambda: coordinator.counters()["snapshot_number"] >= 1, "a snapshot")
    with server(tmp_path):
        coordinator.channel.reset()
        coordinator.channel.job = "other"
        coordinator.attach()
        becomes(lambda: coordinator.counters()["snapshot_number"] >= 2, "a snapshot")
    assert len(files_in(tmp_path)) <= 2
    with server(tmp_path):
        coordinator.channel.reset()
        found = coordinator.ask(messages.QueryJob())
        assert found.job == "other" and found.parts == []


def test_bar30_a_server_whose_lease_ran_out_ends_and_keeps_its_snapshots(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    with serving(tmp_path) as process:
        coordinator.attach()
        coordinator.create()
        coordinator.saved()
        # Nothing more is asked: however long it takes, the lease cannot run out too early.
        coordinator.attach(lease=0.3)
        assert process.wait(60) == 75
        assert process.stderr is not None
        assert "the lease of job 'test' expired" in process.stderr.read()
    assert files_in(tmp_path)
    with server(tmp_path) as alone:
        assert alone.ending is None
        coordinator.channel.reset()
        coordinator.attach([0, 1], lease=0.2)
        joined = threading.Thread(target=alone.join, name="join")
        joined.start()
        joined.join(60)
        assert not joined.is_alive()
        assert alone.ending == "the lease of job 'test' expired"


def test_bar37_a_server_without_room_serves_on(tmp_path: Path, coordinator: Coordinator) -> None:
    coordinator.size = 100_000
    limit = ["prlimit", "--fsize=65536"]
    with serving(tmp_path, "--snapshot-every", "0.2", limit=limit) as process:
        coordinator.attach()
        coordinator.create()
        numbers = itertools.count(1)

        def has_failed_twice() -> bool:
            coordinator.push(next(numbers))
            return coordinator.counters()["snapshot_failures"] >= 2

        becomes(has_failed_twice, "two snapshots that failed")
        assert coordinator.read() == next(numbers) - 1
        assert coordinator.counters()["snapshot_age_s"] == -1
        # Another one may be under way; it leaves nothing either.
        becomes(lambda: files_in(tmp_path) == [], "nothing left of a snapshot that failed")
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "could not save a snapshot: The snapshot" in process.stderr.read()


def kill_while_saving(
    process: subprocess.Popen[str], directory: Path, coordinator: Coordinator, delay_s: float
) -> int:
    """Pushes until a snapshot is half written, then kills; returns what was pushed last."""
    closure = coordinator.read()
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        closure += 1
        coordinator.push(closure)
        if not list((directory / "ps-0").glob("*.tmp-*")):
            continue
        time.sleep(delay_s)
        process.send_signal(signal.SIGSTOP)
        if list((directory / "ps-0").glob("*.tmp-*")):
            process.kill()
            process.wait(60)
            return closure
        process.send_signal(signal.SIGCONT)


def check_kills_while_saving(directory: Path, times: int) -> None:
    coordinator = Coordinator(size=2_000_000)
    rng = random.Random(times)
    pushed = 0
    try:
        for life in range(times):
            with serving(directory, "--snapshot-every", "0.2") as process:
                coordinator.channel.reset()
                coordinator.attach([0, 1] if life else None)
                coordinator.create()
                found = coordinator.read()
                # Those that were saved are there; what came later may be lost, as a whole.
                assert life <= found <= pushed
                coordinator.push(found + 1)
                coordinator.saved()
                delay_s = rng.uniform(0, 0.02)
                pushed = kill_while_saving(process, directory, coordinator, delay_s)
        assert list((directory / "ps-0").glob("*.tmp-*")), "the kill came in time"
        with server(directory):
            assert not list((directory / "ps-0").glob("*.tmp-*"))
            coordinator.channel.reset()
            coordinator.attach([0, 1])
            assert times <= coordinator.read() <= pushed
    finally:
        coordinator.channel.close()


def test_bar35_a_server_may_be_killed_while_it_saves(tmp_path: Path) -> None:
    check_kills_while_saving(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bar35_a_server_may_be_killed_while_it_saves_again_and_again(tmp_path: Path) -> None:
    check_kills_while_saving(tmp_path, 20)


def test_two_servers_cannot_have_one_directory(tmp_path: Path) -> None:
    cluster = {"ps": ["localhost:0", "localhost:0"]}
    with (
        Server(cluster, "ps", 0, snapshots=tmp_path),
        Server(cluster, "ps", 1, snapshots=str(tmp_path)),
    ):
        for _ in range(2):
            with refused(errors.CheckpointError, f"process {os.getpid()}"):
                Server(cluster, "ps", 0, snapshots=tmp_path)


@pytest.mark.parametrize("every", [0, -1.0, float("inf"), float("nan"), "30", True, None])
def test_a_bad_interval_is_refused(tmp_path: Path, every: Any) -> None:
    with refused(errors.InvalidArgumentError, "snapshot_every"):
        Server(CLUSTER, "ps", 0, snapshots=tmp_path, snapshot_every=every, start=False)


def test_snapshots_are_for_parameter_servers(tmp_path: Path) -> None:
    with refused(errors.InvalidArgumentError, "/job:worker/task:0"):
        Server(CLUSTER, "worker", 0, snapshots=tmp_path, start=False)
    options = ["--cluster", json.dumps(CLUSTER), "--job", "worker", "--index", "0"]
    result = CliRunner().invoke(app, ["serve", *options, "--snapshots", str(tmp_path)])
    assert result.exit_code == 2 and "parameter servers" in result.output
