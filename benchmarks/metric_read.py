"""The first `result()` and the first `reset_state()` of a metric on two replicas.

What a person waits for at the end of the first epoch. Nothing is compared: the limit is in
milliseconds, and mostly compilation, if there is any.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_most, compete, main

CASES = ("Mean", "SparseCategoricalAccuracy", "AUC")
# In ms, each.
LIMIT = 20.0


def ours(case: str, seconds: float) -> dict[str, float]:
    del seconds  # There is only one first time.
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    import jax
    import jax.numpy as jnp

    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        metric = getattr(rx.metrics, case)()

    def count() -> None:
        scores = jnp.asarray([[0.2, 0.8], [0.6, 0.4]])
        arguments: dict[str, Any] = {
            "Mean": (scores,),
            "SparseCategoricalAccuracy": (jnp.asarray([1, 1]), scores),
            "AUC": (jnp.asarray([1, 0]), scores[:, 1]),
        }
        metric.update_state(*arguments[case])

    rx.function(lambda: strategy.run(count))()
    jax.block_until_ready([variable.stored for variable in metric.variables])
    start = time.perf_counter()
    float(metric.result())
    middle = time.perf_counter()
    metric.reset_state()
    end = time.perf_counter()
    return {"result_ms": 1e3 * (middle - start), "reset_ms": 1e3 * (end - middle)}


CONTESTANTS = {"ours": ours}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, CONTESTANTS, CASES, settings, report)
    rows: list[Row] = []
    for case in CASES:
        for what, key in (("first result()", "result_ms"), ("first reset_state()", "reset_ms")):
            found = measured["ours", case][key]
            texts = f"{found:.2f} ms", ""
            rows.append(Row(f"{what}, ms", case, *texts, found, *at_most(LIMIT, found)))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
