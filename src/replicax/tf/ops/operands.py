"""How the arguments of an operation become arrays: namespaces, dtypes, axes and shapes.

TensorFlow's rules: a Python number or list takes the dtype of the tensor beside it, and two tensors
of different dtypes are an error. NumPy arrays beside a tensor are converted to its dtype.

An operation computes with NumPy in host mode, and while a function is compiled if all its inputs
are known already: `tf.shape(x)[0] * 2` is a number in the compiled program. Otherwise it computes
with `jax.numpy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf import dtypes
from replicax.tf.dispatch import Op, on_host, op
from replicax.tf.tape_recording import array_of
from replicax.values.indexed_slices import IndexedSlices

# An array of NumPy or JAX.
Array: TypeAlias = Any
# What converts to an array: a tensor, an array, a Python number or a nested list of them.
Value: TypeAlias = Any
# `numpy` or `jax.numpy`.
Namespace: TypeAlias = Any
# A dtype of tf, NumPy or JAX, or its name.
DTypeLike: TypeAlias = Any

_PYTHON = (bool, int, float, complex, str, bytes)
_NARROW = {"float64": "float32", "int64": "int32", "complex128": "complex64"}
_LARGEST_INT32 = 2**31 - 1
_LARGEST_INT8 = 127
_ARRAYS = (np.ndarray, jax.Array)


def xp(*values: Value) -> Namespace:
    """Returns the namespace to compute in: NumPy for values of the host, else `jax.numpy`."""
    if on_host():
        return np
    for value in values:
        if isinstance(value, jax.Array):
            return jnp
    for value in values:
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "OSU":
            return np
    return jnp if jax_compat.is_eager() else np


def quiet_op(body: Callable[..., Any]) -> Op:
    """Makes an op without NumPy's warnings: 1/0 is infinite on the host, as on a device."""
    return op(np.errstate(all="ignore")(body))


def kind_of(dtype: DTypeLike) -> str:
    """Returns f, c, i, u, b or O: real, complex, signed, unsigned, bool or string.

    >>> kind_of(np.float32), kind_of(jnp.bfloat16), kind_of(np.uint8)
    ('f', 'f', 'u')
    """
    return _kind_of(np.dtype(dtype))


@functools.lru_cache(maxsize=256)
def _kind_of(dtype: np.dtype) -> str:
    if dtype.kind in "OSU":
        return "O"
    found = dtypes.as_dtype(dtype)
    if found.is_floating:
        return "f"
    if found.is_integer:
        return "u" if found.is_unsigned else "i"
    return "c" if found.is_complex else "b"


def numpy_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the NumPy dtype that is computed with: on a device, without 64 bits by default."""
    if on_host():
        return dtypes.as_dtype(dtype).dtype
    return _device_dtype(dtypes.as_dtype(dtype))


def _device_dtype(dtype: dtypes.DType) -> np.dtype:
    return dtype.dtype if dtype.name == "string" else dtypes.device_dtype(dtype)


def array(value: Value, dtype: DTypeLike = None) -> Array:
    """Returns a value as an array, as `tf.convert_to_tensor` does.

    >>> array([1, 2]).dtype, array(2.5).dtype, array([1, 2], np.float32).dtype
    (dtype('int32'), dtype('float32'), dtype('float32'))
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        if value.dtype.kind in "SU" and (dtype is None or np.dtype(dtype).kind in "OSU"):
            return _bytes_of(value)
        if dtype is None or value.dtype == dtype:
            return value
        return value.astype(np.dtype(dtype))
    if isinstance(value, IndexedSlices):
        return array(value.map_arrays(array_of).to_dense(), dtype)
    if dtype is None:
        return inferred(value)
    return _converted(value, np.dtype(dtype))


def inferred(value: Value) -> Array:
    """Returns a Python value as an array of the dtype that TensorFlow would choose."""
    if isinstance(value, bool):
        return np.asarray(value)
    if isinstance(value, float):
        return np.asarray(value, np.float32)
    if isinstance(value, int) and -_LARGEST_INT32 <= value <= _LARGEST_INT32:
        return np.asarray(value, np.int32)
    if isinstance(value, list | tuple) and _holds_arrays(value):
        return _packed(value, None)
    found = _as_numpy(value)
    if found.dtype.kind == "f" and found.dtype != np.float16:
        return found.astype(np.float32) if _is_python(value, float) else found
    if found.dtype == np.int64 and _is_python(value, int):
        fits = not found.size or max(abs(int(found.min())), abs(int(found.max()))) <= _LARGEST_INT32
        return found.astype(np.int32) if fits else found
    return found if found.dtype.kind != "f" or found.size else found.astype(np.float32)


