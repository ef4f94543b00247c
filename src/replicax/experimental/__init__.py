"""Names that tf.distribute keeps under `experimental`."""

from replicax.contexts.replica_context import ValueContext as ValueContext
from replicax.foundation.options import CommunicationImplementation as CommunicationImplementation
from replicax.foundation.options import CommunicationOptions as CommunicationOptions
from replicax.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ValueContext",
]
