"""Tensors from values, and tensors of one value: constants, casts, ranges, masks."""

from __future__ import annotations

import builtins
import math

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf import dtypes
from replicax.tf.dispatch import on_host, op
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Namespace,
    Value,
    array,
    integer,
    integers,
    kind_of,
    numbers,
    numpy_dtype,
    operands,
    quiet_op,
    static,
    xp,
)
from replicax.tf.tensor import raw
from replicax.values.indexed_slices import IndexedSlices

__all__ = [
    "bitcast",
    "cast",
    "constant",
    "convert_to_tensor",
    "eye",
    "fill",
    "identity",
    "identity_n",
    "linspace",
    "meshgrid",
    "one_hot",
    "ones",
    "ones_like",
    "range",
    "saturate_cast",
    "sequence_mask",
    "stop_gradient",
    "zeros",
    "zeros_like",
]

# Up to this number of elements, a constant of a compiled function is known while it is compiled.
_MOST_KNOWN = 4096
_BOOL = dtypes.as_dtype("bool")


def _placed(found: Array) -> Array:
    """Returns an array where it will be used: in eager code on the device."""
    if on_host() or isinstance(found, jax.Array) or kind_of(found.dtype) == "O":
        return found
    if jax_compat.is_eager():
        return jnp.asarray(found)
    return found.astype(dtypes.device_dtype(found.dtype), copy=False)


@op
def constant(
    value: Value, dtype: DTypeLike = None, shape: Value = None, name: str | None = "Const"
) -> Array:
    """Returns a tensor of a value; a single number fills `shape`.

    >>> constant([1, 2]), constant(0.5, shape=[2]).numpy().tolist()
    (<tf.Tensor: shape=(2,), dtype=int32, numpy=array([1, 2], dtype=int32)>, [0.5, 0.5])
    """
    found = array(value, None if dtype is None else numpy_dtype(dtype))
    if shape is not None:
        sizes = integers(shape, "shape")
        if math.prod(sizes) != found.size and found.size != 1:
            raise errors.InvalidArgumentError(
                f"`value` must have one element, or those of the shape {sizes}",
                f"it has {found.size}",
                "Correct `shape`.",
            )
        if found.size == 1:
            found = xp(found).broadcast_to(found.reshape(()), sizes)
        found = found.reshape(sizes)
    return _placed(found)


@op
def convert_to_tensor(
    value: Value, dtype: DTypeLike = None, dtype_hint: DTypeLike = None, name: str | None = None
) -> Array:
    """Returns a value as a tensor.

    Args:
      value: An array, a Python number, or a nested list of them.
      dtype: The dtype. A tensor of another one is an error; see `tf.cast`.
      dtype_hint: The dtype to take if the value converts to it.
      name: Ignored.
    """
    if isinstance(value, IndexedSlices):
        value = value.map_arrays(raw).to_dense()
    if dtype is not None:
        target = numpy_dtype(dtype)
        if isinstance(value, jax.Array) and value.dtype != target:
            raise errors.ArgumentTypeError(
                f"`tf.convert_to_tensor` to {target.name} needs a value of that dtype",
                f"the tensor has {value.dtype.name}",
                f"Use tf.cast(x, tf.{target.name}).",
            )
        return _placed(array(value, target))
    if dtype_hint is not None and not isinstance(value, jax.Array):
        try:
            return _placed(array(value, numpy_dtype(dtype_hint)))
        except TypeError:
            pass
    return _placed(array(value))


@op
def identity(input: Value, name: str | None = None) -> Array:
    """Returns a tensor with the same value."""
    return _placed(array(input))


@op
def identity_n(input: Value, name: str | None = None) -> list[Array]:
    """Returns tensors with the same values."""
    return [_placed(array(value)) for value in input]


# Tapes do not record it: where nothing else leads to a source, its gradient is None, not zero.
@op(differentiable=False)
def stop_gradient(input: Value, name: str | None = None) -> Value:
    """Returns the value as a constant for gradients."""
    if isinstance(input, dict):
        return jax.tree.map(lambda v: _stopped(array(v)), input)
    return _stopped(array(input))


