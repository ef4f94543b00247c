"""Reductions over rows with equal numbers: `segment_*` and `unsorted_segment_*`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
    integer,
    is_concrete,
    kind_of,
    numbers,
    numpy_dtype,
    quiet_op,
    require_values,
    xp,
)

__all__ = [
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_prod",
    "segment_sum",
    "unsorted_segment_max",
    "unsorted_segment_mean",
    "unsorted_segment_min",
    "unsorted_segment_prod",
    "unsorted_segment_sqrt_n",
    "unsorted_segment_sum",
]

_HOST = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
_DEVICE = {
    "sum": jax.ops.segment_sum,
    "prod": jax.ops.segment_prod,
    "max": jax.ops.segment_max,
    "min": jax.ops.segment_min,
}


def _start(how: str, dtype: np.dtype) -> Value:
    """Returns what an empty segment has."""
    if how in ("sum", "prod"):
        return how == "prod"
    found = dtypes.as_dtype(dtype)
    return found.min if how == "max" else found.max


def _reduced(data: Array, ids: Array, count: int, how: str) -> Array:
    if ids.ndim > data.ndim or tuple(data.shape[: ids.ndim]) != tuple(ids.shape):
        raise errors.InvalidArgumentError(
            f"The shape of `segment_ids` must start that of `data`, {tuple(data.shape)}",
            f"it is {tuple(ids.shape)}",
            "Pass one number for each row.",
        )
    if is_concrete(ids) and ids.size and int(ids.max()) >= count:
        raise errors.InvalidArgumentError(
            f"`segment_ids` must be below {count}", f"one is {int(ids.max())}", "Raise the number."
        )
    rest = tuple(data.shape[ids.ndim :])
    rows, flat = data.reshape(math.prod(ids.shape), *rest), ids.reshape(-1)
    if xp(rows, flat) is np:
        found = np.full((count, *rest), _start(how, rows.dtype), rows.dtype)
        kept = flat >= 0
        _HOST[how].at(found, flat[kept], rows[kept])
        return found
    inside = jnp.where(flat < 0, count, flat)
    found = _DEVICE[how](jnp.asarray(rows), inside, num_segments=count)
    if how in ("sum", "prod"):
        return found
    # JAX has infinities in empty segments, TensorFlow the limits of the dtype.
    sizes = jax.ops.segment_sum(jnp.ones_like(inside), inside, num_segments=count)
    is_empty = (sizes == 0).reshape(count, *(1 for _ in rest))
    return jnp.where(is_empty, np.asarray(_start(how, np.dtype(found.dtype)), found.dtype), found)


def _counts(data: Array, ids: Array, count: int) -> Array:
    ones = xp(data, ids).ones(ids.shape, data.dtype)
    found = _reduced(ones, ids, count, "sum")
    return found.reshape(count, *(1 for _ in data.shape[ids.ndim :]))


def _mean(data: Array, ids: Array, count: int) -> Array:
    total, sizes = _reduced(data, ids, count, "sum"), _counts(data, ids, count)
    sizes = xp(total, sizes).maximum(sizes, np.asarray(1, data.dtype))
    return total / sizes if kind_of(data.dtype) in "fc" else total // sizes


def _unsorted(
    data: Value, segment_ids: Value, num_segments: Value, how: str, kinds: str = "fciu"
) -> tuple[Array, Array, int]:
    name = f"math.unsorted_segment_{how}"
    ids = numbers(segment_ids, name, "iu")
    return numbers(data, name, kinds), ids, integer(num_segments, "num_segments")


@quiet_op
def unsorted_segment_sum(
    data: Value, segment_ids: Value, num_segments: Value, name: str | None = None
) -> Array:
    """Returns the sums of rows with equal numbers; rows with negative ones are left out.

    >>> unsorted_segment_sum([1, 2, 4], [1, 0, 1], 2).numpy()
    array([2, 5], dtype=int32)
    """
    return _reduced(*_unsorted(data, segment_ids, num_segments, "sum"), "sum")


@quiet_op
def unsorted_segment_prod(
    data: Value, segment_ids: Value, num_segments: Value, name: str | None = None
) -> Array:
    """Returns the products of rows with equal numbers."""
    return _reduced(*_unsorted(data, segment_ids, num_segments, "prod"), "prod")


@quiet_op
def unsorted_segment_max(
    data: Value, segment_ids: Value, num_segments: Value, name: str | None = None
) -> Array:
    """Returns the largest of rows with equal numbers; the lowest number for none."""
    return _reduced(*_unsorted(data, segment_ids, num_segments, "max", "fiu"), "max")


@quiet_op
def unsorted_segment_min(
    data: Value, segment_ids: Value, num_segments: Value, name: str | None = None
) -> Array:
    """Returns the smallest of rows with equal numbers; the highest number for none."""
    return _reduced(*_unsorted(data, segment_ids, num_segments, "min", "fiu"), "min")


@quiet_op
def unsorted_segment_mean(
    data: Value, segment_ids: Value, num_segments: Value, name: str | None = None
) -> Array:
    """Returns the means of rows with equal numbers; 0 for none."""
    x, ids, count = _unsorted(data, segment_ids, num_segments, "mean")
    return _mean(x if kind_of(x.dtype) in "fc" else x.astype(numpy_dtype("float64")), ids, count)


@quiet_op
def unsorted_segment_sqrt_n(
    data: Value, segment_ids: Value, num_segments: Value, name: str | None = None
) -> Array:
    """Returns sums of rows divided by the square roots of their counts."""
    x, ids, count = _unsorted(data, segment_ids, num_segments, "sqrt_n", "fc")
    sizes = _counts(x, ids, count)
    ns = xp(x, ids)
    return _reduced(x, ids, count, "sum") / ns.sqrt(ns.maximum(sizes, np.asarray(1, x.dtype)))


def _sorted(data: Value, segment_ids: Value, how: str) -> tuple[Array, Array, int]:
    x, ids = array(data), numbers(segment_ids, f"math.segment_{how}", "iu")
    (known,) = require_values(
        f"math.segment_{how}",
        ids,
        advice=f"Use tf.math.unsorted_segment_{how}, which is told the number of segments.",
    )
    if known.ndim != 1 or (np.diff(known) < 0).any() or (known < 0).any():
        raise errors.InvalidArgumentError(
            "`segment_ids` must be a sorted vector of numbers from 0",
            f"it is {known.tolist()}",
            f"Use tf.math.unsorted_segment_{how}.",
        )
    return x, ids, int(known[-1]) + 1 if known.size else 0


def _with_gaps(found: Array, data: Array, ids: Array, count: int, value: int) -> Array:
    """Returns the result with a value for numbers that do not occur."""
    is_empty = _counts(data, ids, count) == 0
    return xp(found).where(is_empty, np.asarray(value, found.dtype), found)


@quiet_op
def segment_sum(data: Value, segment_ids: Value, name: str | None = None) -> Array:
    """Returns the sums of neighbouring rows with equal numbers.

    >>> segment_sum([1, 2, 4], [0, 0, 1]).numpy()
    array([3, 4], dtype=int32)
    """
    return _reduced(*_sorted(data, segment_ids, "sum"), "sum")


@quiet_op
def segment_prod(data: Value, segment_ids: Value, name: str | None = None) -> Array:
    """Returns the products of neighbouring rows with equal numbers."""
    return _reduced(*_sorted(data, segment_ids, "prod"), "prod")


@quiet_op
def segment_max(data: Value, segment_ids: Value, name: str | None = None) -> Array:
    """Returns the largest of neighbouring rows with equal numbers; 0 for none."""
    parts = _sorted(data, segment_ids, "max")
    return _with_gaps(_reduced(*parts, "max"), *parts, 0)


@quiet_op
def segment_min(data: Value, segment_ids: Value, name: str | None = None) -> Array:
    """Returns the smallest of neighbouring rows with equal numbers; 0 for none."""
    parts = _sorted(data, segment_ids, "min")
    return _with_gaps(_reduced(*parts, "min"), *parts, 0)


@quiet_op
def segment_mean(data: Value, segment_ids: Value, name: str | None = None) -> Array:
    """Returns the means of neighbouring rows with equal numbers; 0 for none."""
    return _mean(*_sorted(data, segment_ids, "mean"))
