"""Values of Keras variables while the body of a region or a branch runs; imports Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from typing_extensions import override

from replicax.contexts import frames
from replicax.keras.internals import placeholder
from replicax.keras.variables import DistributedVariable, adopt, default_strategy, is_compiled
from replicax.tf import tape_keras_internals
from replicax.tf.arguments import Value, VariableLike
from replicax.tf.tape_recording import Region
from replicax.tracing.gradients import GradientOverlay


def adopt_if_compiled(variable: VariableLike) -> bool:
    """Makes a variable of no strategy one that a compiled function can read and write.

    Keras would keep a traced value in it.
    """
    if isinstance(variable, DistributedVariable) or not is_compiled():
        return False
    adopt(variable, default_strategy())
    return True


class RegionScope(keras.StatelessScope):
    """Gives the variables that a region differentiates their inputs, and notes assignments.

    Attributes:
      assigned: The variables that were assigned, in order.
    """

    def __init__(self, region: Region, snapshot: Value) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._region = region
        self._snapshot = snapshot
        self._around = tape_keras_internals.stateless_scope()
        self.assigned: list[Any] = []

    def is_inside_another(self) -> bool:
        """Tells whether Keras runs a compiled step, whose scope is around this one."""
        return self._around is not None

    @override
    def get_current_value(self, variable: VariableLike) -> Any:
        # Scopes hide those around them, so each read looks through all of them.
        found = self.state_mapping.get(id(variable))
        if found is not None:
            return found
        if self._around is None:
            adopt_if_compiled(variable)
        found = self._region.variable_value(variable)
        if found is not None:
            return found
        self._region.note_variable(variable)
        return self._snapshot.value(variable, lambda: self._outer_value(variable))

    def _outer_value(self, variable: VariableLike) -> Any:
        if self._around is not None:
            found = self._around.get_current_value(variable)
            if found is not None:
                return found
        # A layer that is built while a model's step is traced for the first time has no values.
        return placeholder(variable) if variable._value is None else variable._value

    @override
    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, _ = update
        if all(known is not variable for known in self.assigned):
            self.assigned.append(variable)
        super().add_update(update)

    def new_values(self) -> list[Any]:
        """Returns the new values of the assigned variables."""
        return [self.state_mapping[id(variable)] for variable in self.assigned]


class _BranchScope(keras.StatelessScope):
    """Keeps what a branch assigns to variables of Keras apart from the step around it."""

    def __init__(self, around: keras.StatelessScope) -> None:
        super().__init__(initialize_variables=False)
        self._around = around
        self.assigned: dict[int, Any] = {}

    @override
    def get_current_value(self, variable: VariableLike) -> Any:
        found = self.state_mapping.get(id(variable))
        return self._around.get_current_value(variable) if found is None else found

    @override
    def add_update(self, update: tuple[Any, Any]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


def choose(
    choice: Callable[[Sequence[Callable[[], Any]]], Any], branches: Sequence[Callable[[], Any]]
) -> Any:
    """Makes a choice between branches, which may assign variables in a step of Keras.

    Args:
      choice: Is given the branches, of which it traces all, and returns the result of one.
      branches: Functions without arguments.
    """
    around = tape_keras_internals.stateless_scope()
    if around is None:
        return choice(branches)
    assigned: dict[int, Any] = {}
    for branch in branches:
        assigned |= _assigned_by(branch, around)
    variables = list(assigned.values())

    def with_values(branch: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> tuple[Any, list[Any]]:
            with _BranchScope(around):
                return branch(), [jax.numpy.asarray(variable.value) for variable in variables]

        return call

    result, values = choice(list(map(with_values, branches)))
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return result


def _assigned_by(branch: Callable[[], Any], around: keras.StatelessScope) -> dict[int, Any]:
    """Returns the variables that a branch assigns; its other effects are dropped."""
    frame = frames.current()
    overlay = GradientOverlay(frame)

    def trace() -> None:
        branch()

    with (
        overlay.opened(),
        frames.pushed(frame.with_overlay(overlay)),
        _BranchScope(around) as scope,
    ):
        jax.eval_shape(trace)
    return scope.assigned
