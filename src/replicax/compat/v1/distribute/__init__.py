"""tf.compat.v1.distribute: strategies with the signatures and methods of v1.

The strategies are made of the same parts as those of `rx`; contexts, values and functions are the
same objects.
"""

from replicax import cluster_resolver as cluster_resolver
from replicax.collectives.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from replicax.collectives.cross_device_ops import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from replicax.collectives.cross_device_ops import NcclAllReduce as NcclAllReduce
from replicax.collectives.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from replicax.compat.v1.distribute import experimental as experimental
from replicax.compat.v1.distribute.extended import StrategyExtended as StrategyExtended
from replicax.compat.v1.distribute.loss_reduction import get_loss_reduction as get_loss_reduction
from replicax.compat.v1.distribute.strategies import MirroredStrategy as MirroredStrategy
from replicax.compat.v1.distribute.strategies import OneDeviceStrategy as OneDeviceStrategy
from replicax.compat.v1.distribute.strategy import Strategy as Strategy
from replicax.contexts.replica_context import ReplicaContext as ReplicaContext
from replicax.foundation.options import ReduceOp as ReduceOp
from replicax.foundation.options import RunOptions as RunOptions
from replicax.input.input_context import InputContext as InputContext
from replicax.input.input_context import InputReplicationMode as InputReplicationMode
from replicax.process.server import Server as Server
from replicax.strategies.default import experimental_set_strategy as experimental_set_strategy
from replicax.strategies.default import get_replica_context as get_replica_context
from replicax.strategies.default import get_strategy as get_strategy
from replicax.strategies.default import has_strategy as has_strategy
from replicax.strategies.default import in_cross_replica_context as in_cross_replica_context

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


def __dir__() -> list[str]:
    return __all__
