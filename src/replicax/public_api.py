"""The public classes and functions of `replicax`, with everything that they need, such as JAX.

The package imports this module when one of its names is first used, so that what needs none of
them, such as `replicax run`, starts at once. Its namespaces, such as `replicax.coordinator`, and
the names that need clusters, are imported when they are used themselves.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from replicax.collectives.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from replicax.collectives.cross_device_ops import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from replicax.collectives.cross_device_ops import NcclAllReduce as NcclAllReduce
from replicax.collectives.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from replicax.contexts.replica_context import ReplicaContext as ReplicaContext
from replicax.foundation.devices import device as device
from replicax.foundation.devices import set_virtual_cpu_devices as set_virtual_cpu_devices
from replicax.foundation.options import ReduceOp as ReduceOp
from replicax.foundation.options import RunOptions as RunOptions
from replicax.foundation.options import VariableAggregation as VariableAggregation
from replicax.foundation.options import VariableSynchronization as VariableSynchronization
from replicax.foundation.public_names import show_as_public
from replicax.input.distributed import DistributedDataset as DistributedDataset
from replicax.input.distributed import DistributedIterator as DistributedIterator
from replicax.input.input_context import InputContext as InputContext
from replicax.input.input_context import InputOptions as InputOptions
from replicax.input.input_context import InputReplicationMode as InputReplicationMode
from replicax.strategies.base import Strategy as Strategy
from replicax.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from replicax.strategies.consistency import Staleness as Staleness
from replicax.strategies.default import experimental_set_strategy as experimental_set_strategy
from replicax.strategies.default import get_replica_context as get_replica_context
from replicax.strategies.default import get_strategy as get_strategy
from replicax.strategies.default import has_strategy as has_strategy
from replicax.strategies.default import in_cross_replica_context as in_cross_replica_context
from replicax.strategies.extended import StrategyExtended as StrategyExtended
from replicax.strategies.mirrored import MirroredStrategy as MirroredStrategy
from replicax.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from replicax.tracing.control_flow import cond as cond
from replicax.tracing.control_flow import fori_loop as fori_loop
from replicax.tracing.control_flow import scan as scan
from replicax.tracing.control_flow import switch as switch
from replicax.tracing.control_flow import while_loop as while_loop
from replicax.tracing.function import function as function
from replicax.tracing.function import functions_run_eagerly as functions_run_eagerly
from replicax.tracing.function import run_functions_eagerly as run_functions_eagerly
from replicax.tracing.gradients import grad as grad
from replicax.tracing.gradients import value_and_grad as value_and_grad
from replicax.tracing.signature import PerReplicaSpec as PerReplicaSpec
from replicax.tracing.signature import TensorSpec as TensorSpec
from replicax.values.distributed_values import DistributedValues as DistributedValues
from replicax.values.distributed_values import Mirrored as Mirrored
from replicax.values.distributed_values import PerReplica as PerReplica
from replicax.values.indexed_slices import IndexedSlices as IndexedSlices
from replicax.values.layout import ReplicaLayout as ReplicaLayout
from replicax.values.sparse_tensor import SparseTensor as SparseTensor
from replicax.variables.creators import variable_creator_scope as variable_creator_scope
from replicax.variables.module import Module as Module
from replicax.variables.pytrees import make_variables as make_variables
from replicax.variables.pytrees import read_variables as read_variables
from replicax.variables.replicated import MirroredVariable as MirroredVariable
from replicax.variables.replicated import SyncOnReadVariable as SyncOnReadVariable
from replicax.variables.variable import Variable as Variable

if TYPE_CHECKING:
    from replicax.launch.from_environment import (
        strategy_from_environment as strategy_from_environment,
    )
    from replicax.process.server import Server as Server
    from replicax.strategies.multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from replicax.strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from replicax.strategies.tpu import TPUStrategy as TPUStrategy
    from replicax.variables.sharded import ShardedVariable as ShardedVariable

# The modules of names that need what clusters need: sockets, certificates, groups of processes.
_OF_CLUSTERS = {
    "MultiWorkerMirroredStrategy": "replicax.strategies.multi_worker",
    "ParameterServerStrategy": "replicax.strategies.parameter_server",
    "Server": "replicax.process.server",
    "ShardedVariable": "replicax.variables.sharded",
    "TPUStrategy": "replicax.strategies.tpu",
    "strategy_from_environment": "replicax.launch.from_environment",
}

_package = sys.modules["replicax"]
_own = set(_package.__all__) - set(_package.NAMESPACES) - _OF_CLUSTERS.keys()
vars(_package).update({name: globals()[name] for name in _own})
show_as_public("replicax", _own)


def import_later(name: str) -> Any:
    """Imports a name of `replicax` that this module does not import by itself."""
    value = getattr(importlib.import_module(_OF_CLUSTERS[name]), name)
    setattr(_package, name, value)
    return value
