"""Checks of restarted servers and coordinators, with and without their state."""

from __future__ import annotations

import dataclasses
import json
import random
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import replicax as rx
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors
from torture.checks import ROOT, Outcome, Plan, check
from torture.driver import LEASE_S
from torture.endurance import Feeder
from torture.jobs import Job, cluster, is_there, job, until

_INTERVAL = 1.0
# The duration of a snapshot on a loaded machine.
_SLACK = 1.5


class Pace:
    """Records how many closures had ended when, to bound the updates a server may lose."""

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
        """Returns how many have ended since a given time."""
        before = [count for seen, count in self._seen if seen <= when]
        return self._seen[-1][1] - (before[-1] if before else 0)

    def end(self) -> None:
        """Stops recording."""
        self._ended.set()
        self._thread.join()


@dataclasses.dataclass
class Losses:
    """The state of the updates after servers were killed.

    Attributes:
      slowest_s: The longest time until closures ended again.
      lost: The most updates that one kill cost one variable.
      excess: By how much that was more than the kill may have cost, at worst.
      doubled: How many updates counted twice, at worst.
      num_reset: How often a variable fell below what was settled before.
      num_landed: How many kills met work.
    """

    slowest_s: float = 0.0
    lost: float = 0.0
    excess: float = 0.0
    doubled: float = 0.0
    num_reset: int = 0
    num_landed: int = 0


def _kill_servers(plan: Plan, work: Job, times: int) -> Losses:
    """Kills servers at random times under load, and restarts them."""
    rng, found = plan.rng(), Losses()
    first, expected = 0, [0.0] * 3
    for turn in range(times):
        pace, feeder = Pace(work), Feeder(work, first)
        feeder.start()
        time.sleep(_INTERVAL + _SLACK + rng.random())
        index, running = rng.randrange(2), work.coordinator.status().num_running
        found.num_landed += running > 0
        bound = pace.since(time.monotonic() - _INTERVAL - _SLACK) + running
        killed_s = time.monotonic()
        work.cluster.kill("ps", index)
        work.cluster.restart("ps", index)
        pace.end()
        found.slowest_s = max(found.slowest_s, _until_work(work, feeder, killed_s))
        feeder.end()
        work.coordinator.join(timeout=60)
        values, count = work.values(), feeder.num_scheduled - first
        lost = [e + count - v for e, v in zip(expected, values, strict=True)]
        found.lost = max(found.lost, *lost)
        found.excess = max(found.excess, max(lost) - bound)
        found.doubled = max(found.doubled, -min(lost))
        found.num_reset += any(v < e for e, v in zip(expected, values, strict=True))
        expected, first = values, feeder.num_scheduled
        plan.report(f"{turn + 1} of {times} kills, {found.slowest_s:.1f} s, lost {found.lost:g}")
    return found


def _judge(outcome: Outcome, found: Losses, times: int) -> None:
    outcome.require(found.slowest_s <= 10, f"it took {found.slowest_s:.1f} s")
    outcome.require(found.doubled == 0, f"{found.doubled:g} updates counted twice")
    outcome.require(found.num_reset == 0, f"{found.num_reset} times variables were set back")
    landed = found.num_landed
    outcome.require_landed(landed == times, f"{landed} of {times} kills met work")


@check(
    21,
    claim="a killed server is restored from its snapshot, and training continues",
    limit="≤ 10 s; lost ≤ last interval + in flight, 20 times",
    minutes=15,
)
def restored_server(plan: Plan) -> Outcome:
    """Kills servers that save a snapshot every second."""
    times = plan.size(20, 2)
    of_cluster = {"snapshots": True, "snapshot_every": _INTERVAL}
    with job(plan, workers=2, of_cluster=of_cluster) as work:
        found = _kill_servers(plan, work, times)
    outcome = Outcome(
        f"back in {found.slowest_s:.1f} s, lost ≤ {found.lost:g}, {found.num_landed} kills",
        {"slowest_s": found.slowest_s, "lost": found.lost, "landed": found.num_landed},
    )
    outcome.require(found.excess == 0, f"{found.excess:g} more updates were lost than allowed")
    _judge(outcome, found, times)
    return outcome


@check(
    22,
    claim="a killed server with a mirror recovers every update",
    limit="lost 0, 20 times; ≥ 0.4 of the rate without a mirror",
    minutes=15,
)
def mirrored_server(plan: Plan) -> Outcome:
    """Kills servers whose variables another one mirrors; compares the rates."""
    times, count = plan.size(20, 2), plan.size(2000, 300)
    with job(plan, workers=2) as work:
        alone = _rate(work, count)
    with job(plan, workers=2, of_strategy={"mirror": True}) as work:
        ratio = _rate(work, count) / alone
    with job(plan, workers=2, of_strategy={"mirror": True}) as work:
        found = _kill_servers(plan, work, times)
    outcome = Outcome(
        f"lost {found.lost:g}, back in {found.slowest_s:.1f} s, {ratio:.2f} of the rate",
        {"slowest_s": found.slowest_s, "lost": found.lost, "ratio": ratio},
    )
    outcome.require(found.lost == 0, f"{found.lost:g} updates were lost")
    # A smoke run is too short for a comparison.
    outcome.require(plan.quick or ratio >= 0.4, f"{ratio:.2f} of the rate is left")
    _judge(outcome, found, times)
    return outcome


def _rate(work: Job, count: int) -> float:
    """Returns closures per second, the best of three bursts."""
    counters, best = work.counters, 0.0

    @rx.function
    def update() -> None:
        for counter in counters:
            counter.assign_add(1.0)

    for _ in range(4):
        start = time.monotonic()
        for _ in range(count):
            work.coordinator.schedule(update)
        work.coordinator.join(timeout=120)
        best = max(best, count / (time.monotonic() - start))
    return best


