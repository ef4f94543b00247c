"""Parameter servers, coordinators and workers that come back, with real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameter_servers import STEADY, Desk, becomes, own_cluster

import replicax as rx
from replicax.coordinator.scheduling.timing import Timing
from replicax.protocol import messages
from replicax.ps.client import cluster as ps_cluster
from replicax.ps.client.cluster import Cluster

PROGRAMS = Path(__file__).parent.parent / "support" / "programs"


def make_counters(strategy: Any, names: str = "ab") -> list[Any]:
    with strategy.scope():
        return [rx.Variable(0, dtype="int32", name=name) for name in names]


def until_finished(coordinator: Any, count: int) -> None:
    becomes(lambda: coordinator.status().num_finished >= count, f"{count} closures end")


# Servers.


def test_bar21_bar23_servers_come_back_from_snapshots_and_never_empty() -> None:
    with own_cluster(workers=2, ps=2, snapshots=True, snapshot_every=0.2) as desk:
        strategy = desk.strategy()
        a, b = make_counters(strategy)
        with strategy.scope():
            constants = [rx.Variable(100.0, name=f"constant_{i}") for i in range(2)]
        coordinator = desk.coordinator(strategy)

        def count() -> None:
            a.assign_add(1)
            b.assign_add(1)
            time.sleep(0.005)

        def snapshot_numbers() -> list[float]:
            for constant in constants:
                constant.assign(100.0)  # there is something new, and the same
            ask = strategy.extended.cluster.request
            return [ask(i, messages.Ping(0)).counters["snapshot_number"] for i in range(2)]

        for _ in range(300):
            coordinator.schedule(count)
        until_finished(coordinator, 100)
        before = coordinator.status().num_finished
        numbers = snapshot_numbers()
        # The next one may have begun; the one after that has all that ended until now.
        becomes(
            lambda: all(n >= m + 2 for n, m in zip(snapshot_numbers(), numbers, strict=True)),
            "two snapshots of each server",
        )
        for _ in range(300):
            coordinator.schedule(count)
        desk.cluster.kill("ps", 1)
        assert coordinator.status().num_finished < 600, "the kill landed in the midst of it"
        desk.cluster.restart("ps", 1)
        coordinator.join(timeout=60)
        # The server that was left has lost nothing and counted nothing twice.
        assert int(a.read_value()) == 600
        # The other one lacks at most what it had acknowledged since its last snapshot.
        assert before <= int(b.read_value()) <= 600
        assert [float(c.read_value()) for c in constants] == [100.0, 100.0]
        assert coordinator.status().num_finished == 600

        # The coordinator's own reads and writes wait for it as well.
        desk.cluster.restart("ps", 0, wait=False)
        first = int(a.read_value())
        assert before <= first <= 600
        a.assign_add(1)
        assert int(a.read_value()) == first + 1

        # A server that comes back without its variables is refused.
        desk.cluster.restart("ps", 1, empty=True)
        with pytest.raises(rx.errors.PSIncarnationError, match="/job:ps/task:1"):
            b.read_value()
        becomes(lambda: coordinator.status().servers[1].state == "lost", "it is given up")
        with pytest.raises(rx.errors.PSIncarnationError, match="/job:ps/task:1"):
            coordinator.join(timeout=60)


@pytest.mark.slow
def test_bar20_a_frozen_server_that_keeps_snapshots_goes_on_when_it_wakes() -> None:
    with own_cluster(workers=2, ps=2, snapshots=True, snapshot_every=0.5) as desk:
        strategy = desk.strategy()
        a, b = make_counters(strategy)
        coordinator = desk.coordinator(strategy, timing=Timing.fast())

        def count() -> None:
            a.assign_add(1)
            b.assign_add(1)
            time.sleep(0.005)

        for _ in range(1500):
            coordinator.schedule(count)
        until_finished(coordinator, 100)
        desk.cluster.stop("ps", 1)
        becomes(lambda: coordinator.status().servers[1].state == "away", "it counts as away")
        assert not coordinator.done(), "stopped in the midst of work"
        desk.cluster.cont("ps", 1)
        coordinator.join(timeout=60)
        assert (int(a.read_value()), int(b.read_value())) == (1500, 1500)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_bar20_a_server_that_answers_the_coordinator_but_no_worker_ends_the_job() -> None:
    """It keeps snapshots, so that it is back with its next beat, each time it is given up."""
    with own_cluster(workers=2, ps=2, snapshots=True, snapshot_every=0.5, proxied=("ps",)) as desk:
        strategy = desk.strategy()
        a, b = make_counters(strategy)
        quick = dataclasses.replace(Timing.fast(), data_s=1.0, blame_s=5.0, return_s=10.0)
        coordinator = desk.coordinator(strategy, timing=quick)

        def count() -> None:
            a.assign_add(1)
            b.assign_add(1)

        coordinator.schedule(count)
        coordinator.join(timeout=60)
        for worker in range(2):
            desk.cluster.cut("ps", 1, caller=("worker", worker))
        for _ in range(20):
            coordinator.schedule(count)
        with pytest.raises(rx.errors.PSUnavailableError, match="/job:ps/task:1"):
            coordinator.join(timeout=120)


# Coordinators.


@contextlib.contextmanager
def counting(desk: Desk, number: int) -> Iterator[subprocess.Popen[str]]:
    """Runs a program that counts so many more; ends it with the block."""
    spec = json.dumps(desk.cluster.cluster_spec.as_dict())
    command = [sys.executable, str(PROGRAMS / "counting.py"), spec, str(number)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            yield program
        finally:
            program.kill()
            program.communicate()


def said(program: subprocess.Popen[str]) -> list[str]:
    assert program.stdout is not None
    line = program.stdout.readline().split()
    assert line, program.communicate()[1][-2000:]
    return line


def test_bar30_a_coordinator_comes_back_and_the_former_one_is_refused() -> None:
    with own_cluster(workers=2, ps=2, timing=None) as desk:
        with counting(desk, 3_000) as first:
            assert said(first) == ["new", "0", "0"]
            assert said(first) == ["counting"]
            os.kill(first.pid, signal.SIGSTOP)
            with counting(desk, 3_000) as second:
                word, done, same = said(second)
                assert word == "resumed"
                assert done == same
                assert int(done) >= 20
                assert said(second) == ["counting"]
                os.kill(first.pid, signal.SIGCONT)
                _, problem = first.communicate(timeout=60)
                assert "FencedError" in problem
                assert second.poll() is None
        # SIGKILL: no process could detach.
        with counting(desk, 300) as third:
            word, done, same = said(third)
            assert (word, done) == ("resumed", same)
            assert said(third) == ["counting"]
            ended = said(third)
            assert ended[0] == "ended"
            assert ended[1] == ended[2]
            third.communicate("\n", timeout=60)


def test_bar23_bar30_a_table_that_was_half_written_is_written_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coordinator is lost between two messages; the next one must not find zeros."""
    table = np.arange(1, 4001, dtype=np.float32).reshape(1000, 4)
    monkeypatch.setattr(ps_cluster, "CHUNK_BYTES", 3000)
    ask, num_sent = Cluster.request, 0

    def die_halfway(self: Cluster, server: int, body: messages.Body, *args: Any) -> Any:
        nonlocal num_sent
        num_sent += isinstance(body, messages.Exchange)
        if num_sent == 3:
            raise KeyboardInterrupt
        return ask(self, server, body, *args)

    lost = desk.strategy(job="halfway")
    with lost.scope():
        small = rx.Variable(7.0, name="small")
        monkeypatch.setattr(Cluster, "request", die_halfway)
        with pytest.raises(KeyboardInterrupt):
            rx.Variable(table, name="table")
        monkeypatch.setattr(Cluster, "request", ask)
    small.assign_add(1.0)
    second = rx.ParameterServerStrategy(desk.cluster.resolver, job="halfway")
    try:
        assert second.is_resumed
        with second.scope():
            assert float(rx.Variable(7.0, name="small").read_value()) == 8.0
            assert np.array_equal(rx.Variable(table, name="table").read_value(), table)
    finally:
        second.close()


