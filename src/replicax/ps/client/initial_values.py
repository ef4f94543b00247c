"""First values of variables: sent as arrays, or computed on the server that holds them.

A function that JAX can trace is not evaluated here: each server gets the program for its own part,
so that a table may be larger than the memory of the process that creates it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend import core as jex
from jax.typing import ArrayLike, DTypeLike

from replicax.foundation import errors, jax_compat
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.variables import creators

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# The constants of a program; with more, the value is sent instead.
_MOST_CONSTANT_BYTES = 1 << 20
_PARTITIONING = ("partition_shape", "partition_offset")
# Operations that keep all elements equal.
_UNIFORM = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"}


class Initial(NamedTuple):
    """The first value of a part, as sent to its server."""

    how: messages.Fill | messages.FromBuffer | messages.FromProgram
    buffers: Sequence[Buffer]


class InitialValue:
    """The first value of a variable: shape, type, and the values of its parts."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape = shape
        self.dtype = dtype

    def of_rows(self, start: int, stop: int) -> Initial:
        """Returns the value of a range of rows."""
        raise NotImplementedError

    def whole(self) -> Initial:
        """Returns the value of an unpartitioned variable."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> np.ndarray | jax.Array:
        """Computes the value of a range of rows in this process."""
        raise NotImplementedError


class GivenValue(InitialValue):
    """A known value."""

    def __init__(self, array: np.ndarray | jax.Array) -> None:
        self._array = np.asarray(array)
        super().__init__(self._array.shape, array.dtype)

    def of_rows(self, start: int, stop: int) -> Initial:
        return Initial(messages.FromBuffer(), [np.ascontiguousarray(self._array[start:stop])])

    def whole(self) -> Initial:
        return Initial(messages.FromBuffer(), [np.ascontiguousarray(self._array)])

    def rows(self, start: int, stop: int) -> np.ndarray | jax.Array:
        return self._array[start:stop]


class TracedValue(InitialValue):
    """A value computed by a traced function."""

    def __init__(self, closed: jex.ClosedJaxpr, dtype: DTypeLike | None) -> None:
        (aval,) = closed.out_avals
        super().__init__(tuple(aval.shape), jnp.dtype(dtype or aval.dtype))
        self._closed = closed

    def _value(self) -> jax.Array:
        (found,) = jax_compat.eval_jaxpr(self._closed.jaxpr, self._closed.consts)
        return jnp.asarray(found, self.dtype)

    def of_rows(self, start: int, stop: int) -> Initial:
        return _computed_by(lambda: self._value()[start:stop])

    def whole(self) -> Initial:
        return _computed_by(self._value)

    def rows(self, start: int, stop: int) -> np.ndarray | jax.Array:
        with jax_compat.eagerly():
            return jax.jit(self._value)()[start:stop]


class PartwiseValue(InitialValue):
    """A value computed by a function that can compute parts of it.

    Args:
      function: Takes `partition_shape` and `partition_offset`. If it rejects them, or returns the
        whole value regardless, parts are sliced from the whole.
      shape: The shape of the whole.
      dtype: The type of the whole.
    """

    def __init__(
        self, function: Callable[..., jax.Array], shape: tuple[int, ...], dtype: DTypeLike
    ) -> None:
        super().__init__(shape, jnp.dtype(dtype))
        self._function = function
        self._uncut: InitialValue | None = None

    def of_rows(self, start: int, stop: int) -> Initial:
        found = self._part(start, stop)
        return found.whole() if found is not self._uncut else found.of_rows(start, stop)

    def rows(self, start: int, stop: int) -> np.ndarray | jax.Array:
        found = self._part(start, stop)
        first = start if found is self._uncut else 0
        return found.rows(first, first + stop - start)

    def whole(self) -> Initial:
        return self._whole_value().whole()

    def _part(self, start: int, stop: int) -> InitialValue:
        """Returns the value of a part, or the whole value if parts cannot be computed."""
        if self._uncut is not None:
            return self._uncut
        shape = (stop - start, *self.shape[1:])
        offset = (start, *(0 for _ in self.shape[1:]))
        by_part = functools.partial(self._function, partition_shape=shape, partition_offset=offset)
        try:
            found = _value_of(by_part, self.dtype)
        except (TypeError, ValueError) as error:
            _log.info("An initial value is computed as a whole; a part failed with %r.", error)
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
    """The initial value of a part as a function, for variable creators of users.

    Attributes:
      shape: The shape of the part.
      dtype: Its type.
    """

    def __init__(self, value: InitialValue, start: int, stop: int) -> None:
        self._value = value
        self._range = (start, stop)
        self.shape = (stop - start, *value.shape[1:])
        self.dtype = value.dtype

    def __call__(self) -> np.ndarray | jax.Array:
        return self._value.rows(*self._range)

    def whole(self) -> Initial:
        """Returns the value as sent to its server."""
        return self._value.of_rows(*self._range)


def describe(kwargs: dict[str, Any], is_partitioned: bool) -> InitialValue:
    """Returns the first value of the variable that `rx.Variable(**kwargs)` creates.

    Args:
      kwargs: The arguments.
      is_partitioned: Whether the variable may be partitioned. Then a function that can compute
        parts is not called for the whole.
    """
    given = kwargs.get("initial_value")
    if not callable(given):
        array = creators.initial_array(kwargs)
        if jax_compat.is_traced(array):
            raise errors.TracingError(
                "A variable on a parameter server needs an initial value that is known",
                "a compiled function computes it",
                "Create the variable outside, or pass a function as initial value.",
            )
        return GivenValue(array)
    bound, takes_parts = _bound(cast(Callable[..., jax.Array], given), kwargs)
    shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
    if is_partitioned and takes_parts and shape is not None:
        whole = tuple(np.atleast_1d(shape).tolist()) if shape != () else ()
        if dtype is None and whole:
            # The partitioner needs the type: that of one part with all rows. Errors here occur
            # again below, and are raised there.
            all_rows = functools.partial(
                bound, partition_shape=whole, partition_offset=tuple(0 for _ in whole)
            )
            with contextlib.suppress(Exception), jax_compat.eagerly():
                dtype = jax.eval_shape(all_rows).dtype
        if dtype is not None and whole:
            return PartwiseValue(bound, whole, dtype)
    found = _value_of(bound, dtype)
    creators.require_shape(shape, found.shape)
    return found


def _value_of(function: Callable[[], jax.Array], dtype: DTypeLike | None) -> InitialValue:
    """Calls a function once, on tracers if that works."""
    with jax_compat.eagerly():
        try:
            closed = jax.make_jaxpr(function)()
        except Exception as error:
            # It may still run eagerly; if not, that error is raised.
            _log.info("An initial value is computed eagerly: tracing failed with %r.", error)
        else:
            size = sum(getattr(c, "nbytes", 0) for c in closed.consts)
            is_one = len(closed.out_avals) == 1
            if size <= _MOST_CONSTANT_BYTES and is_one and not closed.jaxpr.effects:
                return TracedValue(closed, dtype)
    return GivenValue(creators.initial_array({"initial_value": function, "dtype": dtype}))


def _bound(function: Callable[..., _T], kwargs: dict[str, Any]) -> tuple[Callable[..., _T], bool]:
    """Binds the required parameters `shape` and `dtype` of a function.

    Returns:
      The function, and whether it may take the parameters of a part.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        # It has no signature: the call decides.
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


