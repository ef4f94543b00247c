"""Training through connections that lose, repeat and break: every update counts once."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parameter_servers import STEADY, Desk, becomes, kept_cluster, tasks_of

import replicax as rx
from replicax.coordinator.scheduling.timing import Timing
from replicax.testing import LocalCluster

WORKERS = 4
# Lost messages are repeated after 30 milliseconds.
QUICK = dataclasses.replace(STEADY, data_s=1.5)
TENTH = {
    "drop_requests": 0.1,
    "drop_replies": 0.1,
    "break_before_reply": 0.1,
    "duplicate_requests": 0.1,
}


@pytest.fixture(scope="module")
def proxied_cluster() -> Iterator[LocalCluster]:
    with kept_cluster(workers=WORKERS, ps=1, proxied=("ps", "worker")) as cluster:
        yield cluster


@pytest.fixture
def desk(proxied_cluster: LocalCluster) -> Iterator[Desk]:
    desk = Desk(proxied_cluster)
    yield desk
    for job, index in tasks_of(proxied_cluster):
        proxied_cluster.proxy(job, index).heal()
    desk.leave()


class Counting:
    """A counter on the server, and a step that adds to it and reads it."""

    def __init__(self, desk: Desk, **options: Any) -> None:
        self.proxy = desk.cluster.proxy("ps", 0)
        strategy = desk.strategy()
        options.setdefault("timing", QUICK)
        self.coordinator = desk.coordinator(strategy, **options)
        with strategy.scope():
            self.counter = rx.Variable(0.0, name="counter")
        counter = self.counter

        def step() -> Any:
            counter.assign_add(1.0)
            return counter.read_value()

        self.step = step
        becomes(self._all_idle, "all workers have joined")

    def _all_idle(self) -> bool:
        return all(w.state == "idle" for w in self.coordinator.status().workers)

    def landed_since(self, before: Any) -> dict[str, int]:
        return {name: self.proxy.landed[name] - before[name] for name in TENTH}

    def num_restarts(self) -> int:
        return sum(w.num_restarts for w in self.coordinator.status().workers)


def count_through_faults(desk: Desk, num_updates: int, timeout: float) -> None:
    # Who schedules without a pause keeps the proxies, threads of this process, from their work:
    # for workers that is a server which does not answer.
    counting = Counting(desk, queue_limit=100)
    coordinator = counting.coordinator
    before = counting.proxy.landed
    counting.proxy.harm(**TENTH)
    results = [coordinator.schedule(counting.step) for _ in range(num_updates)]
    coordinator.join(timeout=timeout)
    landed = counting.landed_since(before)
    counting.proxy.heal()
    assert float(counting.counter.numpy()) == num_updates
    assert min(landed.values()) >= num_updates // 20, landed
    # Each step has seen its own update.
    assert {float(r.fetch()) for r in results} <= set(range(1, num_updates + 1))
    assert counting.num_restarts() == 0
    # The coordinator announces settled closures with its heartbeats.
    figures: dict[str, int | float] = {}

    def is_forgotten() -> bool:
        figures.update(coordinator.status().servers[0].counters)
        return figures["applied"] == num_updates and figures["applied_entries"] <= 8

    becomes(is_forgotten, "the server forgets settled closures")
    assert figures["duplicates"] >= num_updates // 20, figures


def test_bar16_2000_updates_count_once_through_lost_repeated_and_broken_messages(
    desk: Desk,
) -> None:
    count_through_faults(desk, 2_000, timeout=90)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bar16_20000_updates_count_once_through_lost_repeated_and_broken_messages(
    desk: Desk,
) -> None:
    count_through_faults(desk, 20_000, timeout=800)


def test_bar25_50_breaks_of_all_connections_in_one_job(desk: Desk) -> None:
    counting = Counting(desk)
    coordinator = counting.coordinator
    num_scheduled = num_broken = num_rounds = 0
    # Rounds whose closures have ended before connections came back break few of them.
    while num_rounds < 50 or (num_broken < 100 and num_rounds < 200):
        num_rounds += 1
        for _ in range(8):
            coordinator.schedule(counting.step)
            num_scheduled += 1
        becomes(lambda: len(counting.proxy.callers) >= 3 or coordinator.done(), "connections")
        num_broken += counting.proxy.blip()
    coordinator.join(timeout=90)
    assert float(counting.counter.numpy()) == num_scheduled
    assert num_broken >= 100 and counting.proxy.landed["blips"] >= num_broken
    assert counting.num_restarts() == 0


@pytest.mark.slow
def test_bar26_a_worker_that_cannot_reach_a_server_gives_its_closures_back(desk: Desk) -> None:
    counting = Counting(desk, timing=dataclasses.replace(Timing.fast(), data_s=1.0))
    step = sleeping_step(0.01, counting.counter)
    desk.cluster.cut("ps", 0, caller=("worker", 0))
    results = [counting.coordinator.schedule(step) for _ in range(60)]
    counting.coordinator.join(timeout=90)
    # It cannot reach the server.
    assert ("worker", 0) in counting.proxy.callers
    desk.cluster.mend("ps", 0)
    assert float(counting.counter.numpy()) == 60.0
    assert 0 not in {r.fetch() for r in results}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [{"drop_requests": 0.5, "only": ("Run",)}, {"drop_replies": 0.5, "only": ("Finished",)}],
)
def test_closures_and_results_that_are_lost_are_sent_again(desk: Desk, fault: Any) -> None:
    counting = Counting(desk)
    step = sleeping_step(0.01, counting.counter)
    proxies = [desk.cluster.proxy("worker", i) for i in range(WORKERS)]
    before = [proxy.landed for proxy in proxies]
    for proxy in proxies:
        proxy.harm(**fault)
    for _ in range(200):
        counting.coordinator.schedule(step)
    counting.coordinator.join(timeout=90)
    name = next(iter(fault))
    landed = [p.landed[name] - b[name] for p, b in zip(proxies, before, strict=True)]
    assert sum(landed) >= 10, landed
    assert float(counting.counter.numpy()) == 200.0


def test_a_worker_that_finds_itself_given_up_is_started_again(desk: Desk, tmp_path: Path) -> None:
    counting = Counting(desk)
    counter, mark = counting.counter, tmp_path / "ended"

    def step() -> Any:
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            counter.assign_add(1.0)
            return rx.coordinator.experimental_get_current_worker_index()
        os._exit(75)

    before = {desk.cluster.pid("worker", i) for i in range(WORKERS)}
    counting.coordinator.schedule(step)
    counting.coordinator.join(timeout=90)
    becomes(
        lambda: len(before & {desk.cluster.pid("worker", i) for i in range(WORKERS)}) == 3,
        "the supervisor starts the worker again",
    )
    desk.cluster.wait_until_ready()
    assert float(counting.counter.numpy()) == 1.0
    becomes(lambda: counting._all_idle(), "the worker has joined again")


def sleeping_step(seconds: float, counter: Any) -> Any:
    def step() -> int:
        time.sleep(seconds)
        counter.assign_add(1.0)
        index = rx.coordinator.experimental_get_current_worker_index()
        assert index is not None
        return index

    return step


def test_bar10_a_slow_worker_gets_less_work_and_is_not_given_up(desk: Desk) -> None:
    counting = Counting(desk)
    step = sleeping_step(0.02, counting.counter)
    done = [0] * WORKERS
    desk.cluster.slow("worker", 0, throttle=0.1)
    try:
        # Where processes wait for their turn, the slow one may miss the first rounds.
        while done[0] == 0 and sum(done) < 3_000:
            results = [counting.coordinator.schedule(step) for _ in range(300)]
            counting.coordinator.join(timeout=90)
            for result in results:
                done[result.fetch()] += 1
    finally:
        desk.cluster.slow("worker", 0, throttle=1)
    assert float(counting.counter.numpy()) == sum(done)
    assert 0 < done[0] < 0.7 * min(done[1:]), done
    assert counting.num_restarts() == 0


@pytest.mark.slow
def test_bar10_a_slow_worker_costs_little_more_than_its_share(desk: Desk) -> None:
    counting = Counting(desk, speculate=True)
    step = sleeping_step(0.05, counting.counter)

    def measured() -> float:
        start = time.monotonic()
        for _ in range(400):
            counting.coordinator.schedule(step)
        counting.coordinator.join(timeout=100)
        return time.monotonic() - start

    measured()
    before = measured()
    desk.cluster.slow("worker", 0, throttle=0.1)
    try:
        slowed = measured()
    finally:
        desk.cluster.slow("worker", 0, throttle=1)
    assert float(counting.counter.numpy()) == 1200.0
    assert slowed <= before * 4 / 3.1 / 0.9, (before, slowed)