def test_a_job_without_a_name_cannot_be_resumed(desk: Desk) -> None:
    strategy = desk.strategy()
    make_counters(strategy)
    assert not strategy.is_resumed


@pytest.mark.parametrize("name", ["", "x" * 129, 7])
def test_bad_names_of_jobs_are_refused_early(desk: Desk, name: Any) -> None:
    with pytest.raises(rx.errors.InvalidArgumentError, match="`job`"):
        desk.strategy(job=name)


@pytest.mark.parametrize("lease", [0, -1.0, float("inf"), "5", True])
def test_bad_leases_are_refused_early(desk: Desk, lease: Any) -> None:
    with pytest.raises(rx.errors.InvalidArgumentError, match="`lease`"):
        desk.strategy(lease=lease)


# Workers.


def test_bar4_bar5_a_worker_that_wakes_up_too_late_is_refused_and_ends() -> None:
    with own_cluster(workers=2, ps=1, restarts=False) as desk:
        strategy = desk.strategy()
        (a,) = make_counters(strategy, "a")
        coordinator = desk.coordinator(strategy, timing=dataclasses.replace(STEADY, dead_s=3.0))

        def count() -> None:
            a.assign_add(1)
            time.sleep(0.01)

        for _ in range(300):
            coordinator.schedule(count)
        until_finished(coordinator, 30)
        desk.cluster.stop("worker", 1)
        assert coordinator.status().workers[1].num_closures > 0, "it was at work"
        coordinator.join(timeout=60)
        assert int(a.read_value()) == 300
        desk.cluster.cont("worker", 1)
        becomes(lambda: not desk.cluster.alive("worker", 1), "the zombie ends")
        assert int(a.read_value()) == 300


