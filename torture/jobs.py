"""The work that is tormented: a cluster, counters on its servers, closures that leave marks."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

import replicax as rx
from replicax.coordinator.scheduling.timing import Timing
from torture.bars import Plan
from torture.marks import Marks

# How long it may take until a closure is seen to run on some worker.
_BUSY_SECONDS = 10.0
# A machine on which much goes on takes its time to start processes.
_START_SECONDS = 180.0
# The fast profile; workers that were killed all at once have time to start again.
PATIENT = dataclasses.replace(Timing.fast(), no_workers_s=60.0)


class Job:
    """Training whose every step counts once on each of three counters."""

    def __init__(
        self,
        plan: Plan,
        cluster: rx.testing.LocalCluster,
        *,
        timing: Timing,
        resolver: Any = None,
        of_strategy: Mapping[str, Any] | None = None,
        **of_coordinator: Any,
    ) -> None:
        self.plan = plan
        self.cluster = cluster
        self.marks = Marks(plan.directory / "marks")
        self.strategy = rx.ParameterServerStrategy(
            resolver or cluster.resolver, keys=cluster.keys_directory, **(of_strategy or {})
        )
        self.coordinator = rx.coordinator.ClusterCoordinator(
            self.strategy, timing=timing, **of_coordinator
        )
        with self.strategy.scope():
            self.counters = [rx.Variable(0.0, name=f"counter_{i}") for i in range(3)]
        self.step = self._make_step()

    def _make_step(self) -> Any:
        marks, first, rest = self.marks, self.counters[0], self.counters[1:]

        @rx.function
        def count() -> None:
            for counter in rest:
                counter.assign_add(1.0)

        def step(number: int, seconds: float) -> int:
            with marks.around(number):
                first.assign_add(1.0)
                # Reading it back makes sure that the server has the change by now: a kill
                # from here on leaves half of the closure done.
                first.numpy()
                time.sleep(seconds)
                marks.middle(number)
                count()
                # Whoever may not change anything any more learns it here.
                first.numpy()
            return number

        return step

    def schedule(self, count: int, seconds: float, first: int = 0) -> list[Any]:
        """Schedules steps that sleep in their midst; they are numbered from `first` on."""
        step = self.step
        numbers = range(first, first + count)
        return [self.coordinator.schedule(step, args=(i, seconds)) for i in numbers]

    def values(self) -> list[float]:
        """Returns the counters."""
        return [float(counter.numpy()) for counter in self.counters]

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self.cluster.cluster_spec.num_tasks("worker")

    def num_lost(self) -> int:
        """Returns how many workers were lost so far, each as often as it was."""
        return sum(w.num_restarts for w in self.coordinator.status().workers)

    def figure(self, name: str) -> list[float]:
        """Returns what each server counted under a name, as of its last beat."""
        return [float(s.figures.get(name, 0)) for s in self.coordinator.status().servers]

    def until_idle(self, seconds: float = 60.0) -> None:
        """Waits until all workers can be used and have nothing to do."""
        status = self.coordinator.status
        until(lambda: all(w.state == "idle" for w in status().workers), "idle workers", seconds)

    def hit(self, index: int, harm: Callable[[str, int], None]) -> int | None:
        """Harms a worker in the midst of a closure; returns which one, or None if it missed."""
        pid = self.cluster.pid("worker", index)
        deadline = time.monotonic() + _BUSY_SECONDS
        while self.marks.running(pid) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.0005)
        harm("worker", index)
        return self.marks.running(pid)

    def kill_someone(self, chance: random.Random) -> int | None:
        """Kills a worker that has work, and starts it again; returns the closure it was in."""
        status = self.coordinator.status().workers
        busy = [i for i, worker in enumerate(status) if worker.state == "busy"]
        # Where processes start more slowly than they are killed, the last one would meet the same
        # closure each time, which then counts as poison.
        if sum(worker.state in ("busy", "idle") for worker in status) < 2 or not busy:
            return None
        index = chance.choice(busy)
        number = self.hit(index, self.cluster.kill)
        self.cluster.restart("worker", index, wait=False)
        return number

    def close(self) -> None:
        """Leaves the cluster."""
        self.coordinator.close()
        self.strategy.close()


@contextlib.contextmanager
def job(
    plan: Plan,
    *,
    workers: int,
    ps: int = 2,
    timing: Timing | None = None,
    of_cluster: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Job]:
    """A job on a cluster of its own, whose workers are idle; in the fast profile of timing."""
    with cluster(plan, workers=workers, ps=ps, **(of_cluster or {})) as made:
        work = Job(plan, made, timing=timing or PATIENT, **options)
        try:
            work.until_idle()
            yield work
        finally:
            work.close()


@contextlib.contextmanager
def cluster(plan: Plan, **options: Any) -> Iterator[rx.testing.LocalCluster]:
    """A local cluster, in the fast profile of timing, whose logs stay with the bar."""
    options.setdefault("timing", "fast")
    made = rx.testing.LocalCluster(log_directory=plan.directory / "logs", **options)
    try:
        made.start(timeout=_START_SECONDS)
        yield made
    finally:
        made.close()


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Waits for something that other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{seconds:g} s passed without {what}")
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    """Tells whether a process runs, or is stopped; one that has ended does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def quantile(values: list[float], part: float) -> float:
    """Returns the value below which this part of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("inf")


def slope(xs: list[float], ys: list[float]) -> float:
    """Returns by how much ys grow with xs: the line of least squares."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
