"""Samples the processes of a job once a second: memory, threads, files, and finished work."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import os
import statistics
import threading
import time
from pathlib import Path

import psutil

from torture.jobs import Job, slope

_MIB = float(1 << 20)
# The share of the time in which processes warm up.
_WARM = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The resources of one process at one time."""

    second: float
    task: str
    pid: int
    mib: float
    threads: int
    fds: int


@dataclasses.dataclass(frozen=True)
class Growth:
    """The growth of a process that was never restarted, after it had warmed up."""

    mib_per_minute: float
    threads: float
    fds: float


class Sampler(threading.Thread):
    """Takes samples until it is closed.

    Attributes:
      samples: All of them.
      faults: When which fault began.
      longest_gap: The longest time in which no closure ended, in seconds.
      seconds: For how long it has looked.
    """

    def __init__(self, work: Job) -> None:
        super().__init__(name="sampler", daemon=True)
        self._work = work
        self._ended = threading.Event()
        self._begin_s = time.monotonic()
        self.samples: list[Sample] = []
        self.faults: list[tuple[float, str]] = []
        self.finished: list[tuple[float, int]] = []
        self.longest_gap = 0.0
        self.latest = ""

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return self.finished[-1][0] if self.finished else 0.0

    def note(self, fault: str) -> None:
        """Records the start of a fault."""
        self.faults.append((time.monotonic() - self._begin_s, fault))

    def run(self) -> None:
        since, last, turn = time.monotonic(), -1, 0
        while not self._ended.wait(0.1):
            now = time.monotonic()
            finished = self._work.coordinator.status().num_finished
            self.longest_gap = max(self.longest_gap, now - since)
            if finished != last:
                since, last = now, finished
            if turn % 10 == 0:
                self._take(now - self._begin_s)
                self.finished.append((now - self._begin_s, finished))
                self.latest = f"{finished:,} closures ended, gap {self.longest_gap:.1f} s"
            turn += 1

    def end(self) -> None:
        """Stops sampling."""
        self._ended.set()
        self.join(10)

    def _take(self, second: float) -> None:
        cluster = self._work.cluster
        pids = {"coordinator": os.getpid()}
        for job in ("ps", "worker"):
            for index in range(cluster.cluster_spec.num_tasks(job)):
                pids[f"{job} {index}"] = cluster.pid(job, index)
        for task, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                with process.oneshot():
                    found = (process.memory_info().rss / _MIB, process.num_threads())
                    self.samples.append(Sample(second, task, pid, *found, process.num_fds()))

    def growth(self) -> dict[str, Growth]:
        """Returns the growth of the processes that were never restarted."""
        found: dict[str, Growth] = {}
        for task in dict.fromkeys(s.task for s in self.samples):
            mine = [s for s in self.samples if s.task == task]
            if len({s.pid for s in mine}) > 1:
                continue
            warm = [s for s in mine if s.second >= _WARM * self.seconds]
            if len(warm) < 10:
                continue
            fifth = max(1, len(warm) // 5)
            grown = slope([s.second / 60 for s in warm], [s.mib for s in warm])
            found[task] = Growth(
                grown,
                _median_change([s.threads for s in warm], fifth),
                _median_change([s.fds for s in warm], fifth),
            )
        return found

    def save(self, path: Path) -> None:
        """Writes all samples as CSV; faults are lines of a task called "fault"."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["second", "task", "pid", "mib", "threads", "fds"])
            for sample in self.samples:
                writer.writerow([f"{sample.second:.2f}", *dataclasses.astuple(sample)[1:]])
            for second, fault in self.faults:
                writer.writerow([f"{second:.2f}", f"fault: {fault}", "", "", "", ""])


def _median_change(values: list[int], number: int) -> float:
    return statistics.median(values[-number:]) - statistics.median(values[:number])
