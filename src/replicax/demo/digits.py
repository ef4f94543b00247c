"""One training program, unchanged under every strategy, on real data.

Handwritten digits (scikit-learn's, 8 by 8 pixels) are told apart by a small network. The
global batch is the same for all strategies, its last, partial one too, so all of them must
learn the same; demo.png shows that they do. At the end a checkpoint that was saved on
four devices is opened on one, and a Keras model is fitted.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jax
import keras
import numpy as np
import optax
from jax.typing import ArrayLike
from matplotlib.figure import Figure
from rich.console import Console
from sklearn.datasets import load_digits

import replicax as rx
from replicax.demo.live import LiveTable, bar

PICTURE = "demo.png"
GLOBAL_BATCH, EPOCHS = 64, 12
# Pixels and labels, of all replicas.
Batch = tuple[rx.DistributedValues, rx.DistributedValues]

COLUMNS = ("strategy", "replicas", "loss", "test accuracy", "steps/s", "progress")
BAR_WIDTH = 12

STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "OneDevice": lambda: rx.OneDeviceStrategy("CPU:0"),
    "Mirrored, 2 devices": lambda: rx.MirroredStrategy(["CPU:0", "CPU:1"]),
    "Mirrored, 4 devices": lambda: rx.MirroredStrategy([f"CPU:{i}" for i in range(4)]),
    "Mirrored, 8 virtual replicas": lambda: rx.MirroredStrategy(["CPU:0"], virtual_replicas=8),
    "CentralStorage, 2 devices": lambda: rx.CentralStorageStrategy(["CPU:0", "CPU:1"]),
}


class Network(rx.Module):
    """One hidden layer between 64 pixels and 10 digits."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(1)
        self.layers = []
        for inputs, outputs in ((64, 64), (64, 10)):
            weight = rng.normal(0.0, inputs**-0.5, (inputs, outputs)).astype(np.float32)
            bias = np.zeros(outputs, np.float32)
            self.layers.append((rx.Variable(weight), rx.Variable(bias)))

    def __call__(self, pixels: ArrayLike) -> jax.Array:
        (w1, b1), (w2, b2) = self.layers
        return jax.nn.relu(pixels @ w1.value() + b1.value()) @ w2.value() + b2.value()


@dataclasses.dataclass
class Result:
    """What training under one strategy came to."""

    losses: np.ndarray
    accuracy: float
    speed: float
    network: Network


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns pixels and labels to learn from, and others to be tested with."""
    values, targets = load_digits(return_X_y=True)
    pixels, labels = np.asarray(values / 16, np.float32), np.asarray(targets, np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    known, unseen = order[:1437], order[1437:]
    return (pixels[known], labels[known]), (pixels[unseen], labels[unseen])


def train(strategy: rx.Strategy, after_step: Callable[[int, float], None]) -> Result:
    """Trains a network; nothing in here depends on which strategy it is."""
    known, unseen = digits()
    with strategy.scope():
        network = Network()
        weights = list(network.trainable_variables)
        optimizer = rx.optimizers.Optimizer(optax.adam(5e-3), weights)
        accuracy = rx.metrics.SparseCategoricalAccuracy()

    def replica_step(pixels: jax.Array, labels: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(network(pixels), labels)
            return losses.sum() / GLOBAL_BATCH

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        optimizer.apply_gradients(gradients)
        return loss

    @rx.function
    def train_step(batch: Batch) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    @rx.function
    def test_step(batch: Batch) -> None:
        strategy.run(lambda x, y: accuracy.update_state(y, network(x)), args=batch)

    rows = rx.data.Dataset.from_tensor_slices(known).shuffle(len(known[1]), seed=0)
    training = strategy.experimental_distribute_dataset(rows.batch(GLOBAL_BATCH))
    rows = rx.data.Dataset.from_tensor_slices(unseen).batch(GLOBAL_BATCH)
    testing = strategy.experimental_distribute_dataset(rows)
    losses: list[float] = []
    speed = 0.0
    for _ in range(EPOCHS):
        start, steps = time.perf_counter(), len(losses)
        for batch in training:
            losses.append(float(train_step(batch)))
            after_step(len(losses), losses[-1])
        speed = max(speed, (len(losses) - steps) / (time.perf_counter() - start))
    for batch in testing:
        test_step(batch)
    found = float(accuracy.result())
    return Result(np.array(losses), found, speed, network)


def train_all(console: Console) -> dict[str, Result]:
    """Trains under every strategy, and shows how far each has come."""
    title = f"Digits, {EPOCHS} epochs, global batch {GLOBAL_BATCH}"
    with LiveTable(console, title, COLUMNS) as table:
        for name in STRATEGIES:
            table.set(name, "", "", "", "", bar(0.0, BAR_WIDTH))
        return {
            name: train_in_row(name, make(), table, console) for name, make in STRATEGIES.items()
        }


def train_in_row(name: str, strategy: rx.Strategy, table: LiveTable, console: Console) -> Result:
    """Trains under one strategy, and shows it in its row of the table."""
    steps = EPOCHS * -(-1437 // GLOBAL_BATCH)
    replicas = str(strategy.num_replicas_in_sync)
    begun: float | None = None

    def after_step(step: int, loss: float) -> None:
        nonlocal begun
        # The first step includes the compilation.
        begun = begun or time.perf_counter()
        speed = (step - 1) / max(1e-3, time.perf_counter() - begun)
        shown = f"{loss:.4f}", "", f"{speed:.0f}", bar(step / steps, BAR_WIDTH)
        table.set(name, replicas, *shown)
        if not console.is_terminal and step % 92 == 0:
            console.print(f"{name}: step {step}, loss {loss:.4f}")

    result = train(strategy, after_step)
    shown = f"{result.losses[-1]:.4f}", f"{result.accuracy:.1%}", f"{result.speed:.0f}"
    table.set(name, replicas, *shown, bar(1.0, BAR_WIDTH))
    return result


def move_checkpoint(saved: Network) -> float:
    """Saves a network, opens it under OneDevice, and returns its accuracy there."""
    _, (pixels, labels) = digits()
    with tempfile.TemporaryDirectory() as directory:
        path = rx.train.Checkpoint(network=saved).save(Path(directory) / "digits")
        with rx.OneDeviceStrategy("CPU:0").scope():
            network = Network()
            rx.train.Checkpoint(network=network).restore(path).assert_consumed()
            answers = np.argmax(network(pixels), axis=1)
    return float(np.mean(answers == labels))


def fit_keras(strategy: rx.Strategy) -> tuple[float, list[np.ndarray]]:
    """Fits a Keras model made in the scope of a strategy; returns its loss and its weights."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        parts = [keras.layers.Dense(64), keras.layers.BatchNormalization(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *parts])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    # Keras declares no types; pyright takes that of the default "auto".
    silent = cast("str", 0)
    history = model.fit(*digits()[0], batch_size=GLOBAL_BATCH, epochs=4, verbose=silent).history
    return history["loss"][-1], [np.asarray(variable.value) for variable in model.weights]


