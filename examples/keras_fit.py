"""A Keras model with fit, evaluate, predict and callbacks: the same file under every strategy.

    python examples/keras_fit.py --strategy mirrored

A model made in `strategy.scope()` is distributed; nothing else in the program changes. The
strategies `multi_worker` and `parameter_server` take their cluster from TF_CONFIG: start the file
as every task, with a `--directory` that all of them see, since one task writes files. All
synchronous strategies print the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import replicax as rx

import keras  # isort: skip  (after replicax: it chooses the JAX backend)

# The size of a step on all replicas together; the last batch of an epoch is smaller.
GLOBAL_BATCH, EPOCHS = 64, 6


def parameter_servers() -> rx.Strategy:
    task = rx.cluster_resolver.TFConfigClusterResolver()
    if task.task_type in ("worker", "ps"):
        rx.Server(task.cluster_spec(), job_name=task.task_type, task_index=task.task_id).join()
    return rx.ParameterServerStrategy(task)


STRATEGIES: dict[str, Callable[[], rx.Strategy | None]] = {
    "none": lambda: None,
    "one_device": lambda: rx.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: rx.MirroredStrategy(["CPU:0", "CPU:1"]),
    "virtual": lambda: rx.MirroredStrategy(["CPU:0"], virtual_replicas=8),
    "central_storage": lambda: rx.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    "multi_worker": rx.MultiWorkerMirroredStrategy,
    "parameter_server": parameter_servers,
}


def new_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.BatchNormalization(),  # over the global batch
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def digits() -> Any:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels = (pixels[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels[order].astype(np.int32)
    return (pixels[:-360], labels[:-360]), (pixels[-360:], labels[-360:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default="mirrored")
    parser.add_argument("--directory", type=Path, help="for files; default: a temporary one")
    options = parser.parse_args()
    name = options.strategy
    if name not in ("multi_worker", "parameter_server"):
        rx.set_virtual_cpu_devices(2)  # leave out on a machine with GPUs
    strategy = STRATEGIES[name]()
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = new_model()

    training, testing = digits()
    with tempfile.TemporaryDirectory() as directory:
        best = (options.directory or Path(directory)) / "best.keras"
        history = model.fit(
            *training,
            batch_size=GLOBAL_BATCH,
            epochs=EPOCHS,
            validation_split=0.1,
            callbacks=[
                keras.callbacks.ModelCheckpoint(best, "val_accuracy", save_best_only=True),
                keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            ],
            verbose=0,
        ).history
        for epoch, (loss, accuracy) in enumerate(
            zip(history["loss"], history["val_accuracy"], strict=True), 1
        ):
            print(f"epoch {epoch}: loss {loss:.4f}, validation accuracy {accuracy:.3f}")
        # A file that any Keras can open, here without a strategy.
        model = keras.saving.load_model(best)
    _, accuracy = model.evaluate(*testing, verbose=0)
    wrong = int((model.predict(testing[0], verbose=0).argmax(1) != testing[1]).sum())
    print(f"test accuracy {accuracy:.3f}, {wrong} of {len(testing[1])} digits misread")


if __name__ == "__main__":
    main()
