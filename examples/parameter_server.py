"""Training with parameter servers: one file that plays every role of a cluster.

On one machine it starts workers and parameter servers by itself:

    python examples/parameter_server.py

In a cluster, start it as every task, each with its own TF_CONFIG, in any order. The chief trains
and ends; workers and parameter servers serve until they are stopped. With --directory, a chief
that is started again goes on after the last epoch that was saved.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import replicax as rx

BATCH, STEPS_PER_EPOCH = 64, 60


class Network(rx.Module):
    def __init__(self) -> None:
        super().__init__()
        normal = jax.nn.initializers.he_normal()
        # Functions, so that the values are made on the servers that keep them.
        self.w1 = rx.Variable(lambda: normal(jax.random.key(1), (64, 128)), name="w1")
        self.w2 = rx.Variable(lambda: normal(jax.random.key(2), (128, 10)), name="w2")
        self.b = rx.Variable(np.zeros(128, np.float32), name="b")

    def __call__(self, pixels: Any) -> Any:
        return jax.nn.relu(pixels @ self.w1.value() + self.b.value()) @ self.w2.value()


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int32)


def dataset_fn() -> rx.data.Dataset:
    """Called on each worker, and again on one that comes back. The last 360 digits are kept."""
    pixels, labels = digits()
    dataset = rx.data.Dataset.from_tensor_slices((pixels[:-360], labels[:-360]))
    return dataset.shuffle(2000).repeat().batch(BATCH)


def train(resolver: Any, directory: str, num_epochs: int) -> None:
    """The coordinator: makes variables and datasets, schedules steps, saves checkpoints."""
    num_ps = resolver.cluster_spec().num_tasks("ps")
    # Parts of 4 KiB or more, at most one per server: the first matrix is cut, the others are not.
    partitioner = rx.experimental.partitioners.MinSizePartitioner(4 << 10, max_shards=num_ps)
    strategy = rx.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    dataset = coordinator.create_per_worker_dataset(dataset_fn)

    with strategy.scope():
        network = Network()
        weights = [network.w1, network.w2, network.b]
        optimizer = rx.optimizers.Optimizer(optax.adam(3e-3), weights)
        mean_loss = rx.metrics.Mean("loss")
    checkpoint = rx.train.Checkpoint(network=network, optimizer=optimizer)
    manager = rx.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    manager.restore_or_initialize()
    initial_epoch = int(optimizer.iterations) // STEPS_PER_EPOCH
    print(f"starts with epoch {initial_epoch + 1}", flush=True)

    @rx.function
    def worker_fn(iterator: Any) -> None:
        def replica_fn(pixels: Any, labels: Any) -> None:
            def loss_fn() -> Any:
                return optax.losses.softmax_cross_entropy_with_integer_labels(
                    network(pixels), labels
                ).mean()

            loss, gradients = rx.value_and_grad(loss_fn, weights)()
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            mean_loss.update_state(loss)

        strategy.run(replica_fn, args=next(iterator))

    pixels, labels = (array[-360:] for array in digits())
    for epoch in range(initial_epoch, num_epochs):
        iterator = iter(dataset)
        for _ in range(STEPS_PER_EPOCH):
            coordinator.schedule(worker_fn, args=(iterator,))  # returns at once
        coordinator.join()
        manager.save()
        # Any function can be scheduled; `fetch` waits for its result.
        found = coordinator.schedule(lambda: network(pixels).argmax(axis=1)).fetch()
        right = np.mean(found == labels)
        print(f"epoch {epoch + 1}: loss {mean_loss.result():.3f}, accuracy {right:.3f}", flush=True)
        mean_loss.reset_state()
    print(f"{int(optimizer.iterations)} steps are in the model", flush=True)
    manager.close()
    coordinator.close()
    strategy.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains with parameter servers.")
    parser.add_argument("--directory", help="where checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    task = rx.cluster_resolver.TFConfigClusterResolver()
    if task.task_type in ("worker", "ps"):
        rx.Server(task.cluster_spec(), job_name=task.task_type, task_index=task.task_id).join()
    with tempfile.TemporaryDirectory() as temporary:
        if task.task_type == "chief":
            train(task, options.directory or temporary, options.epochs)
        elif task.task_type is None:
            with rx.testing.LocalCluster(workers=2, ps=2) as cluster:
                train(cluster.resolver, options.directory or temporary, options.epochs)