def _as_numpy(value: Value) -> np.ndarray:
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise errors.InvalidArgumentError(
            "A list that becomes a tensor must be rectangular",
            f"{_short(value)} was given",
            "Pad the rows to one length; ragged tensors are not offered.",
        ) from error
    if found.dtype.kind in "SU" and not _has_numbers(value):
        # As objects, which keep zero bytes at the end.
        return _bytes_of(np.asarray(value, object))
    if found.dtype.kind in "SUO" and (
        _has_numbers(value) or not all(isinstance(v, bytes | str) for v in found.flat)
    ):
        raise errors.ArgumentTypeError(
            "A tensor is made from numbers, booleans, strings, arrays, or lists of them",
            f"{_short(value)} was given",
            "Convert it to a NumPy array of numbers first.",
        )
    return _bytes_of(found) if found.dtype.kind == "O" else found


def _has_numbers(value: Value) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_numbers, value))
    return isinstance(value, int | float | complex)


def _bytes_of(strings: Array) -> np.ndarray:
    """Returns strings as TensorFlow keeps them: an array of objects of `bytes`."""
    given = np.asarray(strings)
    flat = [v.encode() if isinstance(v, str) else bytes(v) for v in given.ravel().tolist()]
    found = np.empty(len(flat), object)
    found[:] = flat
    return found.reshape(given.shape)


def _is_python(value: Value, kind: type) -> bool:
    """Tells whether a nested list holds numbers of Python rather than of NumPy."""
    if isinstance(value, list | tuple):
        return all(_is_python(v, kind) for v in value)
    return not isinstance(value, np.generic)


def _holds_arrays(value: Value) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(v, jax.Array | np.ndarray) or _holds_arrays(v) for v in value)
    return False


def _packed(values: Sequence[Value], dtype: np.dtype | None) -> Array:
    """Returns a list that holds arrays as one array of one dimension more."""
    if dtype is None:
        dtype = _dtype_within(values)
    parts = [array(v, dtype) for v in values]
    return xp(*parts).stack(parts)


def _dtype_within(values: Sequence[Value]) -> np.dtype | None:
    for value in values:
        if isinstance(value, jax.Array | np.ndarray):
            return np.dtype(value.dtype)
    for value in values:
        if isinstance(value, list | tuple) and (found := _dtype_within(value)) is not None:
            return found
    return None


def _converted(value: Value, dtype: np.dtype) -> Array:
    if _holds_arrays(value):
        return _packed(value, dtype)
    found = _as_numpy(value)
    source, target = found.dtype.kind, kind_of(dtype)
    is_lossy = {"f": "iub", "c": "fiub", "i": "b", "u": "b", "O": "fiubc"}
    if found.size and (target in is_lossy.get(source, "") or (target == "O") != (source == "O")):
        raise errors.ArgumentTypeError(
            f"A Python value beside a tensor of {dtype.name} must convert to {dtype.name}",
            f"{_short(value)} was given",
            "Convert the tensor with tf.cast, or change the number.",
        )
    return found.astype(dtype)


