"""Checkpoints of training programs, and the description of a cluster."""

from replicax.checkpointing.checkpoint import Checkpoint as Checkpoint
from replicax.checkpointing.manager import CheckpointManager as CheckpointManager
from replicax.checkpointing.reading import latest_checkpoint as latest_checkpoint
from replicax.checkpointing.reading import list_variables as list_variables
from replicax.checkpointing.reading import load_variable as load_variable
from replicax.checkpointing.status import RestoreStatus as RestoreStatus
from replicax.cluster.spec import ClusterSpec as ClusterSpec
