"""Trains a model under the strategy that config.toml names.

    python train.py                          # as config.toml says
    python train.py --strategy one_device    # another strategy, the same program
    pytest                                   # every strategy, for a few steps

Replace `Model` and `make_dataset` by your own. In a cluster, start this file as every task, each
with its own TF_CONFIG: "multi_worker" and "parameter_server" then use the tasks that it lists.
Without TF_CONFIG, both start their tasks on this machine.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

Batch = tuple[jax.Array, jax.Array]
LOCAL_STRATEGIES = ("one_device", "mirrored", "virtual", "central_storage")
STRATEGIES = (*LOCAL_STRATEGIES, "multi_worker", "parameter_server")


class Config:
    """What config.toml says; the file explains each setting."""

    def __init__(self, path: Path, strategy: str | None = None, epochs: int | None = None) -> None:
        settings = tomllib.loads(path.read_text())
        self.strategy: str = strategy or settings["strategy"]
        self.virtual_cpu_devices: int = settings["virtual_cpu_devices"]
        self.virtual_replicas: int = settings["virtual_replicas"]
        self.workers: int = settings["workers"]
        self.parameter_servers: int = settings["parameter_servers"]
        self.global_batch: int = settings["global_batch"]
        self.learning_rate: float = settings["learning_rate"]
        self.epochs: int = epochs or settings["epochs"]
        self.steps_per_epoch: int = settings["steps_per_epoch"]
        self.checkpoints = settings["checkpoints"]


class Model(rx.Module):
    """One hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        normal = jax.nn.initializers.he_normal()
        # Functions, so that parameter servers make the values of what they keep.
        self.w1 = rx.Variable(lambda: normal(jax.random.key(1), (2, 32)), name="w1")
        self.b1 = rx.Variable(np.zeros(32, np.float32), name="b1")
        self.w2 = rx.Variable(lambda: normal(jax.random.key(2), (32, 2)), name="w2")

    def __call__(self, points: jax.Array) -> jax.Array:
        return jax.nn.relu(points @ self.w1.value() + self.b1.value()) @ self.w2.value()


