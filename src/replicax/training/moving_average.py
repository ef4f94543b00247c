"""`ExponentialMovingAverage`: shadow variables that hold averages of others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from replicax.contexts import frames
from replicax.foundation import errors
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.values import printing
from replicax.values.array_surface import as_operand
from replicax.variables.variable import Variable


class ExponentialMovingAverage:
    """Keeps exponential moving averages of variables.

    Each variable gets a shadow variable, which starts with its value and has the same placement:
    mirrored for a mirrored one. `apply` updates the shadows: `shadow -= (1 - decay) * (shadow -
    value)`. It can be called outside of `strategy.run`, inside of it, where the values of all
    replicas are averaged first, and in compiled code. Checkpoints include the shadows.

    Args:
      decay: The weight of the old average; close to 1.
      num_updates: If given, a number or a variable that counts steps: the decay is at most
        `(1 + num_updates) / (10 + num_updates)`, so that averages move faster at the start.
      zero_debias: Accepted for portability: it corrects averages that start with zero, but
        averages of variables start with their value.
      name: Part of the names of shadow variables.

    >>> import replicax as rx
    >>> w = rx.Variable(0.0, name="w")
    >>> ema = rx.train.ExponentialMovingAverage(decay=0.9)
    >>> ema.apply([w])
    >>> _ = w.assign(1.0)
    >>> ema.apply([w])
    >>> round(float(ema.average(w)), 6)
    0.1
    """

    def __init__(
        self,
        decay: ArrayLike,
        num_updates: ArrayLike | None = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        del zero_debias
        self._decay, self._num_updates, self._name = decay, num_updates, name
        # By identity: variables compare like arrays.
        self._shadows: dict[int, tuple[Variable, Variable]] = {}

    @property
    def name(self) -> str:
        """Part of the names of shadow variables."""
        return self._name

    def apply(self, var_list: Sequence[Variable] | None = None) -> None:
        """Updates the shadow variables, and creates those that do not exist yet.

        Args:
          var_list: Floating-point variables; all variables of earlier calls if None.

        Raises:
          InvalidArgumentError: The first call has no variables.
          ArgumentTypeError: There is something else than variables of floating-point types.
        """
        variables = self._checked(var_list)
        decay = self._current_decay()
        for variable in variables:
            shadow = self._shadow_of(variable)
            value = variable.read_value()
            old = shadow.read_value()
            factor = (1 - jnp.asarray(decay, jnp.float32)).astype(old.dtype)
            shadow.assign_sub(factor * (old - value))

    def average(self, var: Variable) -> Variable | None:
        """Returns the shadow variable of a variable; None if it was never passed to `apply`."""
        found = self._shadows.get(id(var))
        return None if found is None else found[1]

    def average_name(self, var: Variable) -> str:
        """Returns the name of the shadow variable that a variable has, or would have."""
        return f"{var.name}/{self._name}"

    def variables_to_restore(
        self, moving_avg_variables: Iterable[Variable] | None = None
    ) -> dict[str, Variable]:
        """Returns variables by the names of the averages to restore into them.

        Args:
          moving_avg_variables: The variables with averages; all variables of `apply` if None.
        """
        known = [variable for variable, _ in self._shadows.values()]
        given = known if moving_avg_variables is None else list(moving_avg_variables)
        return {self.average_name(variable): variable for variable in given}

    def checkpoint_children(self) -> dict[str, Any]:
        """Returns the shadow variables by the names of their variables, for checkpoints."""
        return {variable.name: shadow for variable, shadow in self._shadows.values()}

    def __getstate__(self) -> dict[str, Any]:
        # On a worker, variables have other ids.
        return {**vars(self), "_shadows": list(self._shadows.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._shadows = {id(variable): (variable, shadow) for variable, shadow in state["_shadows"]}

    def __repr__(self) -> str:
        variables = printing.count(len(self._shadows), "variable")
        return f"<ExponentialMovingAverage of {variables}, decay {self._decay}>"

    def _checked(self, var_list: Sequence[Variable] | None) -> list[Variable]:
        if var_list is None:
            var_list = [variable for variable, _ in self._shadows.values()]
            if not var_list:
                raise errors.InvalidArgumentError(
                    "`apply` needs variables in its first call",
                    "`var_list` is None",
                    "Pass a list, such as model.trainable_variables.",
                )
        for variable in var_list:
            if not isinstance(variable, Variable):
                raise errors.ArgumentTypeError(
                    "`apply` averages variables",
                    f"{type(variable).__name__} was given",
                    "Make an rx.Variable of it.",
                )
            if not jnp.issubdtype(variable.dtype, jnp.floating):
                raise errors.ArgumentTypeError(
                    "`apply` averages variables of floating-point types",
                    f"variable {variable.name!r} has type {variable.dtype}",
                    "Leave it out of `var_list`.",
                )
        return list(var_list)

    def _current_decay(self) -> ArrayLike:
        if self._num_updates is None:
            return as_operand(self._decay)
        count = jnp.asarray(as_operand(self._num_updates), jnp.float32)
        return jnp.minimum(as_operand(self._decay), (1 + count) / (10 + count))

    def _shadow_of(self, variable: Variable) -> Variable:
        found = self._shadows.get(id(variable))
        if found is not None:
            return found[1]
        owner, frame = variable.owner, frames.current()
        scope: AbstractContextManager[object] = contextlib.nullcontext()
        if owner is not None and frame.is_default:
            # The shadow is created in the scope of its variable.
            scope = owner.container_strategy.scope()
        with scope:
            shadow = Variable(
                lambda: variable.read_value(),
                name=self.average_name(variable),
                trainable=False,
                synchronization=VariableSynchronization.AUTO,
                aggregation=VariableAggregation.MEAN,
            )
        self._shadows[id(variable)] = variable, shadow
        return shadow
