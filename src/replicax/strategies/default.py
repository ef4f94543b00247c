"""The default strategy, current outside of every scope, and functions about the current one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, final

from typing_extensions import override

from replicax.contexts import frames, guards
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import Overlay
from replicax.contexts.replica_context import ReplicaContext, ValueContext
from replicax.execution.single import SingleExecutor
from replicax.foundation import errors
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.foundation.types import Tree
from replicax.input.input_context import InputContext, InputOptions, checked_options
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.updating import (
    refuse_per_replica,
    update_on_devices,
    update_variable,
)
from replicax.variables import creators
from replicax.variables.variable import Variable


@final
class DefaultExtended(StrategyExtended):
    """One replica, nothing distributed."""

    @property
    @override
    def num_replicas_in_sync(self) -> int:
        return 1

    @property
    @override
    def worker_devices(self) -> tuple[str, ...]:
        raise errors.ContextError(
            "`worker_devices` needs a strategy",
            "the default strategy is current, which has no devices of its own",
            "Use a strategy such as rx.MirroredStrategy().",
        )

    @property
    @override
    def parameter_devices(self) -> tuple[str, ...]:
        return self.worker_devices

    @override
    def scope_frame(self, location: str) -> Frame:
        """Stays in the replica context that the default strategy always is in."""
        return self._frame(_context, frames.current().overlay, is_scope=True, opened_at=location)

    def _frame(
        self,
        context: ReplicaContext,
        overlay: Overlay | None = None,
        is_scope: bool = False,
        opened_at: str = "",
    ) -> Frame:
        executor = SingleExecutor()
        executor.frame = Frame(
            Mode.REPLICA,
            self.container_strategy,
            self,
            None,
            self.reductions.ops,
            replica_context=context,
            executor=executor,
            overlay=overlay,
            is_scope=is_scope,
            is_default=True,
            opened_at=opened_at,
        )
        return executor.frame

    @override
    def values_from_function(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        return value_fn(ValueContext())

    @override
    def distribute_dataset(self, dataset: object, options: InputOptions | None) -> Any:
        checked_options(options, is_from_function=False)
        return dataset

    @override
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None
    ) -> Any:
        checked_options(options, is_from_function=True)
        return dataset_fn(InputContext())

    @override
    def broadcast_to(self, tensor: object, destinations: object) -> Tree:
        guards.require_same_strategy("extended.broadcast_to", self.container_strategy)
        if destinations is not None:
            raise errors.UnsupportedError(
                "The default strategy cannot broadcast to devices",
                f"destinations={destinations!r} was given",
                "Use a strategy with devices.",
            )
        return tensor

    @override
    def creator(self, next_creator: creators.Creator, **kwargs: Any) -> Any:
        frame = frames.current()
        if not frame.is_default:
            raise errors.ContextError(
                "A variable created under the default strategy's scope needs it to be current",
                f"this is {frame.describe()}",
                "Mixing different strategies is not possible: leave one scope first.",
            )
        return next_creator(**kwargs)

    @override
    def colocate_vars_with(self, colocate_with_variable: object) -> AbstractContextManager[None]:
        def creator(next_creator: creators.Creator, **kwargs: Any) -> Any:
            return next_creator(**kwargs)

        return creators.variable_creator_scope(creator)

    @override
    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        return min(var_list, key=lambda v: v.name)

    @override
    def _require_updatable(self, var: object) -> Variable:
        if not isinstance(var, Variable):
            raise errors.InvalidArgumentError(
                "`extended.update` needs a variable", f"it got {var!r}", "Pass an rx.Variable."
            )
        return var

    @override
    def update(
        self,
        var: object,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        guards.require_same_strategy("extended.update", self.container_strategy)
        variable = self._require_updatable(var)
        arguments = (tuple(args), dict(kwargs or {}))
        refuse_per_replica("extended.update", arguments)
        return update_variable(self.own_frame(), variable, fn, *arguments, group)

    @override
    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        del colocate_with
        guards.require_same_strategy("extended.update_non_slot", self.container_strategy)
        arguments = (tuple(args), dict(kwargs or {}))
        refuse_per_replica("extended.update_non_slot", arguments)
        return update_on_devices(self.own_frame(), [None], fn, *arguments, group)

    @override
    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Tree:
        return self.container_strategy.reduce(reduce_op, value, axis=None)


@final
class DefaultStrategy(Strategy):
    """The strategy of code outside of every scope."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended(self))

    @property
    @override
    def extended(self) -> DefaultExtended:
        assert isinstance(self._extended, DefaultExtended)
        return self._extended

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise errors.ContextError(
            "There is one default strategy", "copy.deepcopy was called", "Use it as it is."
        )


_default = DefaultStrategy()
_context = ReplicaContext(_default, 0)
frames.set_default(_default.extended._frame(_context))


def get_strategy() -> Strategy:
    """Returns the current strategy; the default one outside of every scope.

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("CPU:0")
    >>> with strategy.scope():
    ...     rx.get_strategy() is strategy
    True
    """
    strategy = frames.current().strategy
    assert isinstance(strategy, Strategy)
    return strategy


def has_strategy() -> bool:
    """Tells whether a strategy other than the default one is current.

    >>> has_strategy()
    False
    """
    return not frames.current().is_default


def get_replica_context() -> ReplicaContext | Any:
    """Returns the `ReplicaContext` of replica code, and None in cross-replica code.

    >>> import replicax as rx
    >>> with rx.OneDeviceStrategy("CPU:0").scope():
    ...     rx.get_replica_context() is None
    True
    """
    return frames.current().replica_context


def in_cross_replica_context() -> bool:
    """Tells whether the running code acts for all replicas.

    >>> in_cross_replica_context()
    False
    """
    return frames.current().mode is not Mode.REPLICA


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy current everywhere, without a `with` block; None undoes it.

    Raises:
      ContextError: A scope is open.
      ArgumentTypeError: It is neither a strategy nor None.

    >>> import replicax as rx
    >>> rx.experimental_set_strategy(rx.OneDeviceStrategy("CPU:0"))
    >>> rx.has_strategy()
    True
    >>> rx.experimental_set_strategy(None)
    """
    if frames.stack():
        raise errors.ContextError(
            "`experimental_set_strategy` must be called outside of every scope",
            f"this is {frames.current().describe()}",
            "Leave the scope first.",
        )
    if strategy is None:
        frames.install(None)
        creators.install()
        return
    if not isinstance(strategy, Strategy):
        raise errors.ArgumentTypeError(
            "`experimental_set_strategy` needs a strategy or None",
            f"{strategy!r} was given",
            "Pass a strategy such as rx.MirroredStrategy().",
        )
    frames.install(strategy.extended.scope_frame(frames.caller_location()))
    creators.install(strategy.extended.creator)
