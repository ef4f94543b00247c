"""TPUStrategy: mirrored training over the TPU cores of this host, or of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from jax.typing import ArrayLike

from replicax.cluster_resolver import ClusterResolver
from replicax.foundation import devices, errors
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import CommunicationOptions
from replicax.foundation.public_names import show_in_package
from replicax.strategies.base import Strategy
from replicax.strategies.mirrored import resolve_worker_devices
from replicax.strategies.multi_worker import MultiWorkerExtended, layout_of_hosts
from replicax.values.layout import ReplicaLayout

_T = TypeVar("_T")
_Array = TypeVar("_Array", bound=ArrayLike)
_LOGICAL_DEVICES = 1


class TPUStrategy(Strategy):
    """Trains in sync on TPU cores, one replica on each.

    On a slice of several hosts, every host runs the same program; see
    `rx.MultiWorkerMirroredStrategy`.

    Args:
      tpu_cluster_resolver: The hosts, and the index of this one; without it, or with a single
        host, the replicas are on the cores of this host.
      experimental_device_assignment: The devices to use, if not all TPU cores.
      experimental_spmd_xla_partitioning: Accepted for portability; programs are always
        partitioned by XLA.

    Raises:
      InvalidArgumentError: There is no TPU.

    >>> import jax
    >>> import replicax as rx
    >>> has_tpu = jax.default_backend() == "tpu"
    >>> strategy = rx.TPUStrategy() if has_tpu else rx.MirroredStrategy(["cpu:0"])
    >>> strategy.run(lambda: 2.0 * 3.0)
    6.0
    """

    def __init__(
        self,
        tpu_cluster_resolver: object = None,
        experimental_device_assignment: Sequence[str | Device] | None = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        del experimental_spmd_xla_partitioning
        self._resolver = tpu_cluster_resolver
        options = CommunicationOptions()
        layout: ReplicaLayout | None = None
        if isinstance(tpu_cluster_resolver, ClusterResolver):
            # Before any device is used: several hosts start JAX together.
            layout = layout_of_hosts(tpu_cluster_resolver, options)
        if experimental_device_assignment is not None:
            found = resolve_worker_devices(experimental_device_assignment)
        else:
            found = tuple(devices.devices_of_kind("TPU"))
        if not found:
            raise errors.InvalidArgumentError(*devices.missing("TPUStrategy", "TPU"))
        layout = ReplicaLayout(found) if layout is None else layout.restricted_to(found)
        super().__init__(MultiWorkerExtended(self, layout, options))

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that was passed."""
        return self._resolver

    def experimental_assign_to_logical_device(self, tensor: _T, logical_device_id: int) -> _T:
        """Returns the tensor; a replica has one logical device.

        Raises:
          InvalidArgumentError: There is no such logical device.
        """
        if not 0 <= logical_device_id < _LOGICAL_DEVICES:
            raise errors.InvalidArgumentError(
                f"`logical_device_id` must be in [0, {_LOGICAL_DEVICES})",
                f"it is {logical_device_id}",
                "A replica has one logical device.",
            )
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: _T) -> _T:
        """Returns the tensor; a replica has one logical device."""
        return tensor

    def experimental_split_to_logical_devices(
        self, tensor: _Array, partition_dimensions: Sequence[int]
    ) -> _Array:
        """Returns the tensor; a replica has one logical device.

        Raises:
          InvalidArgumentError: The parts do not fit the tensor, or the one logical device.
        """
        rank, parts = np.ndim(tensor), list(partition_dimensions)
        if len(parts) != rank or math.prod(parts) != _LOGICAL_DEVICES:
            raise errors.InvalidArgumentError(
                f"`partition_dimensions` must have {rank} entries whose product is "
                f"{_LOGICAL_DEVICES}",
                f"it is {parts}",
                "Pass 1 for each dimension.",
            )
        return tensor


show_in_package(TPUStrategy)
