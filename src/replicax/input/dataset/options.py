"""Options of datasets."""

from __future__ import annotations

import dataclasses
import enum

from replicax.foundation import errors


class AutoShardPolicy(enum.IntEnum):
    """How a dataset is sharded among the workers of a cluster.

    >>> AutoShardPolicy.DATA.name
    'DATA'
    """

    OFF = -1  # every worker reads all data
    AUTO = 0  # FILE if the dataset reads at least as many files as there are workers, else DATA
    FILE = 1  # each worker reads its own files
    DATA = 2  # each worker keeps its own elements of every file or batch
    HINT = 3  # the dataset shards itself

    __str__ = enum.Enum.__str__


class DistributeOptions:
    """The part of `Options` that distribution reads.

    >>> options = DistributeOptions()
    >>> options.auto_shard_policy = "off"
    >>> options.auto_shard_policy.name
    'OFF'
    """

    __slots__ = ("_auto_shard_policy",)

    def __init__(self, auto_shard_policy: AutoShardPolicy | str | None = None) -> None:
        # None if not set, so that merging keeps an earlier choice.
        self._auto_shard_policy: AutoShardPolicy | None = None
        if auto_shard_policy is not None:
            self.auto_shard_policy = auto_shard_policy

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """How elements are sharded among workers; AUTO by default."""
        return AutoShardPolicy.AUTO if self._auto_shard_policy is None else self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy | str) -> None:
        if isinstance(policy, str):
            policy = AutoShardPolicy.__members__.get(policy.upper(), policy)
        if not isinstance(policy, AutoShardPolicy):
            raise errors.InvalidArgumentError(
                "`auto_shard_policy` must be OFF, AUTO, FILE, DATA or HINT",
                f"it is {policy!r}",
                "Pass a member of rx.data.AutoShardPolicy.",
            )
        self._auto_shard_policy = policy

    def merge(self, newer: DistributeOptions) -> DistributeOptions:
        """Returns these options, overridden by those set in `newer`."""
        return DistributeOptions(
            self._auto_shard_policy
            if newer._auto_shard_policy is None
            else newer._auto_shard_policy
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DistributeOptions)
            and self._auto_shard_policy == other._auto_shard_policy
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DistributeOptions(auto_shard_policy={self.auto_shard_policy.name})"


@dataclasses.dataclass(init=False, slots=True)
class Options:
    """Options of a dataset, set by `Dataset.with_options`.

    >>> options = Options()
    >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    >>> options
    Options(experimental_distribute=DistributeOptions(auto_shard_policy=OFF))
    """

    experimental_distribute: DistributeOptions

    def __init__(self, experimental_distribute: DistributeOptions | None = None) -> None:
        self.experimental_distribute = experimental_distribute or DistributeOptions()

    def merge(self, newer: Options) -> Options:
        """Returns these options, overridden by those set in `newer`."""
        return Options(self.experimental_distribute.merge(newer.experimental_distribute))