def _stopped(value: Array) -> Array:
    if not isinstance(value, jax.Array):
        return value
    stopped = jax.lax.stop_gradient(value)
    # Tapes know arrays by identity.
    return jax_compat.alias(stopped) if stopped is value else stopped


@quiet_op
def cast(x: Value, dtype: DTypeLike, name: str | None = None) -> Array:
    """Returns the values in another dtype; floats lose their fraction in integers.

    >>> cast([1.9, -1.9], dtypes.int32).numpy()
    array([ 1, -1], dtype=int32)
    """
    found = array(x)
    target = numpy_dtype(dtype)
    if found.dtype == target:
        return _placed(found)
    if on_host() and found.dtype.kind in "biuf" and target.kind in "bf":
        # The usual casts of elements of datasets.
        return found.astype(target)
    if (kind_of(target) == "O") != (kind_of(found.dtype) == "O"):
        raise errors.UnsupportedError(
            "`tf.cast` converts numbers",
            f"this is from {np.dtype(found.dtype).name} to {target.name}",
            "Use tf.strings.as_string or tf.strings.to_number.",
        )
    if kind_of(found.dtype) == "c" and kind_of(target) != "c":
        found = xp(found).real(found)
    if kind_of(found.dtype) == "f" and kind_of(target) in "iu" and np.dtype(target).itemsize < 4:
        # Values out of range wrap around, as in TensorFlow on a CPU.
        found = _placed(found).astype(np.int32)
    return _placed(found).astype(target)


@quiet_op
def saturate_cast(value: Value, dtype: DTypeLike, name: str | None = None) -> Array:
    """Returns the values in another dtype, limited to its range.

    >>> saturate_cast([-1.0, 300.0], dtypes.uint8).numpy()
    array([  0, 255], dtype=uint8)
    """
    found = array(value)
    target = numpy_dtype(dtype)
    if kind_of(target) not in "fiu" or kind_of(found.dtype) not in "fiu":
        return cast.raw(found, dtype)
    low, high = dtypes.as_dtype(target).limits
    own = dtypes.as_dtype(found.dtype)
    low, high = max(_exact(low), _exact(own.min)), min(_exact(high), _exact(own.max))
    if kind_of(found.dtype) == "f":
        high = _float_below(high, found.dtype)
    clipped = xp(found).clip(found, np.asarray(low, found.dtype), np.asarray(high, found.dtype))
    return cast.raw(clipped, dtype)


def _exact(limit: Value) -> float | int:
    return int(limit) if float(limit).is_integer() and builtins.abs(limit) < 2**64 else float(limit)


def _float_below(limit: float | int, dtype: DTypeLike) -> float:
    """Returns the largest number of a float dtype that is not above a limit."""
    found = np.asarray(limit, dtype)
    return float(np.nextafter(found, np.asarray(0, dtype)) if float(found) > limit else found)


