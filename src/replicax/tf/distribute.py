"""`tf.distribute`: replicax's strategies, whose steps receive and return tensors.

Each strategy is that of replicax: only the values that go in and out of `run`, `reduce`, `gather`
and `experimental_local_results` are tensors instead of arrays.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import replicax as rx
from replicax import cluster_resolver as cluster_resolver
from replicax import coordinator as coordinator
from replicax.strategies.default import DefaultStrategy
from replicax.tf import loops, namespaces, tape_recording
from replicax.tf.arguments import Ignored, Value
from replicax.tf.data.dataset import Dataset, plain
from replicax.tf.distributed_tensors import (
    TensorExtended,
    as_arrays,
    as_tensors,
    giving_tensors,
    is_own_caller,
    with_tensors,
)
from replicax.tf.distributed_tensors import get_replica_context as get_replica_context
from replicax.tf.function import TensorFunction
from replicax.tf.local_functions import LocalFunctions


class _TensorValues:
    """The methods of strategies whose values TensorFlow programs use as tensors."""

    # Workers give their strategy the same methods.
    shipped_as = "replicax.tf.distribute:as_tensor_strategy"

    @property
    def extended(self) -> Any:
        """What strategies can do beyond their methods."""
        found = super().extended  # type: ignore[misc]
        return found if is_own_caller() else TensorExtended(found)

    def run(
        self,
        fn: Callable[..., Any],
        args: Value = (),
        kwargs: Value = None,
        options: Ignored = None,
    ) -> Any:
        run = super().run  # type: ignore[misc]
        if tape_recording.recording_tapes():
            return self._run_recorded(run, fn, tuple(args), dict(kwargs or {}))
        called = self._compiled_step(fn) if loops.on_host() else with_tensors(fn)
        return as_tensors(run(called, args, kwargs, options))

    def _run_recorded(
        self, run: Callable[..., Any], fn: Value, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a step inside a tape, which can follow one replica, not several."""
        if self.num_replicas_in_sync > 1:  # type: ignore[attr-defined]
            with tape_recording.suspended():
                return as_tensors(run(with_tensors(fn), args, kwargs))
        # Not among the arguments and results, which the library takes apart.
        found: list[Any] = []
        run(lambda: found.append(with_tensors(fn)(*args, **kwargs)))
        return found[0]

    def _compiled_step(self, fn: Value) -> Any:
        """Compiles a step that a loop on the host calls in each round."""
        if not isinstance(fn, types.FunctionType | types.MethodType):
            return with_tensors(fn)
        local, steps = self.__dict__.setdefault("_steps", (LocalFunctions(), {}))
        known = local.known(fn)
        if known not in steps:
            steps[known] = TensorFunction(fn)
        return steps[known]

    def reduce(self, reduce_op: Value, value: Value, axis: Value = None) -> Any:
        return as_tensors(super().reduce(reduce_op, value, axis))  # type: ignore[misc]

    def gather(self, value: Value, axis: int) -> Any:
        return as_tensors(super().gather(value, int(axis)))  # type: ignore[misc]

    def experimental_local_results(self, value: Value) -> tuple[Any, ...]:
        found = super().experimental_local_results(value)  # type: ignore[misc]
        return tuple(map(as_tensors, found))

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        @functools.wraps(value_fn)
        def make(context: Value) -> Any:
            return as_arrays(value_fn(context))

        found = super().experimental_distribute_values_from_function(make)  # type: ignore[misc]
        return as_tensors(found)

    def experimental_distribute_dataset(self, dataset: Value, options: Ignored = None) -> Any:
        if isinstance(self, DefaultStrategy):
            return dataset
        found = super().experimental_distribute_dataset(plain(dataset), options)  # type: ignore[misc]
        return giving_tensors(found)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Ignored = None
    ) -> Any:
        @functools.wraps(dataset_fn)
        def make(context: Value) -> Any:
            found = dataset_fn(context)
            return found if isinstance(self, DefaultStrategy) else plain(found)

        found = super().distribute_datasets_from_function(make, options)  # type: ignore[misc]
        return giving_tensors(found)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Value = (), kwargs: Value = None
    ) -> Any:
        """Runs a function on each replica; the older name of `run`."""
        return self.run(fn, args, kwargs)

    def experimental_make_numpy_dataset(self, numpy_input: Value) -> Any:
        """Returns a dataset of the rows of arrays."""
        return Dataset.from_tensor_slices(numpy_input)


