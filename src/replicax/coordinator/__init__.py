"""The coordinator of parameter servers and workers: runs functions on workers."""

from replicax.contexts.worker_index import (
    experimental_get_current_worker_index as experimental_get_current_worker_index,
)
from replicax.coordinator.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
from replicax.coordinator.per_worker import PerWorkerDataset as PerWorkerDataset
from replicax.coordinator.per_worker import PerWorkerIterator as PerWorkerIterator
from replicax.coordinator.remote_value import PerWorkerValues as PerWorkerValues
from replicax.coordinator.remote_value import RemoteValue as RemoteValue
from replicax.coordinator.scheduling.status import ServerStatus as ServerStatus
from replicax.coordinator.scheduling.status import Status as Status
from replicax.coordinator.scheduling.status import WorkerStatus as WorkerStatus
from replicax.coordinator.scheduling.timing import Timing as Timing
from replicax.coordinator.watchdog import Watchdog as Watchdog
from replicax.foundation.public_names import show_as_public

PerWorkerValue = PerWorkerValues

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "ServerStatus",
    "Status",
    "Timing",
    "Watchdog",
    "WorkerStatus",
    "experimental_get_current_worker_index",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
