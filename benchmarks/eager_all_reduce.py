"""One all-reduce of ten small tensors in uncompiled replica code, on two CPU devices.

The peer is `tf.distribute.MirroredStrategy` on two logical CPUs, executing eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_least, best_time, compete, main

CASES = ("10x16",)
LIMIT = 4.0


def ours(case: str, seconds: float) -> dict[str, float]:
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    import jax
    import jax.numpy as jnp

    count, size = map(int, case.split("x"))
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    values = [
        strategy.experimental_distribute_values_from_function(lambda context: jnp.ones(size))
        for _ in range(count)
    ]

    def replica_code(*values: Any) -> Any:
        return rx.get_replica_context().all_reduce("SUM", list(values))

    def step() -> Any:
        return strategy.run(replica_code, args=values)

    def wait(results: Any) -> None:
        jax.block_until_ready([strategy.experimental_local_results(r) for r in results])

    return {"ms": 1e3 * best_time(step, wait, seconds)}


def tensorflow(case: str, seconds: float) -> dict[str, float]:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    count, size = map(int, case.split("x"))
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    values = [
        strategy.experimental_distribute_values_from_function(lambda context: tf.ones([size]))
        for _ in range(count)
    ]

    def replica_code(*values: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", list(values))

    def step() -> Any:
        return strategy.run(replica_code, args=values)

    def wait(results: Any) -> None:
        for result in results:
            for part in strategy.experimental_local_results(result):
                part.numpy()

    return {"ms": 1e3 * best_time(step, wait, seconds)}


PEERS = ("tensorflow",)
CONTESTANTS = {"ours": ours, "tensorflow": tensorflow}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    names = [n for n in CONTESTANTS if n != "tensorflow" or "tensorflow" in settings.peers]
    measured = compete(__name__, names, CASES, settings, report)
    rows: list[Row] = []
    for case in CASES if "tensorflow" in settings.peers else ():
        own = measured["ours", case]["ms"]
        peer = measured["tensorflow", case]["ms"]
        outcome = at_least(LIMIT, peer / own)
        texts = f"{own:.3f} ms", f"{peer:.3f} ms"
        what = "TF eager / eager all_reduce"
        rows.append(Row(what, "10 tensors of 16 floats", *texts, peer / own, *outcome))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
