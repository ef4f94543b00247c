"""Checks of closures and their workers: kills, stops, poisonous closures."""

from __future__ import annotations

import collections
import itertools
import os
import random
import signal
import threading
import time

from replicax.foundation import errors
from torture.checks import Outcome, Plan, check
from torture.jobs import Job, is_there, job, quantile, until

# `dead_s` of the fast timing profile.
DEAD_SECONDS = 2.0


@check(
    1,
    claim="a worker is killed every 2 s: each closure takes effect once",
    limit="3 exact counters, gap ≤ 5 s, ≥ 20 kills in closures",
    minutes=6,
)
def killed_workers(plan: Plan) -> Outcome:
    """Kills a random one of 4 workers repeatedly, while it runs closures."""
    count, seconds = plan.size(5000, 300), plan.size(60.0, 6.0)
    with job(plan, workers=plan.size(4, 3)) as work:
        begin = time.monotonic()
        work.schedule(count, 0.035)
        every = plan.size(2.0, 1.0)
        landed = _kill_on_and_on(work, plan.rng(), seconds, every)
        work.coordinator.join(timeout=180)
        values, gap = work.values(), work.marks.longest_gap(begin)
    outcome = Outcome(
        f"counters {_numbers(values)} of {count}, gap {gap:.1f} s, {landed} kills",
        {"landed": landed, "gap_s": gap, "lost_or_doubled": sum(abs(v - count) for v in values)},
    )
    outcome.require(values == [count] * 3, f"the counters are {values}, not {count}")
    outcome.require(gap <= 5.0, f"no closure ended for {gap:.1f} s")
    least = plan.size(20, 3)
    outcome.require_landed(landed >= least, f"{landed} of {least} kills hit a closure")
    return outcome


@check(
    2,
    claim="side effects of closures happen at least once",
    limit="every line ≥ 1",
    minutes=5,
)
def external_effects(plan: Plan) -> Outcome:
    """Kills workers whose closures append to a file."""
    count = plan.size(5000, 200)
    path = plan.directory / "lines"
    with job(plan, workers=plan.size(4, 2)) as work:
        step = work.step

        def write_and_step(number: int) -> None:
            with open(path, "a") as file:
                file.write(f"{number}\n")
            step(number, 0.02)

        for number in range(count):
            work.coordinator.schedule(write_and_step, args=(number,))
        landed = _kill_on_and_on(work, plan.rng(), plan.size(40.0, 4.0), plan.size(2.0, 1.0))
        work.coordinator.join(timeout=180)
        values = work.values()
    lines = collections.Counter(int(line) for line in path.read_text().splitlines())
    fewest = min(lines[number] for number in range(count))
    outcome = Outcome(
        f"{lines.total()} lines for {count}, each ≥ {fewest}, {landed} kills",
        {"lines": lines.total(), "fewest": fewest, "landed": landed},
    )
    outcome.require(fewest >= 1, "a closure left no line")
    outcome.require(values == [count] * 3, f"the counters are {values}, not {count}")
    outcome.require_landed(lines.total() > count, "no closure was run twice")
    return outcome


@check(
    3,
    claim="a closure of a killed worker soon runs on another worker",
    limit="p50 ≤ 0.2 s, p99 ≤ 1 s over 200 kills",
    minutes=25,
)
def dispatched_again(plan: Plan) -> Outcome:
    """Kills workers that run closures, and measures when these start again."""
    kills, rng = plan.size(200, 5), plan.rng()
    times: list[float] = []
    with job(plan, workers=plan.size(4, 3)) as work:
        numbers = itertools.count()
        step, missed = work.step, 0
        while len(times) < kills and missed < kills:
            # One worker is idle, so that no closure waits.
            for _ in range(work.num_workers - 1):
                work.coordinator.schedule(step, args=(next(numbers), 0.2))
            instants: list[float] = []

            def kill(task: str, index: int, instants: list[float] = instants) -> None:
                instants.append(time.monotonic())
                work.cluster.kill(task, index)

            until(lambda: work.coordinator.status().num_queued == 0, "dispatch")
            status = work.coordinator.status().workers
            index = rng.choice([i for i, worker in enumerate(status) if worker.num_closures])
            hit = work.hit(index, kill)
            work.cluster.restart("worker", index)
            if hit is None:
                missed += 1
                continue
            begun: float | None = None
            deadline = time.monotonic() + 20
            while begun is None and time.monotonic() < deadline:
                begun = work.marks.next_begin(hit, instants[0])
            times.append(float("inf") if begun is None else begun - instants[0])
            plan.report(f"{len(times)} of {kills} kills, p50 {quantile(times, 0.5):.3f} s")
            work.coordinator.join(timeout=60)
            work.until_idle()
        values = work.values()
    p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
    outcome = Outcome(
        f"p50 {p50:.3f} s, p99 {p99:.3f} s, {len(times)} kills", {"p50_s": p50, "p99_s": p99}
    )
    outcome.require(p50 <= 0.2 and p99 <= 1.0, "closures waited too long")
    count = next(numbers)
    outcome.require(values == [count] * 3, f"the counters are {values}, not {count}")
    outcome.require_landed(len(times) >= kills, f"{len(times)} of {kills} kills hit a closure")
    return outcome


