"""What a test knows about the group of workers that runs it.

The battery (`battery.py`) runs the tests of tests/conformance in several processes at once, each of
which is a worker of one MultiWorkerMirroredStrategy. Tests that compare values of all replicas
collect them from all workers, over a connection that does not depend on the library.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import pickle
from multiprocessing.connection import Client, Connection
from typing import Any

import jax
import numpy as np

import replicax as rx

# The environment variable that describes the worker, as JSON of `Worker`.
VARIABLE = "REPLICAX_TEST_WORKER"
# The name of the strategy of all workers, among the strategies under test.
STRATEGY = "group"
# Longer than the hub waits, see battery.py.
_MOST_SECONDS = 200.0


@dataclasses.dataclass(frozen=True)
class Worker:
    """One process of a battery.

    Attributes:
      index: The number of this worker.
      workers: The number of all workers.
      devices: The number of devices of each worker.
      hub: The address of the parent process, which connects the workers.
      alone: Whether each worker has a MirroredStrategy of its own, to test the battery itself.
    """

    index: int
    workers: int
    devices: int
    hub: str
    alone: bool = False

    @property
    def num_replicas(self) -> int:
        """The number of replicas of the strategy under test."""
        return self.devices if self.alone else self.workers * self.devices

    def new_strategy(self) -> Any:
        """Returns the strategy under test."""
        if self.alone:
            return rx.MirroredStrategy([f"CPU:{i}" for i in range(self.devices)])
        return rx.MultiWorkerMirroredStrategy()

    @functools.cached_property
    def connection(self) -> Connection:
        """The connection to the parent process."""
        connection = Client(self.hub, family="AF_UNIX")
        connection.send(self.index)
        return connection

    def exchange(self, label: str, value: Any) -> list[Any]:
        """Returns the values of all workers, all of which make this call."""
        # The process of the battery has not imported the tests, which define types.
        self.connection.send(("exchange", label, pickle.dumps(value)))
        if not self.connection.poll(_MOST_SECONDS):
            raise TimeoutError(f"no reply about {label} from the process of the battery")
        found, error = self.connection.recv()
        if error:
            raise Disagreement(error)
        return [pickle.loads(other) for other in found]

    def report(self, kind: str, value: Any) -> None:
        """Tells the parent process something."""
        self.connection.send((kind, value))


class Disagreement(AssertionError):
    """The workers of a battery do not do the same."""


@functools.cache
def current() -> Worker | None:
    """Returns this worker; None if no battery has started this process."""
    described = os.environ.get(VARIABLE)
    return Worker(**json.loads(described)) if described else None


def spans_workers(strategy: Any) -> bool:
    """Whether other processes run some of the replicas."""
    worker = current()
    if worker is None or worker.alone:
        return False
    return isinstance(strategy, rx.MultiWorkerMirroredStrategy)


def local_ids(strategy: Any) -> list[int]:
    """Returns the numbers of the replicas of this process."""
    worker = current()
    if worker is None or not spans_workers(strategy):
        return list(range(strategy.num_replicas_in_sync))
    return [worker.index * worker.devices + i for i in range(worker.devices)]


def of_all_workers(strategy: Any, own: list[Any]) -> list[Any]:
    """Returns what the replicas of all workers have, given what those of this process have."""
    worker = current()
    if worker is None or not spans_workers(strategy):
        return list(own)
    lists = worker.exchange("values of all workers", [_on_host(v) for v in own])
    return [value for found in lists for value in found]


def replica_results(strategy: Any, value: Any) -> tuple[Any, ...]:
    """Returns the components of a value, one per replica of all workers, or a plain value.

    In one process these are the local results.
    """
    own = strategy.experimental_local_results(value)
    if not spans_workers(strategy):
        return own
    if not _is_distributed(value):
        same_on_all_workers(strategy, [_on_host(v) for v in own])
        return own
    assert len(own) == len(local_ids(strategy)), "local results are not those of local replicas"
    return tuple(of_all_workers(strategy, list(own)))


def same_on_all_workers(strategy: Any, value: Any) -> Any:
    """Returns a value, and fails if that of another worker differs."""
    worker = current()
    if worker is not None and spans_workers(strategy):
        found = worker.exchange("equal values", _on_host(value))
        for other in found[1:]:
            jax.tree.map(np.testing.assert_array_equal, found[0], other)
    return value


def _is_distributed(value: Any) -> bool:
    kinds = (rx.DistributedValues, rx.MirroredVariable, rx.SyncOnReadVariable)
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)


def _on_host(value: Any) -> Any:
    """Replaces arrays and variables by what another process can unpickle."""
    if isinstance(value, rx.Variable):
        return np.asarray(value.read_value())
    if isinstance(value, jax.Array):
        return np.asarray(value)
    if isinstance(value, dict):
        # JAX would sort the keys.
        made = copy.copy(value)
        made.update((key, _on_host(own)) for key, own in value.items())
        return made
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda leaf: leaf is not value)
    if jax.tree_util.treedef_is_leaf(structure):
        return value
    return jax.tree.unflatten(structure, [_on_host(leaf) for leaf in leaves])