def draw(results: dict[str, Result], picture: Path) -> None:
    """Draws the losses, how far they are apart, and what the network read wrong."""
    first = next(iter(results.values()))
    figure = Figure(figsize=(16, 5), layout="constrained")
    figures = cast("np.ndarray", figure.subfigures(1, 3, width_ratios=(1, 1, 1.1)))
    left, middle, right = figures.flat
    curves, gaps = left.subplots(), middle.subplots()
    for i, (name, result) in enumerate(results.items()):
        width = 1.0 + 1.7 * (len(results) - 1 - i)  # each line thinner than the one below
        curves.plot(result.losses, label=name, linewidth=width, color=f"C{i}")
        so_far = np.maximum.accumulate(np.abs(result.losses - first.losses))
        gaps.plot(so_far, linewidth=width, color=f"C{i}")
    curves.set(title="Loss, one line on top of the other", xlabel="step", ylabel="loss")
    curves.legend()
    gaps.set(title="Largest difference from OneDevice so far", xlabel="step", ylabel="difference")
    gaps.set_yscale("symlog", linthresh=1e-8)
    gaps.set_ylim(0, 1e-4)
    _, (pixels, labels) = digits()
    answers = np.argmax(np.asarray(first.network(pixels)), axis=1)
    wrong = np.flatnonzero(answers != labels)
    right.suptitle(f"{len(wrong)} of {len(labels)} unseen digits misread: answer (truth)")
    for axes, i in zip(right.subplots(2, 5).flat, [*wrong, *[None] * 10], strict=False):
        axes.set_axis_off()
        if i is not None:
            axes.imshow(pixels[i].reshape(8, 8), cmap="gray_r")
            axes.set_title(f"{answers[i]} ({labels[i]})", fontsize="medium")
    worst = max(np.abs(result.losses - first.losses).max() for result in results.values())
    title = f"One program under {len(results)} strategies: all losses agree within {worst:.0e}"
    figure.suptitle(title, fontsize="x-large")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def play(console: Console, pictures: Path) -> None:
    """Trains under every strategy, and compares."""
    results = train_all(console)
    accuracy = move_checkpoint(results["Mirrored, 4 devices"].network)
    console.print(f"Checkpoint of 4 devices, opened on 1: {accuracy:.1%} of unseen digits right")
    (first, alone), (second, weights) = map(
        fit_keras, (rx.get_strategy(), rx.MirroredStrategy(["CPU:0", "CPU:1"]))
    )
    apart = max(np.abs(a - b).max() for a, b in zip(alone, weights, strict=True))
    console.print(
        f"Keras model.fit: loss {first:.4f} alone, {second:.4f} on 2 devices, "
        f"weights {apart:.0e} apart"
    )
    draw(results, pictures / PICTURE)
    console.print(f"Picture: {pictures / PICTURE}")
