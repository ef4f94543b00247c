"""Bars about servers and coordinators that come back, with what they had or without."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from replicax.coordinator.timing import Timing
from replicax.foundation import errors
from torture.bars import ROOT, Outcome, Plan, bar
from torture.endurance import Feeder
from torture.jobs import Job, cluster, is_there, job, until

_INTERVAL = 1.0
# A snapshot takes a while, and a loaded machine looks late at the clock.
_SLACK = 1.5


class Pace:
    """Remembers how many closures had ended when, to tell what a server may have lost."""

    def __init__(self, work: Job) -> None:
        self._work = work
        self._ended = threading.Event()
        self._seen: list[tuple[float, int]] = [(time.monotonic(), 0)]
        self._thread = threading.Thread(target=self._watch, name="pace", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            status = self._work.coordinator.status()
            self._seen.append((time.monotonic(), status.num_finished))

    def since(self, when: float) -> int:
        """Returns how many have ended since some instant."""
        before = [count for seen, count in self._seen if seen <= when]
        return self._seen[-1][1] - (before[-1] if before else 0)

    def end(self) -> None:
        """Watches no more."""
        self._ended.set()
        self._thread.join()


@bar(
    21,
    promise="a killed server comes back from its snapshot, and training goes on",
    limit="≤ 10 s; lost ≤ last interval + in flight, 20 times",
    minutes=15,
)
def restored_server(plan: Plan) -> Outcome:
    """Kills servers that save every second, at random times, under load."""
    times, chance = plan.size(20, 2), plan.chance()
    slowest, lost_most, landed, reset = 0.0, 0.0, 0, 0
    outcome = Outcome()
    of_cluster = {"snapshots": True, "snapshot_every": _INTERVAL}
    with job(plan, workers=2, of_cluster=of_cluster) as work:
        first, expected = 0, [0.0] * 3
        for turn in range(times):
            pace, feeder = Pace(work), Feeder(work, first)
            feeder.start()
            time.sleep(_INTERVAL + _SLACK + chance.random())
            index = chance.randrange(2)
            landed += work.coordinator.status().num_running > 0
            bound = pace.since(time.monotonic() - _INTERVAL - _SLACK)
            bound += work.coordinator.status().num_running
            killed_s = time.monotonic()
            work.cluster.kill("ps", index)
            work.cluster.restart("ps", index)
            pace.end()
            slowest = max(slowest, _until_work(work, feeder, killed_s))
            feeder.end()
            work.coordinator.join(timeout=60)
            values, count = work.values(), feeder.num_scheduled - first
            lost = [e + count - v for e, v in zip(expected, values, strict=True)]
            lost_most = max(lost_most, *lost)
            reset += any(value < e for e, value in zip(expected, values, strict=True))
            outcome.require(min(lost) >= 0, f"counters grew by too much: {lost}")
            outcome.require(max(lost) <= bound, f"{max(lost):g} updates were lost, not {bound}")
            expected, first = values, feeder.num_scheduled
            plan.say(f"{turn + 1} of {times} kills, {slowest:.1f} s, lost {lost_most:g}")
    outcome.figure = f"back in {slowest:.1f} s, lost ≤ {lost_most:g}, {landed} kills"
    outcome.numbers = {"slowest_s": slowest, "lost": lost_most, "landed": landed}
    outcome.require(slowest <= 10, f"it took {slowest:.1f} s")
    outcome.require(reset == 0, f"{reset} times a variable fell below what was settled before")
    outcome.require_landed(landed == times, f"{landed} of {times} kills met work")
    return outcome


def _until_work(work: Job, feeder: Feeder, since: float) -> float:
    """Waits until closures end again; returns how long that took."""
    finished = work.coordinator.status().num_finished

    def goes_on() -> bool:
        if feeder.error is not None:
            raise feeder.error
        return work.coordinator.status().num_finished > finished

    until(goes_on, "closures that end", 60)
    return time.monotonic() - since


@bar(
    23,
    promise="a server that comes back empty is refused; nothing is added to fresh zeros",
    limit="0 updates on fresh variables, only typed errors, 50 times",
    minutes=20,
)
def empty_server(plan: Plan) -> Outcome:
    """Kills a server under load and starts it again at once, without its variables."""
    times = plan.size(50, 2)
    landed = fresh = 0
    outcome = Outcome()
    with cluster(plan, workers=2, ps=2) as made:
        for turn in range(times):
            work = Job(plan, made, timing=Timing.fast())
            try:
                work.until_idle()
                fresh += max(work.figure("applied")) > 0 if turn else 0
                outcome.failures += _lose_server(work, turn % 2)
                landed += 1
            finally:
                work.close()
            # Servers count from zero: each has a new process now.
            made.restart("ps", (turn + 1) % 2)
            plan.say(f"{turn + 1} of {times} kills")
    outcome.figure = f"{fresh} fresh servers were changed, {len(outcome.failures)} other errors"
    outcome.numbers = {"fresh": fresh, "landed": landed}
    outcome.require(fresh == 0, f"{fresh} fresh servers were changed")
    outcome.require_landed(landed == times, f"{landed} of {times} kills met work")
    return outcome


def _lose_server(work: Job, index: int) -> list[str]:
    """Kills a server and starts it again under load; returns what was not as promised."""
    problems: list[str] = []
    work.schedule(400, 0.01)
    until(lambda: work.coordinator.status().num_finished > 20, "work", 60)
    work.cluster.kill("ps", index)
    work.cluster.restart("ps", index)
    try:
        work.coordinator.join(timeout=60)
        problems.append("join raised nothing")
    except errors.PSUnavailableError:
        pass
    except errors.DistributeError as error:
        problems.append(f"join raised {type(error).__name__}: {error}")
    for counter in work.counters:
        try:
            value = float(counter.numpy())
        except errors.PSUnavailableError:
            continue
        if value == 0:
            problems.append("a counter was read as zero")
    return problems


@bar(
    30,
    promise="a coordinator that is killed and started again takes its job over",
    limit="≤ 5 s, the counter continues, the old one refused, 20 times",
    minutes=20,
)
def restarted_coordinator(plan: Plan) -> Outcome:
    """Kills programs that count, and starts them again; some are only stopped, and wake up."""
    times, chance = plan.size(20, 3), plan.chance()
    slowest, refused, stopped, exact, landed = 0.0, 0, 0, 0, 0
    with cluster(plan, workers=2, ps=2) as made:
        tasks = [made.pid(job, i) for job in ("worker", "ps") for i in range(2)]
        spec = json.dumps(made.cluster_spec.as_dict())
        driver = _Driver(spec)
        driver.count(chance)
        for turn in range(times):
            before, old = driver.reported, driver
            is_stopped = turn % 4 == 2
            landed += driver.process.poll() is None
            old.process.send_signal(signal.SIGSTOP if is_stopped else signal.SIGKILL)
            driver = _Driver(spec)
            found = driver.resumed()
            slowest = max(slowest, driver.attached_s)
            # One batch may have been on its way.
            exact += before <= found <= before + _BATCH
            if is_stopped:
                stopped += 1
                refused += old.wakes_up_refused()
            old.end()
            driver.count(chance)
            plan.say(f"{turn + 1} of {times}, {slowest:.1f} s, {found:g} counted")
        driver.end()
        left = _left_after(tasks, Timing.fast().server_orphan_s + 5)
    outcome = Outcome(
        f"back in {slowest:.1f} s, {exact} of {times} continue, {refused} of {stopped} old refused",
        {"slowest_s": slowest, "exact": exact, "refused": refused, "left": left},
    )
    outcome.require(slowest <= 5, f"taking over took {slowest:.1f} s")
    outcome.require(exact == times, f"{times - exact} times the counter was another")
    outcome.require(refused == stopped, f"{stopped - refused} old coordinators went on")
    outcome.require(left == 0, f"{left} tasks outlived their lease")
    outcome.require_landed(landed == times, f"{landed} of {times} kills met a program at work")
    return outcome


def _left_after(pids: list[int], seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sum(map(is_there, pids))


_BATCH = 20


class _Driver:
    """A program that counts in batches, and tells so; see `torture/driver.py`."""

    def __init__(self, spec: str) -> None:
        self.reported = 0.0
        self.attached_s = 0.0
        command = [sys.executable, "-m", "torture.driver", spec, str(_BATCH)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def resumed(self) -> float:
        """Waits until it has the job; returns what it found."""
        said = self._next()
        self.attached_s = float(said["seconds"])
        self.reported = float(said["found"])
        return self.reported

    def count(self, chance: random.Random) -> None:
        """Lets it count some batches."""
        for _ in range(chance.randrange(2, 6)):
            self.reported = float(self._next()["found"])

    def wakes_up_refused(self) -> bool:
        """Lets a stopped one go on; tells whether it was soon refused, and ended."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGCONT)
        try:
            lines = self.process.communicate(timeout=30)[0].splitlines()
        except subprocess.TimeoutExpired:
            return False
        last = json.loads(lines[-1]) if lines else {}
        return last.get("refused_s", start + 60) - start < 2.0

    def end(self) -> None:
        """Ends it, if it has not."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a driver ended with exit status {self.process.wait(20)}")
        return json.loads(line)