@check(
    4,
    5,
    claim="a stopped worker is replaced; continued, it changes nothing and exits",
    limit="≤ T_dead + 2 s = 4 s beside the work; ends ≤ 2 s; exact",
    minutes=8,
)
def stopped_worker(plan: Plan) -> Outcome:
    """Stops one of 3 workers that runs a closure, and continues it when all closures ended."""
    rounds, count, seconds = plan.size(20, 4), 60, 0.02
    worst = slowest_end = 0.0
    landed = accepted = total = 0
    values: list[float] = []
    with job(plan, workers=3) as work:
        for turn in range(rounds):
            # In every other round an older closure is not settled when the worker continues: then
            # only the fence rejects its updates.
            blocker = work.schedule(turn % 2, 5.0, first=total)
            blocked = _pids_in(work, total) if blocker else set()
            first = total + len(blocker)
            index = next(i for i in range(3) if work.cluster.pid("worker", i) not in blocked)
            pid = work.cluster.pid("worker", index)
            work.schedule(count, seconds, first=first)
            landed += work.hit(index, work.cluster.stop) is not None
            start = time.monotonic()
            left = count - _num_ended(work, first)
            if blocker:
                until(lambda first=first: _num_ended(work, first) == count, "the rest", 15)
            else:
                work.coordinator.join(timeout=15)
            worst = max(worst, time.monotonic() - start - left * seconds)
            woken_s = time.monotonic()
            slowest_end = max(slowest_end, _wake(work, index, pid))
            accepted += work.marks.whole_halves(pid, woken_s)
            work.coordinator.join(timeout=60)
            total = first + count
            work.cluster.restart("worker", index)
            work.until_idle()
            values = work.values()
            plan.report(f"{turn + 1} of {rounds} stops")
            if values != [total] * 3:
                break
    outcome = Outcome(
        f"{worst:.1f} s, ends in {slowest_end:.1f} s, {accepted} late updates accepted, counters "
        f"{_numbers(values)} of {total}",
        {"worst_s": worst, "end_s": slowest_end, "accepted": accepted},
    )
    outcome.require(values == [total] * 3, f"the counters are {values}, not {total}")
    outcome.require(worst <= DEAD_SECONDS + 2, f"join took {worst:.1f} s longer than the work")
    outcome.require(accepted == 0, f"late updates of {accepted} closures were accepted")
    outcome.require(slowest_end <= 2.0, f"a continued worker exited after {slowest_end:.1f} s")
    outcome.require_landed(landed == rounds, f"{landed} of {rounds} stops hit a closure")
    return outcome


def _pids_in(work: Job, number: int) -> set[int]:
    """Waits until a closure has started; returns the process that runs it."""

    def begun() -> set[int]:
        return {m.pid for m in work.marks.all() if m.number == number}

    until(begun, "the first closure", 15)
    return begun()


def _num_ended(work: Job, first: int) -> int:
    return len({m.number for m in work.marks.all() if m.kind == "end" and m.number >= first})


def _wake(work: Job, index: int, pid: int) -> float:
    """Continues a worker that was declared dead; returns after how long it exited."""
    start = time.monotonic()
    work.cluster.cont("worker", index)
    while is_there(pid) and time.monotonic() - start < 5.0:
        # Its parent has to reap it.
        work.cluster.alive("worker", index)
        time.sleep(0.005)
    return time.monotonic() - start


