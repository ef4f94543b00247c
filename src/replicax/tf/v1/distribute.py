"""`tf.compat.v1.distribute`: the strategies of version 1, whose steps take and return tensors."""

from __future__ import annotations

from typing import Any

import replicax.compat.v1.distribute as v1
from replicax.tf import distribute
from replicax.tf.distribute import of_tensors

# Members that version 1 does not have, or has with a warning.
_OF_V1 = (
    "experimental_distribute_datasets_from_function",
    "experimental_distribute_values_from_function",
    "experimental_make_numpy_dataset",
    "experimental_run_v2",
    "gather",
)


def of_v1(base: type) -> Any:
    """Returns a strategy class of version 1 with tensors as values."""
    return of_tensors(base, {name: vars(v1.Strategy)[name] for name in _OF_V1})


MirroredStrategy = of_v1(v1.MirroredStrategy)
OneDeviceStrategy = of_v1(v1.OneDeviceStrategy)
Strategy = v1.Strategy

CrossDeviceOps = v1.CrossDeviceOps
HierarchicalCopyAllReduce = v1.HierarchicalCopyAllReduce
InputContext = v1.InputContext
InputReplicationMode = v1.InputReplicationMode
NcclAllReduce = v1.NcclAllReduce
ReduceOp = v1.ReduceOp
ReductionToOneDevice = v1.ReductionToOneDevice
ReplicaContext = v1.ReplicaContext
RunOptions = v1.RunOptions
Server = v1.Server
StrategyExtended = v1.StrategyExtended
cluster_resolver = v1.cluster_resolver
experimental_set_strategy = v1.experimental_set_strategy
get_loss_reduction = v1.get_loss_reduction
get_replica_context = distribute.get_replica_context
get_strategy = distribute.get_strategy
has_strategy = v1.has_strategy
in_cross_replica_context = v1.in_cross_replica_context

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
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
