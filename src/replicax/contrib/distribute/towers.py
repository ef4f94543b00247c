"""`TowerContext`, and functions about the current strategy and tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replicax.contexts.replica_context import ReplicaContext
from replicax.contrib.distribute.distribution_strategy import DistributionStrategy
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.strategies import default
from replicax.strategies.base import Strategy


class TowerContext:
    """The API of the code that `call_for_each_tower` calls once per tower.

    Args:
      context: The replica context of the running code.
    """

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context

    @property
    def tower_id(self) -> Any:
        """The index of this tower, a scalar array; traced in compiled code."""
        return self._context.replica_id_in_sync_group

    @property
    def num_towers(self) -> int:
        """The number of towers."""
        return self._context.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower."""
        return self.num_towers == 1

    @property
    def distribution_strategy(self) -> DistributionStrategy:
        """The strategy whose tower this is."""
        return DistributionStrategy.of(self._context.strategy)

    @property
    def device(self) -> str:
        """The device of this tower."""
        return self._context.devices[0]

    def merge_call(self, merge_fn: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
        """Waits for all towers, then calls `merge_fn(distribution, *args)` once for all.

        Args:
          merge_fn: Called in cross-tower context with the arguments of all towers merged.
          *args: Arguments of this tower.
          **kwargs: Keyword arguments of this tower.

        Returns:
          This tower's part of what `merge_fn` returned.
        """
        if not callable(merge_fn):
            raise errors.ArgumentTypeError(
                "`merge_fn` must be callable",
                f"it is {merge_fn!r}",
                "Pass a function whose first argument is the strategy.",
            )
        return self._context.merge_call(_Merge(merge_fn), args, kwargs)

    def __repr__(self) -> str:
        return f"TowerContext({self._context!r})"


class _Merge:
    """Calls a merge function of r1.9, whose first argument is a `DistributionStrategy`.

    Attributes:
      python_function: The function, by which the calls of all towers are compared.
    """

    def __init__(self, merge_fn: Callable[..., Tree]) -> None:
        self.python_function = merge_fn

    def __call__(self, strategy: Strategy, *args: Tree, **kwargs: Tree) -> Tree:
        return self.python_function(DistributionStrategy.of(strategy), *args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.python_function)


def get_tower_context() -> TowerContext | Any:
    """Returns the `TowerContext` of the running tower, and None in cross-tower code.

    >>> get_tower_context().is_single_tower
    True
    """
    context = default.get_replica_context()
    return None if context is None else TowerContext(context)


def get_cross_tower_context() -> DistributionStrategy | None:
    """Returns the current strategy in cross-tower code, and None in towers.

    >>> get_cross_tower_context() is None
    True
    """
    return get_distribution_strategy() if default.in_cross_replica_context() else None


def get_distribution_strategy() -> DistributionStrategy:
    """Returns the current strategy; a default one outside of every scope.

    >>> get_distribution_strategy().num_towers
    1
    """
    return DistributionStrategy.of(default.get_strategy())


def has_distribution_strategy() -> bool:
    """Tells whether a strategy other than the default one is current.

    >>> has_distribution_strategy()
    False
    """
    return default.has_strategy()


def require_tower_context(tower_ctx: TowerContext) -> None:
    """Raises unless `tower_ctx` is the context of the running tower."""
    current = default.get_replica_context()
    if current is None or tower_ctx._context is not current:
        raise errors.ContextError(
            "This needs the tower context that was passed",
            "another one is current" if current is not None else "this is cross-tower code",
            "Call `get_tower_context()` where you use it.",
        )
