"""The workload of the checks: a cluster, counters on its servers, and closures that leave marks."""

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
from torture.checks import Plan
from torture.marks import Marks

# The timeout until a closure runs on some worker.
_BUSY_SECONDS = 10.0
# A busy machine starts processes slowly.
_START_SECONDS = 180.0
# The fast profile, with time to restart all workers at once.
PATIENT = dataclasses.replace(Timing.fast(), no_workers_s=60.0)


class Job:
    """Training in which every step increments each of three counters once."""

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
                # A read ensures that the server has applied the change: a kill from here on leaves
                # half of the closure done.
                first.numpy()
                time.sleep(seconds)
                marks.middle(number)
                count()
                # A fenced worker gets its error here.
                first.numpy()
            return number

        return step

    def schedule(self, count: int, seconds: float, first: int = 0) -> list[Any]:
        """Schedules steps that sleep halfway; they are numbered from `first` on."""
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
        """Returns how many times workers were lost so far."""
        return sum(w.num_restarts for w in self.coordinator.status().workers)

    def server_counters(self, name: str) -> list[float]:
        """Returns a counter of each server, as of its last heartbeat."""
        return [float(s.counters.get(name, 0)) for s in self.coordinator.status().servers]

    def until_idle(self, seconds: float = 60.0) -> None:
        """Waits until all workers are ready and idle."""
        status = self.coordinator.status
        until(lambda: all(w.state == "idle" for w in status().workers), "idle workers", seconds)

    def hit(self, index: int, harm: Callable[[str, int], None]) -> int | None:
        """Injects a fault into a worker that runs a closure; returns the worker, or None."""
        pid = self.cluster.pid("worker", index)
        deadline = time.monotonic() + _BUSY_SECONDS
        while self.marks.running(pid) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.0005)
        harm("worker", index)
        return self.marks.running(pid)

    def kill_someone(self, rng: random.Random) -> int | None:
        """Kills a busy worker, and restarts it; returns the closure it was running."""
        status = self.coordinator.status().workers
        busy = [i for i, worker in enumerate(status) if worker.state == "busy"]
        # If processes start more slowly than they are killed, the last one would get the same
        # closure each time, which then counts as poisonous.
        if sum(worker.state in ("busy", "idle") for worker in status) < 2 or not busy:
            return None
        index = rng.choice(busy)
        number = self.hit(index, self.cluster.kill)
        self.cluster.restart("worker", index, wait=False)
        return number

    def close(self) -> None:
        """Closes the strategy and the coordinator."""
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
    """A job on its own cluster with idle workers, in the fast timing profile."""
    with cluster(plan, workers=workers, ps=ps, **(of_cluster or {})) as made:
        work = Job(plan, made, timing=timing or PATIENT, **options)
        try:
            work.until_idle()
            yield work
        finally:
            work.close()


@contextlib.contextmanager
def cluster(plan: Plan, **options: Any) -> Iterator[rx.testing.LocalCluster]:
    """A local cluster in the fast timing profile, with logs in the directory of the check."""
    options.setdefault("timing", "fast")
    made = rx.testing.LocalCluster(log_directory=plan.directory / "logs", **options)
    try:
        made.start(timeout=_START_SECONDS)
        yield made
    finally:
        made.close()


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{seconds:g} s passed without {what}")
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    """Returns whether a process runs or is stopped, and has not exited."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def quantile(values: list[float], part: float) -> float:
    """Returns a quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("inf")


def slope(xs: list[float], ys: list[float]) -> float:
    """Returns the slope of the least-squares line."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