@check(
    7,
    claim="one worker is killed 10 times in a row, two are killed together",
    limit="3 exact counters",
)
def killed_again_and_together(plan: Plan) -> Outcome:
    """Kills the same worker repeatedly, and then two at once."""
    times = plan.size(10, 2)
    landed, numbers = 0, itertools.count()
    with job(plan, workers=3) as work:

        def fill() -> None:
            for _ in range(60):
                work.coordinator.schedule(work.step, args=(next(numbers), 0.02))

        for _ in range(times):
            fill()
            landed += work.hit(0, work.cluster.kill) is not None
            work.cluster.restart("worker", 0)
        for _ in range(plan.size(5, 1)):
            fill()
            landed += work.hit(1, work.cluster.kill) is not None
            work.cluster.kill("worker", 2)
            for index in (1, 2):
                work.cluster.restart("worker", index, wait=False)
            work.cluster.wait_until_ready()
        work.coordinator.join(timeout=120)
        values, count = work.values(), next(numbers)
    outcome = Outcome(
        f"counters {_numbers(values)} of {count}, {landed} kills in closures", {"landed": landed}
    )
    outcome.require(values == [count] * 3, f"the counters are {values}, not {count}")
    least = times + plan.size(5, 1)
    outcome.require_landed(landed == least, f"{landed} of {least} kills hit a closure")
    return outcome


@check(
    8,
    claim="a closure that kills its workers is reported, the others complete",
    limit="reported after 3 deaths, 100 of 100 complete",
)
def poison(plan: Plan) -> Outcome:
    """Runs a closure that kills its process, among a hundred good ones."""
    rounds, good = plan.size(5, 1), 100
    outcome = Outcome()
    deaths: list[int] = []
    with job(plan, workers=3) as work:
        for turn in range(rounds):
            lost = work.num_lost()
            # All are queued before the first worker dies, within milliseconds.
            values = work.schedule(good // 2, 0.02, first=turn * good)
            bad = work.coordinator.schedule(lambda: os.kill(os.getpid(), signal.SIGKILL))
            values += work.schedule(good // 2, 0.02, first=turn * good + good // 2)
            with _Reviver(work):
                outcome.require(_is_blamed(work), "join did not name the poison closure")
            try:
                bad.fetch(10)
            except errors.PoisonClosureError:
                pass
            else:
                outcome.failures.append("the poison closure has a result")
            deaths.append(work.num_lost() - lost)
            done = sum(value.fetch(10) == turn * good + i for i, value in enumerate(values))
            outcome.require(done == good, f"{done} of {good} good closures completed")
            plan.report(f"{turn + 1} of {rounds} rounds, deaths {deaths}")
        counters = work.values()
    outcome.measured = f"{max(deaths)} deaths, counters {_numbers(counters)} of {rounds * good}"
    outcome.numbers = {"deaths": max(deaths)}
    outcome.require(max(deaths) <= 3, f"{max(deaths)} workers died of one closure")
    outcome.require(counters == [rounds * good] * 3, f"the counters are {counters}")
    outcome.require_landed(min(deaths) == 3, f"the poison closed {deaths} workers")
    return outcome


def _is_blamed(work: Job) -> bool:
    try:
        work.coordinator.join(timeout=60)
    except errors.PoisonClosureError:
        return True
    return False


class _Reviver:
    """Restarts dead workers in a thread for the duration of the context."""

    def __init__(self, work: Job) -> None:
        self._work = work
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._revive, name="reviver")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _revive(self) -> None:
        cluster = self._work.cluster
        while not self._ended.wait(0.02):
            for index in range(self._work.num_workers):
                if not cluster.alive("worker", index):
                    cluster.restart("worker", index)


def _kill_on_and_on(work: Job, rng: random.Random, seconds: float, every: float) -> int:
    """Kills a busy worker periodically while there is work; returns how many kills hit."""
    landed, begin = 0, time.monotonic()
    while (spent := time.monotonic() - begin) < seconds and not work.coordinator.done():
        landed += work.kill_someone(rng) is not None
        finished = work.coordinator.status().num_finished
        work.plan.report(f"{spent:.0f} s, {finished} closures ended, {landed} kills hit one")
        time.sleep(max(0.0, every - (time.monotonic() - begin - spent)))
    return landed


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
