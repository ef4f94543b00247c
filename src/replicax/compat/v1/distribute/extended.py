"""The v1 `StrategyExtended`: the lower half of a strategy, with members that v2 has dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

from replicax.compat.v1.distribute.multi_step import MultiStepContext
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input.dataset.dataset import Dataset
from replicax.strategies import extended
from replicax.strategies.scope import entered


class _Iterator(Protocol):
    def get_next(self) -> Tree: ...


class StrategyExtended(extended.StrategyExtended):
    """`rx.StrategyExtended` with the members that only v1 has.

    A strategy of your own subclasses it as it does `rx.StrategyExtended`.
    """

    def experimental_make_numpy_dataset(self, numpy_input: Tree, session: object = None) -> Dataset:
        """Returns a dataset of the rows of arrays.

        Args:
          numpy_input: A nest of arrays with the same first dimension.
          session: Must be None: there are no sessions.
        """
        if session is not None:
            raise errors.UnsupportedError(
                "`session` must be None",
                f"it is a {type(session).__name__}",
                "Leave it out: arrays are read where they are, and there are no sessions.",
            )
        return Dataset.from_tensor_slices(numpy_input)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Tree], object],
        iterator: _Iterator,
        iterations: int = 1,
        initial_loop_values: Mapping[str, Tree] | None = None,
    ) -> MultiStepContext:
        """Calls `fn(context, element)` for the next elements, in cross-replica code.

        Args:
          fn: One step; usually it calls `strategy.run`, and sets outputs of the context.
          iterator: An iterator of a distributed dataset.
          iterations: The number of steps.
          initial_loop_values: The outputs before the first step.

        Returns:
          The context, with the outputs of the last step.
        """
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
            raise errors.InvalidArgumentError(
                "`iterations` must be an int of 0 or more", f"it is {iterations!r}", "Pass 1, say."
            )
        context = MultiStepContext(initial_loop_values)
        with entered(self.container_strategy, "experimental_run_steps_on_iterator"):
            for _ in range(iterations):
                fn(context, iterator.get_next())
        context.require_concrete()
        return context


def with_v1_members(lower: extended.StrategyExtended) -> StrategyExtended:
    """Returns the lower half of a strategy with the v1 members, over the same parts.

    Args:
      lower: That of a strategy which is not used itself.
    """
    if isinstance(lower, StrategyExtended):
        return lower
    joined = object.__new__(_joined(type(lower)))
    joined.__dict__.update(lower.__dict__)
    return joined


@functools.cache
def _joined(kind: type[extended.StrategyExtended]) -> type[StrategyExtended]:
    if kind is extended.StrategyExtended:
        return StrategyExtended
    return type(kind.__name__, (StrategyExtended, kind), {"__doc__": kind.__doc__})