def make_points(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns points in a square, and whether each lies in a circle."""
    points = np.random.default_rng(seed).uniform(-1, 1, (count, 2)).astype(np.float32)
    return points, (np.sum(points**2, axis=1) < 0.6).astype(np.int32)


def make_dataset(global_batch: int) -> rx.data.Dataset:
    """Returns the whole dataset, in global batches; strategies give each replica its part."""
    rows = rx.data.Dataset.from_tensor_slices(make_points(seed=0, count=4096))
    return rows.shuffle(4096, seed=0).repeat().batch(global_batch)


class Training:
    """Model, optimizer and steps, made in the scope of a strategy."""

    def __init__(self, strategy: rx.Strategy, config: Config) -> None:
        self.strategy, self.config = strategy, config
        with strategy.scope():
            self.model = Model()
            self.weights = list(self.model.trainable_variables)
            self.optimizer = rx.optimizers.Optimizer(optax.adam(config.learning_rate), self.weights)

        def replica_step(points: jax.Array, labels: jax.Array) -> jax.Array:
            def loss_fn() -> jax.Array:
                losses = optax.losses.softmax_cross_entropy_with_integer_labels(
                    self.model(points), labels
                )
                return rx.nn.compute_average_loss(losses, global_batch_size=config.global_batch)

            loss, gradients = rx.value_and_grad(loss_fn, self.weights)()
            self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
            return loss

        @rx.function
        def step(batch: Batch) -> jax.Array:
            return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

        @rx.function
        def step_on_worker(iterator: Iterator[Batch]) -> jax.Array:
            return strategy.run(replica_step, args=next(iterator))

        self.step, self.step_on_worker = step, step_on_worker

    def checkpoint_manager(self, **others: object) -> rx.train.CheckpointManager:
        """Returns what saves to the directory of the config, and restores from it."""
        checkpoint = rx.train.Checkpoint(model=self.model, optimizer=self.optimizer, **others)
        return rx.train.CheckpointManager(checkpoint, self.config.checkpoints, max_to_keep=2)

    def first_epoch(self) -> int:
        """Returns the number of epochs that the restored checkpoint has behind it."""
        done = int(self.optimizer.iterations) // self.config.steps_per_epoch
        print(f"{done} of {self.config.epochs} epochs are done", flush=True)
        return done


def report(epoch: int, loss: float, answers: np.ndarray, labels: np.ndarray) -> float:
    """Prints a line for an epoch; returns the accuracy on points that were not trained on."""
    accuracy = float(np.mean(np.argmax(answers, axis=1) == labels))
    print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.3f}", flush=True)
    return accuracy


def train(strategy: rx.Strategy, config: Config) -> float:
    """Trains replicas in lock step: one device, many devices, or many workers."""
    training = Training(strategy, config)
    dataset = make_dataset(config.global_batch)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    points, labels = make_points(seed=1, count=1000)
    accuracy = 0.0
    # With the position of the data, so that a run that was stopped goes on with the next batch.
    with training.checkpoint_manager(iterator=iterator) as manager:
        manager.restore_or_initialize()
        for epoch in range(training.first_epoch(), config.epochs):
            loss = 0.0
            for _ in range(config.steps_per_epoch):
                loss = float(training.step(next(iterator)))
            manager.save()
            accuracy = report(epoch, loss, np.asarray(training.model(jnp.asarray(points))), labels)
    iterator.close()
    return accuracy


def train_on_parameter_servers(
    resolver: rx.cluster_resolver.ClusterResolver, config: Config
) -> float:
    """Schedules steps on workers; variables are on parameter servers. A worker may be lost."""
    strategy = rx.ParameterServerStrategy(resolver)
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    training = Training(strategy, config)
    dataset = coordinator.create_per_worker_dataset(lambda: make_dataset(config.global_batch))
    iterator = iter(dataset)
    points, labels = make_points(seed=1, count=1000)
    accuracy = 0.0
    with training.checkpoint_manager() as manager:
        manager.restore_or_initialize()
        for epoch in range(training.first_epoch(), config.epochs):
            losses = [
                coordinator.schedule(training.step_on_worker, args=(iterator,))
                for _ in range(config.steps_per_epoch)
            ]
            coordinator.join()
            manager.save()
            answers = coordinator.schedule(training.model, args=(points,)).fetch()
            accuracy = report(epoch, float(losses[-1].fetch()), np.asarray(answers), labels)
    coordinator.close()
    strategy.close()
    return accuracy


def make_strategy(config: Config) -> rx.Strategy:
    """Returns the strategy that the config names, on the devices of this machine."""
    if config.strategy == "one_device":
        return rx.OneDeviceStrategy(jax.devices()[0])
    if config.strategy == "mirrored":
        return rx.MirroredStrategy()
    if config.strategy == "virtual":
        return rx.MirroredStrategy(jax.devices()[:1], virtual_replicas=config.virtual_replicas)
    if config.strategy == "central_storage":
        return rx.CentralStorageStrategy()
    raise SystemExit(f"config.toml: strategy must be one of {', '.join(STRATEGIES)}")


def train_as_worker(config: Config) -> float:
    """Trains as one of several workers, in lock step with the others."""
    # First of all: it joins the other workers, and raises if one of them is missing.
    return train(rx.MultiWorkerMirroredStrategy(), config)


def main(config: Config) -> float:
    """Trains as the config and TF_CONFIG say; returns the accuracy."""
    task = rx.cluster_resolver.TFConfigClusterResolver()
    if config.strategy == "multi_worker":
        if task.task_type is not None:
            return train_as_worker(config)
        with rx.testing.LocalCluster(workers=config.workers, ps=0) as cluster:
            accuracies = cluster.run(train_as_worker, args=(config,))
            print(cluster.logs("worker", 0))
            return accuracies[0]
    if config.strategy == "parameter_server":
        if task.task_type in ("worker", "ps"):
            rx.Server(task.cluster_spec(), job_name=task.task_type, task_index=task.task_id).join()
        if task.task_type is not None:
            return train_on_parameter_servers(task, config)
        with rx.testing.LocalCluster(config.workers, config.parameter_servers) as cluster:
            return train_on_parameter_servers(cluster.resolver, config)
    rx.set_virtual_cpu_devices(config.virtual_cpu_devices)
    return train(make_strategy(config), config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains under the strategy of config.toml.")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("config.toml"))
    parser.add_argument("--strategy", choices=STRATEGIES, help="instead of the config's")
    parser.add_argument("--epochs", type=int, help="instead of the config's")
    options = parser.parse_args()
    main(Config(options.config, options.strategy, options.epochs))
