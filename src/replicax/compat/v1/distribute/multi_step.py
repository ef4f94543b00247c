"""`MultiStepContext`: outputs of the steps of `experimental_run_steps_on_iterator`."""

from __future__ import annotations

from collections.abc import Mapping

from replicax.foundation import errors, jax_compat
from replicax.foundation.options import ReduceOp
from replicax.foundation.types import Tree
from replicax.strategies import default
from replicax.strategies.base import Strategy
from replicax.values.regroup import leaves_of


class MultiStepContext:
    """Collects outputs of a step function that runs several times.

    The outputs of the last step are kept.

    Args:
      initial_outputs: The outputs before the first step.
    """

    def __init__(self, initial_outputs: Mapping[str, Tree] | None = None) -> None:
        self._last_step_outputs: dict[str, Tree] = dict(initial_outputs or {})
        self._non_tensor_outputs: dict[str, Tree] = {}

    @property
    def last_step_outputs(self) -> dict[str, Tree]:
        """The outputs that the last step has set, by name."""
        return self._last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Tree]:
        """The outputs that are not arrays, by name."""
        return self._non_tensor_outputs

    def set_last_step_output(
        self, name: str, output: Tree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Sets an output of this step.

        Args:
          name: The name of the output.
          output: A value of all replicas; or, in replica code, the value of this replica.
          reduce_op: Combines the values of all replicas; required in replica code. If None,
            the output is kept as it is.
        """
        if default.in_cross_replica_context() or not default.has_strategy():
            if reduce_op is not None:
                output = default.get_strategy().reduce(reduce_op, output, axis=None)
            self._last_step_outputs[name] = output
            return
        if reduce_op is None:
            raise errors.InvalidArgumentError(
                "An output that replica code sets needs a `reduce_op`",
                f"the output {name!r} has none",
                "Pass ReduceOp.SUM or MEAN, or return the value from the replica code and set "
                "it outside.",
            )

        def merge(strategy: Strategy, value: Tree) -> None:
            self._last_step_outputs[name] = strategy.reduce(reduce_op, value, axis=None)

        default.get_replica_context().merge_call(merge, args=(output,))

    def set_non_tensor_output(self, name: str, output: Tree) -> None:
        """Sets an output of any type; in replica code, a tuple of the outputs of all replicas."""
        if default.in_cross_replica_context() or not default.has_strategy():
            self._non_tensor_outputs[name] = output
            return

        def merge(strategy: Strategy, value: Tree) -> None:
            self._non_tensor_outputs[name] = strategy.experimental_local_results(value)

        default.get_replica_context().merge_call(merge, args=(output,))

    def require_concrete(self) -> None:
        """Raises if compiled replica code has set an output that only its trace can use."""
        if not jax_compat.is_eager():
            return
        for name, output in self._last_step_outputs.items():
            if any(map(jax_compat.is_traced, leaves_of(output))):
                raise errors.TracingError(
                    "An output of a step must be set outside of compiled functions",
                    f"a compiled function has set {name!r}",
                    "Return the value from the function, and set it in the step function.",
                )
