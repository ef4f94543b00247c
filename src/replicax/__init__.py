"""replicax: the tf.distribute programming model on JAX.

Write a training step once, against replicas, variables and reductions; run it on one
device, on every device of a machine, or on workers and parameter servers, without a change.
"""

import importlib
from typing import TYPE_CHECKING, Any

from replicax.foundation import after_import, settings
from replicax.foundation.lazy import collections_paused
from replicax.foundation.spelling import suggestion

if TYPE_CHECKING:
    from replicax import cluster_resolver as cluster_resolver
    from replicax import coordinator as coordinator
    from replicax import data as data
    from replicax import errors as errors
    from replicax import experimental as experimental
    from replicax import metrics as metrics
    from replicax import models as models
    from replicax import nn as nn
    from replicax import optimizers as optimizers
    from replicax import profiler as profiler
    from replicax import random as random
    from replicax import saved_model as saved_model
    from replicax import summary as summary
    from replicax import testing as testing
    from replicax import train as train
    from replicax.public_api import *

__version__ = "0.2.0"

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
# Imports classes and functions, when the first name is used.
_PUBLIC_API = "replicax.public_api"
# Each is imported when it is used, after those.
NAMESPACES = (
    "cluster_resolver coordinator data errors experimental metrics models nn optimizers profiler "
    "random saved_model summary testing train"
).split()


def __dir__() -> list[str]:
    return sorted([*__all__, *_LAZY, "__version__"])


if not TYPE_CHECKING:  # which would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return importlib.import_module(f"replicax.{name}")
        if name in __all__:
            # An import frees nothing; collections took a tenth of its time.
            with collections_paused():
                # Fills this module with those that are neither namespaces nor of clusters.
                public_api = importlib.import_module(_PUBLIC_API)
                if name in NAMESPACES:
                    return importlib.import_module(f"replicax.{name}")
                return globals()[name] if name in globals() else public_api.import_later(name)
        todo = suggestion([name], __all__)
        raise AttributeError(f"module 'replicax' has no attribute {name!r}. {todo}".rstrip(". "))


# Tracebacks show the public names of errors, also in programs that never use the namespace.
importlib.import_module("replicax.errors")

# Keras and replicax may be imported in any order.
after_import.call(
    "keras",
    before=settings.choose_keras_backend,
    after=lambda: importlib.import_module("replicax.keras.hooks").install(),
)
