"""`DistributionStrategy`: the API of r1.9, over a strategy of today."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import jax.numpy as jnp

from replicax.collectives.arguments import device_of, resolve_destinations
from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.contrib.distribute import locality
from replicax.foundation import devices, errors, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from replicax.foundation.types import Tree
from replicax.input import distribution
from replicax.input.distributed import DistributedDataset
from replicax.input.input_context import InputContext
from replicax.strategies.base import Strategy
from replicax.strategies.default import DefaultStrategy, get_strategy
from replicax.strategies.extended import StrategyExtended
from replicax.values.distributed_values import Mirrored, PerReplica
from replicax.values.layout import ReplicaLayout
from replicax.variables import creators
from replicax.variables.variable import Variable

_T = TypeVar("_T")
_METHODS = {"sum": ReduceOp.SUM, "mean": ReduceOp.MEAN}
# The face of each strategy that has one, while it is used.
_faces: weakref.WeakKeyDictionary[Strategy, weakref.ref[DistributionStrategy]] = (
    weakref.WeakKeyDictionary()
)


class DistributionStrategy:
    """A strategy with the API of TensorFlow 1.9, in which replicas are called towers.

    It calls a strategy of today, which is its attribute `strategy`. Without a subclass, that is
    the one outside of every scope: a single tower, nothing is distributed.

    Each method says which locality its values need, and raises an error for others; see
    `replicax.contrib.distribute.locality`.

    >>> from replicax.contrib import distribute
    >>> distribution = distribute.MirroredStrategy(["CPU:0"])
    >>> with distribution.scope():
    ...     result = distribution.call_for_each_tower(lambda x: x + 1, 3)
    >>> distribution.unwrap(result)
    [4]
    """

    strategy: Strategy

    def __init__(self) -> None:
        with frames.outside():
            self._bind(get_strategy())

    @classmethod
    def of(cls, strategy: Strategy) -> DistributionStrategy:
        """Returns the `DistributionStrategy` that calls a strategy."""
        known = _faces.get(strategy)
        face = None if known is None else known()
        if face is None:
            face = object.__new__(DistributionStrategy)
            face._bind(strategy)
        return face

    def _bind(self, strategy: Strategy) -> None:
        self.strategy = strategy
        _faces[strategy] = weakref.ref(self)

    @property
    def _extended(self) -> StrategyExtended:
        return self.strategy.extended

    @property
    def _is_default(self) -> bool:
        return isinstance(self.strategy, DefaultStrategy)

    def __repr__(self) -> str:
        return f"<contrib.distribute.{type(self).__name__} of {self.strategy!r}>"

    # Facts.

    @property
    def num_towers(self) -> int:
        """The number of towers, by which averages are divided."""
        return self.strategy.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower."""
        return self.num_towers == 1

    @property
    def worker_devices(self) -> list[str]:
        """The device of each tower of this process."""
        return list(self._extended.worker_devices)

    @property
    def parameter_devices(self) -> list[str]:
        """The devices that hold variables."""
        return list(self._extended.parameter_devices)

    @property
    def worker_device_index(self) -> Any:
        """The index of each tower's device in `worker_devices`; 0 if there is one tower.

        Pass it to `call_for_each_tower`, which gives each tower its own index.
        """
        layout = self._extended.layout
        if layout is None or layout.num_replicas == 1:
            return 0
        first = layout.first_local
        return self._extended.values_from_function(lambda c: c.replica_id_in_sync_group - first)

    def configure(self, session_config: _T = None) -> _T:
        """Returns a session configuration as it is: there is nothing to configure."""
        return session_config

    # Scopes.

    @contextlib.contextmanager
    def scope(self) -> Iterator[Self]:
        """Makes this the current strategy, and enters its cross-tower context."""
        with self.strategy.scope():
            yield self

    def colocate_vars_with(self, colocate_with_variable: object) -> AbstractContextManager[None]:
        """Returns a context manager: variables created inside have the locality V(v).

        Args:
          colocate_with_variable: A variable of this strategy, or what `non_slot_devices` returned.
        """
        return self._extended.colocate_vars_with(colocate_with_variable)

    def tower_local_var_scope(self, reduce_method: str) -> AbstractContextManager[None]:
        """Returns a context manager: variables created inside are tower-local, not mirrored.

        Each tower reads and writes a copy of its own. Reading the variable outside of towers,
        `fetch` and checkpoints combine the copies. Tower-local variables are not trainable.

        Args:
          reduce_method: "sum" or "mean", how copies are combined.
        """
        aggregation = VariableAggregation[_method(reduce_method).name]
        if frames.current().strategy is not self.strategy:
            raise self._wrong_context("tower_local_var_scope")

        def creator(next_creator: creators.Creator, **kwargs: Any) -> Any:
            if kwargs.get("trainable"):
                raise errors.InvalidArgumentError(
                    "A tower-local variable is not trainable",
                    f"trainable=True was given for {kwargs.get('name') or 'Variable'!r}",
                    "Leave `trainable` out, or create the variable outside of "
                    "`tower_local_var_scope`.",
                )
            kwargs["trainable"] = False
            kwargs["synchronization"] = VariableSynchronization.ON_READ
            kwargs["aggregation"] = aggregation
            return next_creator(**kwargs)

        return creators.variable_creator_scope(creator)

    # Towers.

    def call_for_each_tower(self, fn: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
        """Calls `fn` once per tower and merges the results.

        Args:
          fn: The code of a tower.
          *args: Arguments; values of locality T and M are replaced by those of each tower.
          **kwargs: Keyword arguments, likewise. `run_concurrently` is not passed on: towers
            take turns, and compiled ones run together.
        """
        self._require_cross_tower("call_for_each_tower")
        kwargs.pop("run_concurrently", None)
        if not self._is_default:
            where = self._worker_targets()
            locality.require_for_towers("call_for_each_tower", (args, kwargs), where)
        return self.strategy.run(fn, args=args, kwargs=kwargs)

    def distribute_dataset(
        self, dataset_fn: Iterable[Tree] | Callable[[], Iterable[Tree]]
    ) -> DistributedDataset:
        """Returns a dataset that gives each tower one element of a dataset per step.

        Its iterators, made by `make_one_shot_iterator` or `make_initializable_iterator`, have
        locality T. If elements for some towers are missing in the last step, they get parts
        without rows.

        Args:
          dataset_fn: A function that returns a dataset of batches of one tower, or the dataset.
        """

        def made(context: InputContext) -> Tree:
            del context
            return dataset_fn if isinstance(dataset_fn, Iterable) else dataset_fn()

        if self._is_default:
            layout = ReplicaLayout([devices.current()])
            return distribution.distribute_from_function(made, None, layout, InputContext())
        return self.strategy.distribute_datasets_from_function(made)

    # Values.

    def broadcast(self, tensor: Tree, destinations: object = None) -> Tree:
        """Copies a value to devices: locality M, or V(v) if `destinations` is a variable v.

        Args:
          tensor: A value of one device.
          destinations: A variable, a device name or a list of device names; by default the
            worker devices.
        """
        self._require_cross_tower("broadcast")
        if not self.is_single_tower:
            locality.require_one_value("broadcast", tensor)
        if isinstance(tensor, bool | int | float | complex):
            tensor = jnp.asarray(tensor)
        if self._is_default:
            return self._extended.broadcast_to(tensor, destinations)
        if destinations is None:
            destinations = self.worker_devices
        return self._extended.broadcast_to(tensor, destinations)

    def reduce(self, method_string: str, value: Tree, destinations: object = None) -> Tree:
        """Combines a value of locality T to one of locality M, or V(v).

        Args:
          method_string: "sum" or "mean".
          value: A value of each tower.
          destinations: A variable, a device name or a list of device names; by default the
            devices of the value.
        """
        op = _method(method_string)
        self._require_cross_tower("reduce")
        self._require_per_tower("reduce", value)
        return self._extended.reduce_to(op, value, self._destinations(value, destinations))

    def batch_reduce(
        self, method_string: str, value_destination_pairs: Sequence[tuple[Tree, object]]
    ) -> list[Tree]:
        """Does several `reduce` together, which is faster; one result per pair."""
        op = _method(method_string)
        self._require_cross_tower("batch_reduce")
        pairs = []
        for value, destinations in value_destination_pairs:
            self._require_per_tower("batch_reduce", value)
            pairs.append((value, self._destinations(value, destinations)))
        if self._is_default:
            return [self._extended.reduce_to(op, value, where) for value, where in pairs]
        return self._extended.batch_reduce_to(op, pairs)

    def fetch(
        self,
        val: Tree,
        destination: str = "/device:CPU:0",
        fn: Callable[[Tree], Tree] = lambda x: x,
    ) -> Tree:
        """Returns `fn(val)` on a device; `fn` is computed where the value is.

        Args:
          val: A value of any locality, or a variable. The copies of a tower-local variable are
            combined. Of a value per tower, all components are copied, and stay a value per tower.
          destination: A device name.
          fn: Applied before the value is copied.
        """
        target = devices.resolve(destination)
        if isinstance(val, PerReplica):
            parts = [_computed(fn, part, target) for part in val.values]
            return PerReplica(parts, val.layout)
        if isinstance(val, Variable):
            if val.is_per_replica or target not in val.placement:
                return _computed(fn, val.read_value(), target)
            return _computed(fn, val.components[val.placement.index(target)].read_value(), target)
        if isinstance(val, Mirrored):
            where = [device_of(part) for part in val.values]
            return _computed(fn, val.values[where.index(target) if target in where else 0], target)
        return _computed(fn, val, target)

    def unwrap(self, value: Tree) -> list[Tree]:
        """Returns the components of a value; a list of the value itself if it has none."""
        return self.strategy.unwrap(value)

    def group(self, value: Tree, name: str | None = None) -> None:
        """Waits until all components of a value are computed."""
        self.strategy.group(value, name)

    # Updates.

    def update(self, var: Variable, fn: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
        """Calls `fn(copy, *args)` on every device of a variable; the result has locality V(v).

        Args:
          var: A variable that was created in the scope.
          fn: Takes a copy of the variable, and the arguments.
          *args: Values of locality V(v), and variables that are colocated with `var`.
          **kwargs: Keyword arguments, likewise.
        """
        self._require_cross_tower("update")
        if not self._is_default and isinstance(var, Variable):
            where = f"V({var.name!r})"
            locality.require_at("update", (args, kwargs), var.placement, where)
        return self._extended.update(var, fn, args, kwargs)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Returns the devices for variables that belong to no single variable.

        Args:
          var_list: The variables that are trained; the default strategy needs them.
        """
        return self._extended.non_slot_devices(var_list)

    def update_non_slot(
        self, colocate_with: object, fn: Callable[..., Tree], *args: Tree, **kwargs: Tree
    ) -> Tree:
        """Calls `fn(*args)` on the devices that `non_slot_devices` returned.

        Args:
          colocate_with: The devices.
          fn: Takes the arguments.
          *args: Values of locality N, and variables on these devices.
          **kwargs: Keyword arguments, likewise.
        """
        self._require_cross_tower("update_non_slot")
        if not self._is_default and isinstance(colocate_with, list | tuple) and colocate_with:
            where = resolve_destinations(colocate_with)
            locality.require_at("update_non_slot", (args, kwargs), where, "N")
        return self._extended.update_non_slot(colocate_with, fn, args, kwargs)

    # Checks.

    def _require_cross_tower(self, api: str) -> None:
        frame = frames.current()
        if self._is_default and frame.is_default:
            return
        if frame.strategy is not self.strategy or frame.mode is Mode.REPLICA:
            raise self._wrong_context(api)

    def _wrong_context(self, api: str) -> errors.ContextError:
        frame = frames.current()
        name = type(self).__name__
        if frame.strategy is not self.strategy:
            advice = "Call it inside `with distribution.scope():`."
            found = "no scope is open" if frame.is_default else f"this is {frame.describe()}"
        else:
            advice = "Call it in a function that you pass to `get_tower_context().merge_call`."
            found = f"this is the tower context of {name}"
        return errors.ContextError(
            f"`{api}` needs the cross-tower context of {name}", found, advice
        )

    def _require_per_tower(self, api: str, value: Tree) -> None:
        # The values of a single tower are not wrapped.
        if not self.is_single_tower:
            locality.require_per_tower(api, value)

    def _worker_targets(self) -> tuple[Device, ...]:
        layout = self._extended.layout
        assert layout is not None
        return layout.local_devices

    def _destinations(self, value: Tree, destinations: object) -> object:
        if destinations is not None or self._is_default:
            return destinations
        is_wrapped = isinstance(value, PerReplica) or hasattr(value, "placement")
        return value if is_wrapped else self.worker_devices


def _method(method_string: str) -> ReduceOp:
    if method_string not in _METHODS:
        raise errors.InvalidArgumentError(
            'The first argument must be "sum" or "mean"',
            f"it is {method_string!r}",
            'Pass "sum" or "mean", in lower case.',
        )
    return _METHODS[method_string]


def _computed(fn: Callable[[Tree], Tree], value: Tree, target: Device) -> Tree:
    """Returns `fn(value)`, computed where the value is, on another device."""
    with devices.device(device_of(value)):
        result = fn(value)
    return placement.put(result, target)
