"""Functions of Python inside of programs: `tf.py_function`, `tf.numpy_function`, `tf.print`.

In `dataset.map` and in eager code they are plain calls. In a compiled function they become calls
back to the host, each time the program runs.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from replicax.foundation import errors, jax_compat
from replicax.tf import dispatch, tape_recording
from replicax.tf.arguments import DTypeLike, Structure, Value
from replicax.tf.dispatch import raw_tree
from replicax.tf.dtypes import DType, as_dtype, device_dtype
from replicax.tf.tensor import Tensor, TensorShape, raw
from replicax.tf.tensor_spec import TensorSpec

__all__ = ["numpy_function", "print", "py_function"]


def py_function(
    func: Callable[..., Any] | None = None,
    inp: Sequence[Any] | None = None,
    Tout: DTypeLike | None = None,
    name: str | None = None,
) -> Any:
    """Calls a Python function with tensors that have values; `@py_function(Tout=...)` wraps one.

    In a compiled function it is called on the host when the program runs. The shapes of results
    must be known there: `Tout` may be a `tf.TensorSpec`; for a plain type, the function is called
    once with zeros while the program is compiled. Eagerly, a tape records what the function does;
    in compiled code its results have no gradient.

    Args:
      func: Takes one tensor per input; returns a value, a sequence of values, or None.
      inp: The inputs: tensors, or structures of them.
      Tout: The type or `tf.TensorSpec` of the result, a sequence of them, or () for no result.
      name: Accepted for portability, without effect.

    >>> py_function(lambda x: x.numpy() + 1, [Tensor(jnp.asarray(2.0))], "float32").numpy()
    np.float32(3.0)
    """
    del name
    if func is None:
        return _decorator(py_function, Tout=Tout)
    return _call(func, _inputs("py_function", inp), Tout, with_tensors=True)


def numpy_function(
    func: Callable[..., Any] | None = None,
    inp: Sequence[Any] | None = None,
    Tout: DTypeLike | None = None,
    stateful: bool = True,
    name: str | None = None,
) -> Any:
    """Calls a Python function with NumPy arrays; `@numpy_function(Tout=...)` wraps one.

    In a compiled function, shapes of results are found as `py_function` finds them. Results have
    no gradient.

    Args:
      func: Takes one array per input; returns an array, a sequence of arrays, or None.
      inp: The inputs.
      Tout: The type or `tf.TensorSpec` of the result, a sequence of them, or () for no result.
      stateful: Whether calls may be neither left out nor merged.
      name: Accepted for portability, without effect.

    >>> numpy_function(np.cumsum, [Tensor(jnp.asarray([1, 2]))], "int32").numpy().tolist()
    [1, 3]
    """
    del name
    if func is None:
        return _decorator(numpy_function, Tout=Tout, stateful=stateful)
    inputs = _inputs("numpy_function", inp)
    return _call(func, inputs, Tout, with_tensors=False, stateful=stateful)


def _decorator(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def wrapped(*inputs: Any) -> Any:
            return call(func, inputs, **options)

        return wrapped

    return decorate


def _inputs(name: str, inp: Sequence[Any] | None) -> list[Any]:
    if inp is None:
        raise errors.ArgumentTypeError(
            f"`tf.{name}` needs the inputs of the function",
            "`inp` was not given",
            f"Pass inp=[x], or decorate the function with @tf.{name}(Tout=...).",
        )
    return list(inp)


def _call(
    func: Callable[..., Any],
    inputs: list[Any],
    types: DTypeLike,
    with_tensors: bool,
    stateful: bool = True,
) -> Any:
    kinds = _Results(types)
    if _is_compiled(inputs):
        return _call_compiled(func, inputs, kinds, with_tensors, stateful)
    if with_tensors:
        return kinds.converted(func(*map(dispatch.wrap_tree, map(_as_value, inputs))))
    with tape_recording.suspended():
        return kinds.converted(func(*_as_numpy(inputs)))


def _is_compiled(values: Value) -> bool:
    """Tells whether a call is part of a program, even if all of its arguments are constants."""
    if dispatch.on_host():
        return False
    return jax_compat.is_staging() or any(map(jax_compat.is_traced, _leaves(values)))


def _as_value(value: Value) -> Any:
    """Returns a tensor for a number, a string or an array; structures and tensors stay."""
    if isinstance(value, Tensor) or tape_recording.is_variable(value):
        return value
    if isinstance(value, list | tuple | dict):
        return tape_recording.map_leaves(_as_value, value)
    if isinstance(value, str | bytes):
        return Tensor(np.asarray(value.encode() if isinstance(value, str) else value, object))
    return dispatch.default_array(value)


def _as_numpy(inputs: Sequence[Any]) -> list[Any]:
    def array(value: Value) -> Any:
        found = np.asarray(raw(_as_value(value)))
        # A scalar string is `bytes`, as TensorFlow gives it.
        return found.item() if found.dtype == object and not found.ndim else found

    return [tape_recording.map_leaves(array, value) for value in inputs]


def _leaves(tree: Structure) -> list[Any]:
    found: list[Any] = []
    tape_recording.map_leaves(lambda leaf: found.append(raw(leaf)), tree)
    return found


class _Results:
    """The results that a function must have: `Tout`."""

    def __init__(self, types: DTypeLike) -> None:
        self.is_one = isinstance(types, DType | TensorSpec | str | type | np.dtype)
        given = [types] if self.is_one else list(types or ())
        self.specs = [t if isinstance(t, TensorSpec) else TensorSpec(None, t) for t in given]

    def converted(self, found: Structure) -> Any:
        """Returns the results of a call as tensors of the types asked for."""
        if not self.specs:
            return []
        values = [found] if self.is_one else self._sequence(found)
        made = [self._tensor(v, s) for v, s in zip(values, self.specs, strict=True)]
        return made[0] if self.is_one else made

    def _sequence(self, found: Structure) -> list[Any]:
        is_sequence = isinstance(found, list | tuple)
        if not is_sequence and len(self.specs) == 1:
            return [found]
        values = list(found) if is_sequence else [found]
        if len(values) != len(self.specs):
            raise errors.StructureError(
                f"The function must return {len(self.specs)} results, one for each of `Tout`",
                f"it returned {len(values)}",
                "Correct `Tout`, or the function.",
            )
        return values

    def _tensor(self, value: Value, spec: TensorSpec) -> Any:
        kind = as_dtype(spec.dtype)
        if isinstance(value, Tensor) and value.dtype == kind:
            return value
        if kind.name == "string":
            return dispatch.wrap_tree(_text(value))
        array = np.asarray(raw(value))
        if array.dtype.kind in "OSU":
            raise errors.InvalidArgumentError(
                f"The function must return {kind!r}, as `Tout` says",
                f"it returned {value!r}",
                "Correct `Tout`, or the function.",
            )
        array = array.astype(dispatch.array_dtype(kind))
        return Tensor(array if dispatch.on_host() else jnp.asarray(array))

    def arrays(
        self, found: Structure, shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> tuple[np.ndarray, ...]:
        """Returns the results of a call for the compiled program."""
        if not self.specs:
            return ()
        values = [found] if self.is_one else self._sequence(found)
        return tuple(
            np.asarray(raw(v)).astype(s.dtype) for v, s in zip(values, shapes, strict=True)
        )

    def shapes(self, call: Callable[[], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns shapes and types; `call` is tried if `Tout` does not say them."""
        if any(as_dtype(spec.dtype).name == "string" for spec in self.specs):
            raise errors.UnsupportedError(
                "A function that is called by a compiled program must return numbers",
                "`Tout` has tf.string",
                "Call it outside of `tf.function`, or in `dataset.map`.",
            )
        known = [TensorShape(spec.shape) for spec in self.specs]
        if not all(shape.is_fully_defined() for shape in known):
            known = [np.shape(raw(value)) for value in _values_of(self, call)]
        return tuple(
            jax.ShapeDtypeStruct(tuple(shape), device_dtype(spec.dtype))
            for shape, spec in zip(known, self.specs, strict=True)
        )


