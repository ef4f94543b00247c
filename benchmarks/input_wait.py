"""How long a training loop waits for its data, if the data comes twice as fast as it is used.

A case `S/R` is a step of S ms (the device works, Python does not) fed by a source that takes
R ms per batch of 256x64 floats (it waits for something, as a reader of files does). There is
no peer: the share of the step that is spent in `next(iterator)` is the figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_most, compete, main

CASES = ("10/5", "40/20")
LIMIT = 0.02


def ours(case: str, seconds: float) -> dict[str, float]:
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    import jax
    import numpy as np

    step_s, read_s = (float(n) / 1e3 for n in case.split("/"))
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    count = max(20, int(seconds / step_s))

    class Slow:
        def __iter__(self) -> Any:
            for i in range(count):
                time.sleep(read_s)
                yield np.full((256, 64), i, np.float32)

    @rx.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(batch,)), axis=None)

    distributed = strategy.experimental_distribute_dataset(Slow())
    waited = total = 0.0
    iterator = iter(distributed)
    for i in range(count):
        start = time.perf_counter()
        batch = next(iterator)
        got = time.perf_counter()
        jax.block_until_ready(step(batch))
        time.sleep(max(0.0, step_s - (time.perf_counter() - got)))
        if i >= 5:
            # The first steps compile, and find the buffer empty.
            waited += got - start
            total += time.perf_counter() - start
    return {"share": waited / total}


CONTESTANTS = {"ours": ours}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, CONTESTANTS, CASES, settings, report)
    rows = []
    for case in CASES:
        share = measured["ours", case]["share"]
        outcome = at_most(LIMIT, share)
        rows.append(Row("share of a step spent waiting", case, f"{share:.2%}", "", share, *outcome))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