def of_tensors(base: type, members: Mapping[str, Any] | None = None) -> Any:
    """Returns a strategy class of replicax with tensors as values.

    Args:
      base: The strategy class.
      members: Further members of the class.
    """
    given = {"__doc__": base.__doc__, "__module__": __name__, **(members or {})}
    # Its examples are those of the base, and use the names of that module.
    given["_module_source"] = getattr(base, "_module_source", base.__module__)
    made = type(base.__name__, (_TensorValues, base), given)
    made.__qualname__ = base.__name__
    return made


MirroredStrategy = of_tensors(rx.MirroredStrategy)
MultiWorkerMirroredStrategy = of_tensors(rx.MultiWorkerMirroredStrategy)
OneDeviceStrategy = of_tensors(rx.OneDeviceStrategy)
ParameterServerStrategy = of_tensors(rx.ParameterServerStrategy)
TPUStrategy = of_tensors(rx.TPUStrategy)
CentralStorageStrategy = of_tensors(rx.CentralStorageStrategy)


def as_tensor_strategy(strategy: Value) -> Any:
    """Gives a strategy of replicax the methods of those of `tf.distribute`."""
    if not isinstance(strategy, _TensorValues):
        is_known = type(strategy) is rx.ParameterServerStrategy
        strategy.__class__ = ParameterServerStrategy if is_known else of_tensors(type(strategy))
    return strategy


# There is one default strategy; this object shares its state.
_default = object.__new__(of_tensors(DefaultStrategy))
_default.__dict__ = rx.get_strategy().__dict__


def get_strategy() -> Any:
    """Returns the current strategy; the default one outside of every scope.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    found = rx.get_strategy()
    return _default if isinstance(found, DefaultStrategy) else found


class _Experimental(types.ModuleType):
    """`tf.distribute.experimental`."""

    CentralStorageStrategy = CentralStorageStrategy
    MultiWorkerMirroredStrategy = of_tensors(rx.experimental.MultiWorkerMirroredStrategy)
    ParameterServerStrategy = ParameterServerStrategy
    TPUStrategy = of_tensors(rx.experimental.TPUStrategy)

    def __getattr__(self, name: str) -> Any:
        return getattr(rx.experimental, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted(rx.experimental.__all__)


experimental = _Experimental(f"{__name__}.experimental", _Experimental.__doc__)
sys.modules[experimental.__name__] = experimental
sys.modules[f"{__name__}.cluster_resolver"] = cluster_resolver
Strategy = rx.Strategy

CrossDeviceOps = rx.CrossDeviceOps
DistributedDataset = rx.DistributedDataset
DistributedIterator = rx.DistributedIterator
DistributedValues = rx.DistributedValues
HierarchicalCopyAllReduce = rx.HierarchicalCopyAllReduce
InputContext = rx.InputContext
InputOptions = rx.InputOptions
InputReplicationMode = rx.InputReplicationMode
NcclAllReduce = rx.NcclAllReduce
ReduceOp = rx.ReduceOp
ReductionToOneDevice = rx.ReductionToOneDevice
ReplicaContext = rx.ReplicaContext
RunOptions = rx.RunOptions
Server = rx.Server
StrategyExtended = rx.StrategyExtended
experimental_set_strategy = rx.experimental_set_strategy
has_strategy = rx.has_strategy
in_cross_replica_context = rx.in_cross_replica_context

# Namespaces below this one are modules as well: `from tf.x.y import z`.
__path__: list[str] = []

__all__ = [
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "cluster_resolver",
    "coordinator",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

__getattr__ = namespaces.refusing(__name__)
