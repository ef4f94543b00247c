"""`StrategyExtended`: all logic of a strategy, composed of parts; a new strategy subclasses it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from replicax.collectives.arguments import resolve_destinations, resolve_pairs
from replicax.collectives.cross_device_ops import CollectiveAllReduce, CrossDeviceOps
from replicax.contexts import frames, guards
from replicax.contexts.frames import Frame, Mode, Strategy
from replicax.contexts.replica_context import ReplicaContext, ValueContext
from replicax.execution.executor import Executor
from replicax.foundation import devices, errors
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import CommunicationOptions, ReduceOp, resolve_reduce_op
from replicax.foundation.types import Tree
from replicax.input.input_context import InputContext, InputOptions
from replicax.strategies import updating
from replicax.strategies.inputs import Inputs
from replicax.strategies.placement import Placement
from replicax.strategies.reductions import Reductions
from replicax.values.distributed_values import PerReplica, container_of
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import leaves_of, local_results, wrap_all
from replicax.variables import creators
from replicax.variables.replicated import VariableComponent
from replicax.variables.variable import Variable


class StrategyExtended:
    """The lower half of a strategy, for code that must know about distribution.

    It is composed of four parts: `executor` runs replica code, `placement` creates variables,
    `reductions` combines values, `inputs` distributes datasets. A new strategy passes parts of
    its own, or subclasses this and overrides hooks such as `_create_variable`; its `Strategy`
    subclass only makes the instance.

    Args:
      container_strategy: The strategy that this is the lower half of.
      layout: The replicas.
      parameter_devices: Where variables are; by default the devices of the placement.
      cross_device_ops: Combines values of several devices.
      placement: Creates variables.
      executor: Runs replica code.

    Raises:
      UnsupportedError: It was made without a layout, and has to know its replicas.

    >>> import jax
    >>> import replicax as rx
    >>> from replicax.strategies.placement import CopyPerReplica
    >>> class FirstDevice(rx.Strategy):
    ...     def __init__(self):
    ...         layout = rx.ReplicaLayout(jax.devices()[:1])
    ...         super().__init__(rx.StrategyExtended(self, layout, placement=CopyPerReplica()))
    >>> FirstDevice().num_replicas_in_sync
    1
    """

    def __init__(
        self,
        container_strategy: Strategy,
        layout: ReplicaLayout | None = None,
        parameter_devices: Sequence[Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        placement: Placement | None = None,
        executor: Executor | None = None,
    ) -> None:
        # Weak: the strategy owns its lower half.
        self._container = weakref.ref(container_strategy)
        self.layout: ReplicaLayout | None = layout
        self.placement = placement or Placement()
        self._parameter_devices = parameter_devices or self.placement.devices
        self.reductions = Reductions(layout, cross_device_ops or CollectiveAllReduce())
        self.executor = executor or Executor()
        self._inputs = None if layout is None else Inputs(layout)

    # Properties.

    @property
    def container_strategy(self) -> Any:
        """The strategy that this is the lower half of."""
        return self._container()

    def relink(self, container_strategy: Strategy) -> None:
        """Makes this the lower half of another strategy."""
        self._container = weakref.ref(container_strategy)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.container_strategy!r}>"

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """Combines values of several devices."""
        return self.reductions.ops

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that are kept in step."""
        return self._require_layout().num_replicas

    def _require_layout(self) -> ReplicaLayout:
        if self.layout is None:
            raise errors.UnsupportedError(
                "A StrategyExtended subclass must know its replicas",
                f"{type(self).__name__} was made without a layout",
                "Pass layout=ReplicaLayout(devices) to StrategyExtended.__init__.",
            )
        return self.layout

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica of this process."""
        return tuple(devices.name_of(d) for d in self._require_layout().local_devices)

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

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs the program for its own replicas."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries."""
        return True

    def _require_own_cross_replica(self, api: str, instead: str = "") -> None:
        """Raises in replica code, and under another strategy."""
        guards.require_same_strategy(api, self.container_strategy)
        guards.require_cross_replica(api, instead, self.container_strategy)

    # Running.

    def scope_frame(self, location: str) -> Frame:
        """Returns the frame of code in the scope of the strategy."""
        return Frame(
            Mode.CROSS_REPLICA,
            self.container_strategy,
            self,
            self.layout,
            self.reductions.ops,
            overlay=frames.current().overlay if frames.stack() else None,
            is_scope=True,
            opened_at=location,
        )

    def own_frame(self) -> Frame:
        """Returns the current frame if it is of this strategy, else that of its scope."""
        frame = frames.current()
        return frame if frame.hooks is self else self.scope_frame(frame.opened_at)

    def call_for_each_replica(
        self,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        """Runs `fn` once per replica; does the work of `Strategy.run`."""
        self._require_own_cross_replica("call_for_each_replica")
        arguments = (tuple(args), dict(kwargs or {}))
        for leaf in leaves_of(arguments):
            if isinstance(leaf, PerReplica):
                leaf.require_replicas(self._require_layout())
        return self._call_for_each_replica(fn, *arguments)

    def _call_for_each_replica(
        self, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        """Hook: runs replica code."""
        return self.executor.run(self.own_frame(), fn, args, kwargs)

    def enter_replica_context(
        self, context: ReplicaContext
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that makes a replica context of the user the current one."""
        return self.executor.entered(self.scope_frame(""), context)

    # Values.

    def local_results(self, value: Tree) -> tuple[Tree, ...]:
        """Returns the components of this process."""
        return local_results(value)

    def values_from_function(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        """Calls `value_fn` for each replica and wraps the results, leaf by leaf."""
        layout = self._require_layout()
        count, first = layout.num_replicas, layout.first_local
        values = [value_fn(ValueContext(first + i, count)) for i in range(layout.num_local)]
        return wrap_all(values, layout)

    def value_container(self, value: object) -> Any:
        """Returns the distributed value or variable that a component belongs to."""
        return container_of(value)

    # Data.

    @property
    def inputs(self) -> Inputs:
        """Distributes datasets."""
        self._require_layout()
        assert self._inputs is not None
        return self._inputs

    @property
    def input_context(self) -> InputContext:
        """The input pipeline of this process: the only one, by default."""
        return self.inputs.context

    def distribute_dataset(self, dataset: object, options: InputOptions | None) -> Iterable[Tree]:
        """Does the work of `Strategy.experimental_distribute_dataset`."""
        return self.inputs.distribute(dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None
    ) -> Iterable[Tree]:
        """Does the work of `Strategy.distribute_datasets_from_function`."""
        return self.inputs.from_function(dataset_fn, options)

    # Reducing.

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Tree:
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
        return self.reductions.reduce(op, [value], [resolve_destinations(destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[object, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Tree]:
        """Does several `reduce_to` together, which is faster; one result per pair."""
        op = resolve_reduce_op(reduce_op)
        self._require_own_cross_replica(
            "extended.batch_reduce_to", "Use `all_reduce` in replica code."
        )
        pairs = resolve_pairs(value_destination_pairs)
        values = [value for value, _ in pairs]
        self._check_batch(values)
        return self.reductions.reduce(op, values, [targets for _, targets in pairs], options)

    def _check_batch(self, values: Sequence[object]) -> None:
        """Hook: may refuse values that the reduction algorithm cannot take together."""

    def broadcast_to(self, tensor: object, destinations: object) -> Tree:
        """Copies a value to devices; Python numbers are returned as they are."""
        self._require_own_cross_replica("extended.broadcast_to")
        if isinstance(tensor, int | float | bool | complex):
            return tensor
        return self.reductions.broadcast(tensor, resolve_destinations(destinations))

    # Variables.

    def creator(self, next_creator: creators.Creator, **kwargs: Any) -> Any:
        """Creates a variable; the strategy's entry in the stack of creators."""
        frame = frames.current()
        if frame.mode is Mode.REPLICA and frame.hooks is self:
            assert frame.executor is not None
            name = kwargs.get("name") or "Variable"
            return frame.executor.shared_variable(
                name, lambda: self._create_variable(next_creator, **kwargs)
            )
        return self._create_variable(next_creator, **kwargs)

    def _create_variable(self, next_creator: creators.Creator, **kwargs: Any) -> Variable:
        """Hook: creates a variable."""
        return self.placement.create(self, next_creator, kwargs)

    def variable_created_in_scope(self, v: object) -> bool:
        """Tells whether a variable was created in this strategy's scope."""
        return getattr(v, "owner", None) is self

    def read_var(self, v: Variable) -> Any:
        """Returns the value of a variable; aggregated, if it is synchronized on read."""
        return v.read_value()

    def colocate_vars_with(
        self, colocate_with_variable: object
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager: variables created inside share devices with a variable.

        Args:
          colocate_with_variable: A variable of this strategy, or a result of `non_slot_devices`.

        Raises:
          ContextError: This is not the scope of this strategy.
          InvalidArgumentError: The variable is not of this strategy.
        """
        if frames.current().hooks is not self:
            raise errors.ContextError(
                "`colocate_vars_with` needs its own strategy's scope",
                f"this is {frames.current().describe()}",
                "Call it inside `with strategy.scope():`.",
            )
        self._validate_colocate_with_variable(colocate_with_variable)
        targets = resolve_destinations(colocate_with_variable)

        def creator(next_creator: creators.Creator, **kwargs: Any) -> Any:
            return next_creator(**kwargs, colocate_with=targets)

        return creators.variable_creator_scope(creator)

    def _validate_colocate_with_variable(self, value: object) -> None:
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

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Returns the devices for optimizer state that belongs to no single variable."""
        del var_list
        return self.parameter_devices

    def update(
        self,
        var: object,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        """Calls `fn(copy, *args)` on every device of `var`, in update context.

        Args:
          var: A variable of this strategy.
          fn: Takes a copy of the variable, and the arguments.
          args: Arguments that are equal on all replicas; mirrored ones are unwrapped.
          kwargs: Keyword arguments, likewise.
          group: If False, results come as one tuple per leaf, with a result per copy.

        Raises:
          InvalidArgumentError: The variable is not of this strategy.
        """
        guards.require_same_strategy("extended.update", self.container_strategy)
        frame = frames.current()
        arguments = (tuple(args), dict(kwargs or {}))
        if frame.mode is Mode.REPLICA and not frame.is_default:

            def merged(strategy: Strategy, args: Tree, kwargs: Tree) -> Tree:
                return self.update(var, fn, args, kwargs, group)

            assert frame.replica_context is not None
            return frame.replica_context.merge_call(merged, arguments)
        variable = self._require_updatable(var)
        updating.refuse_per_replica("extended.update", arguments)
        return updating.update_variable(self.own_frame(), variable, fn, *arguments, group)

    def _require_updatable(self, var: object) -> Variable:
        """Hook: returns the variable to update, or raises."""
        if not isinstance(var, Variable) or not self.variable_created_in_scope(var):
            raise errors.InvalidArgumentError(
                "`extended.update` needs a variable created in this strategy's scope",
                f"it got {_kind(var)}",
                "Create the variable inside `with strategy.scope():`.",
            )
        return var

    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        """Calls `fn(*args)` on the devices that `non_slot_devices` returned.

        Raises:
          InvalidArgumentError: `colocate_with` is not the result of `non_slot_devices`.
        """
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
        return updating.update_on_devices(self.own_frame(), targets, fn, *arguments, group)


def _kind(value: object) -> str:
    if isinstance(value, Variable):
        return f"variable {value.name!r}, which was created outside of it"
    return f"{value!r}"
