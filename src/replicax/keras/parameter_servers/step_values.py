"""The values of a model's variables during one step on a worker.

The model on a worker holds no arrays. A step opens a `StepScope`, in which its variables have the
values that were read from the servers, and which collects what the step assigns. Variables that
are tables are read when they are needed only: a lookup fetches its rows.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import keras
from typing_extensions import override

from replicax.keras import internals
from replicax.variables.variable import Variable

_current: contextvars.ContextVar[StepScope | None] = contextvars.ContextVar(
    "replicax_keras_step", default=None
)


class StepScope(keras.StatelessScope):
    """Holds the values of all variables of a model during a step.

    Args:
      values: The value of each variable, by the id of the variable.
      tables: Variables on servers that are read when they are needed, by the same id.
    """

    def __init__(self, values: Mapping[int, jax.Array], tables: Mapping[int, Variable]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._values = dict(values)
        self._tables = dict(tables)

    @override
    def __enter__(self) -> StepScope:
        super().__enter__()
        self._token = _current.set(self)
        return self

    @override
    def __exit__(self, *args: Any, **kwargs: Any) -> None:
        _current.reset(self._token)
        super().__exit__(*args, **kwargs)

    @override
    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        self._values[id(variable)] = value

    @override
    def get_current_value(self, variable: keras.Variable) -> Any:
        found = self._values.get(id(variable))
        if found is None and id(variable) in self._tables:
            found = self._values[id(variable)] = self._tables[id(variable)].read_value()
        return found

    def table(self, variable: keras.Variable) -> Variable | None:
        """Returns the variable on the servers whose rows can be looked up; None if it was read."""
        return None if id(variable) in self._values else self._tables.get(id(variable))

    def values_of(self, variables: Iterable[keras.Variable]) -> list[Any]:
        """Returns the current values of variables; None of those without one."""
        return [self._values.get(id(variable)) for variable in variables]


def current() -> StepScope | None:
    """Returns the scope of the step that is running."""
    return _current.get()


class WorkerVariable(keras.Variable):
    """A variable of a model on a worker: its value is that of the running step.

    A scope of Keras inside the step, which does not know the variable, hides that of the step.
    """

    @property
    @override
    def value(self) -> Any:
        found = internals.stateless_value(self)
        scope = current()
        if found is None and scope is not None:
            found = scope.get_current_value(self)
        if found is None:
            found = internals.placeholder(self)
        return internals.autocast(self, found)


def adopt(variables: Iterable[keras.Variable]) -> None:
    """Makes the variables of a model those of steps; idempotent."""
    for variable in variables:
        variable.__class__ = WorkerVariable


@contextlib.contextmanager
def construction() -> Iterator[None]:
    """Lets a model be built without values for its variables."""
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        internals.forget_uninitialized_variables()
