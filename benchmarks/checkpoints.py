"""Checkpoints of 256 MB: how long training waits for one, and how long saving takes.

A case `asyncxM` is a save of M MB in the background: what counts is how long the training
loop is blocked by it. The limit is a plain copy of the same size, without which the values
could change while they are written. A case `syncxM` is a save that is over when it returns
(with us everything is then on disk, with TensorFlow in the hands of the operating system),
and a restore. The peer is TensorFlow's `CheckpointManager`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import OUT, Measured, Row, Settings, at_least, at_most, compete, main

ASYNC, SYNC = "asyncx256", "syncx256"
COPY_LIMIT, TENSORFLOW_LIMIT = 1.5, 1.0
NUM_ARRAYS = 16


def arrays(case: str) -> list[Any]:
    """Returns the arrays of a case: numbers that no file system can leave out."""
    import numpy as np

    count = int(case.rpartition("x")[2]) * 1_000_000 // NUM_ARRAYS // 4
    rng = np.random.default_rng(0)
    return [rng.random(count, np.float32) for _ in range(NUM_ARRAYS)]


def best_ms(
    steps: dict[str, Callable[[], Any]], between: Callable[[], Any], seconds: float
) -> dict[str, float]:
    """Returns the best time of each step; they run in turns, `between` is not counted."""
    best = dict.fromkeys(steps, float("inf"))
    # The first round warms up: imports, threads, memory.
    end, counted = time.perf_counter() + max(seconds, 0.5), -1
    while counted < 3 or time.perf_counter() < end:
        counted += 1
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            elapsed = 1e3 * (time.perf_counter() - start)
            between()
            if counted:
                best[name] = min(best[name], elapsed)
    return best


def directory() -> tempfile.TemporaryDirectory[str]:
    """Returns a directory on the disk of this project; /tmp may be in memory."""
    OUT.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=OUT, prefix="checkpoints-")


def ours(case: str, seconds: float) -> dict[str, float]:
    import numpy as np

    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    initial = arrays(case)
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = [rx.Variable(value) for value in initial]
    checkpoint = rx.train.Checkpoint(variables=variables)

    def restore() -> None:
        checkpoint.restore(manager.latest_checkpoint).assert_consumed()

    def between() -> None:
        manager.wait()
        os.sync()

    with directory() as home, rx.train.CheckpointManager(checkpoint, home, 2) as manager:
        if case == ASYNC:
            steps = {"ms": lambda: manager.save(asynchronous=True)}
            return best_ms(steps, between, seconds)
        found = best_ms({"save_ms": manager.save, "restore_ms": restore}, between, seconds)
    assert np.array_equal(variables[-1].numpy(), initial[-1])
    return found


def tensorflow(case: str, seconds: float) -> dict[str, float]:
    import numpy as np
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    initial = arrays(case)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = [tf.Variable(value) for value in initial]
    checkpoint = tf.train.Checkpoint(variables=variables)

    with directory() as home:
        manager = tf.train.CheckpointManager(checkpoint, home, max_to_keep=2)

        def restore() -> None:
            checkpoint.restore(manager.latest_checkpoint).assert_consumed()

        found = best_ms({"save_ms": manager.save, "restore_ms": restore}, os.sync, seconds)
    assert np.array_equal(variables[-1].numpy(), initial[-1])
    return found


def copy(case: str, seconds: float) -> dict[str, float]:
    import numpy as np

    array = np.concatenate(arrays(case))
    return best_ms({"ms": lambda: np.copy(array)}, lambda: None, seconds)


PEERS = ("tensorflow",)
CONTESTANTS = {"ours": ours, "copy": copy, "tensorflow": tensorflow}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, ("ours", "copy"), (ASYNC,), settings, report)
    own, peer = measured["ours", ASYNC]["ms"], measured["copy", ASYNC]["ms"]
    texts = f"{own:.0f} ms", f"{peer:.0f} ms"
    outcome = at_most(COPY_LIMIT, own / peer)
    rows = [Row("wait for a save / plain copy", ASYNC, *texts, own / peer, *outcome)]
    if "tensorflow" in settings.peers:
        measured |= compete(__name__, ("ours", "tensorflow"), (SYNC,), settings, report)
        own, peer = (sum(measured[name, SYNC].values()) for name in ("ours", "tensorflow"))
        texts = f"{own:.0f} ms", f"{peer:.0f} ms"
        outcome = at_least(TENSORFLOW_LIMIT, peer / own)
        rows.append(Row("TF save and restore / ours", SYNC, *texts, peer / own, *outcome))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
