"""Counts: of values, of classes that were confused, and of bins."""

from __future__ import annotations

import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Value,
    array,
    integer,
    is_concrete,
    numbers,
    numpy_dtype,
    require_values,
    xp,
)

__all__ = ["bincount", "confusion_matrix", "histogram_fixed_width", "histogram_fixed_width_bins"]


@op(differentiable=False)
def bincount(
    arr: Value,
    weights: Value = None,
    minlength: Value = None,
    maxlength: Value = None,
    dtype: DTypeLike = dtypes.int32,
    name: str | None = None,
    axis: Value = None,
    binary_output: bool = False,
) -> Array:
    """Returns how often each number occurs, or the sum of its weights.

    In a compiled function, `minlength` and `maxlength` must be given, and equal.

    >>> bincount([1, 1, 3]).numpy()
    array([0, 2, 0, 1], dtype=int32)
    """
    x = numbers(arr, "math.bincount", "iu")
    factors = None if weights is None else array(weights)
    size = _num_bins(x, minlength, maxlength)
    if is_concrete(x) and x.size and int(np.asarray(x).min()) < 0:
        raise errors.InvalidArgumentError(
            "`arr` must hold numbers from 0", "one is negative", "Leave those out first."
        )
    rows = x.reshape(-1) if axis is None else x
    is_bin = rows[..., None] == np.arange(size, dtype=x.dtype)
    ns = xp(x, factors)
    if binary_output:
        return ns.any(is_bin, axis=-2).astype(numpy_dtype(dtype))
    if factors is None:
        return ns.sum(is_bin, axis=-2, dtype=numpy_dtype(dtype))
    weighted = is_bin * factors.reshape(rows.shape)[..., None]
    return ns.sum(weighted, axis=-2, dtype=factors.dtype)


def _num_bins(x: Array, minlength: Value, maxlength: Value) -> int:
    least = 0 if minlength is None else integer(minlength, "minlength")
    most = None if maxlength is None else integer(maxlength, "maxlength")
    if most is not None and least == most:
        return most
    (known,) = require_values(
        "math.bincount", x, advice="Pass `minlength` and `maxlength`, both the number of bins."
    )
    size = max(least, int(known.max()) + 1 if known.size else 0)
    return size if most is None else min(size, most)


@op(differentiable=False)
def confusion_matrix(
    labels: Value,
    predictions: Value,
    num_classes: Value = None,
    weights: Value = None,
    dtype: DTypeLike = dtypes.int32,
    name: str | None = None,
) -> Array:
    """Returns how often each class (row) was predicted as each class (column).

    >>> confusion_matrix([0, 1], [1, 1]).numpy().tolist()
    [[0, 1], [0, 1]]
    """
    true = numbers(labels, "math.confusion_matrix", "iuf").reshape(-1)
    guessed = numbers(predictions, "math.confusion_matrix", "iuf").reshape(-1)
    if num_classes is None:
        known = require_values("math.confusion_matrix", true, guessed, advice="Pass `num_classes`.")
        size = max((int(k.max()) + 1 for k in known if k.size), default=0)
    else:
        size = integer(num_classes, "num_classes")
    for values in (true, guessed):
        if is_concrete(values) and values.size:
            found = np.asarray(values)
            if found.min() < 0 or found.max() >= size:
                raise errors.InvalidArgumentError(
                    f"Classes must be from 0 to {size - 1}",
                    f"they are from {found.min()} to {found.max()}",
                    "Raise `num_classes`.",
                )
    target = numpy_dtype(dtype)
    classes = np.arange(size)
    ns = xp(true, guessed, weights)
    rows = (true[:, None] == classes).astype(target)
    columns = (guessed[:, None] == classes).astype(target)
    if weights is not None:
        rows = rows * array(weights).reshape(-1, 1).astype(target)
    return ns.matmul(rows.T, columns)


def _bins(values: Value, value_range: Value, nbins: Value) -> tuple[Array, int]:
    x = numbers(values, "histogram_fixed_width", "fi")
    count = integer(nbins, "nbins")
    low, high = (v.astype(x.dtype) for v in array(value_range))
    ns = xp(x, low, high)
    scaled = (x - low) / (high - low) * np.asarray(count, np.float32)
    return ns.clip(ns.floor(scaled), 0, count - 1).astype(np.int32), count


@op(differentiable=False)
def histogram_fixed_width(
    values: Value,
    value_range: Value,
    nbins: Value = 100,
    dtype: DTypeLike = dtypes.int32,
    name: str | None = None,
) -> Array:
    """Returns the counts of values in bins of equal width; those outside go to the end bins."""
    places, count = _bins(values, value_range, nbins)
    is_bin = places.reshape(-1)[:, None] == np.arange(count)
    return xp(places).sum(is_bin, axis=0, dtype=numpy_dtype(dtype))


@op(differentiable=False)
def histogram_fixed_width_bins(
    values: Value,
    value_range: Value,
    nbins: Value = 100,
    dtype: DTypeLike = dtypes.int32,
    name: str | None = None,
) -> Array:
    """Returns the number of the bin of each value."""
    places, _ = _bins(values, value_range, nbins)
    return places.astype(numpy_dtype(dtype))
