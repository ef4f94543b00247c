"""Checkpoints of training programs, and the description of a cluster."""

from replicax.checkpointing.checkpoint import Checkpoint as Checkpoint
from replicax.checkpointing.manager import CheckpointManager as CheckpointManager
from replicax.checkpointing.reading import checkpoints_iterator as checkpoints_iterator
from replicax.checkpointing.reading import latest_checkpoint as latest_checkpoint
from replicax.checkpointing.reading import list_variables as list_variables
from replicax.checkpointing.reading import load_variable as load_variable
from replicax.checkpointing.status import RestoreStatus as RestoreStatus
from replicax.checkpointing.tensorflow_checkpoint import load_tf_checkpoint as load_tf_checkpoint
from replicax.checkpointing.warm_start import warm_start as warm_start
from replicax.cluster.spec import ClusterSpec as ClusterSpec
from replicax.foundation.public_names import show_as_public
from replicax.training.moving_average import ExponentialMovingAverage as ExponentialMovingAverage

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "ClusterSpec",
    "ExponentialMovingAverage",
    "RestoreStatus",
    "checkpoints_iterator",
    "latest_checkpoint",
    "list_variables",
    "load_tf_checkpoint",
    "load_variable",
    "warm_start",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
