"""Distribution of datasets: what a strategy makes of a dataset, or of a function of one."""

from __future__ import annotations

from collections.abc import Callable

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input.distributed import DistributedDataset
from replicax.input.input_context import InputContext, checked_options
from replicax.input.sharding import sharding_for
from replicax.input.sources import source_of
from replicax.values.layout import ReplicaLayout


def distribute_dataset(
    dataset: object, options: object, layout: ReplicaLayout, context: InputContext
) -> DistributedDataset:
    """Returns a dataset whose elements are the global batches of `dataset`, split by replica."""
    if isinstance(dataset, DistributedDataset):
        raise errors.ArgumentTypeError(
            "A dataset can be distributed once",
            "a DistributedDataset was given",
            "Use it directly.",
        )
    chosen = checked_options(options, is_from_function=False)
    sharding = sharding_for(source_of(dataset), context, layout.num_local)
    return DistributedDataset(layout, [sharding.own], chosen, sharding)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Tree],
    options: object,
    layout: ReplicaLayout,
    context: InputContext,
) -> DistributedDataset:
    """Returns a dataset that gives each replica whole batches of the datasets of a function."""
    if not callable(dataset_fn):
        raise errors.ArgumentTypeError(
            "`dataset_fn` must be a function that takes an rx.InputContext",
            f"it is {type(dataset_fn).__name__}",
            "Pass a function, or pass a dataset to experimental_distribute_dataset.",
        )
    chosen = checked_options(options, is_from_function=True)
    contexts = [context]
    if chosen.is_per_replica:
        count = context.num_replicas_in_sync
        first = layout.first_local or context.input_pipeline_id * layout.num_local
        contexts = [InputContext(count, first + i, count) for i in range(layout.num_local)]
    sources = [source_of(dataset_fn(own)) for own in contexts]
    return DistributedDataset(layout, sources, chosen, contexts[0])
