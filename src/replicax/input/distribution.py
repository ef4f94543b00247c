"""How a strategy turns datasets, and functions that make them, into distributed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replicax.foundation import errors
from replicax.input import sharding
from replicax.input.distributed import DistributedDataset
from replicax.input.input_context import InputContext, checked_options
from replicax.input.sources import source_of
from replicax.values.layout import ReplicaLayout


def distribute_dataset(
    dataset: Any, options: Any, layout: ReplicaLayout, context: InputContext
) -> DistributedDataset:
    """Cuts the global batches of a dataset into the parts of replicas."""
    if isinstance(dataset, DistributedDataset):
        raise errors.ArgumentTypeError(
            "A dataset can be distributed once",
            "a DistributedDataset was given",
            "Use it as it is.",
        )
    chosen = checked_options(options, is_from_function=False)
    source, share = sharding.shard_for_worker(source_of(dataset), context, layout.num_replicas)
    return DistributedDataset(layout, [source], chosen, share)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    options: Any,
    layout: ReplicaLayout,
    context: InputContext,
) -> DistributedDataset:
    """Feeds replicas from the datasets that a function makes, batch by batch."""
    if not callable(dataset_fn):
        raise errors.ArgumentTypeError(
            "`dataset_fn` must be a function that takes an rx.InputContext",
            f"it is {type(dataset_fn).__name__}",
            "Pass the function, or give a dataset to experimental_distribute_dataset.",
        )
    chosen = checked_options(options, is_from_function=True)
    contexts = [context]
    if chosen.is_per_replica:
        count = context.num_replicas_in_sync
        first = context.input_pipeline_id * layout.num_replicas
        contexts = [InputContext(count, first + i, count) for i in range(layout.num_replicas)]
    sources = [source_of(dataset_fn(own)) for own in contexts]
    return DistributedDataset(layout, sources, chosen, None)
