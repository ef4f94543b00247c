"""The argument of a `dataset_fn`, and options of distributed datasets."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from replicax.foundation import errors


class InputReplicationMode(enum.Enum):
    """How often a `dataset_fn` is called: once per worker, or once per replica.

    >>> import replicax as rx
    >>> options = rx.InputOptions(
    ...     experimental_replication_mode=rx.InputReplicationMode.PER_REPLICA,
    ...     experimental_place_dataset_on_device=False,
    ... )
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True, eq=False, repr=False, slots=True)
class InputContext:
    """The argument of a `dataset_fn`, for sharding and batching.

    Attributes:
      num_input_pipelines: The number of pipelines that read the data together.
      input_pipeline_id: The index of this pipeline.
      num_replicas_in_sync: The number of replicas that share a global batch.

    >>> context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(64)
    16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the size of the part of a global batch for one replica.

        Raises:
          InvalidArgumentError: The size is not a multiple of the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise errors.InvalidArgumentError(
                f"The global batch size must be a multiple of {self.num_replicas_in_sync}, the "
                "number of replicas",
                f"it is {global_batch_size}",
                "Change it, or use experimental_distribute_dataset, which splits any batch.",
            )
        return global_batch_size // self.num_replicas_in_sync

    def __repr__(self) -> str:
        id_, count = self.input_pipeline_id, self.num_input_pipelines
        return f"InputContext(input pipeline id {id_}, total: {count})"


class InputOptions(NamedTuple):
    """How elements reach the replicas.

    Attributes:
      experimental_fetch_to_device: Whether elements are copied to the devices ahead of time;
        None means yes. Otherwise components are NumPy arrays.
      experimental_replication_mode: How often `dataset_fn` is called.
      experimental_place_dataset_on_device: Accepted with PER_REPLICA for portability.
      experimental_per_replica_buffer_size: The number of elements to buffer on the devices.

    >>> InputOptions().experimental_per_replica_buffer_size
    1
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    @property
    def fetches_to_device(self) -> bool:
        """Whether elements are copied to the devices."""
        return self.experimental_fetch_to_device is not False

    @property
    def is_per_replica(self) -> bool:
        """Whether each replica has its own dataset."""
        return self.experimental_replication_mode is InputReplicationMode.PER_REPLICA


def checked_options(options: object, is_from_function: bool) -> InputOptions:
    """Returns the options of a call; raises for invalid combinations."""
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise errors.ArgumentTypeError(
            "`options` must be an rx.InputOptions or None",
            f"it is {type(options).__name__}",
            "Pass rx.InputOptions(...).",
        )
    if options.experimental_per_replica_buffer_size < 1:
        raise errors.InvalidArgumentError(
            "`experimental_per_replica_buffer_size` must be at least 1",
            f"it is {options.experimental_per_replica_buffer_size}",
            "Omit it for the default.",
        )
    if not is_from_function and options.is_per_replica:
        raise errors.UnsupportedError(
            "InputReplicationMode.PER_REPLICA needs a function that makes one dataset per replica",
            "experimental_distribute_dataset was given a single dataset",
            "Use distribute_datasets_from_function.",
        )
    if options.experimental_place_dataset_on_device and not options.is_per_replica:
        raise errors.InvalidArgumentError(
            "`experimental_place_dataset_on_device` needs PER_REPLICA replication",
            "the mode is PER_WORKER",
            "Omit it, or pass experimental_replication_mode=PER_REPLICA.",
        )
    if options.experimental_place_dataset_on_device and options.experimental_fetch_to_device:
        raise errors.InvalidArgumentError(
            "A dataset that is placed on the device must not be fetched to it",
            "both `experimental_place_dataset_on_device` and `experimental_fetch_to_device` "
            "are True",
            "Pass one of the two.",
        )
    return options
