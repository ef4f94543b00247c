"""One small training program, run unchanged under every strategy.

Two spirals are told apart by a small network. The global batch is the same for all
strategies, so all of them must learn the same thing; out/demo.png shows that they do.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

PICTURE = Path(__file__).resolve().parent.parent / "out" / "demo.png"
GLOBAL_BATCH, STEPS, RATE, MOMENTUM = 256, 600, 0.05, 0.9

STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "OneDevice": lambda: rx.OneDeviceStrategy("CPU:0"),
    "Mirrored, 2 devices": lambda: rx.MirroredStrategy(["CPU:0", "CPU:1"]),
    "Mirrored, 4 devices": lambda: rx.MirroredStrategy([f"CPU:{i}" for i in range(4)]),
    "Mirrored, 8 virtual replicas": lambda: rx.MirroredStrategy(["CPU:0"], virtual_replicas=8),
    "CentralStorage, 2 devices": lambda: rx.CentralStorageStrategy(["CPU:0", "CPU:1"]),
}


class Network(rx.Module):
    """Two hidden layers; its output is above 0 for points of the first spiral."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(1)
        self.layers = []
        for inputs, outputs in ((2, 64), (64, 64), (64, 1)):
            weight = rng.normal(0.0, 2.0 / inputs**0.5, (inputs, outputs)).astype(np.float32)
            self.layers.append((rx.Variable(weight), rx.Variable(jnp.zeros(outputs))))

    def __call__(self, points: Any) -> Any:
        *hidden, (weight, bias) = self.layers
        for w, b in hidden:
            points = jnp.tanh(points @ w.value() + b.value())
        return (points @ weight.value() + bias.value())[:, 0]


@dataclasses.dataclass
class Result:
    """What training under one strategy came to."""

    replicas: int
    losses: np.ndarray
    accuracy: float
    speed: float
    network: Network


def spirals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns noisy points on two interleaved spirals, and which spiral each is on."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    radius = np.sqrt(rng.uniform(0.01, 1.0, count))
    angle = 3 * np.pi * radius + np.pi * labels
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1) * radius[:, None]
    points += rng.normal(0.0, 0.05, points.shape)
    return points.astype(np.float32), labels.astype(np.float32)


def train(strategy: rx.Strategy, after_step: Callable[[int, float], None]) -> Result:
    """Trains a network; nothing in here depends on which strategy it is."""
    points, labels = spirals(4096, seed=0)
    with strategy.scope():
        network = Network()
        weights = network.trainable_variables
        velocities = [rx.Variable(jnp.zeros(w.shape), trainable=False) for w in weights]

    def replica_step(points: Any, labels: Any) -> Any:
        def loss_fn() -> Any:
            margins = network(points) * (2 * labels - 1)
            return jnp.sum(jax.nn.softplus(-margins)) / GLOBAL_BATCH

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        context = rx.get_replica_context()
        gradients = context.all_reduce("SUM", gradients)
        for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
            context.update(velocity, lambda v, g: v.assign(MOMENTUM * v + g), args=(gradient,))
            context.update(weight, lambda w, v: w.assign_sub(RATE * v), args=(velocity.value(),))
        return loss

    @rx.function
    def train_step(points: Any, labels: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, (points, labels)), axis=None)

    def share(context: Any) -> Any:
        own = np.split(chosen, context.num_replicas_in_sync)[context.replica_id_in_sync_group]
        return points[own], labels[own]

    rng, losses, start = np.random.default_rng(2), [], 0.0
    for step in range(STEPS):
        chosen = rng.choice(len(points), GLOBAL_BATCH, replace=False)
        batch = strategy.experimental_distribute_values_from_function(share)
        losses.append(float(train_step(*batch)))
        after_step(step, losses[-1])
        start = start or time.perf_counter()  # after the first step, which compiles
    speed = (STEPS - 1) / (time.perf_counter() - start)
    unseen, truth = spirals(2000, seed=3)
    accuracy = float(np.mean((np.asarray(network(unseen)) > 0) == (truth > 0)))
    return Result(strategy.num_replicas_in_sync, np.array(losses), accuracy, speed, network)


def train_all(console: Console) -> dict[str, Result]:
    """Trains under every strategy: with a bar on a terminal, with plain lines elsewhere."""
    results: dict[str, Result] = {}
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=STEPS * len(STRATEGIES))
        for name, make in STRATEGIES.items():

            def after_step(step: int, loss: float, name: str = name) -> None:
                progress.update(bar, advance=1, description=f"{name}, loss {loss:.4f}")
                if not console.is_terminal and (step + 1) % 200 == 0:
                    console.print(f"{name}: step {step + 1}, loss {loss:.4f}")

            results[name] = train(make(), after_step)
    return results


def draw(results: dict[str, Result]) -> None:
    """Draws the losses, how far they are from those of the first strategy, and the network."""
    first = next(iter(results.values()))
    figure = Figure(figsize=(15, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for i, (name, result) in enumerate(results.items()):
        width = 1.0 + 1.7 * (len(results) - 1 - i)  # each line thinner than the one below
        left.plot(result.losses, label=name, linewidth=width, color=f"C{i}")
        so_far = np.maximum.accumulate(np.abs(result.losses - first.losses))
        middle.plot(so_far, linewidth=width, color=f"C{i}")
    left.set(title="Loss, one line on top of the other", xlabel="step", ylabel="loss")
    left.legend()
    middle.set(title="Largest difference to OneDevice so far", xlabel="step", ylabel="difference")
    middle.set_yscale("symlog", linthresh=1e-8)
    middle.set_ylim(0, 1e-4)
    grid = np.linspace(-1.15, 1.15, 200, dtype=np.float32)
    mesh = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    chances = jax.nn.sigmoid(first.network(mesh)).reshape(200, 200)
    right.contourf(grid, grid, chances, levels=20, cmap="RdBu", alpha=0.45)
    right.contour(grid, grid, chances, levels=[0.5], colors="black")
    points, labels = spirals(600, seed=3)
    right.scatter(*points.T, c=labels, cmap="bwr_r", s=16, edgecolors="white", linewidths=0.5)
    right.set(title="Decision boundary, unseen points", xlabel="x", ylabel="y", aspect="equal")
    worst = max(np.abs(result.losses - first.losses).max() for result in results.values())
    title = f"One program under {len(results)} strategies: all losses agree within {worst:.0e}"
    figure.suptitle(title, fontsize="x-large")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    console = Console()
    results = train_all(console)
    table = Table(title=f"{STEPS} steps of {GLOBAL_BATCH} examples")
    for column in ("strategy", "replicas", "loss", "accuracy", "steps/s"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name, result in results.items():
        numbers = f"{result.losses[-1]:.4f}", f"{result.accuracy:.1%}", f"{result.speed:.0f}"
        table.add_row(name, str(result.replicas), *numbers)
    console.print(table)
    draw(results)
    console.print(f"Picture: {PICTURE.relative_to(PICTURE.parent.parent)}")


if __name__ == "__main__":
    main()
