"""Reductions over dimensions, the places of extremes, and running sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Value,
    array,
    axes_of,
    integer,
    kind_of,
    normalized,
    numbers,
    numpy_dtype,
    quiet_op,
    require_kind,
    xp,
)

__all__ = [
    "argmax",
    "argmin",
    "count_nonzero",
    "cumprod",
    "cumsum",
    "cumulative_logsumexp",
    "reduce_all",
    "reduce_any",
    "reduce_euclidean_norm",
    "reduce_logsumexp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_std",
    "reduce_sum",
    "reduce_variance",
    "zero_fraction",
]


def _axes(axis: Value, x: Array) -> tuple[int, ...] | None:
    axes = axes_of(axis)
    return None if axes is None else tuple(normalized(place, x.ndim) for place in axes)


@quiet_op
def reduce_sum(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Returns the sum over dimensions, in the dtype of the tensor.

    >>> reduce_sum([[1, 2], [3, 4]], axis=0).numpy()
    array([4, 6], dtype=int32)
    """
    x = numbers(input_tensor, "reduce_sum", "fciu")
    return xp(x).sum(x, axis=_axes(axis, x), keepdims=keepdims, dtype=x.dtype)


@quiet_op
def reduce_prod(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Returns the product over dimensions."""
    x = numbers(input_tensor, "reduce_prod", "fciu")
    return xp(x).prod(x, axis=_axes(axis, x), keepdims=keepdims, dtype=x.dtype)


@quiet_op
def reduce_mean(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Returns the mean over dimensions; of integers, rounded towards zero.

    >>> float(reduce_mean([1.0, 2.0, 6.0])), int(reduce_mean([1, 2, 4]))
    (3.0, 2)
    """
    x = numbers(input_tensor, "reduce_mean", "fciu")
    axes = _axes(axis, x)
    if kind_of(x.dtype) in "fc":
        return _mean(x, axes, keepdims)
    wide = np.dtype(x.dtype) if x.dtype.itemsize >= 4 else numpy_dtype(dtypes.int64)
    total = xp(x).sum(x, axis=axes, keepdims=keepdims, dtype=wide)
    places = range(x.ndim) if axes is None else axes
    count = int(np.prod([x.shape[place] for place in places], dtype=np.int64))
    if not count:
        return xp(x).zeros_like(total).astype(x.dtype)
    quotient = xp(x).abs(total) // np.asarray(count).astype(wide)
    return (xp(x).sign(total) * quotient).astype(x.dtype)


def _mean(x: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
    # NumPy warns of an empty mean, which is not a number.
    if x.size:
        return xp(x).mean(x, axis=axes, keepdims=keepdims, dtype=x.dtype)
    places = range(x.ndim) if axes is None else axes
    count = int(np.prod([x.shape[place] for place in places], dtype=np.int64))
    return xp(x).sum(x, axis=axes, keepdims=keepdims) / np.asarray(count, x.dtype)


@quiet_op
def reduce_max(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Returns the largest element over dimensions."""
    x = numbers(input_tensor, "reduce_max", "fiu")
    start = {} if x.size else {"initial": _limit(x, is_lowest=True)}
    return xp(x).max(x, axis=_axes(axis, x), keepdims=keepdims, **start)


@quiet_op
def reduce_min(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Returns the smallest element over dimensions."""
    x = numbers(input_tensor, "reduce_min", "fiu")
    start = {} if x.size else {"initial": _limit(x, is_lowest=False)}
    return xp(x).min(x, axis=_axes(axis, x), keepdims=keepdims, **start)


def _limit(x: Array, *, is_lowest: bool) -> Array:
    if kind_of(x.dtype) == "f":
        return np.asarray(-np.inf if is_lowest else np.inf, x.dtype)
    found = dtypes.as_dtype(x.dtype)
    return np.asarray(found.min if is_lowest else found.max, x.dtype)


def _truths(value: Value, name: str) -> Array:
    found = array(value) if hasattr(value, "dtype") else array(value, np.bool_)
    require_kind(found, name, "b")
    return found


@quiet_op
def reduce_all(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Tells whether all elements are true."""
    x = _truths(input_tensor, "reduce_all")
    return xp(x).all(x, axis=_axes(axis, x), keepdims=keepdims)


@quiet_op
def reduce_any(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Tells whether one element is true."""
    x = _truths(input_tensor, "reduce_any")
    return xp(x).any(x, axis=_axes(axis, x), keepdims=keepdims)


@quiet_op
def reduce_variance(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Returns the variance: the mean of the squared distances from the mean."""
    x = numbers(input_tensor, "math.reduce_variance", "fc")
    return _variance(x, _axes(axis, x), keepdims)


def _variance(x: Array, axes: tuple[int, ...] | None, keepdims: bool) -> Array:
    distance = xp(x).abs(x - _mean(x, axes, keepdims=True))
    return _mean(distance * distance, axes, keepdims)


@quiet_op
def reduce_std(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Returns the standard deviation: the root of the variance."""
    x = numbers(input_tensor, "math.reduce_std", "fc")
    return xp(x).sqrt(_variance(x, _axes(axis, x), keepdims))


@quiet_op
def reduce_euclidean_norm(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Returns the root of the sum of squares."""
    x = numbers(input_tensor, "math.reduce_euclidean_norm", "fciu")
    ns = xp(x)
    squares = ns.sum(x * ns.conj(x), axis=_axes(axis, x), keepdims=keepdims, dtype=x.dtype)
    if kind_of(x.dtype) in "iu":
        return ns.sqrt(squares.astype(numpy_dtype(dtypes.float64))).astype(x.dtype)
    return ns.sqrt(squares)


@quiet_op
def reduce_logsumexp(
    input_tensor: Value, axis: Value = None, keepdims: bool = False, name: str | None = None
) -> Array:
    """Returns log(sum(exp(x))), without overflow.

    >>> round(float(reduce_logsumexp([1000.0, 1000.0])), 3)
    1000.693
    """
    x = numbers(input_tensor, "reduce_logsumexp", "f")
    axes, ns = _axes(axis, x), xp(x)
    top = ns.max(x, axis=axes, keepdims=True, initial=_limit(x, is_lowest=True))
    top = ns.where(ns.isfinite(top), top, ns.zeros_like(top))
    if isinstance(top, jax.Array):
        top = jax.lax.stop_gradient(top)
    found = ns.log(ns.sum(ns.exp(x - top), axis=axes, keepdims=True)) + top
    return found if keepdims else ns.squeeze(found, axis=axes)


@quiet_op
def argmax(
    input: Value,
    axis: Value = None,
    output_type: DTypeLike = dtypes.int64,
    name: str | None = None,
) -> Array:
    """Returns the place of the largest element along a dimension; the first one by default.

    >>> argmax([[1, 9], [4, 3]], axis=1).numpy().tolist()
    [1, 0]
    """
    x = numbers(input, "argmax", "fiub")
    x = _without_nan(x, -np.inf)
    return xp(x).argmax(x, axis=_one_axis(axis, x)).astype(numpy_dtype(output_type))


@quiet_op
def argmin(
    input: Value,
    axis: Value = None,
    output_type: DTypeLike = dtypes.int64,
    name: str | None = None,
) -> Array:
    """Returns the place of the smallest element along a dimension; the first one by default."""
    x = numbers(input, "argmin", "fiub")
    x = _without_nan(x, np.inf)
    return xp(x).argmin(x, axis=_one_axis(axis, x)).astype(numpy_dtype(output_type))


def _without_nan(x: Array, value: float) -> Array:
    """Replaces what is not a number, which is never the largest or smallest element."""
    if kind_of(x.dtype) != "f":
        return x
    return xp(x).where(xp(x).isnan(x), np.asarray(value, x.dtype), x)


def _one_axis(axis: Value, x: Array) -> int:
    place = normalized(0 if axis is None else integer(axis, "axis"), x.ndim)
    if not x.shape[place]:
        raise errors.InvalidArgumentError(
            "The dimension must have an element", f"the shape is {tuple(x.shape)}", "Add one."
        )
    return place


@quiet_op
def count_nonzero(
    input: Value,
    axis: Value = None,
    keepdims: bool | None = None,
    dtype: DTypeLike = dtypes.int64,
    name: str | None = None,
) -> Array:
    """Returns the number of elements that are not zero, or not the empty string."""
    x = array(input)
    is_set = x != (b"" if kind_of(x.dtype) == "O" else 0)
    target = numpy_dtype(dtype)
    return xp(x).sum(is_set, axis=_axes(axis, x), keepdims=bool(keepdims), dtype=target)


@quiet_op
def zero_fraction(value: Value, name: str | None = None) -> Array:
    """Returns the share of elements that are zero."""
    x = array(value)
    return _mean((x == 0).astype(np.float32), None)


@quiet_op
def cumsum(
    x: Value,
    axis: Value = 0,
    exclusive: bool = False,
    reverse: bool = False,
    name: str | None = None,
) -> Array:
    """Returns the sums of the elements up to each place.

    >>> cumsum([1, 2, 3], exclusive=True).numpy()
    array([0, 1, 3], dtype=int32)
    """
    x = numbers(x, "cumsum", "fciu")
    return _running(x, axis, exclusive, reverse, "cumsum", 0)


@quiet_op
def cumprod(
    x: Value,
    axis: Value = 0,
    exclusive: bool = False,
    reverse: bool = False,
    name: str | None = None,
) -> Array:
    """Returns the products of the elements up to each place."""
    x = numbers(x, "math.cumprod", "fciu")
    return _running(x, axis, exclusive, reverse, "cumprod", 1)


@quiet_op
def cumulative_logsumexp(
    x: Value,
    axis: Value = 0,
    exclusive: bool = False,
    reverse: bool = False,
    name: str | None = None,
) -> Array:
    """Returns log(sum(exp(x))) of the elements up to each place."""
    x = numbers(x, "math.cumulative_logsumexp", "f")
    return _running(x, axis, exclusive, reverse, "logsumexp", -np.inf)


def _running(
    x: Array, axis: Value, exclusive: bool, reverse: bool, how: str, first: Value
) -> Array:
    ns, place = xp(x), normalized(integer(axis, "axis"), x.ndim)
    x = ns.flip(x, place) if reverse else x
    if how != "logsumexp":
        found = getattr(ns, how)(x, axis=place, dtype=x.dtype)
    elif ns is np:
        found = np.logaddexp.accumulate(x, axis=place)
    else:
        found = jax.lax.cumlogsumexp(jnp.asarray(x), axis=place)
    if exclusive and x.shape[place]:
        edge = [(int(i == place), 0) for i in range(x.ndim)]
        kept = found[(slice(None),) * place + (slice(0, -1),)]
        found = ns.pad(kept, edge, constant_values=np.asarray(first, x.dtype))
    return ns.flip(found, place) if reverse else found
