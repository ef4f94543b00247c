"""Names that `tf.compat.v1.distribute` keeps under `experimental`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from replicax import experimental
from replicax.cluster_resolver import ClusterResolver
from replicax.compat.v1.distribute.deprecation import warn_once
from replicax.compat.v1.distribute.strategy import Strategy
from replicax.foundation import errors
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import CommunicationImplementation as CommunicationImplementation
from replicax.foundation.options import CommunicationOptions as CommunicationOptions
from replicax.strategies import central_storage

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
]


def __dir__() -> list[str]:
    return __all__


def CollectiveHints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Returns `CommunicationOptions`; deprecated."""
    warn_once("experimental.CollectiveHints", "experimental.CommunicationOptions")
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


@final
class CentralStorageStrategy(Strategy):
    """`rx.CentralStorageStrategy` with the API of v1.

    Args:
      compute_devices: Names of the replicas' devices; all GPUs, or else CPUs, if None.
      parameter_device: The device of variables; the CPU if there are several replicas.

    >>> import replicax.compat.v1.distribute as distribute
    >>> strategy = distribute.experimental.CentralStorageStrategy(["CPU:0"])
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | None = None,
        parameter_device: str | Device | None = None,
    ) -> None:
        made = central_storage.CentralStorageStrategy(compute_devices, parameter_device)
        super().__init__(made.extended)


@final
class MultiWorkerMirroredStrategy(Strategy):
    """`rx.MultiWorkerMirroredStrategy` with the API of v1.

    Args:
      communication: The preferred collective library.
      cluster_resolver: The cluster and this task; by default those of TF_CONFIG.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        made = experimental.MultiWorkerMirroredStrategy(communication, cluster_resolver)
        super().__init__(made.extended)
        self._cluster_resolver = made.cluster_resolver


@final
class TPUStrategy(Strategy):
    """`rx.TPUStrategy` with the API of v1.

    Args:
      tpu_cluster_resolver: The hosts, and the index of this one.
      steps_per_run: The number of steps of a training loop; 1 by default.
      device_assignment: The devices to use, if not all TPU cores.
    """

    def __init__(
        self,
        tpu_cluster_resolver: object = None,
        steps_per_run: int | None = None,
        device_assignment: Sequence[str | Device] | None = None,
    ) -> None:
        made = experimental.TPUStrategy(tpu_cluster_resolver, device_assignment)
        super().__init__(made.extended)
        self._cluster_resolver = made.cluster_resolver
        self._steps_per_run = 1 if steps_per_run is None else steps_per_run

    @property
    def steps_per_run(self) -> int:
        """The number that was passed, for training loops that use it."""
        return self._steps_per_run


@final
class ParameterServerStrategy(Strategy):
    """Not offered: the v1 strategy needs one graph and session per worker.

    Args:
      cluster_resolver: The cluster.

    Raises:
      UnsupportedError: Always.
    """

    def __init__(self, cluster_resolver: ClusterResolver | None = None) -> None:
        raise errors.UnsupportedError(
            "The v1 ParameterServerStrategy needs graphs and sessions, which Estimator makes",
            f"ParameterServerStrategy(cluster_resolver={cluster_resolver!r}) was called",
            "Use rx.ParameterServerStrategy(cluster_resolver) with a "
            "rx.coordinator.ClusterCoordinator.",
        )
