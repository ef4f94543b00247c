"""Checks of workers that are slow or hold a lock for long: none is declared dead."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import statistics
import threading
import time
from collections.abc import Iterator

from replicax.coordinator.scheduling.timing import Timing
from torture.checks import Outcome, Plan, check
from torture.jobs import Job, job

# A straggler runs for this part of the time.
_DUTY = 0.1


@check(
    10,
    claim="one of 4 workers at 10 % speed delays no other; speculation cuts the tail",
    limit="≥ 0.9 of ideal, tail ≤ 2 closures, exact",
    minutes=6,
)
def straggler(plan: Plan) -> Outcome:
    """Compares the rate with a straggler with that without; then the wait for the last one."""
    count, seconds = plan.size(1200, 120), 0.05
    with job(plan, workers=4) as work:
        work.schedule(8, seconds)
        work.coordinator.join(timeout=60)
        sound = _rate(work, count, seconds, first=8)
        done = work.coordinator.status().workers[3].num_done
        work.cluster.slow("worker", 3, _DUTY)
        slow = _rate(work, count, seconds, first=8 + count)
        work.cluster.slow("worker", 3, 1)
        done, lost = work.coordinator.status().workers[3].num_done - done, work.num_lost()
        values, total = work.values(), 8 + 2 * count
    tail, median, copied = _tail(plan)
    ideal = slow / sound / ((3 + _DUTY) / 4)
    outcome = Outcome(
        f"{ideal:.2f} of ideal, tail {tail / median:.1f} closures, {copied} of them run twice",
        {"ideal": ideal, "tail": tail / median, "by_straggler": done},
    )
    outcome.require(ideal >= 0.9, f"{slow:.0f} closures/s instead of {sound:.0f}")
    outcome.require(tail <= 2 * median, f"the last one came {tail:.2f} s after the others")
    outcome.require(values == [total] * 3, f"the counters are {values}, not {total}")
    outcome.require(lost == 0, f"{lost} slow workers were declared dead")
    outcome.require_landed(0 < done < 0.24 * count, f"the straggler ran {done} of {count}")
    outcome.require_landed(copied > 0, "no closure of the straggler was run by another worker")
    return outcome


def _rate(work: Job, count: int, seconds: float, first: int) -> float:
    start = time.monotonic()
    work.schedule(count, seconds, first=first)
    work.coordinator.join(timeout=180)
    return count / (time.monotonic() - start)


def _tail(plan: Plan) -> tuple[float, float, int]:
    """The wait for the last closure, how long one takes, how many other workers ran."""
    seconds, count = 0.5, 8
    tails: list[float] = []
    with job(plan, workers=4, speculate=True) as work:
        first = 10**6
        work.schedule(count, seconds, first=first)
        work.coordinator.join(timeout=60)
        for turn in range(1, plan.size(6, 2)):
            start = time.monotonic()
            work.schedule(4, seconds, first=first + turn * count)
            # Stopped for less than the time until it is declared dead: only speculation helps.
            work.hit(3, work.cluster.stop)
            waker = threading.Timer(1.6, work.cluster.cont, ("worker", 3))
            waker.start()
            work.coordinator.join(timeout=60)
            # The others had nothing to do after one closure each.
            tails.append(time.monotonic() - start - seconds)
            waker.join()
            work.until_idle()
        begun = [m.number for m in work.marks.all() if m.kind == "begin" and m.number >= first]
    return statistics.median(tails), seconds, len(begun) - len(set(begun))


@check(
    11,
    claim="a worker whose closure holds the GIL for half of T_dead is not declared dead",
    limit="0 false deaths in 20",
    minutes=8,
)
def held_lock(plan: Plan) -> Outcome:
    """Runs closures that keep all Python threads of their worker from running."""
    count, seconds = plan.size(20, 3), plan.size(5.0, 1.0)
    timing = Timing.fast() if plan.quick else Timing()
    of_cluster = {"timing": "fast" if plan.quick else "default"}
    with job(plan, workers=2, timing=timing, of_cluster=of_cluster) as work:
        values = [work.coordinator.schedule(hold, args=(seconds,)) for _ in range(count)]
        work.coordinator.join(timeout=seconds * count + 120)
        held = [float(value.fetch(10)) for value in values]
        lost = work.num_lost()
    outcome = Outcome(
        f"{lost} deaths, held {min(held):.1f} s or longer, {count} times", {"lost": lost}
    )
    outcome.require(lost == 0, f"{lost} workers were declared dead")
    landed = sum(gap > 0.9 * seconds for gap in held)
    outcome.require_landed(landed == count, f"{landed} of {count} closures held the lock")
    return outcome


def hold(seconds: float) -> float:
    """Holds the GIL; returns how long another thread could not run."""
    with _ticking() as ticks:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    # Without a pause, two holds would be one longer hold.
    time.sleep(0.3)
    return max((later - earlier for earlier, later in itertools.pairwise(ticks)), default=0.0)


@contextlib.contextmanager
def _ticking() -> Iterator[list[float]]:
    """Records periodically that the other thread can run."""
    ended, ticks = threading.Event(), [time.monotonic()]

    def tick() -> None:
        while not ended.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick, name="ticking")
    thread.start()
    try:
        yield ticks
    finally:
        ended.set()
        thread.join()
        ticks.append(time.monotonic())
