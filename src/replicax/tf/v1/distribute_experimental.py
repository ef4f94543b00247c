"""`tf.compat.v1.distribute.experimental`: strategies whose steps take and return tensors."""

from __future__ import annotations

from replicax.compat.v1.distribute import experimental
from replicax.tf.v1.distribute import of_v1

CentralStorageStrategy = of_v1(experimental.CentralStorageStrategy)
CollectiveCommunication = experimental.CollectiveCommunication
CollectiveHints = experimental.CollectiveHints
CommunicationImplementation = experimental.CommunicationImplementation
CommunicationOptions = experimental.CommunicationOptions
MultiWorkerMirroredStrategy = of_v1(experimental.MultiWorkerMirroredStrategy)
ParameterServerStrategy = experimental.ParameterServerStrategy
TPUStrategy = of_v1(experimental.TPUStrategy)

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
