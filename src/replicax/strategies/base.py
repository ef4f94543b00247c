"""`Strategy`: what users hold; a thin face over `StrategyExtended`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax.contexts import guards
from replicax.contexts.replica_context import ValueContext
from replicax.foundation import devices, errors
from replicax.foundation.options import ReduceOp, RunOptions, resolve_reduce_op
from replicax.strategies import reductions
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.scope import Scope, entered
from replicax.values.regroup import map_structure


class Strategy:
    """A set of devices, with a policy of where variables live and how replicas run.

    Args:
      extended: The `StrategyExtended` that holds all logic.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended

    @property
    def extended(self) -> StrategyExtended:
        """The lower half, for code that must know about distribution."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are combined."""
        return self._extended.num_replicas_in_sync

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of a strategy of several machines; None on one machine."""
        return None

    def scope(self) -> Any:
        """Returns a context manager that makes this strategy the current one.

        Variables created inside are distributed; plain calls inside are not.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("CPU:0")
        >>> with strategy.scope():
        ...     rx.get_strategy() is strategy
        True
        """
        return Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` once per replica and merges what the calls return.

        Distributed values in the arguments are replaced by each replica's component. An
        `rx.function`, or any function inside one, is compiled into one program.

        Args:
          fn: The replica code.
          args: Positional arguments, a list or tuple.
          kwargs: Keyword arguments.
          options: Accepted for portability.

        >>> import replicax as rx
        >>> rx.OneDeviceStrategy("CPU:0").run(lambda x: x * 2, args=(3,))
        6
        """
        del options
        if not isinstance(args, list | tuple):
            raise errors.InvalidArgumentError(
                errors.message(
                    "`args` must be a list or tuple",
                    f"it is {type(args).__name__}",
                    "For a single argument pass `args=(value,)`.",
                )
            )
        if not callable(fn):
            raise errors.ArgumentTypeError(
                errors.message("`fn` must be callable", f"it is {fn!r}", "Pass a function.")
            )
        with entered(self, "run"):
            return self._extended.call_for_each_replica(fn, args, kwargs)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Combines a per-replica value into one array on the current device.

        Args:
          reduce_op: `ReduceOp.SUM` or `MEAN`, or the name.
          value: A result of `run`, or a structure of such.
          axis: None to combine across replicas only; or the dimension(s), usually 0, along
            which to combine inside each replica as well. MEAN then divides by the true
            number of elements, also for a partial batch.
        """
        op = resolve_reduce_op(reduce_op)
        guards.require_cross_replica(
            "Strategy.reduce", "Use `rx.get_replica_context().all_reduce(...)` there."
        )
        count = self.num_replicas_in_sync
        with entered(self, "reduce"):

            def reduce_leaf(leaf: Any) -> Any:
                divisor = None
                how = op
                if axis is not None:
                    leaf, how, divisor = reductions.reduce_along(op, leaf, axis, count)
                pairs = [(leaf, (devices.current(),))]
                total = self._extended.batch_reduce(how, pairs, None)[0]
                return total if divisor is None else total / divisor

            return map_structure(reduce_leaf, value)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates a per-replica value along `axis`, on the current device."""
        guards.require_cross_replica(
            "Strategy.gather", "Use `rx.get_replica_context().all_gather(...)` there."
        )
        with entered(self, "gather"):
            return map_structure(lambda leaf: self._extended.gather_components(leaf, axis), value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a distributed value, or a tuple of the value itself."""
        return self._extended.local_results(value)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a distributed value from one call of `value_fn` per replica."""
        guards.require_cross_replica("experimental_distribute_values_from_function")
        return self._extended.values_from_function(value_fn)

    def unwrap(self, value: Any) -> list[Any]:
        """Returns the components of a distributed value as a list."""
        return list(self.experimental_local_results(value))

    def group(self, value: Any, name: str | None = None) -> None:
        """Waits until all components of a value are computed."""
        del name
        jax.block_until_ready(self.unwrap(value))

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """Returns `extended.colocate_vars_with(colocate_with_variable)`."""
        return self._extended.colocate_vars_with(colocate_with_variable)

    def __copy__(self) -> Any:
        raise errors.ContextError(
            errors.message(
                "Only copy.deepcopy can copy a strategy",
                "copy.copy was called",
                "Use copy.deepcopy, or make a new strategy.",
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(self.__dict__)
        clone._extended = copy.copy(self._extended)
        clone._extended.relink(clone)
        return clone

    def __repr__(self) -> str:
        return f"<rx.{type(self).__name__} with {self.num_replicas_in_sync} replicas>"
