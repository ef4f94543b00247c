"""Steps per second of Keras' `fit` with 2 parameter servers and 2 workers.

`ours` trains a Keras MLP `HxLxB` of L layers of HxH weights on batches of B with `fit`: on batches
that the coordinator sends, and on data that the workers make. The peer is the loop of
`parameter_server.py` on tf.distribute, which is written by hand and has neither metrics nor a
Keras optimizer: TensorFlow has no `fit` with Keras 3 and parameter servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks import parameter_server
from benchmarks.harness import Measured, Row, Settings, at_least, compete, main

CASES = ("mlp 64x4x64", "mlp 512x4x64")
PEERS = ("tensorflow",)
TARGET = 2.0


def ours(case: str, seconds: float) -> dict[str, float]:
    import replicax as rx

    del seconds
    # After replicax, which chooses the backend.
    import keras
    import numpy as np

    width, depth, batch = map(int, case.split()[1].split("x"))
    steps = parameter_server.BURSTS[case]
    inputs = np.ones((batch * steps, width), np.float32)

    def dataset_fn() -> rx.data.Dataset:
        ones = np.ones((batch, width), np.float32)
        return rx.data.Dataset.from_tensors((ones, ones)).repeat()

    def best(fit: Callable[[], Any]) -> float:
        fit()
        found = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            fit()
            found = min(found, time.perf_counter() - start)
        return 1e6 * found / steps

    with rx.testing.LocalCluster(
        workers=parameter_server.NUM_WORKERS, ps=parameter_server.NUM_SERVERS
    ) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        with rx.coordinator.ClusterCoordinator(strategy):
            with strategy.scope():
                layers = [keras.layers.Dense(width, "relu", use_bias=False) for _ in range(depth)]
                model = keras.Sequential([keras.Input((width,)), *layers])
                model.compile(keras.optimizers.SGD(0.01), "mse")
            sent = best(lambda: model.fit(inputs, inputs, batch_size=batch, verbose=0))
            made = best(lambda: model.fit(dataset_fn, steps_per_epoch=steps, verbose=0))
        strategy.close()
    return {"sent_us": sent, "made_us": made}


CONTESTANTS = {"ours": ours, "tensorflow": parameter_server.tensorflow}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    names = ["ours", *(["tensorflow"] if "tensorflow" in settings.peers else [])]
    found = compete(__name__, names, CASES, settings, report)
    rows: list[Row] = []
    for name, what in (
        ("sent_us", "Keras steps/s, ours / tf.distribute by hand"),
        ("made_us", "… with data of the workers"),
    ):
        for case in CASES:
            per_second = 1e6 / found["ours", case][name]
            texts, ratio, outcome = (f"{per_second:,.0f}/s", ""), None, ("", None)
            if "tensorflow" in settings.peers:
                theirs = 1e6 / found["tensorflow", case]["us"]
                texts, ratio = (texts[0], f"{theirs:,.0f}/s"), per_second / theirs
                outcome = at_least(TARGET, ratio)
            rows.append(Row(what, case, *texts, ratio, *outcome))
    return found, rows


if __name__ == "__main__":
    main(CONTESTANTS)