@op
def bitcast(input: Value, type: DTypeLike, name: str | None = None) -> Array:
    """Returns the bits of a tensor as values of another dtype."""
    found, target = array(input), numpy_dtype(type)
    if xp(found) is not np:
        return jax.lax.bitcast_convert_type(_placed(found), target)
    size, wanted = found.dtype.itemsize, target.itemsize
    if wanted > size:
        return np.ascontiguousarray(found).view(target).reshape(found.shape[:-1])
    parts = (size // wanted,) if wanted < size else ()
    flat = np.ascontiguousarray(found).reshape(-1).view(target)
    return flat.reshape(*found.shape, *parts)


def _filled(ns: Namespace, sizes: tuple[int, ...], value: Array) -> Array:
    return ns.full(sizes, value, dtype=value.dtype)


@op
def zeros(
    shape: Value, dtype: DTypeLike = dtypes.float32, name: str | None = None, layout: Value = None
) -> Array:
    """Returns a tensor of zeros; of empty strings for `tf.string`."""
    return _of_one_value(integers(shape, "shape"), 0, numpy_dtype(dtype))


@op
def ones(
    shape: Value, dtype: DTypeLike = dtypes.float32, name: str | None = None, layout: Value = None
) -> Array:
    """Returns a tensor of ones."""
    return _of_one_value(integers(shape, "shape"), 1, numpy_dtype(dtype))


def _of_one_value(sizes: tuple[int, ...], value: int, dtype: np.dtype) -> Array:
    if kind_of(dtype) == "O":
        return np.full(sizes, b"" if value == 0 else b"1", object)
    return _space_of(sizes).full(sizes, value, dtype=dtype)


def _space_of(sizes: tuple[int, ...]) -> Namespace:
    """Returns NumPy for small constants of compiled functions, which are known then."""
    return xp() if math.prod(sizes) <= _MOST_KNOWN or on_host() else jnp


@op
def zeros_like(
    input: Value, dtype: DTypeLike = None, name: str | None = None, layout: Value = None
) -> Array:
    """Returns zeros in the shape of a tensor."""
    return _like(input, 0, dtype)


@op
def ones_like(
    input: Value, dtype: DTypeLike = None, name: str | None = None, layout: Value = None
) -> Array:
    """Returns ones in the shape of a tensor."""
    return _like(input, 1, dtype)


def _like(input: Value, value: int, dtype: DTypeLike) -> Array:
    found = array(input)
    target = np.dtype(found.dtype) if dtype is None else numpy_dtype(dtype)
    if kind_of(target) == "O":
        return _of_one_value(tuple(found.shape), value, target)
    # From the tensor itself, so that a compiled function keeps its sharding.
    if isinstance(found, jax.Array):
        return jnp.full_like(found, value, dtype=target)
    return _of_one_value(tuple(found.shape), value, target)


@op
def fill(dims: Value, value: Value, name: str | None = None, layout: Value = None) -> Array:
    """Returns a tensor of one value.

    >>> fill([2], 7).numpy()
    array([7, 7], dtype=int32)
    """
    sizes, found = integers(dims, "dims"), array(value)
    if found.ndim:
        raise errors.InvalidArgumentError(
            "`value` must be a scalar", f"its shape is {tuple(found.shape)}", "Use tf.broadcast_to."
        )
    ns = np if kind_of(found.dtype) == "O" else _space_of(sizes)
    return _filled(jnp if isinstance(found, jax.Array) else ns, sizes, found)


@op
def eye(
    num_rows: Value,
    num_columns: Value = None,
    batch_shape: Value = None,
    dtype: DTypeLike = dtypes.float32,
    name: str | None = None,
) -> Array:
    """Returns identity matrices."""
    rows = integer(num_rows, "num_rows")
    columns = rows if num_columns is None else integer(num_columns, "num_columns")
    batch = () if batch_shape is None else integers(batch_shape, "batch_shape")
    ns = _space_of((*batch, rows, columns))
    found = ns.eye(rows, columns, dtype=numpy_dtype(dtype))
    return ns.broadcast_to(found, (*batch, rows, columns)) if batch else found


@op
def range(
    start: Value,
    limit: Value = None,
    delta: Value = 1,
    dtype: DTypeLike = None,
    name: str | None = "range",
) -> Array:
    """Returns the numbers from `start` to below `limit`; with one argument, from 0.

    >>> range(3).numpy(), range(1, 2, 0.5).numpy()
    (array([0, 1, 2], dtype=int32), array([1. , 1.5], dtype=float32))
    """
    if limit is None:
        start, limit = 0, start
    given = [static(v, n) for v, n in ((start, "start"), (limit, "limit"), (delta, "delta"))]
    target = _range_dtype([start, limit, delta]) if dtype is None else numpy_dtype(dtype)
    first, last, step = (v.reshape(()).astype(target) for v in given)
    if step == 0:
        raise errors.InvalidArgumentError("`delta` must not be 0", "it is", "Pass a step.")
    if (last - first) / step < 0 and last != first:
        raise errors.InvalidArgumentError(
            "`delta` must lead from `start` to `limit`",
            f"they are {step}, {first} and {last}",
            "Change the sign of `delta`.",
        )
    wide = [
        v.astype(np.float64) if kind_of(target) == "f" else v.astype(object)
        for v in (first, last, step)
    ]
    count = builtins.max(0, math.ceil((wide[1] - wide[0]) / wide[2]))
    return _placed((first + np.arange(count).astype(target) * step).astype(target))


def _range_dtype(values: list[Value]) -> np.dtype:
    """Returns the widest of the dtypes: int32, int64, float32, float64."""
    found = [np.dtype(array(v).dtype).name for v in values]
    order = ("int32", "int64", "float16", "bfloat16", "float32", "float64")
    unknown = [name for name in found if name not in order]
    if unknown:
        raise errors.ArgumentTypeError(
            "`tf.range` counts in int32, int64 or a float dtype",
            f"{unknown[0]} was given",
            "Convert it with tf.cast, or pass `dtype`.",
        )
    return numpy_dtype(builtins.max(found, key=order.index))


@op
def linspace(
    start: Value, stop: Value, num: Value, name: str | None = None, axis: Value = 0
) -> Array:
    """Returns `num` values from `start` to `stop`, both included, evenly spaced."""
    count = integer(num, "num")
    if count < 0:
        raise errors.InvalidArgumentError("`num` must not be negative", f"it is {count}", "Use 1.")
    first, last = operands(start, stop, op="linspace")
    if kind_of(first.dtype) in "iu":
        wide = numpy_dtype(dtypes.float64)
        first, last = first.astype(wide), last.astype(wide)
    ns = xp(first, last)
    return ns.linspace(first, last, count, axis=integer(axis, "axis"), dtype=first.dtype)


@op
def meshgrid(*args: Value, indexing: str = "xy", name: str | None = None) -> list[Array]:
    """Returns the coordinates of all points of a grid.

    >>> [part.shape.as_list() for part in meshgrid([1, 2, 3], [4, 5])]
    [[2, 3], [2, 3]]
    """
    if indexing not in ("xy", "ij"):
        raise errors.InvalidArgumentError(
            "`indexing` must be 'xy' or 'ij'", f"it is {indexing!r}", "Pass one of them."
        )
    arrays = operands(*args, op="meshgrid") if args else ()
    return list(xp(*arrays).meshgrid(*arrays, indexing=indexing))


@op
def one_hot(
    indices: Value,
    depth: Value,
    on_value: Value = None,
    off_value: Value = None,
    axis: Value = None,
    dtype: DTypeLike = None,
    name: str | None = None,
) -> Array:
    """Returns a new dimension with `on_value` at the index and `off_value` in other places.

    An index out of range gives `off_value` alone.

    >>> one_hot([0, 2], 3).numpy().tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    found = numbers(indices, "one_hot", "iu")
    given = [v for v in (on_value, off_value) if v is not None]
    target = numpy_dtype(dtype) if dtype is not None else None
    if target is None:
        target = np.dtype(operands(*given, op="one_hot")[0].dtype if given else np.float32)
    place = -1 if axis is None else integer(axis, "axis")
    place = place + found.ndim + 1 if place < 0 else place
    if not 0 <= place <= found.ndim:
        raise errors.InvalidArgumentError(
            f"`axis` must be in [-1, {found.ndim}]", f"it is {axis}", "Pass another axis."
        )
    count = integer(depth, "depth")
    rest = found.ndim - place
    counted = np.arange(count).reshape((count,) + (1,) * rest) if rest else np.arange(count)
    is_on = found.reshape((*found.shape[:place], 1, *found.shape[place:])) == counted
    if not given:
        return xp(is_on).asarray(is_on, dtype=target)
    on = array(1 if on_value is None and kind_of(target) != "b" else _or(on_value, True), target)
    off = array(
        0 if off_value is None and kind_of(target) != "b" else _or(off_value, False), target
    )
    return xp(found, on, off).where(is_on, on, off)


def _or(value: Value, default: bool) -> Value:
    return default if value is None else value


@op
def sequence_mask(
    lengths: Value,
    maxlen: Value = None,
    dtype: DTypeLike = _BOOL,
    name: str | None = None,
) -> Array:
    """Tells which of `maxlen` positions are below each length.

    >>> sequence_mask([1, 2], 3).numpy().tolist()
    [[True, False, False], [True, True, False]]
    """
    found = numbers(lengths, "sequence_mask", "iuf")
    if maxlen is None:
        known = static(found, "maxlen")
        size = builtins.max(0, int(known.max())) if known.size else 0
    else:
        size = integer(maxlen, "maxlen")
    found = found.astype(np.int32) if kind_of(found.dtype) == "f" else found
    mask = xp(found).expand_dims(found, -1) > np.arange(size).astype(found.dtype)
    return mask.astype(numpy_dtype(dtype))
