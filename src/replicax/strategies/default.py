"""The default strategy, in force outside of every scope, and the questions about now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from typing_extensions import override

from replicax.contexts import frames, guards
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.replica_context import ReplicaContext, ValueContext
from replicax.execution.single import SingleExecutor
from replicax.foundation import errors
from replicax.input.input_context import InputContext, checked_options
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
            "the default strategy is in force, which has no devices of its own",
            "Ask a strategy such as rx.MirroredStrategy().",
        )

    @property
    @override
    def parameter_devices(self) -> tuple[str, ...]:
        return self.worker_devices

    @override
    def scope_frame(self, location: str) -> Frame:
        """Stays in the replica context that the default strategy always is in."""
        return Frame(
            Mode.REPLICA,
            self.container_strategy,
            replica_context=_context,
            executor=SingleExecutor(self.container_strategy, None),
            overlay=frames.current().overlay,
            is_scope=True,
            is_default=True,
            opened_at=location,
        )

    @override
    def values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        return value_fn(ValueContext())

    @override
    def distribute_dataset(self, dataset: Any, options: Any) -> Any:
        checked_options(options, is_from_function=False)
        return dataset

    @override
    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        checked_options(options, is_from_function=True)
        return dataset_fn(InputContext())

    @override
    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        guards.require_same_strategy("extended.broadcast_to", self.container_strategy)
        if destinations is not None:
            raise errors.UnsupportedError(
                "The default strategy cannot broadcast to devices",
                f"destinations={destinations!r} was given",
                "Use a strategy with devices.",
            )
        return tensor

    @override
    def creator(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        frame = frames.current()
        if not frame.is_default:
            raise errors.ContextError(
                "A variable created under the default strategy's scope needs it to be current",
                f"this is {frame.describe()}",
                "Mixing different strategies is not possible: leave one scope first.",
            )
        return next_creator(**kwargs)

    @override
    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            return next_creator(**kwargs)

        return creators.variable_creator_scope(creator)

    @override
    def non_slot_devices(self, var_list: Sequence[Any]) -> Any:
        return min(var_list, key=lambda v: v.name)

    @override
    def _require_updatable(self, var: Any) -> None:
        if not isinstance(var, Variable):
            raise errors.InvalidArgumentError(
                "`extended.update` needs a variable", f"it got {var!r}", "Pass an rx.Variable."
            )

    @override
    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        strategy = self.container_strategy
        guards.require_same_strategy("extended.update", strategy)
        self._require_updatable(var)
        arguments = (tuple(args), dict(kwargs or {}))
        refuse_per_replica("extended.update", arguments)
        return update_variable(strategy, var, fn, *arguments, group)

    @override
    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        del colocate_with
        strategy = self.container_strategy
        guards.require_same_strategy("extended.update_non_slot", strategy)
        arguments = (tuple(args), dict(kwargs or {}))
        refuse_per_replica("extended.update_non_slot", arguments)
        return update_on_devices(strategy, None, [None], fn, *arguments, group)  # type: ignore[list-item]

    @override
    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
        return self.container_strategy.reduce(reduce_op, value, axis=None)


@final
class DefaultStrategy(Strategy):
    """The strategy of code that knows nothing about strategies."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise errors.ContextError(
            "There is one default strategy", "a copy was asked for", "Use it as it is."
        )


_default = DefaultStrategy()
_context = ReplicaContext(_default, 0)
frames.set_default(
    Frame(
        Mode.REPLICA,
        _default,
        replica_context=_context,
        executor=SingleExecutor(_default, None),
        is_default=True,
    )
)


def get_strategy() -> Strategy:
    """Returns the strategy in force; the default one outside of every scope."""
    return frames.current().strategy


def has_strategy() -> bool:
    """Tells whether a strategy other than the default one is in force.

    >>> has_strategy()
    False
    """
    return not frames.current().is_default


def get_replica_context() -> ReplicaContext | Any:
    """Returns the `ReplicaContext` of replica code, and None in cross-replica code."""
    return frames.current().replica_context


def in_cross_replica_context() -> bool:
    """Tells whether the running code acts for all replicas.

    >>> in_cross_replica_context()
    False
    """
    return frames.current().mode is not Mode.REPLICA


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy current everywhere, without a `with` block; None undoes it."""
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
