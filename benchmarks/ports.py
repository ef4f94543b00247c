"""TensorFlow programs through `replicax.tf`: a custom loop with a tape, and `dataset.map`.

A case `HxLxB` trains a Keras network of L dense layers of H units on two CPU devices: a step with
`tf.GradientTape` and a Keras optimizer in a `tf.function`, fed by a distributed dataset of global
batches of B examples. Peers: the same loop with `rx.value_and_grad`, which takes turns with it in
one process; and the same program on TensorFlow.

The case `map` reads a dataset on one core, whose function casts, reshapes, encodes a label and
flips images at random. The peer is tf.data.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import (
    Measured,
    Row,
    Settings,
    at_least,
    at_most,
    best_time,
    compete,
    main,
    taking_turns,
)

LOOPS = ("64x3x64", "512x3x256")
MAP = "map"
SAME_LOOP_LIMIT, TENSORFLOW_LIMIT, MAP_LIMIT = 1.05, 1.3, 0.5
CLASSES, ELEMENTS = 10, 2000


def sizes(case: str) -> tuple[int, int, int]:
    """Returns width, depth and batch of a case."""
    width, depth, batch = map(int, case.split("x"))
    return width, depth, batch


def build(keras: Any, width: int, depth: int) -> Any:
    """Returns the network."""
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    layers = [keras.Input((width,)), *hidden, keras.layers.Dense(CLASSES)]
    return keras.Sequential(layers)


def rows(width: int, batch: int) -> Any:
    """Returns the examples of one batch."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, width)).astype(np.float32)
    return x, rng.integers(0, CLASSES, size=(batch,)).astype(np.int32)


def tape_step(tf: Any, keras: Any, case: str) -> Callable[[], Any]:
    """Returns one step of the program, which is the same for both."""
    width, depth, batch = sizes(case)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = build(keras, width, depth)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_object(y, logits), global_batch_size=batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        losses = strategy.run(replica_step, args=(x, y))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    data = tf.data.Dataset.from_tensors(rows(width, batch)).cache().repeat().prefetch(2)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    return lambda: train_step(*next(iterator))


def gradient_step(case: str) -> Callable[[], Any]:
    """Returns one step of the same program, written for replicax."""
    import jax.numpy as jnp
    import keras

    import replicax as rx

    width, depth, batch = sizes(case)
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = build(keras, width, depth)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def replica_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            return jnp.sum(loss_object(y, model(x, training=True))) / batch

        loss, gradients = rx.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @rx.function
    def train_step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    data = rx.data.Dataset.from_tensors(rows(width, batch)).cache().repeat().prefetch(2)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    return lambda: train_step(*next(iterator))


def map_dataset(tf: Any) -> Any:
    """Returns the dataset whose reading is measured, which is the same program for both."""
    import numpy as np

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(ELEMENTS, 784)).astype(np.uint8)
    labels = rng.integers(0, CLASSES, size=(ELEMENTS,)).astype(np.int64)

    def prepare(image: Any, label: Any) -> Any:
        image = tf.reshape(tf.cast(image, tf.float32) / 255.0, [28, 28, 1])
        image = tf.image.random_flip_left_right(image)
        return image, tf.one_hot(label, CLASSES)

    return tf.data.Dataset.from_tensor_slices((images, labels)).map(prepare).batch(100)


def on_one_core() -> None:
    """Leaves one core to this process, and to the threads that it starts."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


def map_time(dataset: Any, seconds: float) -> float:
    """Returns the time of one element, in microseconds: the best of all passes."""
    best, end = float("inf"), time.perf_counter() + max(seconds, 1.0)
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        for _ in dataset:
            pass
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / ELEMENTS


def ours(case: str, seconds: float) -> dict[str, float]:
    if case == MAP:
        on_one_core()
        import replicax.tf as tf

        return {"us": map_time(map_dataset(tf), seconds)}
    import replicax as rx

    rx.set_virtual_cpu_devices(2)
    import jax
    import keras

    import replicax.tf as tf

    steps = {"tape": tape_step(tf, keras, case), "value_and_grad": gradient_step(case)}
    return taking_turns(steps, jax.block_until_ready, max(seconds, 1.0) * 2, 20)


def tensorflow(case: str, seconds: float) -> dict[str, float]:
    if case == MAP:
        on_one_core()
        import tensorflow as tf

        return {"us": map_time(map_dataset(tf), seconds)}
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    step = tape_step(tf, tf.keras, case)
    return {"ms": 1e3 * best_time(step, lambda loss: loss.numpy(), seconds)}


PEERS = ("tensorflow",)
CONTESTANTS = {"ours": ours, "tensorflow": tensorflow}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    names = [n for n in CONTESTANTS if n != "tensorflow" or "tensorflow" in settings.peers]
    measured = compete(__name__, names, (*LOOPS, MAP), settings, report)
    found: list[Row] = []
    for case in LOOPS:
        own, peer = (measured["ours", case][f"{name}_ms"] for name in ("tape", "value_and_grad"))
        outcome = at_most(SAME_LOOP_LIMIT, own / peer)
        texts = f"{own:.3f} ms", f"{peer:.3f} ms"
        found.append(Row("loop with a tape / value_and_grad", case, *texts, own / peer, *outcome))
    if "tensorflow" not in settings.peers:
        return measured, found
    for case in LOOPS:
        own, peer = measured["ours", case]["tape_ms"], measured["tensorflow", case]["ms"]
        outcome = at_least(TENSORFLOW_LIMIT, peer / own)
        texts = f"{own:.3f} ms", f"{peer:.3f} ms"
        found.append(Row("TensorFlow / loop with a tape", case, *texts, peer / own, *outcome))
    own, peer = measured["ours", MAP]["us"], measured["tensorflow", MAP]["us"]
    outcome = at_least(MAP_LIMIT, peer / own)
    texts = f"{1e6 / own:,.0f}/s", f"{1e6 / peer:,.0f}/s"
    found.append(Row("dataset.map / tf.data, one core", MAP, *texts, peer / own, *outcome))
    return measured, found


if __name__ == "__main__":
    main(CONTESTANTS)
