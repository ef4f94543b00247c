"""Global batches of a dataset of `ray.data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from replicax.foundation import errors


class RayDataset(Protocol):
    """What is used of `ray.data.Dataset` and of its `DataIterator`."""

    def iter_batches(self, *, batch_size: int, batch_format: str, drop_last: bool) -> Any: ...


class RayBatches:
    """The batches of a dataset, which can be read any number of times; see `batches`."""

    def __init__(self, dataset: RayDataset, batch_size: int, drop_remainder: bool) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        context = getattr(self._dataset, "context", None)
        if context is not None:
            # All workers read the same batches, and each takes its part: the order must not differ.
            context.execution_options.preserve_order = True
        found = self._dataset.iter_batches(
            batch_size=self._batch_size, batch_format="numpy", drop_last=self._drop_remainder
        )
        return iter(found)

    def __repr__(self) -> str:
        return f"RayBatches({type(self._dataset).__name__}, batch_size={self._batch_size})"


def batches(dataset: RayDataset, batch_size: int, *, drop_remainder: bool = False) -> RayBatches:
    """Returns the batches of a dataset of `ray.data`, for `experimental_distribute_dataset`.

    A batch is a dict from the name of a column to an array. Positions in checkpoints are numbers
    of batches.

    Every worker of a sync group reads all batches, in the same order, and takes its part. To have
    Ray split the data instead, pass the dataset in `datasets=` of `RayCluster.run`, and the part of
    a worker, `ray.train.get_dataset_shard(name)`, here, inside of
    `distribute_datasets_from_function`.

    Args:
      dataset: A `ray.data.Dataset`, or a shard of one.
      batch_size: The number of rows of a batch: of a global one, for a whole dataset.
      drop_remainder: Whether to leave out a last batch with fewer rows.

    Example:
      >>> class Rows:  # Stands for `ray.data.range(5)`.
      ...     def iter_batches(self, *, batch_size, batch_format, drop_last):
      ...         return [{"id": np.arange(5)[i : i + batch_size]} for i in range(0, 5, batch_size)]
      >>> [batch["id"].tolist() for batch in batches(Rows(), batch_size=2)]
      [[0, 1], [2, 3], [4]]
    """
    if not hasattr(dataset, "iter_batches"):
        raise errors.ArgumentTypeError(
            "`rx.ray.batches` takes a dataset of `ray.data`",
            f"it got a {type(dataset).__name__}",
            "Pass a `ray.data.Dataset`, or a shard of one.",
        )
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise errors.InvalidArgumentError(
            "`batch_size` must be a whole number of at least 1",
            f"it is {batch_size!r}",
            "Pass the number of rows of a batch.",
        )
    return RayBatches(dataset, batch_size, drop_remainder)
