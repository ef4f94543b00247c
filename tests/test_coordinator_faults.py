"""The coordinator when real processes die, stop and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import replicax as rx
from replicax.coordinator.cluster_coordinator import ClusterCoordinator
from replicax.coordinator.timing import Timing
from replicax.foundation import errors
from replicax.testing.local_cluster import LocalCluster

pytestmark = pytest.mark.slow


class Training:
    """A cluster, three counters on its servers, and a step that counts on all of them."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            self.counters = [rx.Variable(0.0, name=f"counter_{i}") for i in range(3)]
        self.coordinator = ClusterCoordinator(strategy, timing=Timing.fast())
        counters = self.counters

        @rx.function
        def count() -> None:
            for counter in counters:
                counter.assign_add(1.0)

        def slow_count() -> None:
            counters[0].assign_add(1.0)
            threading.Event().wait(0.01)
            count()
            counters[0].assign_sub(1.0)

        self.count, self.slow_count = count, slow_count

    def values(self) -> list[float]:
        return [float(counter.numpy()) for counter in self.counters]

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            threading.Event().wait(0.02)

    def until_idle(self) -> None:
        status = self.coordinator.status
        self.until(lambda: all(w.state == "idle" for w in status().workers))

    def num_lost(self) -> int:
        return sum(w.num_restarts for w in self.coordinator.status().workers)


@contextlib.contextmanager
def training(workers: int) -> Iterator[Training]:
    with LocalCluster(workers=workers, ps=2, timing="fast") as cluster:
        made = Training(cluster)
        with made.coordinator:
            made.until_idle()
            yield made


def test_bar1_bar7_T111_each_closure_counts_once_whatever_is_killed() -> None:
    with training(workers=3) as job:
        for _ in range(1500):
            job.coordinator.schedule(job.slow_count)
        num_kills = 0
        while not job.coordinator.done() and num_kills < 8:
            before, index = job.num_lost(), num_kills % 3
            job.until(
                lambda index=index: (
                    job.coordinator.status().workers[index].num_closures or job.coordinator.done()
                )
            )
            job.cluster.kill("worker", index)
            if num_kills == 4:
                # Two at once.
                job.cluster.kill("worker", (index + 1) % 3)
                job.cluster.restart("worker", (index + 1) % 3)
            job.cluster.restart("worker", index)
            job.until(lambda before=before: job.num_lost() > before)
            num_kills += 1
        job.coordinator.join(timeout=60)
        assert num_kills >= 3, "the faults must land while closures run"
        assert job.values() == [1500.0] * 3


def test_bar4_bar5_a_stopped_worker_is_replaced_and_changes_nothing_when_it_wakes() -> None:
    with training(workers=2) as job:
        for _ in range(400):
            job.coordinator.schedule(job.slow_count)
        job.until(lambda: job.coordinator.status().workers[0].num_closures)
        job.cluster.stop("worker", 0)
        job.coordinator.join(timeout=30)
        assert job.coordinator.status().workers[0].state == "fenced"
        assert job.values() == [400.0] * 3
        job.cluster.cont("worker", 0)
        job.until_idle()
        assert job.values() == [400.0] * 3
        for _ in range(20):
            job.coordinator.schedule(job.count)
        job.coordinator.join(timeout=30)
        assert job.values() == [420.0] * 3


def test_bar8_a_poison_closure_is_named_and_the_others_complete() -> None:
    with training(workers=3) as job:
        poison = job.coordinator.schedule(lambda: os.kill(os.getpid(), signal.SIGKILL))
        for _ in range(100):
            job.coordinator.schedule(job.count)
        ended = threading.Event()
        revived: set[tuple[int, int]] = set()

        def revive() -> None:
            while not ended.wait(0.05):
                for index, worker in enumerate(job.coordinator.status().workers):
                    life = (index, worker.num_restarts)
                    if worker.state == "connecting" and life not in revived:
                        revived.add(life)
                        job.cluster.restart("worker", index)

        reviver = threading.Thread(target=revive)
        reviver.start()
        try:
            with pytest.raises(errors.PoisonClosureError, match="closure"):
                job.coordinator.join(timeout=60)
        finally:
            ended.set()
            reviver.join()
        with pytest.raises(errors.PoisonClosureError):
            poison.fetch()
        assert job.num_lost() == 3
        assert job.values() == [100.0] * 3


def test_T114_bar18_a_killed_server_is_named() -> None:
    with training(workers=2) as job:
        values = [job.coordinator.schedule(job.slow_count) for _ in range(1000)]
        job.until(lambda: job.coordinator.status().num_finished)
        job.cluster.kill("ps", 1)
        with pytest.raises(errors.UnavailableError, match="/job:ps/task:1"):
            job.coordinator.join(timeout=10)
        with pytest.raises(errors.UnavailableError, match="/job:ps/task:1"):
            job.coordinator.schedule(job.count)
        with pytest.raises(errors.CancelledError):
            values[-1].fetch(timeout=0)
