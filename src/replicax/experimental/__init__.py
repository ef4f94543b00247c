"""Names that tf.distribute keeps under `experimental`."""

from __future__ import annotations

from collections.abc import Sequence

from replicax import coordinator as coordinator
from replicax.contexts.replica_context import ValueContext as ValueContext
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import CommunicationImplementation as CommunicationImplementation
from replicax.foundation.options import CommunicationOptions as CommunicationOptions
from replicax.strategies import tpu
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


class TPUStrategy(tpu.TPUStrategy):
    """`rx.TPUStrategy` with the older name of its second argument."""

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
    "ParameterServerStrategy",
    "TPUStrategy",
    "ValueContext",
    "cache_variable_reads",
    "coordinator",
    "partitioners",
]


def __dir__() -> list[str]:
    return __all__