@pytest.mark.slow
def test_a_closure_with_a_deadline_ends_with_its_worker() -> None:
    with own_cluster(workers=2, ps=1) as desk:
        strategy = desk.strategy()
        (a,) = make_counters(strategy, "a")
        coordinator = desk.coordinator(strategy)

        def count() -> None:
            a.assign_add(1)

        def hang() -> None:
            while True:
                pass

        for _ in range(20):
            coordinator.schedule(count)
        stuck = coordinator.schedule(hang, deadline=0.5)
        with pytest.raises(rx.errors.PoisonClosureError, match="its deadline being"):
            coordinator.join(timeout=60)
        with pytest.raises(rx.errors.PoisonClosureError):
            stuck.fetch(timeout=0)
        # Workers that were ended are started again.
        for _ in range(5):
            coordinator.schedule(count)
        coordinator.join(timeout=60)
        assert int(a.read_value()) == 25


@pytest.mark.parametrize("deadline", [0, -1.0])
def test_bad_deadlines_are_refused_early(desk: Desk, deadline: Any) -> None:
    with pytest.raises(rx.errors.InvalidArgumentError, match="`deadline`"):
        desk.coordinator().schedule(int, deadline=deadline)


@pytest.mark.slow
def test_bar10_speculation_saves_the_tail_and_counts_once() -> None:
    with own_cluster(workers=2, ps=1) as desk:
        strategy = desk.strategy()
        (a,) = make_counters(strategy, "a")
        coordinator = desk.coordinator(strategy, speculate=True, timing=Timing.fast())

        def count() -> None:
            a.assign_add(1)
            time.sleep(0.2)

        for _ in range(8):
            coordinator.schedule(count)
        until_finished(coordinator, 4)
        desk.cluster.stop("worker", 1)
        assert coordinator.status().workers[1].num_closures > 0, "it was at work"
        started = time.monotonic()
        coordinator.join(timeout=60)
        is_quick = time.monotonic() - started < 1.8
        desk.cluster.cont("worker", 1)
        assert int(a.read_value()) == 8
        assert is_quick, "no wait until the worker was declared dead"