def _short(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def operands(*values: Value, op: str) -> tuple[Array, ...]:
    """Returns values as arrays of one dtype, by TensorFlow's rules of promotion.

    >>> x, y = operands(np.asarray([1.0, 2.0], np.float32), 2, op="add")
    >>> y.dtype
    dtype('float32')
    """
    first = values[0]
    if isinstance(first, _ARRAYS):
        dtype = first.dtype
        for value in values:
            if not isinstance(value, _ARRAYS) or value.dtype != dtype:
                break
        else:
            if dtype.kind not in "SU":
                return values
        if len(values) == 2 and _fits(values[1], dtype):
            return first, np.asarray(values[1], dtype)
    elif len(values) == 2 and isinstance(values[1], _ARRAYS) and _fits(first, values[1].dtype):
        return np.asarray(first, values[1].dtype), values[1]
    dtype = common_dtype(values, op)
    return tuple(array(value, dtype) for value in values)


def _fits(value: Value, dtype: np.dtype) -> bool:
    """Tells quickly whether a value is a number that surely converts to a dtype."""
    if type(value) is float:
        return dtype.kind == "f"
    return type(value) is int and 0 <= value <= _LARGEST_INT8 and dtype.kind in "fiu"


_TEXT = np.dtype(object)


def common_dtype(values: Sequence[Value], op: str) -> np.dtype | None:
    """Returns the dtype of the operands, or raises an error that says `tf.cast`."""
    on_device = [np.dtype(v.dtype) for v in values if isinstance(v, jax.Array)]
    if on_device:
        return _only(on_device, op)
    found = [np.dtype(v.dtype) for v in values if isinstance(v, np.ndarray)]
    if found:
        return _only(found, op)
    found = [np.dtype(v.dtype) for v in values if isinstance(v, np.generic)]
    if found:
        return found[0]
    within = _dtype_within([v for v in values if isinstance(v, list | tuple)])
    return within if within is not None else np.dtype(inferred(values[0]).dtype)


def _only(found: list[np.dtype], op: str) -> np.dtype:
    # NumPy's own arrays of text are strings, too.
    found = [_TEXT if dtype.kind in "SU" else dtype for dtype in found]
    dtype = found[0]
    for other in found[1:]:
        if other == dtype:
            continue
        narrow, wide = (dtype, other) if other.itemsize >= dtype.itemsize else (other, dtype)
        # A device has no 64 bits by default, and NumPy's own default is 64 bits.
        if _NARROW.get(wide.name) != narrow.name:
            raise errors.ArgumentTypeError(
                f"The tensors of `tf.{op}` must have one dtype",
                f"they have {dtype.name} and {other.name}",
                f"Convert one with tf.cast(x, tf.{dtype.name}).",
            )
        dtype = narrow
    return dtype


def numbers(x: Value, op: str, kinds: str = "fc") -> Array:
    """Returns an array whose dtype is of one of some kinds (see `kind_of`)."""
    found = array(x)
    require_kind(found, op, kinds)
    return found


_KINDS = {"f": "float", "c": "complex", "i": "signed", "u": "unsigned", "b": "bool", "O": "string"}


def require_kind(x: Array, op: str, kinds: str) -> None:
    """Raises an error for an array whose dtype an operation does not take."""
    if kind_of(x.dtype) not in kinds:
        wanted = ", ".join(_KINDS[kind] for kind in kinds)
        advice = "tf.float32" if "f" in kinds else "tf.bool" if kinds == "b" else "tf.int32"
        raise errors.ArgumentTypeError(
            f"`tf.{op}` takes these kinds of dtypes: {wanted}",
            f"the tensor has {np.dtype(x.dtype).name}",
            f"Convert it with tf.cast(x, {advice}).",
        )


def static(value: Value, argument: str) -> np.ndarray:
    """Returns the elements of a value that must be known when a function is compiled."""
    if isinstance(value, list | tuple):
        return np.asarray([static(v, argument) for v in value])
    if jax_compat.is_traced(value):
        raise errors.TracedValueError(
            f"`{argument}` must be known when the function is compiled",
            "it is computed by the compiled function",
            "Compute it from x.shape or Python numbers, or outside tf.function.",
        )
    return np.asarray(value)


def integer(value: Value, argument: str) -> int:
    """Returns one static integer."""
    if isinstance(value, int):
        return int(value)
    found = static(value, argument)
    if found.size != 1 or found.dtype.kind not in "iub":
        raise errors.InvalidArgumentError(
            f"`{argument}` must be one integer", f"it is {_short(value)}", "Pass an integer."
        )
    return int(found.reshape(()))


def integers(value: Value, argument: str) -> tuple[int, ...]:
    """Returns static integers: of a shape, a list, or one number."""
    if isinstance(value, int):
        return (int(value),)
    if isinstance(value, list | tuple):
        return tuple(integer(_dimension(v, argument), argument) for v in value)
    found = static(value, argument)
    if found.size and found.dtype.kind not in "iu":
        raise errors.ArgumentTypeError(
            f"`{argument}` must hold integers", f"it holds {found.dtype.name}", "Pass integers."
        )
    return tuple(int(v) for v in found.reshape(-1))


def _dimension(value: Value, argument: str) -> Value:
    if value is None:
        raise errors.InvalidArgumentError(
            f"`{argument}` must be fully known",
            "it holds None",
            "Use -1 in tf.reshape, or tf.shape(x)[0] for the size of a batch.",
        )
    return value


def axis_of(axis: Value) -> int | None:
    """Returns one axis."""
    return None if axis is None else integer(axis, "axis")


def axes_of(axis: Value) -> tuple[int, ...] | None:
    """Returns the axes of a reduction; None stands for all of them."""
    return None if axis is None else integers(axis, "axis")


def normalized(axis: int, ndim: int, argument: str = "axis") -> int:
    """Returns an axis counted from the front."""
    if not -ndim <= axis < ndim:
        raise errors.InvalidArgumentError(
            f"`{argument}` must be from {-ndim} to {ndim - 1}",
            f"it is {axis}",
            f"The tensor has {ndim} dimensions.",
        )
    return axis % ndim


def is_concrete(*values: Value) -> bool:
    """Tells whether values can be read now, which is cheap: on the host or the CPU."""
    return not any(jax_compat.is_traced(value) for value in values) and (
        on_host() or jax.default_backend() == "cpu"
    )


def require_values(op: str, *values: Value, advice: str) -> tuple[np.ndarray, ...]:
    """Returns values on the host, for an operation whose result's shape depends on them."""
    if any(jax_compat.is_traced(value) for value in values):
        raise errors.TracedValueError(
            f"`tf.{op}` has a result whose shape depends on values: it needs values that are known",
            "it was called in a compiled function",
            advice,
        )
    return tuple(np.asarray(value) for value in values)
