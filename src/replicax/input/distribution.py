"""Distribution of datasets: sharding among workers, and parts of batches for replicas."""

from __future__ import annotations

from collections.abc import Callable

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input.dataset.dataset import Dataset
from replicax.input.dataset.options import AutoShardPolicy
from replicax.input.distributed import DistributedDataset
from replicax.input.input_context import InputContext, checked_options
from replicax.input.rebatching import Share
from replicax.input.sources import BuilderSource, Source, source_of
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
    source, share = _shard_for_worker(source_of(dataset), context, layout.num_replicas)
    return DistributedDataset(layout, [source], chosen, share)


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
        first = context.input_pipeline_id * layout.num_replicas
        contexts = [InputContext(count, first + i, count) for i in range(layout.num_replicas)]
    sources = [source_of(dataset_fn(own)) for own in contexts]
    return DistributedDataset(layout, sources, chosen, None)


def _shard_for_worker(
    source: Source, context: InputContext, num_local_replicas: int
) -> tuple[Source, Share]:
    """Returns what this worker reads, and its share of each batch."""
    workers, worker = context.num_input_pipelines, context.input_pipeline_id
    if context.num_replicas_in_sync != num_local_replicas * workers:
        raise errors.InvalidArgumentError(
            f"{workers} workers must have the same number of replicas each",
            f"there are {context.num_replicas_in_sync} replicas, {num_local_replicas} of them here",
            "Use the same number of devices on every worker.",
        )
    if workers == 1:
        return source, Share(num_local_replicas)
    dataset = source.dataset if isinstance(source, BuilderSource) else None
    policy = _resolved_policy(source.policy, dataset, workers)
    if policy is AutoShardPolicy.FILE:
        assert dataset is not None
        source = BuilderSource(autoshard(dataset, policy, workers, worker))
    cuts = policy is AutoShardPolicy.DATA
    return source, Share(num_local_replicas, workers, worker, cuts_each_batch=cuts)


def _resolved_policy(
    policy: AutoShardPolicy, dataset: Dataset | None, num_workers: int
) -> AutoShardPolicy:
    """Replaces AUTO by FILE for datasets of enough files, otherwise by DATA."""
    files = None if dataset is None else dataset.files
    if policy is AutoShardPolicy.AUTO:
        has_enough = files is not None and len(files) >= num_workers
        return AutoShardPolicy.FILE if has_enough else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and files is None:
        raise errors.NotFoundError(
            "AutoShardPolicy.FILE needs a dataset that reads files",
            "this one does not start with a reader such as rx.data.TextLineDataset",
            "Use AutoShardPolicy.DATA or AUTO.",
        )
    # With HINT the dataset shards itself.
    return AutoShardPolicy.OFF if policy is AutoShardPolicy.HINT else policy


def autoshard(dataset: Dataset, policy: AutoShardPolicy, num_workers: int, worker: int) -> Dataset:
    """Returns the shard of a dataset that one of several workers reads.

    >>> from replicax.input.dataset.dataset import Dataset
    >>> list(autoshard(Dataset.range(4), AutoShardPolicy.DATA, 2, 1).as_numpy_iterator())
    [np.int64(1), np.int64(3)]
    """
    policy = _resolved_policy(policy, dataset, num_workers)
    if policy is AutoShardPolicy.OFF:
        return dataset
    if policy is AutoShardPolicy.FILE:
        assert dataset.files is not None
        return dataset.with_files(dataset.files[worker::num_workers])
    count = dataset.cardinality()
    if 0 <= count < num_workers:
        raise errors.InvalidArgumentError(
            f"Sharding by data needs at least one element for each of {num_workers} workers",
            f"the dataset has {count}",
            "Use fewer workers, or AutoShardPolicy.OFF.",
        )
    return dataset.shard_records(num_workers, worker)
