"""Checks of the coordinator: shipping, the queue, results, and leaks."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import psutil

import replicax as rx
from replicax.coordinator.scheduling.closures import LIMIT
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors
from torture.checks import Outcome, Plan, check
from torture.jobs import Job, cluster, job, slope, until
from torture.marks import Marks

_MIB = float(1 << 20)


class SlowToArrive:
    """An object that is slow to unpickle, and leaves marks meanwhile."""

    def __init__(self, marks: Marks, number: int) -> None:
        self._state = (marks, number)

    def __reduce__(self) -> Any:
        return arrive, self._state


def arrive(marks: Marks, number: int) -> int:
    """Called during unpickling on a worker."""
    with marks.around(number):
        time.sleep(0.3)
    return number


@check(
    12,
    claim="a worker is killed while datasets are created or functions arrive, or in between",
    limit="0 errors seen in 30 kills each",
    minutes=15,
)
def killed_while_shipping(plan: Plan) -> Outcome:
    """Kills workers at three points of their preparation."""
    times = plan.size(30, 1)
    landed = dict.fromkeys(("datasets", "functions", "between"), 0)
    problems: list[str] = []
    with job(plan, workers=2) as work:
        number = 0
        for turn in range(times):
            for moment in landed:
                number += 1
                try:
                    landed[moment] += _kill_at(work, moment, number)
                except errors.DistributeError as error:
                    problems.append(f"{moment}: {type(error).__name__}: {error}")
            plan.report(f"{turn + 1} of {times} rounds")
    counts = ", ".join(f"{moment} {count}" for moment, count in landed.items())
    outcome = Outcome(f"{len(problems)} errors; {counts}", {"errors": len(problems), **landed})
    outcome.failures += problems
    fewest = min(landed.values())
    outcome.require_landed(fewest == times, f"{fewest} of {times} kills landed")
    return outcome


def _kill_at(work: Job, moment: str, number: int) -> bool:
    """Prepares the workers for a closure, and kills one of them at a given point."""
    marks = Marks(work.plan.directory / f"arrivals-{number}")
    pid, index = work.cluster.pid("worker", 0), number

    def make_dataset() -> Any:
        with marks.around(index):
            time.sleep(0.3 if moment == "datasets" else 0.0)
        return rx.data.Dataset.range(10).repeat()

    dataset = work.coordinator.create_per_worker_dataset(make_dataset)
    if moment == "datasets":
        until(lambda: marks.running(pid) is not None, "a dataset in the making", 20)
        work.cluster.kill("worker", 0)
    elif moment == "between":
        until(lambda: any(m.pid == pid and m.kind == "end" for m in marks.all()), "a dataset", 20)
        work.cluster.kill("worker", 0)
    iterator = iter(dataset)
    load = SlowToArrive(marks, number) if moment == "functions" else number

    def step(iterator: Any) -> int:
        next(iterator)
        return int(load)  # type: ignore[arg-type]

    values = [work.coordinator.schedule(step, args=(iterator,)) for _ in range(8)]
    if moment == "functions":
        until(lambda: marks.running(pid) is not None, "a function that arrives", 20)
        work.cluster.kill("worker", 0)
        has_landed = marks.running(pid) is not None
    else:
        has_landed = (marks.running(pid) is not None) == (moment == "datasets")
    work.cluster.restart("worker", 0)
    work.coordinator.join(timeout=60)
    if [int(value.fetch(10)) for value in values] != [number] * 8:
        raise errors.DistributeError("results are not those of the closures")
    work.until_idle()
    return has_landed


@check(
    13,
    claim="a full queue blocks `schedule`, with bounded memory; `join` times out in time",
    limit="waits at 262,144; < +300 MiB; join(timeout) +≤ 0.5 s",
    minutes=10,
)
def full_queue(plan: Plan) -> Outcome:
    """Schedules while all workers are stopped, until the queue is full."""
    limit = plan.size(LIMIT, 20_000)
    # Stopped workers must not be declared dead here.
    timing = Timing(dead_s=240.0, worker_orphan_s=300.0)
    of_cluster = {"timing": "default"}
    with job(plan, workers=2, timing=timing, of_cluster=of_cluster, queue_limit=limit) as work:
        work.coordinator.schedule(nothing)
        work.coordinator.join(timeout=60)
        for index in range(2):
            work.cluster.stop("worker", index)
        filler = _Filler(work, limit + 5000)
        before = psutil.Process().memory_info().rss
        filler.start()
        until(filler.is_blocked, "a full queue", 300)
        grown = (psutil.Process().memory_info().rss - before) / _MIB
        status = work.coordinator.status()
        start = time.monotonic()
        late = _join_late(work, 1.0) - 1.0
        took = time.monotonic() - start
        for index in range(2):
            work.cluster.cont("worker", index)
        filler.join(timeout=300)
        work.coordinator.join(timeout=300)
        finished = work.coordinator.status().num_finished
    outcome = Outcome(
        f"waits at {status.num_queued:,}, {grown:+.0f} MiB, join late by {late:.2f} s",
        {"queued": status.num_queued, "grown_mib": grown, "late_s": late, "join_s": took},
    )
    outcome.require(status.num_queued <= limit, f"{status.num_queued} closures were queued")
    outcome.require(grown < 300, f"memory grew by {grown:.0f} MiB")
    outcome.require(0 <= late <= 0.5, f"join(timeout=1) took {1 + late:.2f} s")
    outcome.require(finished == limit + 5001, f"{finished} of {limit + 5001} closures ended")
    outcome.require_landed(status.num_queued == limit, f"{status.num_queued} were queued")
    return outcome


def nothing() -> None:
    """A closure without effects."""


class _Filler(threading.Thread):
    """Schedules closures until all are scheduled."""

    def __init__(self, work: Job, count: int) -> None:
        super().__init__(name="filler", daemon=True)
        self._work = work
        self._count = count
        self.num_scheduled = 0
        self._seen, self._since_s = 0, time.monotonic()

    def run(self) -> None:
        while self.num_scheduled < self._count:
            self._work.coordinator.schedule(nothing)
            self.num_scheduled += 1

    def is_blocked(self) -> bool:
        """Returns whether it has made no progress for two seconds."""
        now = time.monotonic()
        if self.num_scheduled != self._seen or not self._seen:
            self._seen, self._since_s = self.num_scheduled, now
            self._work.plan.report(f"{self._seen:,} scheduled")
            time.sleep(0.2)
        return now - self._since_s > 2.0


def _join_late(work: Job, timeout: float) -> float:
    start = time.monotonic()
    try:
        work.coordinator.join(timeout=timeout)
    except errors.DeadlineExceededError:
        return time.monotonic() - start
    return 0.0


@check(
    14,
    claim="results outlive the workers that computed them, fetched or not",
    limit="100 of 100",
)
def results_outlive_workers(plan: Plan) -> Outcome:
    """Kills all workers, and reads results from before."""
    count = 100
    with job(plan, workers=2) as work:
        values = [work.coordinator.schedule(make_array, args=(i,)) for i in range(count)]
        work.coordinator.join(timeout=60)
        got = [value.get() for value in values[: count // 2]]
        for index in range(2):
            work.cluster.kill("worker", index)
        dead = sum(not work.cluster.alive("worker", i) for i in range(2))
        same = sum(bool(np.array_equal(g, make_array(i))) for i, g in enumerate(got))
        fetched = [value.fetch(10) for value in values]
        same += sum(bool(np.array_equal(f, make_array(i))) for i, f in enumerate(fetched))
        # No wait for dead workers.
    outcome = Outcome(f"{same - len(got)} of {count}", {"readable": same - len(got)})
    outcome.require(same == count + len(got), f"{same} of {count + len(got)} reads were right")
    outcome.require_landed(dead == 2, f"{dead} of 2 workers were dead")
    return outcome


def make_array(number: int) -> Any:
    """Returns some array of this number."""
    return np.arange(number, number + 100, dtype=np.float32)


@check(
    15,
    claim="1,000 coordinators are created and dropped without leaks",
    limit="threads back ≤ 1 s, < 20 KiB each",
    minutes=15,
)
def dropped_coordinators(plan: Plan) -> Outcome:
    """Creates and drops coordinators, half of them without `close`."""
    count = plan.size(1000, 30)
    slowest, memory = 0.0, []
    with cluster(plan, workers=1, ps=1) as made:
        baseline = set(threading.enumerate())
        for turn in range(count):
            _make_and_drop(made, is_closed=turn % 2 == 0)
            gc.collect()
            start = time.monotonic()
            until(lambda: set(threading.enumerate()) <= baseline, "the end of threads", 20)
            slowest = max(slowest, time.monotonic() - start)
            memory.append(psutil.Process().memory_info().rss / 1024)
            if turn % 10 == 0:
                plan.report(f"{turn} of {count}, {memory[-1] / 1024:.0f} MiB")
    # One-time allocations of the first ones are not growth.
    half = memory[len(memory) // 4 :]
    grown = slope([float(i) for i in range(len(half))], half)
    outcome = Outcome(
        f"threads back in {slowest:.2f} s, {grown:+.1f} KiB each",
        {"slowest_s": slowest, "grown_kib": grown},
    )
    outcome.require(slowest <= 1.0, f"threads were there for {slowest:.1f} s")
    # A smoke run is too short to tell growth from noise.
    outcome.require(plan.quick or grown < 20, f"memory grows by {grown:.1f} KiB each")
    outcome.require_landed(len(memory) == count, f"{len(memory)} of {count}")
    return outcome


def _make_and_drop(made: rx.testing.LocalCluster, *, is_closed: bool) -> None:
    strategy = rx.ParameterServerStrategy(made.resolver)
    coordinator = rx.coordinator.ClusterCoordinator(strategy, timing=Timing.fast())
    if coordinator.schedule(nothing).fetch(60) is not None:
        raise errors.DistributeError("a closure returned something")
    if is_closed:
        coordinator.close()
        strategy.close()
