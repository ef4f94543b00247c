"""replicax: the tf.distribute programming model on JAX.

Write a training step once, against replicas, variables and reductions; run it on one
device, on every device of a machine, or on workers and parameter servers, without a change.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from replicax.foundation import after_import, settings
from replicax.foundation.spelling import suggestion

if TYPE_CHECKING:
    from replicax.public_api import *

__version__ = "0.1.0"

__all__ = [
    "CentralStorageStrategy",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MirroredVariable",
    "Module",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PerReplicaSpec",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ReplicaLayout",
    "RunOptions",
    "Server",
    "ShardedVariable",
    "SparseTensor",
    "Staleness",
    "Strategy",
    "StrategyExtended",
    "SyncOnReadVariable",
    "TPUStrategy",
    "TensorSpec",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "cond",
    "coordinator",
    "data",
    "device",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "fori_loop",
    "function",
    "functions_run_eagerly",
    "get_replica_context",
    "get_strategy",
    "grad",
    "has_strategy",
    "in_cross_replica_context",
    "make_variables",
    "metrics",
    "models",
    "nn",
    "optimizers",
    "profiler",
    "random",
    "read_variables",
    "run_functions_eagerly",
    "saved_model",
    "scan",
    "set_virtual_cpu_devices",
    "strategy_from_environment",
    "summary",
    "switch",
    "testing",
    "train",
    "value_and_grad",
    "variable_creator_scope",
    "while_loop",
]


# Those that import Keras, or are seldom needed; `from replicax import *` leaves them out.
_LAZY = ("compat", "contrib", "keras", "ray")
# Imports everything else, when the first name is used; it gets these from here while it does.
_PUBLIC_API = "replicax.public_api"
_PACKAGES = (
    "cluster_resolver coordinator data errors experimental metrics models nn optimizers profiler "
    "random saved_model summary testing train"
).split()


def __dir__() -> list[str]:
    return sorted([*__all__, *_LAZY, "__version__"])


if not TYPE_CHECKING:  # which would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name in _LAZY or (name in _PACKAGES and _PUBLIC_API in sys.modules):
            return importlib.import_module(f"replicax.{name}")
        if name in __all__:
            # Fills this module with all of them.
            importlib.import_module(_PUBLIC_API)
            return globals()[name]
        todo = suggestion([name], __all__)
        raise AttributeError(f"module 'replicax' has no attribute {name!r}. {todo}".rstrip(". "))


# Keras and replicax may be imported in any order.
after_import.call(
    "keras",
    before=settings.choose_keras_backend,
    after=lambda: importlib.import_module("replicax.keras.hooks").install(),
)