def _values_of(results: _Results, call: Callable[[], Any]) -> list[Any]:
    try:
        found = call()
    except Exception as error:
        raise errors.InvalidArgumentError(
            "Compiled code needs the shapes of the results of a Python function",
            f"`Tout` has types only, and a call with zeros raised {type(error).__name__}: {error}",
            "Pass `Tout=tf.TensorSpec(shape, dtype)`, or call the function outside of "
            "`tf.function`.",
        ) from error
    return [found] if results.is_one else results._sequence(found)


def _text(value: Value) -> np.ndarray:
    array = np.asarray(raw(value), dtype=object)
    encode = np.vectorize(lambda x: x.encode() if isinstance(x, str) else x, otypes=[object])
    return encode(array) if array.size else array


def _call_compiled(
    func: Callable[..., Any],
    inputs: list[Any],
    kinds: _Results,
    with_tensors: bool,
    stateful: bool,
) -> Any:
    plain = [tape_recording.map_leaves(jnp.asarray, raw_tree(_as_value(v))) for v in inputs]

    def called(given: list[Any]) -> Any:
        if not with_tensors:
            return func(*given)
        # The tensors hold NumPy arrays, as those of datasets do: JAX must not run in a callback.
        with dispatch.host_mode():
            return raw_tree(func(*map(dispatch.wrap_tree, given)))

    def on_zeros() -> Any:
        zeros = tape_recording.map_leaves(lambda x: np.zeros(x.shape, x.dtype), plain)
        with tape_recording.suspended():
            return called(zeros)

    shapes = kinds.shapes(on_zeros)

    def callback(*given: Any) -> Any:
        arrays = tape_recording.map_leaves(np.asarray, list(given))
        return kinds.arrays(called(arrays), shapes)

    fixed = tape_recording.map_leaves(jax.lax.stop_gradient, plain)
    if stateful:
        found = io_callback(callback, shapes, *fixed)
    else:
        found = jax.pure_callback(callback, shapes, *fixed)
    tensors = [Tensor(array) for array in found]
    return tensors[0] if kinds.is_one else tensors


