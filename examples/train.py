"""One program for every cluster: handwritten digits, on as many workers as there are.

It runs unchanged by itself, in lock step on several workers, with parameter servers, and on other
machines; the launcher decides, and the result is the same up to rounding:

    python examples/train.py
    replicax run --workers 2 examples/train.py
    replicax run --workers 2 --ps 1 examples/train.py
    replicax run --workers 2 --hosts node1,node2 examples/train.py --directory /shared/digits

With --directory, a group that lost a worker goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import replicax as rx

# Of all workers together; it can be divided by 1, 2, 3, 4 and 6.
GLOBAL_BATCH = 48


class Network(rx.Module):
    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(1)
        self.w1 = rx.Variable(random.normal(0, 0.12, (64, 64)).astype(np.float32))
        self.w2 = rx.Variable(random.normal(0, 0.12, (64, 10)).astype(np.float32))

    def __call__(self, pixels: Any) -> Any:
        return jax.nn.relu(pixels @ self.w1.value()) @ self.w2.value()


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int32)


def batches() -> rx.data.Dataset:
    """The same batches in the same order wherever they are read; the last 360 digits are kept."""
    pixels, labels = digits()
    dataset = rx.data.Dataset.from_tensor_slices((pixels[:-360], labels[:-360]))
    return dataset.shuffle(2000, seed=0).repeat().batch(GLOBAL_BATCH, drop_remainder=True)


def restored(checkpoint: rx.train.Checkpoint, directory: str | None) -> Any:
    if directory is None:
        return None
    manager = rx.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    manager.restore_or_initialize()
    return manager


def judged(network: Network) -> str:
    pixels, labels = (array[-360:] for array in digits())
    w1, w2 = network.w1.numpy(), network.w2.numpy()
    right = np.mean(np.argmax(np.maximum(pixels @ w1, 0) @ w2, axis=1) == labels)
    norm = np.sqrt(np.square(w1).sum() + np.square(w2).sum())
    return f"{right:.1%} of unseen digits are read right; norm of the weights {norm:.5f}"


def main(num_steps: int, directory: str | None, save_every: int) -> None:
    # First of all: it joins the other workers. Steps of parameter servers wait for each other here,
    # so that they compute what a group in lock step computes; "async" is faster.
    strategy = rx.strategy_from_environment(parameter_servers={"consistency": "sync"})
    with strategy.scope():
        network = Network()
        weights = [network.w1, network.w2]
        optimizer = rx.optimizers.Optimizer(optax.adam(3e-3), weights)

    def replica_step(pixels: Any, labels: Any) -> Any:
        def loss_fn() -> Any:
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(network(pixels), labels)
            return losses.mean() / strategy.num_replicas_in_sync

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    @rx.function
    def train_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    manager = restored(rx.train.Checkpoint(network=network, optimizer=optimizer), directory)
    first = int(optimizer.iterations)

    is_chief = strategy.extended.should_checkpoint
    if is_chief:
        print(f"{type(strategy).__name__} starts at step {first}", flush=True)
    dataset = batches().skip(first).take(num_steps - first)
    for step, loss in enumerate(losses_of(strategy, train_step, dataset), start=first + 1):
        if manager is not None and step % save_every == 0:
            manager.save(checkpoint_number=step)
        if is_chief and (step % 50 == 0 or step == num_steps):
            print(f"step {step}: loss {loss:.4f}", flush=True)
    if is_chief:
        print(judged(network), flush=True)
    if manager is not None:
        manager.close()


def losses_of(strategy: rx.Strategy, train_step: Any, dataset: rx.data.Dataset) -> Any:
    """Runs a step for each batch, and yields its loss."""
    if not isinstance(strategy, rx.ParameterServerStrategy):
        for batch in strategy.experimental_distribute_dataset(dataset):
            yield float(train_step(batch))
        return
    # The coordinator gives each worker its part of a batch, and waits for all of them.
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    num_workers = len(strategy.extended.worker_devices)
    for batch in dataset:
        parts = zip(*(np.array_split(array, num_workers) for array in batch), strict=True)
        losses = [coordinator.schedule(train_step, args=(part,)) for part in parts]
        coordinator.join()
        yield float(np.mean([loss.fetch() for loss in losses]))
    coordinator.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains on any cluster.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--directory", help="where all workers find checkpoints")
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()
    main(options.steps, options.directory, options.save_every)
