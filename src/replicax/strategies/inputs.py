"""Distribution of datasets over replicas: the input part of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol, final

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input import distribution
from replicax.input.distributed import DistributedDataset
from replicax.input.input_context import InputContext, InputOptions
from replicax.values.layout import ReplicaLayout


class Inputs:
    """Distributes datasets over the replicas of this process.

    Args:
      layout: The replicas, of all processes if there are several.
      context: The input pipeline of this process; by default one of those of the layout's
        processes.
    """

    def __init__(self, layout: ReplicaLayout, context: InputContext | None = None) -> None:
        self._layout = layout
        peers = layout.peers
        count, index = (1, 0) if peers is None else (peers.count, peers.index)
        self.context = context or InputContext(count, index, layout.num_replicas)

    def distribute(self, dataset: object, options: InputOptions | None) -> DistributedDataset:
        """Cuts the global batches of a dataset into one part per replica."""
        return distribution.distribute_dataset(dataset, options, self._layout, self.context)

    def from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None
    ) -> DistributedDataset:
        """Feeds the replicas from a dataset that a function makes."""
        return distribution.distribute_from_function(
            dataset_fn, options, self._layout, self.context
        )


class _Distributing(Protocol):
    def experimental_distribute_dataset(
        self, dataset: object, options: InputOptions | None = None
    ) -> Iterable[Tree]: ...

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> Iterable[Tree]: ...


@final
class UnplacedDataset:
    """The result of `experimental_distribute_dataset` where no replica runs.

    Pass it to `ClusterCoordinator.create_per_worker_dataset`: each worker reads all of it.
    """

    def __init__(self, source: Tree, options: InputOptions | None, is_function: bool) -> None:
        self._source = source
        self._options = options
        self._is_function = is_function

    def distribute(self, strategy: _Distributing) -> Any:
        """Returns the dataset of one worker."""
        if self._is_function:
            return strategy.distribute_datasets_from_function(self._source, self._options)
        return strategy.experimental_distribute_dataset(self._source, self._options)

    def __iter__(self) -> NoReturn:
        raise errors.InvalidArgumentError(
            "A distributed dataset of a ParameterServerStrategy is read on workers",
            "it is iterated on the coordinator",
            "Pass it to ClusterCoordinator.create_per_worker_dataset.",
        )
