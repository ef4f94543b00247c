"""First values of variables: sent as they are, or made on the server that keeps them.

A function that JAX can trace is not called for its value: each server gets the program for its
own part, so that a table may be larger than the memory of the process that creates it.
"""

from __future__ import annotations

import contextlib
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
from replicax.protocol import messages
from replicax.variables import creators

_log = logging.getLogger(__name__)

# Constants that a program carries along; beyond that, it is the value that travels.
_MOST_CONSTANT_BYTES = 1 << 20
_PARTITIONING = ("partition_shape", "partition_offset")
# What leaves every element the same.
_UNIFORM = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"}


class Initial(NamedTuple):
    """The first value of a part."""

    how: messages.Fill | messages.FromBuffer | messages.FromProgram
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

    def rows(self, start: int, stop: int) -> Any:
        """Computes the value of a part here."""
        raise NotImplementedError


class GivenValue(InitialValue):
    """A value that is there."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)
        super().__init__(self._array.shape, array.dtype)

    def of_rows(self, start: int, stop: int) -> Initial:
        return Initial(messages.FromBuffer(), [np.ascontiguousarray(self._array[start:stop])])

    def whole(self) -> Initial:
        return Initial(messages.FromBuffer(), [np.ascontiguousarray(self._array)])

    def rows(self, start: int, stop: int) -> Any:
        return self._array[start:stop]


class TracedValue(InitialValue):
    """A value that a traced function gives."""

    def __init__(self, closed: Any, dtype: Any) -> None:
        (aval,) = closed.out_avals
        super().__init__(tuple(aval.shape), jnp.dtype(dtype or aval.dtype))
        self._closed = closed

    def _value(self) -> Any:
        (found,) = jax_compat.eval_jaxpr(self._closed.jaxpr, self._closed.consts)
        return jnp.asarray(found, self.dtype)

    def of_rows(self, start: int, stop: int) -> Initial:
        return _made_by(lambda: self._value()[start:stop])

    def whole(self) -> Initial:
        return _made_by(self._value)

    def rows(self, start: int, stop: int) -> Any:
        with jax_compat.eagerly():
            return jax.jit(self._value)()[start:stop]


class PartwiseValue(InitialValue):
    """A value that a function gives part by part; it is asked for parts only.

    Args:
      function: Takes `partition_shape` and `partition_offset`. If it refuses them, or gives the
        whole value all the same, parts are cut from the whole.
      shape: The shape of the whole.
      dtype: The type of the whole.
    """

    def __init__(self, function: Callable[..., Any], shape: tuple[int, ...], dtype: Any) -> None:
        super().__init__(shape, jnp.dtype(dtype))
        self._function = function
        self._uncut: InitialValue | None = None

    def of_rows(self, start: int, stop: int) -> Initial:
        found = self._part(start, stop)
        return found.whole() if found is not self._uncut else found.of_rows(start, stop)

    def rows(self, start: int, stop: int) -> Any:
        found = self._part(start, stop)
        first = start if found is self._uncut else 0
        return found.rows(first, first + stop - start)

    def whole(self) -> Initial:
        return self._whole_value().whole()

    def _part(self, start: int, stop: int) -> InitialValue:
        """Returns the value of a part, or that of the whole if there is nothing smaller."""
        if self._uncut is not None:
            return self._uncut
        shape = (stop - start, *self.shape[1:])
        offset = (start, *(0 for _ in self.shape[1:]))
        by_part = functools.partial(self._function, partition_shape=shape, partition_offset=offset)
        try:
            found = _value_of(by_part, self.dtype)
        except (TypeError, ValueError) as error:
            _log.info("An initial value is computed as a whole: for a part, %r.", error)
            return self._whole_value()
        if found.shape == shape:
            return found
        self._uncut = found
        creators.require_shape(self.shape, found.shape)
        return found

    def _whole_value(self) -> InitialValue:
        if self._uncut is None:
            self._uncut = _value_of(self._function, self.dtype)
            creators.require_shape(self.shape, self._uncut.shape)
        return self._uncut


class PartValue:
    """The initial value of a part, as creators outside the scope see it: a function.

    Attributes:
      shape: The shape of the part.
      dtype: Its type.
    """

    def __init__(self, value: InitialValue, start: int, stop: int) -> None:
        self._value = value
        self._range = (start, stop)
        self.shape = (stop - start, *value.shape[1:])
        self.dtype = value.dtype

    def __call__(self) -> Any:
        return self._value.rows(*self._range)

    def whole(self) -> Initial:
        """Returns what the server is told."""
        return self._value.of_rows(*self._range)


def describe(kwargs: dict[str, Any], is_cut: bool) -> InitialValue:
    """Finds out how the variable that `rx.Variable(**kwargs)` asks for gets its value.

    Args:
      kwargs: The arguments.
      is_cut: Whether the variable may be cut into parts. Then a function that can make parts is
        not called for the whole.
    """
    function = kwargs.get("initial_value")
    if not callable(function):
        array = creators.initial_array(kwargs)
        if jax_compat.is_traced(array):
            raise errors.TracingError(
                "A variable on a parameter server needs an initial value that is known",
                "a compiled function computes it",
                "Create the variable outside, or pass a function as initial value.",
            )
        return GivenValue(array)
    bound, knows_parts = _bound(function, kwargs)
    shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
    if is_cut and knows_parts and shape is not None:
        whole = tuple(np.atleast_1d(shape).tolist()) if shape != () else ()
        if dtype is None and whole:
            # The partitioner wants to know the type: asked for one part that is everything, the
            # function tells. What goes wrong here goes wrong below, and is raised there.
            ask = functools.partial(
                bound, partition_shape=whole, partition_offset=tuple(0 for _ in whole)
            )
            with contextlib.suppress(Exception), jax_compat.eagerly():
                dtype = jax.eval_shape(ask).dtype
        if dtype is not None and whole:
            return PartwiseValue(bound, whole, dtype)
    found = _value_of(bound, dtype)
    creators.require_shape(shape, found.shape)
    return found


def _value_of(function: Callable[[], Any], dtype: Any) -> InitialValue:
    """Calls a function once, on tracers if that works."""
    with jax_compat.eagerly():
        try:
            closed = jax.make_jaxpr(function)()
        except Exception as error:
            # It may still do as a function that runs; if not, that error is the user's.
            _log.info("An initial value is computed here: tracing it failed with %r.", error)
        else:
            size = sum(getattr(c, "nbytes", 0) for c in closed.consts)
            is_one = len(closed.out_avals) == 1
            if size <= _MOST_CONSTANT_BYTES and is_one and not closed.jaxpr.effects:
                return TracedValue(closed, dtype)
    return GivenValue(creators.initial_array({"initial_value": function, "dtype": dtype}))


def _bound(function: Callable[..., Any], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Gives a function the shape and type that it asks for by name.

    Returns:
      The function, and whether it may be one that makes parts.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        # It cannot be asked: the call will show.
        return function, True
    given = {
        name: kwargs[name]
        for name in ("shape", "dtype")
        if name in parameters
        and parameters[name].default is inspect.Parameter.empty
        and kwargs.get(name) is not None
    }
    bound = functools.partial(function, **given) if given else function
    is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return bound, is_open or all(name in parameters for name in _PARTITIONING)


def _made_by(function: Callable[[], Any]) -> Initial:
    """Returns the first value as one number, or as a program for the server."""
    with jax_compat.eagerly():
        element = uniform_element(jax.make_jaxpr(function)())
        if element is not None:
            return Initial(messages.Fill(element.tobytes()), [])
        program = export.export(jax.jit(function), platforms=("cpu",))().serialize()
    return Initial(messages.FromProgram([], 0), [bytes(program)])


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
