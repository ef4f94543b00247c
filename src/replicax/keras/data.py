"""`rx.data` datasets, distributed datasets and their iterators as the data of Keras models.

Their elements are global batches of the form that Keras expects: `x`, `(x, y)` or
`(x, y, sample_weight)`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from replicax.contexts import frames
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input.dataset.dataset import Dataset
from replicax.input.dataset.plan import INFINITE_CARDINALITY
from replicax.input.distributed import DistributedDataset
from replicax.input.iterators import DataIterator
from replicax.keras import internals, worker_batches
from replicax.values.distributed_values import DistributedValues, PerReplica
from replicax.values.layout import ReplicaLayout

_Source = Dataset | DistributedDataset | DataIterator


class DatasetAdapter(internals.DataAdapter):
    """Gives Keras the elements of a dataset of replicax.

    Args:
      source: The dataset, or an iterator, which is continued where it stands.
      class_weight: The weight of each class, for the targets of a batch.
    """

    def __init__(self, source: _Source, class_weight: Mapping[int, float] | None = None) -> None:
        self._source, self._class_weight = source, class_weight
        # What Keras has read to build the model; it is given again. See `on_epoch_end`.
        self._built_from: list[Tree] = []
        self._opened: Iterator[Tree] | None = None
        self._is_built = False

    @property
    @override
    def num_batches(self) -> int | None:
        if isinstance(self._source, DataIterator):
            return None
        count = self._source.cardinality()
        return count if count >= 0 else None

    @property
    @override
    def batch_size(self) -> int | None:
        return None

    @property
    @override
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    @override
    def partial_batch_size(self) -> int | None:
        return None

    @override
    def get_jax_iterator(self) -> Iterator[Tree]:
        # A generator: Keras asks for iterators that it does not use, and opening one takes up
        # an epoch of a shuffled dataset.
        elements = self._open()
        try:
            for element in elements:
                batch = self._weighted(global_batch(element))
                if not self._is_built:
                    self._built_from.append(element)
                    self._opened = elements
                yield batch
        finally:
            if self._opened is not elements and elements is not self._source:
                _close(elements)

    @override
    def get_numpy_iterator(self) -> Iterator[Tree]:
        return (jax.tree.map(np.asarray, batch) for batch in self.get_jax_iterator())

    @override
    def on_epoch_end(self) -> None:
        # Keras calls this after it has built the model from the first batch, and before the
        # first epoch.
        self._is_built = True

    def _open(self) -> Iterator[Tree]:
        opened, self._opened = self._opened, None
        if opened is not None:
            return itertools.chain(self._built_from, opened)
        return iter(self._source)

    def _weighted(self, batch: Tree) -> Tree:
        if self._class_weight is None:
            return batch
        return internals.with_class_weight(batch, self._class_weight)


def _close(elements: Iterator[Tree]) -> None:
    close = getattr(elements, "close", None)
    if close is not None:
        close()


def global_batch(element: Tree) -> Tree:
    """Returns the batch of all replicas as one array per leaf, on the devices if it is there."""
    layout = getattr(getattr(frames.current().strategy, "extended", None), "layout", None)
    join = functools.partial(_joined, layout=layout)
    return jax.tree.map(join, element, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))


def _joined(leaf: object, layout: ReplicaLayout | None) -> object:
    if not isinstance(leaf, PerReplica):
        return leaf
    stored = leaf.stored(layout) if layout is not None and leaf.layout == layout else None
    if stored is not None:
        return stored[0]
    if layout is not None and layout.spans_processes:
        return worker_batches.joined(leaf, layout)
    return np.concatenate([np.asarray(part) for part in leaf.values])


def get_data_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets Keras take the datasets of replicax where it takes its own."""

    @functools.wraps(original)
    def get_data_adapter(x: object, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, _Source):
            return original(x, *args, **kwargs)
        _require_no_arrays(x, kwargs)
        if not isinstance(x, DataIterator):
            _require_batches(x, kwargs.get("steps_per_epoch"))
        return DatasetAdapter(x, kwargs.get("class_weight"))

    return get_data_adapter


def _require_no_arrays(source: _Source, given: Mapping[str, Any]) -> None:
    for name in ("y", "sample_weight", "batch_size"):
        if given.get(name) is not None:
            raise errors.InvalidArgumentError(
                "The elements of a dataset are whole batches: x, (x, y) or (x, y, sample_weight)",
                f"`{name}` was given beside a {type(source).__name__}",
                f"Leave `{name}` out, and make it part of the dataset.",
            )


def _require_batches(source: Dataset | DistributedDataset, steps: int | None) -> None:
    if isinstance(source, Dataset) and source.has_examples:
        raise errors.InvalidArgumentError(
            "The elements of a dataset must be global batches",
            f"{source!r} has no `batch` step",
            "Batch it, such as with `dataset.batch(global_batch_size)`.",
        )
    if source.cardinality() == INFINITE_CARDINALITY and steps is None:
        raise errors.InvalidArgumentError(
            "A dataset without an end needs a number of steps",
            f"{source!r} is infinite, and no steps were given",
            "Pass `steps_per_epoch` to fit (or `validation_steps`), `steps` to evaluate and "
            "predict, or leave `repeat` out.",
        )
