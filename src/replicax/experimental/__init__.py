"""Names that tf.distribute keeps under `experimental`."""

from __future__ import annotations

from collections.abc import Sequence

import replicax.coordinator as coordinator
from replicax.checkpointing.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from replicax.checkpointing.preemption import TerminationConfig as TerminationConfig
from replicax.checkpointing.preemption_notice import PreemptionWatcher as PreemptionWatcher
from replicax.cluster_resolver import ClusterResolver
from replicax.contexts.replica_context import ValueContext as ValueContext
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import CommunicationImplementation as CommunicationImplementation
from replicax.foundation.options import CommunicationOptions as CommunicationOptions
from replicax.foundation.public_names import show_as_public
from replicax.launch.elastic import ElasticResult as ElasticResult
from replicax.launch.elastic import ElasticRun as ElasticRun
from replicax.launch.elastic import KeepGlobalBatch as KeepGlobalBatch
from replicax.launch.elastic import KeepReplicaBatch as KeepReplicaBatch
from replicax.launch.elastic import run_elastic as run_elastic
from replicax.strategies import multi_worker, tpu
from replicax.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from replicax.strategies.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from replicax.variables import partitioners as partitioners
from replicax.variables.read_cache import cache_variable_reads as cache_variable_reads

CollectiveCommunication = CommunicationImplementation


def CollectiveHints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Returns `CommunicationOptions`; the older spelling of it.

    >>> CollectiveHints(bytes_per_pack=1024).bytes_per_pack
    1024
    """
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


class MultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """`rx.MultiWorkerMirroredStrategy` with its older arguments.

    Args:
      communication: The preferred collective library.
      cluster_resolver: The cluster and this task; by default those of TF_CONFIG.

    >>> strategy = MultiWorkerMirroredStrategy(CommunicationImplementation.RING)
    >>> strategy.extended.num_replicas_in_sync >= 1
    True
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        options = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options)


class TPUStrategy(tpu.TPUStrategy):
    """`rx.TPUStrategy` with the older name of its second argument.

    >>> import jax
    >>> if jax.default_backend() == "tpu":
    ...     strategy = TPUStrategy(device_assignment=jax.devices()[:1])
    """

    def __init__(
        self,
        tpu_cluster_resolver: object = None,
        device_assignment: Sequence[str | Device] | None = None,
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ElasticResult",
    "ElasticRun",
    "KeepGlobalBatch",
    "KeepReplicaBatch",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "cache_variable_reads",
    "coordinator",
    "partitioners",
    "run_elastic",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
