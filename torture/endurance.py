"""The soak test: continuous work under faults, with samples of memory, threads and files."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import replicax as rx
from torture.checks import OUT, Outcome, Plan, check
from torture.jobs import PATIENT, Job, cluster
from torture.picture import draw
from torture.samples import Sampler

_FAULT_SECONDS = 5.0
# T_dead of the fast profile, and 8 s.
_LONGEST_GAP = 10.0
_QUEUED = 400
_STEP_SECONDS = 0.01
_DISK_BYTES = 64 << 20
# The server that is killed.
_MORTAL = 1


class Feeder(threading.Thread):
    """Keeps the queue filled with closures until it is closed.

    Attributes:
      num_scheduled: How many it has scheduled, after those before `first`.
      error: What ended it early.
    """

    def __init__(self, work: Job, first: int = 0) -> None:
        super().__init__(name="feeder", daemon=True)
        self._work = work
        self._ended = threading.Event()
        self.num_scheduled = first
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._ended.wait(0.05):
                waiting = self._work.coordinator.status().num_queued
                if waiting < _QUEUED:
                    count = _QUEUED - waiting
                    self._work.schedule(count, _STEP_SECONDS, first=self.num_scheduled)
                    self.num_scheduled += count
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Stops scheduling, and raises an earlier error."""
        self._ended.set()
        self.join(60)
        if self.error is not None:
            raise self.error


class Tormentor:
    """The faults of the soak test by name; each returns whether it hit a busy task."""

    def __init__(self, work: Job, disk: Path | None, rng: random.Random) -> None:
        self._work = work
        self._cluster = work.cluster
        self._disk = disk
        self._rng = rng
        self.faults: dict[str, Callable[[], bool]] = {
            "kill worker": self._kill,
            "stop worker": self._stop_short,
            "freeze worker": self._stop_long,
            "slow worker": self._slow,
            "kill server": self._kill_server,
            "stop server": self._stop_server,
            "cut line": self._cut,
            "blip": self._blip,
            "garbage": self._garbage,
        }
        if disk is not None:
            self.faults["full disk"] = self._fill

    def _worker(self) -> int:
        return self._rng.randrange(self._work.num_workers)

    def _server(self) -> int:
        return self._rng.randrange(2)

    def _kill(self) -> bool:
        index = self._worker()
        hit = self._work.hit(index, self._cluster.kill)
        self._cluster.restart("worker", index, wait=False)
        return hit is not None

    def _stop_short(self) -> bool:
        return self._stop(1.0)

    def _stop_long(self) -> bool:
        return self._stop(3.5)

    def _stop(self, seconds: float) -> bool:
        index = self._worker()
        hit = self._work.hit(index, self._cluster.stop)
        time.sleep(seconds)
        self._cluster.cont("worker", index)
        return hit is not None

    def _slow(self) -> bool:
        index = self._worker()
        self._cluster.slow("worker", index, 0.1)
        time.sleep(3.0)
        self._cluster.slow("worker", index, 1)
        return self._is_busy()

    def _kill_server(self) -> bool:
        """Returns always the same server, so that the growth of the other is visible."""
        is_busy = self._is_busy()
        self._cluster.kill("ps", _MORTAL)
        self._cluster.restart("ps", _MORTAL, wait=False)
        return is_busy

    def _cut(self) -> bool:
        """Cuts a server off from a worker, or from the server that it mirrors."""
        index, is_busy = self._server(), self._is_busy()
        caller, seconds = ("worker", self._worker()), 3.0
        if self._rng.random() < 0.5:
            caller, seconds = ("ps", 1 - index), 1.5
        self._cluster.cut("ps", index, caller=caller)
        time.sleep(seconds)
        self._cluster.mend("ps", index)
        return is_busy

    def _stop_server(self) -> bool:
        index, is_busy = self._server(), self._is_busy()
        self._cluster.stop("ps", index)
        time.sleep(1.0)
        self._cluster.cont("ps", index)
        return is_busy

    def _blip(self) -> bool:
        return self._is_busy() and self._cluster.blip("ps", self._server()) > 0

    def _garbage(self) -> bool:
        """Sends random bytes to the addresses of tasks."""
        is_busy = self._is_busy()
        directory = self._cluster.directory
        for name in (f"w{self._worker()}", f"p{self._server()}"):
            with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(OSError):
                peer.settimeout(2.0)
                peer.connect(str(directory / name))
                peer.sendall(self._rng.randbytes(4096))
        return is_busy

    def _fill(self) -> bool:
        assert self._disk is not None
        with rx.testing.fill(self._disk):
            time.sleep(2.5)
        return self._is_busy()

    def _is_busy(self) -> bool:
        return self._work.coordinator.status().num_running > 0