def _computed_by(function: Callable[[], jax.Array]) -> Initial:
    """Returns a first value as one number, or as a program for the server."""
    with jax_compat.eagerly():
        element = uniform_element(jax.make_jaxpr(function)())
        if element is not None:
            return Initial(messages.Fill(element.tobytes()), [])
        program = export.export(jax.jit(function), platforms=("cpu",))().serialize()
    return Initial(messages.FromProgram([], 0), [bytes(program)])


def uniform_element(closed: jex.ClosedJaxpr) -> np.ndarray | None:
    """Returns the element of a program's only result if all its elements are equal.

    >>> uniform_element(jax.make_jaxpr(lambda: jnp.full((2, 3), 7.0))()).item()
    7.0
    """
    found = _uniform_results(closed.jaxpr, closed.consts, [None] * len(closed.in_avals))
    element = None if found is None else found[0]
    return None if element is None else element.astype(closed.out_avals[0].dtype)


def _uniform_results(
    jaxpr: jex.Jaxpr, consts: Sequence[ArrayLike], arguments: list[np.ndarray | None]
) -> list[np.ndarray | None] | None:
    known: dict[object, np.ndarray | None] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= {var: _number(c) for var, c in zip(jaxpr.constvars, consts, strict=True)}

    def value(atom: object) -> np.ndarray | None:
        return _number(atom.val) if isinstance(atom, jex.Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        inputs = [value(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name in ("pjit", "jit"):
            inner = eqn.params["jaxpr"]
            outs = _uniform_results(inner.jaxpr, inner.consts, inputs)
        elif name in _UNIFORM and inputs[0] is not None:
            outs = [inputs[0].astype(cast(jax.ShapeDtypeStruct, eqn.outvars[0].aval).dtype)]
        else:
            outs = [None] * len(eqn.outvars)
        known |= dict(zip(eqn.outvars, outs or [], strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _number(constant: ArrayLike) -> np.ndarray | None:
    """Returns a constant if it is a scalar, but not a random key."""
    is_key = jnp.issubdtype(jnp.result_type(constant), jax.dtypes.extended)
    return None if np.ndim(constant) or is_key else np.asarray(constant)
