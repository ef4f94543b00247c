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
from collections.abc import Callable
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


def block(burst: Callable[[], Any]) -> float:
    """Returns the seconds that a burst takes, over a block of several."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < BLOCK_S:
        burst()
        count += 1
    return (time.perf_counter() - start) / count


def ours(case: str, seconds: float) -> dict[str, float]:
    import replicax as rx
    from replicax.observe import client

    times: list[float] = []
    with rx.testing.LocalCluster(workers=2, ps=2) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            step, args = parameter_server.our_step(case, strategy, coordinator)

            def burst() -> None:
                for _ in range(BURSTS[case]):
                    coordinator.schedule(step, args=args)
                coordinator.join()

            burst()
            directory = client.find_job(f"observing.py-{os.getpid()}")
            command = [sys.executable, "-c", WATCH, str(directory)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
                assert watcher.stdout is not None
                assert watcher.stdout.readline() == "5\n"
                for _ in range(max(2, round(10 * seconds))):
                    watcher.send_signal(signal.SIGSTOP)
                    times.append(block(burst))
                    watcher.send_signal(signal.SIGCONT)
                    times.append(block(burst))
                assert watcher.poll() is None
                watcher.kill()
                looks = len(watcher.stdout.readlines())
        strategy.close()
    ratios = [
        now / statistics.mean([before, after])
        for before, now, after in zip(times[::2], times[1::2], times[2::2], strict=False)
    ]
    return {
        "slower": statistics.median(ratios) - 1,
        "least": min(ratios) - 1,
        "most": max(ratios) - 1,
        "alone_s": statistics.median(times[::2]),
        "observed_s": statistics.median(times[1::2]),
        "looks": looks,
    }


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
