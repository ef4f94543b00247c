"""First values of variables: sent as they are, or made on the server that keeps them.

A function that JAX can trace is not called for its value: each server gets the program for its
own part, so that a table may be larger than the memory of the process that creates it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from replicax.foundation import errors, jax_compat
from replicax.transport import messages
from replicax.variables import creators

_log = logging.getLogger(__name__)

# Constants that a program carries along; beyond that, it is the value that travels.
_MOST_CONSTANT_BYTES = 1 << 20
_PARTITIONING = ("partition_shape", "partition_offset")
# What leaves every element the same.
_UNIFORM = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"}


class Initial(NamedTuple):
    """The first value of a part."""

    how: messages.Fill | messages.Given | messages.Computed
    buffers: list[Any]


class InitialValue:
    """What a variable starts with: shape and type, and the value of each of its parts."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = dtype

    def of_rows(self, start: int, stop: int) -> Initial:
        """Returns the value of a part."""
        raise NotImplementedError

    def whole(self) -> Initial:
        """Returns the value of a variable in one part."""
        raise NotImplementedError


class GivenValue(InitialValue):
    """A value that is there."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)
        super().__init__(self._array.shape, array.dtype)

    def of_rows(self, start: int, stop: int) -> Initial:
        return Initial(messages.Given(), [np.ascontiguousarray(self._array[start:stop])])

    def whole(self) -> Initial:
        return Initial(messages.Given(), [np.ascontiguousarray(self._array)])


class TracedValue(InitialValue):
    """A value that a traceable function gives."""

    def __init__(self, function: Callable[[], Any], by_part: Any, spec: Any) -> None:
        super().__init__(tuple(spec.shape), spec.dtype)
        self._function = function
        # Makes the rows from a start on, for functions that know about parts; else None.
        self._by_part = by_part

    def of_rows(self, start: int, stop: int) -> Initial:
        if self._by_part is not None:
            shape = (stop - start, *self.shape[1:])
            offset = (start, *(0 for _ in self.shape[1:]))
            part = functools.partial(self._by_part, partition_shape=shape, partition_offset=offset)
            return _made_by(lambda: jnp.asarray(part(), self.dtype))
        return _made_by(lambda: self._function()[start:stop])

    def whole(self) -> Initial:
        return _made_by(self._function)


def describe(kwargs: dict[str, Any]) -> InitialValue:
    """Finds out how the variable that `rx.Variable(**kwargs)` asks for gets its value."""
    function = kwargs.get("initial_value")
    if not callable(function):
        array = creators.initial_array(kwargs)
        if jax_compat.is_traced(array):
            raise errors.TracingError(
                errors.message(
                    "A variable on a parameter server needs an initial value that is known",
                    "a compiled function computes it",
                    "Create the variable outside, or pass a function as initial value.",
                )
            )
        return GivenValue(array)
    bound, by_part = _bound(function, kwargs)

    def value() -> Any:
        return creators.initial_array({**kwargs, "initial_value": bound})

    with jax_compat.eagerly():
        try:
            closed = jax.make_jaxpr(bound)()
        except Exception as error:
            # It may still do as a function that runs; if not, that error is the user's.
            _log.info("An initial value is computed here: tracing it failed with %r.", error)
            return GivenValue(value())
        size = sum(getattr(c, "nbytes", 0) for c in closed.consts)
        if size > _MOST_CONSTANT_BYTES or len(closed.out_avals) != 1 or closed.jaxpr.effects:
            return GivenValue(value())
    dtype = kwargs.get("dtype") or closed.out_avals[0].dtype
    spec = jax.ShapeDtypeStruct(closed.out_avals[0].shape, jnp.dtype(dtype))
    creators.require_shape(kwargs.get("shape"), spec.shape)
    return TracedValue(lambda: jnp.asarray(bound(), spec.dtype), by_part, spec)


def _bound(function: Callable[..., Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Gives a function the shape and type that it asks for by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}
    given = {
        name: kwargs[name]
        for name in ("shape", "dtype")
        if name in parameters
        and parameters[name].default is inspect.Parameter.empty
        and kwargs.get(name) is not None
    }
    bound = functools.partial(function, **given) if given else function
    knows_parts = all(name in parameters for name in _PARTITIONING)
    return bound, (bound if knows_parts else None)


def _made_by(function: Callable[[], Any]) -> Initial:
    """Returns the first value as one number, or as a program for the server."""
    with jax_compat.eagerly():
        element = uniform_element(jax.make_jaxpr(function)())
        if element is not None:
            return Initial(messages.Fill(element.tobytes()), [])
        program = export.export(jax.jit(function), platforms=("cpu",))().serialize()
    return Initial(messages.Computed([], 0), [bytes(program)])


def uniform_element(closed: Any) -> np.ndarray | None:
    """Returns the number of which the only result of a program consists, if it does.

    >>> uniform_element(jax.make_jaxpr(lambda: jnp.full((2, 3), 7.0))()).item()
    7.0
    """
    found = _uniform_results(closed.jaxpr, closed.consts, [None] * len(closed.in_avals))
    element = None if found is None else found[0]
    return None if element is None else element.astype(closed.out_avals[0].dtype)


def _uniform_results(
    jaxpr: Any, consts: Any, arguments: list[np.ndarray | None]
) -> list[np.ndarray | None] | None:
    known: dict[Any, np.ndarray | None] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= {var: _number(c) for var, c in zip(jaxpr.constvars, consts, strict=True)}

    def value(atom: Any) -> np.ndarray | None:
        return _number(atom.val) if hasattr(atom, "val") else known.get(atom)

    for eqn in jaxpr.eqns:
        inputs = [value(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name in ("pjit", "jit"):
            inner = eqn.params["jaxpr"]
            outs = _uniform_results(inner.jaxpr, inner.consts, inputs)
        elif name in _UNIFORM and inputs[0] is not None:
            outs = [inputs[0].astype(eqn.outvars[0].aval.dtype)]
        else:
            outs = [None] * len(eqn.outvars)
        known |= dict(zip(eqn.outvars, outs or [], strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _number(constant: Any) -> np.ndarray | None:
    """Returns a constant if it is one number; a key of jax.random is none."""
    is_key = jnp.issubdtype(jnp.result_type(constant), jax.dtypes.extended)
    return None if np.ndim(constant) or is_key else np.asarray(constant)
