"""Auto-sharding: what each worker reads of a dataset."""

from __future__ import annotations

from typing import NamedTuple

from replicax.foundation import errors
from replicax.input.dataset.dataset import Dataset
from replicax.input.dataset.options import AutoShardPolicy
from replicax.input.input_context import InputContext
from replicax.input.rebatching import Share
from replicax.input.sources import BuilderSource, Source


class Sharding(NamedTuple):
    """How a dataset of global batches is sharded among workers.

    Attributes:
      whole: The dataset before it is sharded.
      policy: FILE, DATA or OFF.
      share: The part of each batch for this worker.
    """

    whole: Source
    policy: AutoShardPolicy
    share: Share

    @property
    def own(self) -> Source:
        """What this worker reads."""
        if self.policy is AutoShardPolicy.FILE:
            return self.shard(self.share.worker, self.share.num_workers)
        return self.whole

    def shard(self, index: int, count: int) -> Source:
        """Returns one of several shards by file."""
        if count == 1:
            return self.whole
        assert isinstance(self.whole, BuilderSource)
        return BuilderSource(autoshard(self.whole.dataset, AutoShardPolicy.FILE, count, index))


def sharding_for(source: Source, context: InputContext, num_local_replicas: int) -> Sharding:
    """Returns how a dataset is sharded, as its options say."""
    workers, worker = context.num_input_pipelines, context.input_pipeline_id
    if context.num_replicas_in_sync != num_local_replicas * workers:
        raise errors.InvalidArgumentError(
            f"{workers} workers must have the same number of replicas each",
            f"there are {context.num_replicas_in_sync} replicas, {num_local_replicas} of them here",
            "Use the same number of devices on every worker.",
        )
    if workers == 1:
        return Sharding(source, AutoShardPolicy.DATA, Share(num_local_replicas))
    dataset = source.dataset if isinstance(source, BuilderSource) else None
    policy = _resolved_policy(source.policy, dataset, workers)
    cuts = policy is AutoShardPolicy.DATA
    share = Share(num_local_replicas, workers, worker, cuts_each_batch=cuts)
    return Sharding(source, policy, share)


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
