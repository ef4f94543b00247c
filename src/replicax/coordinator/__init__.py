"""The coordinator of parameter servers and workers: runs functions on workers."""

from replicax.coordinator.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
from replicax.coordinator.remote_value import PerWorkerValues as PerWorkerValues
from replicax.coordinator.remote_value import RemoteValue as RemoteValue
from replicax.coordinator.timing import Timing as Timing
from replicax.parameter_server.worker_index import (
    experimental_get_current_worker_index as experimental_get_current_worker_index,
)

PerWorkerValue = PerWorkerValues

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "Timing",
    "experimental_get_current_worker_index",
]