def _until_work(work: Job, feeder: Feeder, since: float) -> float:
    """Waits until closures end again; returns how long that took."""
    finished = work.coordinator.status().num_finished

    def goes_on() -> bool:
        if feeder.error is not None:
            raise feeder.error
        return work.coordinator.status().num_finished > finished

    until(goes_on, "closures that end", 60)
    return time.monotonic() - since


@check(
    23,
    claim="a server without its state is rejected; no update is applied to fresh zeros",
    limit="0 updates on fresh variables, only typed errors, 50 times",
    minutes=20,
)
def empty_server(plan: Plan) -> Outcome:
    """Kills a server under load and restarts it at once, without its variables."""
    times = plan.size(50, 2)
    landed = fresh = 0
    outcome = Outcome()
    with cluster(plan, workers=2, ps=2) as made:
        for turn in range(times):
            work = Job(plan, made, timing=Timing.fast())
            try:
                work.until_idle()
                fresh += max(work.server_counters("applied")) > 0 if turn else 0
                outcome.failures += _lose_server(work, turn % 2)
                landed += 1
            finally:
                work.close()
            # Servers count from zero: each has a new process now.
            made.restart("ps", (turn + 1) % 2)
            plan.report(f"{turn + 1} of {times} kills")
    outcome.measured = f"{fresh} fresh servers were changed, {len(outcome.failures)} other errors"
    outcome.numbers = {"fresh": fresh, "landed": landed}
    outcome.require(fresh == 0, f"{fresh} fresh servers were changed")
    outcome.require_landed(landed == times, f"{landed} of {times} kills met work")
    return outcome


def _lose_server(work: Job, index: int) -> list[str]:
    """Kills and restarts a server under load; returns the violations."""
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


@check(
    30,
    claim="a coordinator that is killed and restarted resumes its job",
    limit="≤ 5 s, the counter continues, the old one fenced, 20 times",
    minutes=20,
)
def restarted_coordinator(plan: Plan) -> Outcome:
    """Kills and restarts programs that count; some are only stopped, and continue later."""
    times, rng = plan.size(20, 3), plan.rng()
    slowest, refused, stopped, exact, landed = 0.0, 0, 0, 0, 0
    with cluster(plan, workers=2, ps=2) as made:
        tasks = [made.pid(job, i) for job in ("worker", "ps") for i in range(2)]
        spec = json.dumps(made.cluster_spec.as_dict())
        driver = _Driver(spec)
        driver.begin()
        driver.count(rng)
        for turn in range(times):
            is_stopped, old = turn % 4 == 2, driver
            # Started in advance: on a loaded machine that may take longer than a lease.
            driver = _Driver(spec)
            landed += old.process.poll() is None
            old.strike(signal.SIGSTOP if is_stopped else signal.SIGKILL)
            driver.begin()
            found = driver.resumed()
            slowest = max(slowest, driver.attached_s)
            # One batch may have been in flight.
            is_exact = old.reported <= found <= old.reported + _BATCH
            if not is_exact:
                plan.report(f"{found:g} counted, after {old.reported:g} that were reported")
            exact += is_exact
            if is_stopped:
                stopped += 1
                refused += old.wakes_up_refused()
            old.end()
            driver.count(rng)
            plan.report(f"{turn + 1} of {times}, {slowest:.1f} s, {found:g} counted")
        driver.end()
        left = _left_after(tasks, LEASE_S + 5)
    outcome = Outcome(
        f"back in {slowest:.1f} s, {exact} of {times} continue, {refused} of {stopped} old refused",
        {"slowest_s": slowest, "exact": exact, "refused": refused, "left": left},
    )
    outcome.require(slowest <= 5, f"a resume took {slowest:.1f} s")
    outcome.require(exact == times, f"{times - exact} times the counter was another")
    outcome.require(refused == stopped, f"{stopped - refused} old coordinators continued")
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
    """A program that counts in batches and reports progress; see `torture/driver.py`."""

    def __init__(self, spec: str) -> None:
        self.reported = 0.0
        self.attached_s = 0.0
        command = [sys.executable, "-m", "torture.driver", spec, str(_BATCH)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._unread = b""
        assert "ready" in self._next()

    def begin(self) -> None:
        """Lets it attach the job."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def resumed(self) -> float:
        """Waits until it has attached the job; returns the counter that it found."""
        said = self._next()
        self.attached_s = float(said["seconds"])
        self.reported = float(said["found"])
        return self.reported

    def count(self, rng: random.Random) -> None:
        """Lets it count some batches."""
        for _ in range(rng.randrange(2, 6)):
            self.reported = float(self._next()["found"])

    def strike(self, number: signal.Signals) -> None:
        """Kills or stops it with a signal; `reported` is then its last report."""
        self.process.send_signal(number)
        for said in self._rest():
            self.reported = float(said["found"])

    def wakes_up_refused(self) -> bool:
        """Continues a stopped one; returns whether it was soon fenced, and exited."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            return False
        said = self._rest()
        return bool(said) and said[-1].get("refused_s", start + 60) - start < 2.0

    def end(self) -> None:
        """Kills it, if it has not exited."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _next(self) -> dict[str, Any]:
        while b"\n" not in self._unread:
            if not self._read():
                raise RuntimeError(f"a driver ended with exit status {self.process.wait(20)}")
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _rest(self) -> list[dict[str, Any]]:
        """Returns its unread output."""
        assert self.process.stdout is not None
        while select.select([self.process.stdout], [], [], 0.2)[0] and self._read():
            pass
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def _read(self) -> bool:
        """Waits for output and reads some of it; False at its end."""
        assert self.process.stdout is not None
        found = self.process.stdout.read(1 << 16)
        self._unread += found or b""
        return bool(found)
