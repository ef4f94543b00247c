"""Auto-sharding: which part of a dataset each of several workers reads."""

from __future__ import annotations

from replicax.foundation import errors
from replicax.input.builder import Dataset
from replicax.input.input_context import InputContext
from replicax.input.options import AutoShardPolicy
from replicax.input.rebatching import Share
from replicax.input.sources import BuilderSource, Source


def shard_for_worker(
    source: Source, context: InputContext, num_local_replicas: int
) -> tuple[Source, Share]:
    """Returns what this worker reads, and which part of each batch it keeps."""
    workers, worker = context.num_input_pipelines, context.input_pipeline_id
    if context.num_replicas_in_sync != num_local_replicas * workers:
        raise errors.InvalidArgumentError(
            f"{workers} workers must have the same number of replicas each",
            f"there are {context.num_replicas_in_sync} replicas, {num_local_replicas} of them here",
            "Give every worker the same number of devices.",
        )
    if workers == 1:
        return source, Share(num_local_replicas)
    dataset = source.dataset if isinstance(source, BuilderSource) else None
    policy = resolved_policy(source.policy, dataset, workers)
    if policy is AutoShardPolicy.FILE:
        assert dataset is not None
        source = BuilderSource(autoshard(dataset, policy, workers, worker))
    cuts = policy is AutoShardPolicy.DATA
    return source, Share(num_local_replicas, workers, worker, cuts_each_batch=cuts)


def resolved_policy(
    policy: AutoShardPolicy, dataset: Dataset | None, num_workers: int
) -> AutoShardPolicy:
    """Decides AUTO: by file for readers of enough files, otherwise by data."""
    files = None if dataset is None else dataset.files
    if policy is AutoShardPolicy.AUTO:
        has_enough = files is not None and len(files) >= num_workers
        return AutoShardPolicy.FILE if has_enough else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and files is None:
        raise errors.NotFoundError(
            "AutoShardPolicy.FILE needs a dataset that reads files",
            "this one does not start from a reader such as rx.data.TextLineDataset",
            "Use AutoShardPolicy.DATA or AUTO.",
        )
    # A hint says that the dataset shards itself.
    return AutoShardPolicy.OFF if policy is AutoShardPolicy.HINT else policy


def autoshard(dataset: Dataset, policy: AutoShardPolicy, num_workers: int, worker: int) -> Dataset:
    """Returns the part of a dataset that one of several workers reads.

    >>> from replicax.input.builder import Dataset
    >>> list(autoshard(Dataset.range(4), AutoShardPolicy.DATA, 2, 1).as_numpy_iterator())
    [np.int64(1), np.int64(3)]
    """
    policy = resolved_policy(policy, dataset, num_workers)
    if policy is AutoShardPolicy.OFF:
        return dataset
    if policy is AutoShardPolicy.FILE:
        assert dataset.files is not None
        return dataset.with_files(dataset.files[worker::num_workers])
    count = dataset.cardinality()
    if 0 <= count < num_workers:
        raise errors.InvalidArgumentError(
            f"Sharding by data needs an element for each of {num_workers} workers",
            f"the dataset has {count}",
            "Use fewer workers, or AutoShardPolicy.OFF.",
        )
    return dataset.shard_records(num_workers, worker)
