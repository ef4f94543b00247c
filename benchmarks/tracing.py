"""What traces cost: closures per second with 2 parameter servers and 2 workers, recorded or not.

Bursts of closures run in one cluster, recorded and not recorded in turn; the median of the ratios
of neighbours counts. While nothing is recorded, a recording point costs the call of a builtin: the
row `off` is the time of all points that a closure passes, by all tasks, as a part of the time of
the closure.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_most, compete, main
from benchmarks.parameter_server import BURSTS, NUM_SERVERS, NUM_WORKERS, our_step

CASES = ("assign_add", "mlp 64x4x64", "mlp 512x4x64")
WARM_UP = 20
MOST_ON, MOST_OFF = 1.05, 0.005


def ours(case: str, seconds: float) -> dict[str, float]:
    import replicax as rx

    with rx.testing.LocalCluster(workers=NUM_WORKERS, ps=NUM_SERVERS) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver, keys=cluster.keys_directory)
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            step, args = our_step(case, strategy, coordinator)
            found = _bursts(
                case, seconds, lambda: coordinator.schedule(step, args=args), coordinator
            )
        strategy.close()
    return found


def _bursts(
    case: str, seconds: float, schedule: Callable[[], Any], coordinator: Any
) -> dict[str, float]:
    import replicax as rx
    from replicax.timeline import perfetto

    # Short bursts, so that there are many of them: the machine changes by more than the trace.
    count = BURSTS[case] // 4
    times: dict[str, list[float]] = {"on": [], "off": []}
    num_spans = 0
    for _ in range(50):
        schedule()
    coordinator.join()
    end = time.perf_counter() + max(20.0, 10 * seconds)
    with tempfile.TemporaryDirectory() as folder:
        while time.perf_counter() < end:
            for name, own in times.items():
                tracing = rx.profiler.trace(folder) if name == "on" else contextlib.nullcontext()
                with tracing as trace:
                    # What a new trace and the file of the last one have left to do.
                    gc.collect()
                    for _ in range(WARM_UP):
                        schedule()
                    coordinator.join()
                    start = time.perf_counter()
                    for _ in range(count):
                        schedule()
                    coordinator.join()
                    own.append(time.perf_counter() - start)
                if isinstance(trace, rx.profiler.Trace):
                    assert trace.path is not None
                    num_spans = sum(len(part.spans) for part in perfetto.read(trace.path))
                    Path(trace.path).unlink()
    pairs = zip(times["on"], times["off"], strict=True)
    return {
        "ratio": statistics.median(on / off for on, off in pairs),
        "off_us": 1e6 * min(times["off"]) / count,
        "spans": num_spans / (count + WARM_UP),
        "point_us": _point_us(),
    }


def _point_us() -> float:
    """Returns the time of a recording point while nothing is recorded."""
    from replicax.foundation import spans

    number = 200_000
    point = "began = spans.now()\nif began:\n    spans.record('pull', began)"
    timed = min(timeit.repeat(point, globals={"spans": spans}, number=number, repeat=5))
    return 1e6 * timed / number


CONTESTANTS = {"ours": ours}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, ["ours"], CASES, settings, report)
    rows = []
    for case in CASES:
        found = measured["ours", case]
        off, ratio = found["off_us"], found["ratio"]
        texts = f"{1e6 / off / ratio:,.0f}/s", f"{1e6 / off:,.0f}/s"
        what = "closure recorded / not recorded"
        rows.append(Row(what, case, *texts, ratio, *at_most(MOST_ON, ratio)))
        share = found["spans"] * found["point_us"] / off
        texts = f"{found['spans']:.1f} points", f"{1e3 * found['point_us']:.0f} ns each"
        rows.append(Row("… off: points / closure", case, *texts, share, *at_most(MOST_OFF, share)))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
