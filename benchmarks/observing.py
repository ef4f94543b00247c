"""What it costs training that a job is observed.

2 workers and 2 parameter servers train without a break. Another process asks all tasks for their
status once per second, as `replicax top` does; it is stopped for every second block of closures.
A task that is not asked has one more thread, which sleeps in the kernel. A machine drifts by more
than the difference: each block is held against those before and after it, and the middle of many
counts.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import parameter_server
from benchmarks.harness import Measured, Row, Settings, at_most, compete, main

CASES = ("assign_add", "mlp 64x4x64")
# Short enough that a block has many.
BURSTS = {"assign_add": 500, "mlp 64x4x64": 100}
# The duration of a block: one look at the job.
BLOCK_S = 1.0
MOST_SLOWDOWN = 0.02

WATCH = """
import sys, time
from pathlib import Path
from replicax.top.view import Sampler
sampler = Sampler(Path(sys.argv[1]))
while True:
    view = sampler.sample()
    assert len(view.rows) == 5 and all(row.pid for row in view.rows), view
    print(len(view.rows), flush=True)
    time.sleep(1.0)
"""


def block(burst: Callable[[], Any], pids: Sequence[int]) -> tuple[float, float]:
    """Returns the seconds, and the processor seconds of all processes, of a burst in a block."""
    start, used, count = time.perf_counter(), cpu_s(pids), 0
    while time.perf_counter() - start < BLOCK_S:
        burst()
        count += 1
    return (time.perf_counter() - start) / count, (cpu_s(pids) - used) / count


def cpu_s(pids: Sequence[int]) -> float:
    """Returns the processor time of processes so far."""
    total = 0
    for pid in pids:
        # After the name, which may contain spaces: user and system time are the 12th and 13th.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def ours(case: str, seconds: float) -> dict[str, float]:
    import replicax as rx
    from replicax.observe import client, job_directory

    times: list[tuple[float, float]] = []
    with rx.testing.LocalCluster(workers=2, ps=2) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            step, args = parameter_server.our_step(case, strategy, coordinator)

            def burst() -> None:
                for _ in range(BURSTS[case]):
                    coordinator.schedule(step, args=args)
                coordinator.join()

            burst()
            (directory,) = [
                d for d in job_directory.running() if d.name.endswith(f"-{os.getpid()}")
            ]
            command = [sys.executable, "-c", WATCH, str(directory)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
                assert watcher.stdout is not None
                assert watcher.stdout.readline() == "5\n"
                asked = client.ask_all(directory, "ping")
                pids = [watcher.pid, *(answer.pid or 0 for answer in asked)]
                for _ in range(max(2, round(10 * seconds))):
                    watcher.send_signal(signal.SIGSTOP)
                    times.append(block(burst, pids))
                    watcher.send_signal(signal.SIGCONT)
                    times.append(block(burst, pids))
                assert watcher.poll() is None
                watcher.kill()
                looks = len(watcher.stdout.readlines())
        strategy.close()
    slower, used = (ratios([time[i] for time in times]) for i in (0, 1))
    return {
        "slower": statistics.median(slower) - 1,
        "least": min(slower) - 1,
        "most": max(slower) - 1,
        # Other programs on the machine change the time, and hardly the processor time.
        "more_cpu": statistics.median(used) - 1,
        "alone_s": statistics.median(time for time, _ in times[::2]),
        "observed_s": statistics.median(time for time, _ in times[1::2]),
        "looks": looks,
    }


def ratios(times: list[float]) -> list[float]:
    """Returns how every second time compares with those before and after it."""
    return [
        now / statistics.mean([before, after])
        for before, now, after in zip(times[::2], times[1::2], times[2::2], strict=False)
    ]


CONTESTANTS = {"ours": ours}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    # Both take turns within one round: the best of several would be no comparison.
    once = dataclasses.replace(settings, rounds=1)
    measured = compete(__name__, CONTESTANTS, CASES, once, report)
    rows = []
    for case in CASES:
        found = measured["ours", case]
        texts = [f"{BURSTS[case] / found[name]:,.0f}/s" for name in ("observed_s", "alone_s")]
        outcome = at_most(MOST_SLOWDOWN, found["slower"])
        rows.append(Row("slower when observed", case, *texts, found["slower"], *outcome))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
