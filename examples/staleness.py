"""What staleness costs, and what it buys: one problem under every consistency.

Four workers, one of them slow, learn to tell handwritten digits apart (scikit-learn's, 8 by 8
pixels), each time for as many seconds. A worker that computes for long sends a gradient of
values that others have changed since. How much is lost by that, per step and per second, is in
the picture, together with the staleness that the servers have measured.

    python examples/staleness.py --picture out/staleness.png
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import replicax as rx

# How long a step takes on each worker, at least.
PAUSES_S = (0.015, 0.015, 0.03, 0.12)
BATCH, TEST = 32, 360
# As high as gradients of old values just allow; fresh ones would allow more.
RATE, MOMENTUM = 0.045, 0.9
# Steps that wait for a worker.
AHEAD = 40

MODES: dict[str, dict[str, Any]] = {
    "sync": {"consistency": "sync"},
    "sync, 1 backup worker": {"consistency": "sync", "backup_workers": 1},
    "Staleness(0)": {"consistency": rx.Staleness(0)},
    "Staleness(4)": {"consistency": rx.Staleness(4)},
    "Staleness(16)": {"consistency": rx.Staleness(16)},
    "async": {"consistency": "async"},
}


@dataclasses.dataclass
class Run:
    """What was seen of one training: when, after how many updates, and how good it was then."""

    seconds: np.ndarray
    updates: np.ndarray
    losses: np.ndarray
    accuracies: np.ndarray
    mean_staleness: float
    max_staleness: int

    @property
    def rate(self) -> float:
        """Updates per second."""
        return float(self.updates[-1] / self.seconds[-1])


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int32)


def dataset_fn() -> rx.data.Dataset:
    """Called on each worker."""
    pixels, labels = digits()
    dataset = rx.data.Dataset.from_tensor_slices((pixels[:-TEST], labels[:-TEST]))
    return dataset.shuffle(2000).repeat().batch(BATCH)


def slowly(pixels: Any) -> Any:
    """Makes a compiled step take as long as it is to take on this worker."""
    seconds = PAUSES_S[rx.coordinator.experimental_get_current_worker_index()]

    def wait(array: Any) -> Any:
        time.sleep(seconds)
        return array

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(pixels.shape, pixels.dtype), pixels)


def judge(weights: list[np.ndarray]) -> tuple[float, float]:
    """Returns loss and accuracy on the held-out digits."""
    pixels, labels = (array[-TEST:] for array in digits())
    w1, b1, w2, b2 = weights
    with np.errstate(all="ignore"):
        scores = np.maximum(pixels @ w1 + b1, 0) @ w2 + b2
        scores = scores - scores.max(axis=1, keepdims=True)
        right = scores[np.arange(TEST), labels]
        loss = np.mean(np.log(np.exp(scores).sum(axis=1)) - right)
    return float(loss), float(np.mean(scores.argmax(axis=1) == labels))


def train(cluster: Any, seconds: float, **options: Any) -> Run:
    """Trains for some seconds, and looks at the weights on the way."""
    strategy = rx.ParameterServerStrategy(cluster.resolver, **options)
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    rng = np.random.default_rng(1)
    with strategy.scope():
        weights = [
            rx.Variable((rng.normal(0, scale, shape)).astype(np.float32))
            for shape, scale in (((64, 64), 0.15), (64, 0), ((64, 10), 0.15), (10, 0))
        ]
        optimizer = rx.optimizers.Optimizer(optax.sgd(RATE, MOMENTUM), weights)

    @rx.function
    def step(iterator: Any) -> None:
        pixels, labels = next(iterator)
        pixels = slowly(pixels)  # after the weights were read, before they are changed

        def loss_fn() -> Any:
            w1, b1, w2, b2 = (weight.value() for weight in weights)
            scores = jax.nn.relu(pixels @ w1 + b1) @ w2 + b2
            return optax.losses.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        optimizer.apply_gradients(rx.grad(loss_fn, weights)())

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    initial = [weight.numpy() for weight in weights]
    for _ in range(2 * len(PAUSES_S)):  # every worker compiles
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    for weight, value in zip(weights, initial, strict=True):
        weight.assign(value)
    seen: list[tuple[float, int, list[np.ndarray]]] = [(0.0, 0, initial)]
    first, begun_s = int(optimizer.iterations), time.monotonic()
    while seen[-1][0] < seconds:
        for _ in range(AHEAD - coordinator.status().num_queued):
            coordinator.schedule(step, args=(iterator,))
        found = [weight.numpy() for weight in weights]
        seen.append((time.monotonic() - begun_s, int(optimizer.iterations) - first, found))
        time.sleep(0.04)
    coordinator.join()
    time.sleep(1.0)  # servers tell what they have measured with their next beat
    status = coordinator.status()
    coordinator.close()
    strategy.close()
    times, updates, found = zip(*seen, strict=True)
    losses, accuracies = zip(*map(judge, found), strict=True)
    return Run(
        np.array(times),
        np.array(updates),
        np.array(losses),
        np.array(accuracies),
        status.mean_staleness,
        status.max_staleness,
    )


def smooth(losses: np.ndarray, width: int = 9) -> np.ndarray:
    """Returns the means of neighbours, so that lines can be told apart; both ends stay."""
    count = len(losses)
    halves = [min(width // 2, i, count - 1 - i) for i in range(count)]
    return np.array([losses[i - h : i + h + 1].mean() for i, h in enumerate(halves)])


def draw(runs: dict[str, Run], picture: Path) -> None:
    """Draws the loss against updates and against seconds, and what the servers have measured."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    by_update, by_second, bars = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    for i, (name, run) in enumerate(runs.items()):
        label = f"{name}: {run.accuracies[-10:].mean():.0%} right in the end"
        for axes, where in ((by_update, run.updates), (by_second, run.seconds)):
            axes.plot(where, run.losses, color=f"C{i}", alpha=0.2, linewidth=1)
            axes.plot(where, smooth(run.losses), color=f"C{i}", label=label, linewidth=2)
        bars.barh(i, run.max_staleness, color=f"C{i}", alpha=0.35)
        bars.barh(i, run.mean_staleness, color=f"C{i}")
        text = f"  {run.mean_staleness:.1f}, at most {run.max_staleness};  {run.rate:.0f} updates/s"
        bars.text(run.max_staleness, i, text, va="center")
    by_update.set_xlim(0, min(300, max(run.updates[-1] for run in runs.values())))
    by_update.set(title="Per update, fresh gradients learn more", xlabel="updates")
    by_second.set(title="Per second, waiting workers make fewer updates", xlabel="seconds")
    for axes in (by_update, by_second):
        axes.set(yscale="log", ylabel="loss on unseen digits")
    by_second.legend(fontsize="small")
    bars.set_yticks(range(len(runs)), list(runs))
    bars.invert_yaxis()
    bars.set_xlim(0, 2.2 * max(4, *(run.max_staleness for run in runs.values())))
    bars.set(title="Staleness as measured: mean (dark), largest (light)", xlabel="steps of others")
    pauses = ", ".join(f"{1000 * pause:.0f}" for pause in PAUSES_S)
    figure.suptitle(f"Four workers whose steps take {pauses} ms", fontsize="x-large")
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains under every consistency.")
    parser.add_argument("--seconds", type=float, default=12.0, help="for each of them")
    parser.add_argument("--picture", type=Path, default=Path("out/staleness.png"))
    parser.add_argument("modes", nargs="*", help=f"some of: {', '.join(MODES)}")
    options = parser.parse_args()
    runs: dict[str, Run] = {}
    with rx.testing.LocalCluster(workers=len(PAUSES_S), ps=1, timing="fast") as cluster:
        for name in options.modes or MODES:
            runs[name] = run = train(cluster, options.seconds, **MODES[name])
            print(
                f"{name}: {run.rate:.0f} updates/s, staleness {run.mean_staleness:.1f} on average, "
                f"{run.max_staleness} at most, loss {run.losses[-1]:.3f}, "
                f"{run.accuracies[-1]:.1%} right",
                flush=True,
            )
    draw(runs, options.picture)
    print(f"Picture: {options.picture}")


if __name__ == "__main__":
    main()
