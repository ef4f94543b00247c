"""A dataset of the coordinator that is to be read by workers."""

from __future__ import annotations

from typing import Any, final

from replicax.foundation import errors


@final
class UnplacedDataset:
    """What `experimental_distribute_dataset` gives where no replica runs.

    Pass it to `ClusterCoordinator.create_per_worker_dataset`: each worker reads all of it.
    """

    def __init__(self, source: Any, options: Any, is_function: bool) -> None:
        self._source = source
        self._options = options
        self._is_function = is_function

    def distribute(self, strategy: Any) -> Any:
        """Returns the dataset of one worker."""
        if self._is_function:
            return strategy.distribute_datasets_from_function(self._source, self._options)
        return strategy.experimental_distribute_dataset(self._source, self._options)

    def __iter__(self) -> Any:
        raise errors.InvalidArgumentError(
            "A distributed dataset of a ParameterServerStrategy is read on workers",
            "it is iterated on the coordinator",
            "Pass it to ClusterCoordinator.create_per_worker_dataset.",
        )
