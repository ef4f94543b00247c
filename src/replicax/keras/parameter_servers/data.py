"""Data of `fit` that the coordinator sends with the steps, or that each worker reads itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.contexts.worker_index import experimental_get_current_worker_index
from replicax.coordinator.cluster_coordinator import ClusterCoordinator
from replicax.coordinator.per_worker import PerWorkerIterator
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input.input_context import InputContext, InputOptions
from replicax.keras import internals
from replicax.tracing.signature import PerReplicaSpec, TensorSpec


class DatasetCreator:
    """Makes a dataset on each worker, for `fit` and `evaluate` with parameter servers.

    Shuffle and repeat the dataset, and pass `steps_per_epoch`: a step reads the next batch of the
    worker that runs it, and workers go at their own pace. A function can be passed to `fit` as it
    is, too.

    Args:
      dataset_fn: A function that returns a dataset of batches; it may take an
        `rx.InputContext`, with the index of the worker and the number of workers.
      input_options: Accepted for portability.
    """

    def __init__(
        self, dataset_fn: Callable[..., Any], input_options: InputOptions | None = None
    ) -> None:
        if not callable(dataset_fn):
            raise errors.ArgumentTypeError(
                "`dataset_fn` must be a function that returns a dataset",
                f"it is a {type(dataset_fn).__name__}",
                "Pass a function; arrays and datasets can be passed to `fit` themselves.",
            )
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    def __call__(self, *args: object) -> Any:
        """Returns the dataset that the function returns."""
        return self.dataset_fn(*args)


def is_creator(data: object) -> bool:
    """Tells whether data is a function that makes a dataset."""
    if isinstance(data, DatasetCreator):
        return True
    return callable(data) and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


@dataclasses.dataclass(frozen=True)
class _OnWorker:
    """Makes the dataset of the worker that it is called on."""

    dataset_fn: Callable[..., Any]
    num_workers: int

    def __call__(self) -> Any:
        if not _takes_context(self.dataset_fn):
            return self.dataset_fn()
        index = experimental_get_current_worker_index()
        return self.dataset_fn(InputContext(self.num_workers, index, 1))


def _takes_context(dataset_fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(dataset_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    required = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in required and p.default is inspect.Parameter.empty for p in parameters)


class WorkerDataAdapter(internals.DataAdapter):
    """Stands for data that workers read; Keras gets batches of zeros, to infer shapes.

    Args:
      data: The function that makes the dataset.
      coordinator: The coordinator.
    """

    def __init__(
        self,
        data: DatasetCreator | Callable[..., Any],
        coordinator: ClusterCoordinator,
        num_workers: int,
    ) -> None:
        dataset_fn = data.dataset_fn if isinstance(data, DatasetCreator) else data
        make = _OnWorker(dataset_fn, num_workers)
        self._dataset = coordinator.create_per_worker_dataset(make)
        # One for all epochs: the dataset repeats.
        self.iterator: PerWorkerIterator = iter(self._dataset)

    def get_jax_iterator(self) -> Iterator[Tree]:
        """Yields batches of zeros, without end."""
        batch = jax.tree.map(_zeros, self._dataset.element_spec)
        while True:
            yield batch

    def get_numpy_iterator(self) -> Iterator[Tree]:
        """Yields batches of zeros, without end."""
        return self.get_jax_iterator()

    @property
    def num_batches(self) -> None:
        """The number of batches, which is not known."""
        return None

    @property
    def batch_size(self) -> None:
        """The size of a batch, which is not known."""
        return None

    @property
    def has_partial_batch(self) -> None:
        """Whether the last batch is smaller, which is not known."""
        return None

    @property
    def partial_batch_size(self) -> None:
        """The size of the last batch, which is not known."""
        return None


def _zeros(spec: TensorSpec | PerReplicaSpec) -> np.ndarray:
    if isinstance(spec, PerReplicaSpec):
        raise errors.UnsupportedError(
            "Keras trains with one replica on each worker",
            f"there are {len(spec.value_specs)}",
            "Leave `replicas_per_worker` out.",
        )
    shape = [1 if side is None else side for side in spec.shape or ()]
    return np.broadcast_to(np.zeros((), spec.dtype), shape)
