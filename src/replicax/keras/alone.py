"""What the chief does by itself: the callbacks of a user, which no other worker runs.

In there, nothing may need another worker. New variables belong to this process. Models of several
workers are evaluated on one device of this process. Values that are assigned to variables are
noted, so that all workers get them afterwards.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import keras

from replicax.contexts import frames
from replicax.keras import internals
from replicax.keras.variables import DistributedVariable, noting_writes
from replicax.values.layout import copier
from replicax.variables import creators

_is_alone: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "replicax_keras_alone", default=False
)

# The functions that Keras makes for a model, which differ between one process and all.
_FUNCTIONS = ("train_function", "test_function", "predict_function")
# The attribute of a model that holds those of one process, which refer to the model.
_OWN = "_replicax_functions_of_one_process"


def is_alone() -> bool:
    """Tells whether this code runs on the chief only."""
    return _is_alone.get()


@contextlib.contextmanager
def entered() -> Iterator[list[DistributedVariable]]:
    """Runs code of the chief; fills the list with the variables that it assigns."""
    token = _is_alone.set(True)
    before = creators.creator_stack()
    creators.set_creator_stack(())
    try:
        # Names of variables must be equal on all workers.
        with frames.outside(), internals.kept_names(), noting_writes() as written:
            yield written
    finally:
        creators.set_creator_stack(before)
        _is_alone.reset(token)


@contextlib.contextmanager
def own_functions(model: keras.Model) -> Iterator[None]:
    """Gives a model the functions of one process meanwhile."""
    before = [getattr(model, name) for name in _FUNCTIONS]
    compilation = internals.compilation_of(model)
    own = model.__dict__.get(_OWN, {})
    # Keras makes all functions again after `compile`.
    is_valid = own.get("of") is compilation
    _set_functions(model, own["made"] if is_valid else [None] * len(_FUNCTIONS))
    try:
        yield
    finally:
        made = [getattr(model, name) for name in _FUNCTIONS]
        model.__dict__[_OWN] = {"of": compilation, "made": made}
        _set_functions(model, before)


def _set_functions(model: keras.Model, functions: list[Any]) -> None:
    for name, function in zip(_FUNCTIONS, functions, strict=True):
        setattr(model, name, function)


def copied(variables: list[DistributedVariable]) -> list[jax.Array]:
    """Returns values in buffers of their own, which a step of one process may take over."""
    values = [variable.value for variable in variables]
    return copier(values[0].sharding)(values) if values else []