# Printing.


def print(*inputs: Any, **kwargs: Any) -> None:
    r"""Prints values; in a compiled function, each time the program runs, once per replica.

    Args:
      *inputs: Tensors, Python values, and structures of them.
      **kwargs: `output_stream` (`sys.stderr` by default; a stream, a function of `logging` or a
        "file://" path), `summarize` (how many elements of the start and the end of a dimension
        are shown; 3 by default, -1 for all), `sep`, `end` and `name`.

    >>> print("values:", Tensor(jnp.arange(10)), output_stream=sys.stdout)
    values: [0 1 2 ... 7 8 9]
    """
    stream = kwargs.pop("output_stream", None)
    summarize = kwargs.pop("summarize", 3)
    sep, end = kwargs.pop("sep", " "), kwargs.pop("end", os.linesep)
    kwargs.pop("name", None)
    if kwargs:
        raise errors.ArgumentTypeError(
            "`tf.print` takes output_stream, summarize, sep, end and name",
            f"{', '.join(kwargs)} was given",
            "Remove it.",
        )
    edge = -1 if summarize is None else int(summarize)

    def write(*values: Any) -> None:
        text = sep.join(_shown(value, edge, is_top=True) for value in values)
        _write(text, end, stream)

    arrays = [tape_recording.map_leaves(raw, value) for value in inputs]
    if not _is_compiled(arrays):
        write(*arrays)
        return
    leaves, structure = _split(arrays)

    def write_leaves(*values: Any) -> None:
        found = iter(values)
        write(
            *tape_recording.map_leaves(
                lambda leaf: np.asarray(next(found)) if leaf is _HOLE else leaf, structure
            )
        )

    jax.debug.callback(write_leaves, *leaves)


_HOLE = object()


def _split(values: Value) -> tuple[list[Any], Any]:
    """Returns the arrays of a structure, and the structure with holes in their places."""
    leaves: list[Any] = []

    def take(leaf: Value) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        leaves.append(jax.lax.stop_gradient(leaf))
        return _HOLE

    return leaves, tape_recording.map_leaves(take, values)


def _shown(value: Value, edge: int, is_top: bool = False) -> str:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _array_text(np.asarray(value), edge)
    if isinstance(value, str):
        return value if is_top else repr(value)
    if isinstance(value, dict):
        items = (f"{key!r}: {_shown(item, edge)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    fields = getattr(value, "_fields", None)
    if isinstance(value, tuple) and fields is not None:
        pairs = zip(fields, value, strict=True)
        named = (f"{name}={_shown(item, edge)}" for name, item in pairs)
        return f"{type(value).__name__}({', '.join(named)})"
    if isinstance(value, list | tuple):
        inner = ", ".join(_shown(item, edge) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return str(value)


def _array_text(array: np.ndarray, edge: int, indent: int = 1) -> str:
    if not array.ndim:
        return _element_text(array[()])
    size = len(array)
    is_cut = edge >= 0 and size > 2 * edge
    rows: list[Any] = [*range(edge), None, *range(size - edge, size)] if is_cut else [*range(size)]
    parts = [
        "..." if row is None else _array_text(array[row, ...], edge, indent + 1) for row in rows
    ]
    if array.ndim == 1:
        return f"[{' '.join(parts)}]"
    between = "\n" * (array.ndim - 1) + " " * indent
    return f"[{between.join(parts)}]"


def _element_text(value: Value) -> str:
    if isinstance(value, bytes):
        return f'"{value.decode("utf-8", "backslashreplace")}"'
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, np.float64):
        return _shortest(value, (15, 17))
    if jnp.issubdtype(np.asarray(value).dtype, np.floating):
        return _shortest(np.float32(value), (6, 9))
    return str(value)


def _shortest(value: np.floating, digits: tuple[int, int]) -> str:
    short = f"{value:.{digits[0]}g}"
    return short if type(value)(short) == value else f"{value:.{digits[1]}g}"


def _write(text: str, end: str, stream: Value) -> None:
    if stream is None or isinstance(stream, str):
        if stream is None:
            _put(sys.stderr, text + end)
            return
        path = urllib.parse.urlparse(stream).path
        with open(path, "a", encoding="utf-8") as file:
            _put(file, text + end)
    elif hasattr(stream, "write"):
        _put(stream, text + end)
    elif callable(stream):
        stream(text)
    else:
        level = stream if isinstance(stream, int) else logging.INFO
        logging.getLogger("replicax").log(level, "%s", text)


def _put(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
