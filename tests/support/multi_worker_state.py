"""A program with state of every kind, for checkpoints of several workers."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import replicax as rx

ROWS, BATCH = 64, 8


class Training:
    """Variables of every kind, an optimizer, a metric, a key and a dataset of a strategy.

    Every step takes the next batch; what it adds up does not depend on the number of replicas.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        on_read = rx.VariableSynchronization.ON_READ
        with strategy.scope():
            self.w = rx.Variable(np.arange(4.0, dtype=np.float32), name="w")
            self.total = rx.Variable(
                0.0, synchronization=on_read, aggregation=rx.VariableAggregation.SUM
            )
            self.large = rx.Variable(
                np.zeros((200, 100), np.float32),
                synchronization=on_read,
                aggregation=rx.VariableAggregation.SUM,
            )
            self.optimizer = rx.optimizers.Optimizer(optax.adam(0.1), [self.w])
            self.mean = rx.metrics.Mean()
        data = rx.data.Dataset.range(ROWS).batch(BATCH)
        self.iterator = iter(strategy.experimental_distribute_dataset(data))
        self.checkpoint = rx.train.Checkpoint(
            w=self.w,
            total=self.total,
            large=self.large,
            optimizer=self.optimizer,
            mean=self.mean,
            iterator=self.iterator,
            key=jax.random.key(0),
            epoch=0,
        )
        self._step = rx.function(self._train)

    def _train(self, iterator: Any) -> None:
        def replica_step(x: Any) -> None:
            rows = x.astype("float32")
            self.total.assign_add(rows.sum())
            self.large.assign_add(rows.sum() * np.ones((200, 100), np.float32))
            self.mean.update_state(rows)
            gradient = rows.sum() / BATCH * np.ones(self.w.shape, np.float32)
            self.optimizer.apply_gradients([(gradient, self.w)])

        self.strategy.run(replica_step, args=(next(iterator),))

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._step(self.iterator)
            self.checkpoint.epoch += 1
            self.checkpoint.key = jax.random.split(self.checkpoint.key)[0]

    def spoil(self) -> None:
        """Changes what a restore must bring back."""
        self.w.assign(self.w.read_value() * 0 - 1)
        self.total.assign(-1.0)
        self.mean.reset_state()
        self.checkpoint.epoch = -1

    def facts(self) -> dict[str, Any]:
        """Returns the state, as plain values that can be compared."""
        return {
            "w": np.asarray(self.w.read_value()).tolist(),
            "total": float(self.total.read_value()),
            "large": float(np.asarray(self.large.read_value()).sum()),
            "mean": float(self.mean.result()),
            "iterations": int(self.optimizer.iterations),
            "key": jax.random.key_data(self.checkpoint.key).tolist(),
            "epoch": self.checkpoint.epoch,
        }

    def rest(self) -> list[int]:
        """Returns the rows of this process that are left."""
        found: list[int] = []
        for batch in self.iterator:
            for part in self.strategy.experimental_local_results(batch):
                found += np.asarray(part).tolist()
        return found


def on_workers() -> Training:
    """Returns a program of the workers of a cluster."""
    return Training(rx.MultiWorkerMirroredStrategy())


# The type, the text and the `errno` of an error.
Failure = tuple[str, str, int | None]


@contextlib.contextmanager
def caught(into: list[Failure], *kinds: type[Exception]) -> Iterator[None]:
    """Catches an error of the given kinds, which must be raised."""
    try:
        yield
    except kinds as error:
        into.append((type(error).__name__, str(error), getattr(error, "errno", None)))
    else:
        raise AssertionError(f"none of {kinds} was raised")


@contextlib.contextmanager
def small_files(is_here: bool, most_bytes: int = 1024) -> Iterator[None]:
    """Makes the kernel refuse larger files to this process: a write fails with EFBIG."""
    if not is_here:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def index_of_worker() -> int:
    return int(rx.cluster_resolver.TFConfigClusterResolver().task_id or 0)


def names_in(directory: str | os.PathLike[str]) -> list[str]:
    return sorted(entry.name for entry in Path(directory).iterdir() if entry.name[0] != ".")
