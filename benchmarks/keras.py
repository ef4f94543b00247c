"""Epochs of Keras' `fit`: models of four kinds, batches of 64 examples, 100 steps an epoch.

`both` trains copies of one model in turns, in one process: under MirroredStrategy on two CPU
devices and under `keras.distribution.DataParallel` on the same ones; under OneDeviceStrategy, and
as Keras does it without a strategy. The peer `tensorflow` is Keras with its TensorFlow backend
under `tf.distribute.MirroredStrategy` on two logical CPU devices.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_least, at_most, compete, main

CASES = ("mlp128", "mlp1024", "cnn", "lstm")
PEERS = ("tensorflow",)
DATA_PARALLEL_LIMIT = 1.03
PLAIN_LIMIT = 1.03
TENSORFLOW_LIMIT = 1.5
# The cases that are compared with the TensorFlow backend.
TENSORFLOW_CASES = ("mlp128", "cnn", "lstm")
BATCH, STEPS, CLASSES = 64, 100, 10
SHAPES = {"mlp128": (128,), "mlp1024": (1024,), "cnn": (28, 28, 1), "lstm": (32, 16)}


def model_of(case: str) -> Any:
    import keras

    layers = keras.layers
    width = int(case.removeprefix("mlp")) if case.startswith("mlp") else 0
    hidden = {
        "cnn": lambda: [
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
        ],
        "lstm": lambda: [layers.LSTM(64)],
    }.get(case, lambda: [layers.Dense(width, activation="relu") for _ in range(3)])
    model = keras.Sequential([keras.Input(SHAPES[case]), *hidden(), layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
    return model


def data_of(case: str) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    inputs = random.normal(size=(BATCH * STEPS, *SHAPES[case])).astype(np.float32)
    return inputs, random.integers(0, CLASSES, BATCH * STEPS)


def epochs_in_turns(
    models: dict[str, Callable[[], None]], seconds: float, name_of: Callable[[str], str]
) -> dict[str, float]:
    """Returns the time of an epoch of each, in ms: the best of its turns."""
    for train in models.values():
        train()
    best = dict.fromkeys(models, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, train in models.items():
            start = time.perf_counter()
            train()
            best[name] = min(best[name], time.perf_counter() - start)
    return {name_of(name): 1e3 * value for name, value in best.items()}


def trainer(case: str, scope: Callable[[], Any], is_open: bool) -> Callable[[], None]:
    """Returns a function that trains a new model for an epoch, in its scope if asked for."""
    inputs, labels = data_of(case)
    with scope():
        model = model_of(case)

    def train() -> None:
        with scope() if is_open else contextlib.nullcontext():
            model.fit(inputs, labels, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)

    return train


def both(case: str, seconds: float) -> dict[str, float]:
    # XLA's CPU client starves on collectives in flight if its pool has few threads.
    os.environ.setdefault("NPROC", "8")
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    import keras

    @contextlib.contextmanager
    def data_parallel() -> Iterator[None]:
        keras.distribution.set_distribution(distribution)
        try:
            yield
        finally:
            keras.distribution.set_distribution(None)

    distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    mirrored = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    one_device = rx.OneDeviceStrategy("CPU:0")
    models = {
        "mirrored": trainer(case, mirrored.scope, is_open=False),
        "data_parallel": trainer(case, data_parallel, is_open=True),
        "one_device": trainer(case, one_device.scope, is_open=False),
        "plain": trainer(case, contextlib.nullcontext, is_open=False),
    }
    return epochs_in_turns(models, 10 * seconds, "{}_ms".format)


def tensorflow(case: str, seconds: float) -> dict[str, float]:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    train = trainer(case, strategy.scope, is_open=False)
    return epochs_in_turns({"mirrored": train}, 3 * seconds, "{}_ms".format)


CONTESTANTS = {"both": both, "tensorflow": tensorflow}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, ["both"], CASES, settings, report)
    if "tensorflow" in settings.peers:
        measured |= compete(__name__, PEERS, TENSORFLOW_CASES, settings, report)
    rows: list[Row] = []

    def row(what: str, case: str, own: float, peer: float, ratio: float, *outcome: Any) -> None:
        rows.append(Row(what, case, f"{own:.1f} ms", f"{peer:.1f} ms", ratio, *outcome))

    for what, ours, peer, limit in (
        (
            "fit, Mirrored x2 / Keras DataParallel",
            "mirrored_ms",
            "data_parallel_ms",
            DATA_PARALLEL_LIMIT,
        ),
        ("fit, OneDevice / Keras alone", "one_device_ms", "plain_ms", PLAIN_LIMIT),
    ):
        for case in CASES:
            found = measured["both", case]
            ratio = found[ours] / found[peer]
            row(what, case, found[ours], found[peer], ratio, *at_most(limit, ratio))
    if "tensorflow" in settings.peers:
        for case in TENSORFLOW_CASES:
            own = measured["both", case]["mirrored_ms"]
            peer = measured["tensorflow", case]["mirrored_ms"]
            outcome = at_least(TENSORFLOW_LIMIT, peer / own)
            row("fit, Keras on TF Mirrored / ours", case, own, peer, peer / own, *outcome)
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
