"""`StrategyExtended`: all logic of a strategy; a new strategy is a subclass of this."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from replicax.collectives.cross_device_ops import CollectiveAllReduce, CrossDeviceOps
from replicax.collectives.destinations import resolve_destinations, resolve_pairs
from replicax.contexts import frames, guards
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.replica_context import ReplicaContext, ValueContext
from replicax.execution import spmd
from replicax.execution.entered_replica import entered_replica
from replicax.execution.single import run_single
from replicax.execution.threaded import ThreadedRun
from replicax.foundation import devices, errors
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import ReduceOp, resolve_reduce_op
from replicax.input import distribution
from replicax.input.input_context import InputContext
from replicax.strategies import components, reductions, updating
from replicax.tracing.function import Function
from replicax.tracing.program import note_layout
from replicax.values.containers import container_of
from replicax.values.distributed_values import PerReplica
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import leaves_of
from replicax.variables import creators
from replicax.variables.replicated import VariableComponent
from replicax.variables.variable import Variable


class StrategyExtended:
    """The lower half of a strategy, for code that must know about distribution.

    A new strategy subclasses this, passes the replicas' layout to `__init__` and overrides
    `_create_variable`; its `Strategy` subclass only makes the instance.

    Args:
      container_strategy: The strategy that this is the lower half of.
      layout: The replicas.
      parameter_devices: Where variables live; the replicas' devices if None.
      cross_device_ops: How values of several devices are combined.
    """

    def __init__(
        self,
        container_strategy: Any,
        layout: ReplicaLayout | None = None,
        parameter_devices: Sequence[Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        # Weak: the strategy owns its lower half.
        self._container = weakref.ref(container_strategy)
        self.layout = layout
        self.cross_device_ops: CrossDeviceOps = cross_device_ops or CollectiveAllReduce()
        self._parameter_devices = parameter_devices

    # Facts.

    @property
    def container_strategy(self) -> Any:
        """The strategy that this is the lower half of."""
        return self._container()

    def relink(self, container_strategy: Any) -> None:
        """Makes this the lower half of another strategy."""
        self._container = weakref.ref(container_strategy)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.container_strategy!r}>"

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that are kept in step."""
        if self.layout is None:
            raise errors.UnsupportedError(
                "A StrategyExtended subclass must know its replicas",
                f"{type(self).__name__} was made without a layout",
                "Pass layout=ReplicaLayout(devices) to StrategyExtended.__init__.",
            )
        return self.layout.num_replicas

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica."""
        assert self.num_replicas_in_sync
        return tuple(devices.name_of(d) for d in self.layout.devices)  # type: ignore[union-attr]

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables."""
        if self._parameter_devices is None:
            return self.worker_devices
        return tuple(devices.name_of(d) for d in self._parameter_devices)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether replica code must know all shapes; eager replica code need not."""
        return False

    def _require_own_cross_replica(self, api: str, instead: str = "") -> None:
        """Raises in replica code, and under another strategy."""
        guards.require_same_strategy(api, self.container_strategy)
        guards.require_cross_replica(api, instead)

    # Running.

    def scope_frame(self, location: str) -> Frame:
        """Returns the frame of code in the scope of the strategy."""
        return Frame(
            Mode.CROSS_REPLICA,
            self.container_strategy,
            self.layout,
            overlay=frames.current().overlay if frames.stack() else None,
            is_scope=True,
            opened_at=location,
        )

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs `fn` once per replica; the engine of `Strategy.run`."""
        self._require_own_cross_replica("call_for_each_replica")
        arguments = (tuple(args), dict(kwargs or {}))
        for leaf in leaves_of(arguments):
            if isinstance(leaf, PerReplica):
                leaf.require_components(self.num_replicas_in_sync)
        return self._call_for_each_replica(fn, *arguments)

    def _call_for_each_replica(self, fn: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        strategy, layout = self.container_strategy, self.layout
        overlay = frames.current().overlay
        if overlay is None and isinstance(fn, Function):
            return fn.on_replicas(strategy)(*args, **kwargs)
        if layout is None or layout.num_replicas == 1:
            return run_single(strategy, layout, fn, args, kwargs)
        if overlay is not None:
            return spmd.run_replicas(strategy, layout, fn, args, kwargs)
        return ThreadedRun(strategy, layout, fn, args, kwargs).run()

    def enter_replica_context(
        self, context: ReplicaContext
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that makes a hand-made replica context the current one."""
        return entered_replica(self.container_strategy, self.layout, context)

    # Values.

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of this process."""
        return components.local_results(value)

    def values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Calls `value_fn` for each replica and wraps what it returns, leaf by leaf."""
        count = self.num_replicas_in_sync
        values = [value_fn(ValueContext(i, count)) for i in range(count)]
        return components.wrapped(values, self.layout)

    # Data.

    @property
    def input_context(self) -> InputContext:
        """Which input pipeline of the strategy this process runs: the only one, by default."""
        return InputContext(num_replicas_in_sync=self.num_replicas_in_sync)

    def distribute_dataset(self, dataset: Any, options: Any) -> Any:
        """Does the work of `Strategy.experimental_distribute_dataset`."""
        assert self.num_replicas_in_sync and self.layout is not None
        return distribution.distribute_dataset(dataset, options, self.layout, self.input_context)

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        """Does the work of `Strategy.distribute_datasets_from_function`."""
        assert self.num_replicas_in_sync and self.layout is not None
        return distribution.distribute_from_function(
            dataset_fn, options, self.layout, self.input_context
        )

    def value_container(self, value: Any) -> Any:
        """Returns the distributed value or variable that a component belongs to."""
        return container_of(value)

    # Reducing.

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Combines the values of all replicas and puts the result on `destinations`.

        Args:
          reduce_op: How to combine.
          value: A per-replica value.
          destinations: A variable, a distributed value, an array, a device name or a list of
            device names. `value` itself makes it an all-reduce.
          options: Hints for the reduction.
        """
        op = resolve_reduce_op(reduce_op)
        self._require_own_cross_replica("extended.reduce_to", "Use `all_reduce` in replica code.")
        return self.batch_reduce(op, [(value, resolve_destinations(destinations))], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Does several `reduce_to` together, which is faster; one result per pair."""
        op = resolve_reduce_op(reduce_op)
        self._require_own_cross_replica(
            "extended.batch_reduce_to", "Use `all_reduce` in replica code."
        )
        pairs = resolve_pairs(value_destination_pairs)
        self._check_batch([v for v, _ in pairs])
        return self.batch_reduce(op, pairs, options)

    def _check_batch(self, values: list[Any]) -> None:
        """Hook: may refuse values that the reduction algorithm cannot take together."""

    def batch_reduce(self, op: ReduceOp, pairs: Sequence[tuple[Any, Any]], options: Any) -> Any:
        """Does the work of `batch_reduce_to` on resolved arguments."""
        self._note_layout()
        values, targets = [v for v, _ in pairs], [resolve_destinations(d) for _, d in pairs]
        count = self.num_replicas_in_sync
        return reductions.reduce_values(self.cross_device_ops, op, values, targets, count, options)

    def _note_layout(self) -> None:
        """Tells the function being compiled, if there is one, which replicas it uses."""
        overlay = frames.current().overlay
        if overlay is not None and self.layout is not None:
            note_layout(overlay, self.layout)

    def gather_components(self, value: Any, axis: int) -> Any:
        """Concatenates the components of a value on the current device."""
        self._note_layout()
        count = self.num_replicas_in_sync
        return reductions.gather_values(value, axis, devices.current(), count)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies a value to devices; Python numbers pass through, their type open."""
        self._require_own_cross_replica("extended.broadcast_to")
        if isinstance(tensor, int | float | bool | complex):
            return tensor
        return self.cross_device_ops.broadcast(tensor, destinations)

    # Variables.

    def creator(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """Creates a variable; the strategy's entry in the stack of creators."""
        frame = frames.current()
        if frame.mode is Mode.REPLICA and frame.strategy is self.container_strategy:
            assert frame.executor is not None
            name = kwargs.get("name") or "Variable"
            return frame.executor.shared_variable(
                name, lambda: self._create_variable(next_creator, **kwargs)
            )
        return self._create_variable(next_creator, **kwargs)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Variable:
        """Hook: makes a variable of the kind and in the place that the strategy wants."""
        raise errors.UnsupportedError(
            "A StrategyExtended subclass must define `_create_variable`",
            f"{type(self).__name__} does not",
            "Override it; `next_creator(**kwargs)` makes a plain variable.",
        )

    def variable_created_in_scope(self, v: Any) -> bool:
        """Tells whether a variable was created in this strategy's scope."""
        return getattr(v, "owner", None) is self

    def read_var(self, v: Any) -> Any:
        """Returns the value of a variable; aggregated, if it is synchronized on read."""
        return v.read_value()

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """Returns a context manager: variables created inside share devices with a variable.

        Args:
          colocate_with_variable: A variable of this strategy, or what `non_slot_devices` gave.
        """
        if frames.current().strategy is not self.container_strategy:
            raise errors.ContextError(
                "`colocate_vars_with` needs its own strategy's scope",
                f"this is {frames.current().describe()}",
                "Call it inside `with strategy.scope():`.",
            )
        self._validate_colocate_with_variable(colocate_with_variable)
        targets = resolve_destinations(colocate_with_variable)

        def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            return next_creator(**kwargs, colocate_with=targets)

        return creators.variable_creator_scope(creator)

    def _validate_colocate_with_variable(self, value: Any) -> None:
        """Hook: refuses what variables cannot be colocated with."""
        if isinstance(value, tuple | list) and value:
            return
        is_whole = isinstance(value, Variable) and not isinstance(value, VariableComponent)
        if not is_whole or not self.variable_created_in_scope(value):
            raise errors.InvalidArgumentError(
                "`colocate_vars_with` needs a variable created in this strategy's scope",
                f"it got {_kind(value)}",
                "Pass such a variable, or the result of `non_slot_devices`.",
            )

    def non_slot_devices(self, var_list: Sequence[Any]) -> Any:
        """Returns the devices for optimizer state that belongs to no single variable."""
        del var_list
        return self.parameter_devices

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(copy, *args)` on every device of `var`, in update context.

        Args:
          var: A variable of this strategy.
          fn: Takes a copy of the variable, and the arguments.
          args: Arguments that are equal on all replicas; mirrored ones are unwrapped.
          kwargs: Keyword arguments, likewise.
          group: If False, results come as one tuple per leaf, with a result per copy.
        """
        guards.require_same_strategy("extended.update", self.container_strategy)
        frame = frames.current()
        arguments = (tuple(args), dict(kwargs or {}))
        if frame.mode is Mode.REPLICA and not frame.is_default:

            def merged(strategy: Any, args: Any, kwargs: Any) -> Any:
                return strategy.extended.update(var, fn, args, kwargs, group)

            return frame.replica_context.merge_call(merged, arguments)
        self._require_updatable(var)
        updating.refuse_per_replica("extended.update", arguments)
        return updating.update_variable(self.container_strategy, var, fn, *arguments, group)

    def _require_updatable(self, var: Any) -> None:
        """Hook: refuses what `update` cannot work on."""
        if not isinstance(var, Variable) or not self.variable_created_in_scope(var):
            raise errors.InvalidArgumentError(
                "`extended.update` needs a variable created in this strategy's scope",
                f"it got {_kind(var)}",
                "Create the variable inside `with strategy.scope():`.",
            )

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(*args)` on the devices that `non_slot_devices` returned."""
        self._require_own_cross_replica("extended.update_non_slot")
        if not isinstance(colocate_with, tuple | list):
            raise errors.InvalidArgumentError(
                "`colocate_with` must be the result of `non_slot_devices`",
                f"it is {_kind(colocate_with)}",
                "Call `extended.non_slot_devices(var_list)`.",
            )
        arguments = (tuple(args), dict(kwargs or {}))
        updating.refuse_per_replica("extended.update_non_slot", arguments)
        targets = resolve_destinations(colocate_with)
        return updating.update_on_devices(
            self.container_strategy, self.layout, targets, fn, *arguments, group
        )


def _kind(value: Any) -> str:
    if isinstance(value, Variable):
        return f"variable {value.name!r}, which was created elsewhere"
    return f"{value!r}"