@check(
    51,
    claim="a random fault every 5 s for half an hour: nothing is lost, nothing grows",
    limit="exact; gap ≤ 10 s; < 1 MiB/min; threads, files flat",
    minutes=10,
)
def soak(plan: Plan) -> Outcome:
    """Works on 2 servers that mirror each other and 4 workers, with a fault every few seconds."""
    seconds = plan.size(60.0 * plan.minutes, 25.0)
    rng = plan.rng()
    with _cluster_on_a_small_disk(plan) as (made, disk):
        work = Job(plan, made, timing=PATIENT, of_strategy={"mirror": True})
        try:
            work.until_idle(120)
            landed, sampler, count = _torment(work, disk, rng, seconds)
            work.coordinator.join(timeout=120)
            values = work.values()
        finally:
            work.close()
    OUT.mkdir(parents=True, exist_ok=True)
    sampler.save(OUT / "soak.csv")
    draw(sampler, OUT / "soak.png")
    return _judged(plan, sampler, landed, values, count)


@contextlib.contextmanager
def _cluster_on_a_small_disk(plan: Plan) -> Iterator[tuple[Any, Path | None]]:
    """A cluster with snapshots on a small disk, where that can be mounted."""
    with contextlib.ExitStack() as stack:
        disk: Path | None = None
        with contextlib.suppress(rx.errors.PermissionDeniedError):
            disk = stack.enter_context(rx.testing.small_disk(_DISK_BYTES))
        options = {"snapshots": disk or True, "proxied": ("ps",), "seed": plan.seed}
        yield stack.enter_context(cluster(plan, workers=4, ps=2, **options)), disk


def _torment(
    work: Job, disk: Path | None, rng: random.Random, seconds: float
) -> tuple[dict[str, int], Sampler, int]:
    """Feeds the cluster and injects faults; returns the count of each fault, and the samples."""
    tormentor = Tormentor(work, disk, rng)
    landed = dict.fromkeys(tormentor.faults, 0)
    feeder, sampler = Feeder(work), Sampler(work)
    feeder.start()
    sampler.start()
    begin = time.monotonic()
    try:
        names: list[str] = []
        while (spent := time.monotonic() - begin) < seconds:
            if not names:
                # Each once, in another order every time.
                names = rng.sample(list(tormentor.faults), len(tormentor.faults))
            name = names.pop()
            sampler.note(name)
            landed[name] += tormentor.faults[name]()
            work.plan.report(f"{spent:.0f} of {seconds:.0f} s, {sampler.latest}")
            if feeder.error is not None:
                break
            time.sleep(max(0.0, _FAULT_SECONDS - (time.monotonic() - begin - spent)))
    finally:
        sampler.end()
        feeder.end()
    return landed, sampler, feeder.num_scheduled


def _judged(
    plan: Plan, sampler: Sampler, landed: dict[str, int], values: list[float], count: int
) -> Outcome:
    growth = sampler.growth()
    slope = max((found.mib_per_minute for found in growth.values()), default=0.0)
    total = sum(landed.values())
    outcome = Outcome(
        f"off by {sum(abs(v - count) for v in values):g} of {3 * count:,}, gap "
        f"{sampler.longest_gap:.1f} s, {slope:+.2f} MiB/min, {total} faults",
        {"closures": count, "gap_s": sampler.longest_gap, "mib_per_minute": slope, **landed},
    )
    outcome.require(values == [count] * 3, f"the counters are {values}, not {count}")
    outcome.require(sampler.longest_gap <= _LONGEST_GAP, "nothing ended for too long")
    # Growth is visible after minutes; a smoke run only warms up.
    is_long = sampler.seconds >= 240
    for name, found in growth.items() if is_long else ():
        outcome.require(
            found.mib_per_minute < 1.0, f"{name} grows by {found.mib_per_minute:.2f} MiB/min"
        )
        outcome.require(abs(found.threads) <= 2, f"{name} has {found.threads:+g} threads")
        outcome.require(abs(found.fds) <= 2, f"{name} has {found.fds:+g} file descriptors")
    missed = [name for name, number in landed.items() if not number]
    outcome.require_landed(plan.quick or not missed, f"these faults met no work: {missed}")
    outcome.require_landed(total >= sampler.seconds / 12, f"{total} faults landed")
    return outcome
