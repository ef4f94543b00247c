"""Names about code that runs: order, names of scopes, and what kind of code it is."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.foundation import jax_compat
from replicax.tf import tape_recording
from replicax.tf.arguments import Value
from replicax.tf.tensor import Tensor, raw
from replicax.values.indexed_slices import IndexedSlices

__all__ = [
    "AggregationMethod",
    "control_dependencies",
    "executing_eagerly",
    "get_current_name_scope",
    "get_logger",
    "get_static_value",
    "group",
    "init_scope",
    "inside_function",
    "is_symbolic_tensor",
    "is_tensor",
    "name_scope",
    "newaxis",
    "no_op",
    "timestamp",
    "tuple",
]

newaxis = None


class AggregationMethod:
    """How gradients were added in version 1; accepted for portability, without effect."""

    ADD_N = 0
    DEFAULT = 0
    EXPERIMENTAL_TREE = 1
    EXPERIMENTAL_ACCUMULATE_N = 2


@contextlib.contextmanager
def control_dependencies(control_inputs: Value) -> Iterator[None]:
    """Runs a block; code always runs in the order in which it is written.

    >>> with control_dependencies([]):
    ...     pass
    """
    for control_input in control_inputs or ():
        if callable(control_input):
            control_input()
    yield


def group(*inputs: Any, **kwargs: Any) -> None:
    """Does nothing: its arguments have run when it is called.

    >>> group(1, 2)
    """
    del inputs, kwargs


def no_op(name: str | None = None) -> None:
    """Does nothing.

    >>> no_op()
    """
    del name


def tuple(
    tensors: Iterable[Any], control_inputs: Value = None, name: str | None = None
) -> list[Any]:
    """Returns a list of tensors; all of them have been computed.

    >>> len(tuple([Tensor(np.int32(1)), Tensor(np.int32(2))]))
    2
    """
    del control_inputs, name
    return list(tensors)


_name_scopes: list[str] = []


class name_scope:
    """Names a part of a program; `jax.named_scope` shows it in profiles.

    Args:
      name: The name; it is also what `with` gives.
      default_name: Used if there is no name, as in version 1.
      values: Accepted for portability, without effect.

    >>> with name_scope("block") as scope:
    ...     scope
    'block/'
    """

    def __init__(
        self, name: str | None = None, default_name: str | None = None, values: object = None
    ) -> None:
        del values
        self._name = name or default_name or "scope"
        self._scope: Any = None

    @property
    def name(self) -> str:
        """The name that was given."""
        return self._name

    def __enter__(self) -> str:
        name = self._name.rstrip("/")
        self._scope = jax.named_scope(name)
        self._scope.__enter__()
        _name_scopes.append(name)
        return "/".join(_name_scopes) + "/"

    def __exit__(self, *error: Any) -> None:
        _name_scopes.pop()
        self._scope.__exit__(*error)


def get_current_name_scope() -> str:
    """Returns the names of the scopes around the running code.

    >>> get_current_name_scope()
    ''
    """
    return "/".join(_name_scopes)


@contextlib.contextmanager
def init_scope() -> Iterator[None]:
    """Runs a block; variables that it makes are made once, as everywhere.

    >>> with init_scope():
    ...     pass
    """
    yield


def executing_eagerly() -> bool:
    """Tells whether code runs at once, not in a `tf.function` that is compiled.

    >>> executing_eagerly()
    True
    """
    return not inside_function()


def inside_function() -> bool:
    """Tells whether the running code is compiled.

    >>> inside_function()
    False
    """
    return jax_compat.is_staging()


def get_static_value(tensor: Value, partial: bool = False) -> Any:
    """Returns the value of a tensor, or None if only the compiled program knows it.

    >>> get_static_value(Tensor(np.int32(3)))
    array(3, dtype=int32)
    """
    del partial
    found = raw(tensor)
    return None if jax_compat.is_traced(found) else np.asarray(found)


def is_tensor(x: Value) -> bool:
    """Tells whether a value is a tensor, a variable or sparse rows.

    >>> is_tensor(Tensor(np.int32(1))), is_tensor(1)
    (True, False)
    """
    is_array = isinstance(x, Tensor | jax.Array | IndexedSlices)
    return is_array or tape_recording.is_variable(x) or type(x).__name__ == "KerasTensor"


def is_symbolic_tensor(tensor: Value) -> bool:
    """Tells whether a tensor has no value yet: of a Keras model, or of a compiled function.

    >>> is_symbolic_tensor(Tensor(np.int32(1)))
    False
    """
    return type(tensor).__name__ == "KerasTensor" or jax_compat.is_traced(raw(tensor))


def get_logger() -> logging.Logger:
    """Returns the logger of the library.

    >>> get_logger().name
    'replicax'
    """
    return logging.getLogger("replicax")


def timestamp(name: str | None = None) -> Any:
    """Returns the seconds since 1970; in a compiled function, those of its compilation.

    >>> timestamp().dtype
    tf.float64
    """
    del name
    return Tensor(np.asarray(time.time(), np.float64))
