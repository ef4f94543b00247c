"""Parameter servers for tests: one cluster of processes, which many tests use one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import replicax as rx
from replicax.coordinator.scheduling.timing import Timing

FixedShards = rx.experimental.partitioners.FixedShardsPartitioner

# Processes that die are noticed at once, whatever the times are. Those that are silent are waited
# for longer than in the profile for tests: on a machine with much else to do a process may get no
# turn for seconds. Tests of what is done about silence take a shorter `dead_s`.
STEADY = dataclasses.replace(
    Timing.fast(), dead_s=20.0, no_workers_s=60.0, worker_orphan_s=20.0, return_s=60.0
)


# Clusters that live longer than a test.
_kept: list[rx.testing.LocalCluster] = []


def kept_processes() -> set[int]:
    """Returns the processes of the clusters that tests share, which tests may start again."""
    return {c.pid(job, i) for c in _kept for job, i in tasks_of(c)}


def tasks_of(cluster: rx.testing.LocalCluster) -> list[tuple[str, int]]:
    spec = cluster.cluster_spec
    return [(job, i) for job in spec.jobs for i in range(spec.num_tasks(job))]


def mend(cluster: rx.testing.LocalCluster) -> None:
    """Starts tasks again that a test has ended."""
    for job, i in tasks_of(cluster):
        if not cluster.alive(job, i):
            cluster.restart(job, i, wait=False)
    cluster.wait_until_ready()


@contextlib.contextmanager
def kept_cluster(**options: Any) -> Iterator[rx.testing.LocalCluster]:
    """A cluster for several tests."""
    with rx.testing.LocalCluster(timing="fast", **options) as cluster:
        _kept.append(cluster)
        try:
            yield cluster
        finally:
            _kept.remove(cluster)


class Desk:
    """Where a test works: a cluster, and the strategies and coordinators that it makes there.

    Servers are in one job at a time, so a new strategy ends the one before.
    """

    def __init__(self, cluster: rx.testing.LocalCluster) -> None:
        self.cluster = cluster
        self._strategy: Any = None
        self._coordinator: Any = None

    def strategy(self, parts: Any = None, **options: Any) -> Any:
        """Makes a strategy; `parts` is a number of parts, or a partitioner."""
        self.leave()
        partitioner = FixedShards(parts) if isinstance(parts, int) else parts
        options.setdefault("variable_partitioner", partitioner)
        self._strategy = rx.ParameterServerStrategy(self.cluster.resolver, **options)
        return self._strategy

    def coordinator(self, strategy: Any = None, **options: Any) -> Any:
        """Makes the coordinator of a strategy, a new one without parts by default."""
        strategy = strategy or self.strategy()
        options.setdefault("timing", STEADY)
        self._coordinator = rx.coordinator.ClusterCoordinator(strategy, **options)
        return self._coordinator

    def leave(self) -> None:
        """Leaves the cluster, as the next job can only begin then."""
        if self._coordinator is not None:
            self._coordinator.close()
        if self._strategy is not None:
            self._strategy.close()
        self._coordinator = self._strategy = None


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[rx.testing.LocalCluster]:
    """Two workers and two parameter servers, which no test may harm."""
    with kept_cluster(workers=2, ps=2) as cluster:
        yield cluster


@pytest.fixture
def desk(shared_cluster: rx.testing.LocalCluster) -> Iterator[Desk]:
    """The cluster that tests share, free for this one."""
    desk = Desk(shared_cluster)
    yield desk
    desk.leave()


@contextlib.contextmanager
def own_cluster(**options: Any) -> Iterator[Desk]:
    """A cluster for a test that harms it, or wants another one."""
    options.setdefault("timing", "fast")
    with rx.testing.LocalCluster(**options) as cluster:
        desk = Desk(cluster)
        try:
            yield desk
        finally:
            desk.leave()


def until_all_idle(coordinator: Any) -> None:
    """Waits until all workers have joined; who joins late finds nothing left to do."""
    status = coordinator.status
    becomes(lambda: all(w.state == "idle" for w in status().workers), "all workers have joined")


def becomes(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Waits for something that other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)
