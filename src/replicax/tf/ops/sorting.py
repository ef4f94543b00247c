"""Order: sorting, the largest elements, and distinct ones."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
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
    kind_of,
    normalized,
    numbers,
    numpy_dtype,
    require_values,
    xp,
)

__all__ = [
    "approx_max_k",
    "approx_min_k",
    "argsort",
    "in_top_k",
    "sort",
    "top_k",
    "unique",
    "unique_with_counts",
]


class TopKV2(NamedTuple):
    """The largest elements, and where they are."""

    values: Array
    indices: Array


class Unique(NamedTuple):
    """Distinct elements, and which one each element is."""

    y: Array
    idx: Array


class UniqueWithCounts(NamedTuple):
    """Distinct elements, which one each element is, and how often each occurs."""

    y: Array
    idx: Array
    count: Array


def _is_descending(direction: str) -> bool:
    if direction not in ("ASCENDING", "DESCENDING"):
        raise errors.InvalidArgumentError(
            "`direction` must be 'ASCENDING' or 'DESCENDING'",
            f"it is {direction!r}",
            "Pass one of them.",
        )
    return direction == "DESCENDING"


def _order(x: Array, axis: int, is_descending: bool) -> Array:
    """Returns the places of elements in order; of equal ones, the first comes first."""
    ns = xp(x)
    if not is_descending:
        return ns.argsort(x, axis=axis, stable=True)
    # A stable order of the reversed row, read backwards.
    found = ns.argsort(ns.flip(x, axis), axis=axis, stable=True)
    return x.shape[axis] - 1 - ns.flip(found, axis)


@op
def sort(
    values: Value, axis: Value = -1, direction: str = "ASCENDING", name: str | None = None
) -> Array:
    """Returns the elements in order along a dimension.

    >>> sort([3, 1, 2], direction="DESCENDING").numpy()
    array([3, 2, 1], dtype=int32)
    """
    x = numbers(values, "sort", "fiu")
    place = normalized(integer(axis, "axis"), x.ndim)
    is_descending = _is_descending(direction)
    found = xp(x).sort(x, axis=place)
    return xp(x).flip(found, place) if is_descending else found


@op
def argsort(
    values: Value,
    axis: Value = -1,
    direction: str = "ASCENDING",
    stable: bool = False,
    name: str | None = None,
) -> Array:
    """Returns the places of the elements in order; of equal ones, the first comes first."""
    x = numbers(values, "argsort", "fiu")
    place = normalized(integer(axis, "axis"), x.ndim)
    return _order(x, place, _is_descending(direction)).astype(np.int32)


@op
def top_k(
    input: Value,
    k: Value = 1,
    sorted: bool = True,
    index_type: DTypeLike = dtypes.int32,
    name: str | None = None,
) -> TopKV2:
    """Returns the k largest elements of the last dimension, and their places.

    >>> values, indices = top_k([1, 5, 3], k=2)
    >>> values.numpy().tolist(), indices.numpy().tolist()
    ([5, 3], [1, 2])
    """
    x, count = numbers(input, "math.top_k", "fiu"), integer(k, "k")
    if not x.ndim or not 0 <= count <= x.shape[-1]:
        raise errors.InvalidArgumentError(
            "`k` must not exceed the size of the last dimension",
            f"it is {count}, and the shape {tuple(x.shape)}",
            "Choose a smaller `k`.",
        )
    if xp(x) is np:
        places = _order(x, x.ndim - 1, True)[..., :count]
        return TopKV2(
            np.take_along_axis(x, places, axis=-1), places.astype(numpy_dtype(index_type))
        )
    values, places = jax.lax.top_k(jnp.asarray(x), count)
    return TopKV2(values, places.astype(numpy_dtype(index_type)))


@op
def approx_max_k(
    operand: Value,
    k: Value,
    reduction_dimension: Value = -1,
    recall_target: float = 0.95,
    reduction_input_size_override: int = -1,
    aggregate_to_topk: bool = True,
    name: str | None = None,
) -> tuple[Array, Array]:
    """Returns about the k largest elements along a dimension, and their places."""
    return _extreme(operand, k, reduction_dimension, False)


@op
def approx_min_k(
    operand: Value,
    k: Value,
    reduction_dimension: Value = -1,
    recall_target: float = 0.95,
    reduction_input_size_override: int = -1,
    aggregate_to_topk: bool = True,
    name: str | None = None,
) -> tuple[Array, Array]:
    """Returns about the k smallest elements along a dimension, and their places."""
    return _extreme(operand, k, reduction_dimension, True)


def _extreme(operand: Value, k: Value, axis: Value, is_smallest: bool) -> tuple[Array, Array]:
    x = numbers(operand, "math.approx_max_k", "f")
    place = normalized(integer(axis, "reduction_dimension"), x.ndim)
    ns = xp(x)
    places = ns.moveaxis(_order(x, place, not is_smallest), place, -1)[..., : integer(k, "k")]
    values = ns.take_along_axis(ns.moveaxis(x, place, -1), places, axis=-1)
    return ns.moveaxis(values, -1, place), ns.moveaxis(places, -1, place).astype(np.int32)


@op(differentiable=False)
def in_top_k(targets: Value, predictions: Value, k: Value, name: str | None = None) -> Array:
    """Tells whether each target is among the k largest predictions; equal ones count as in.

    >>> in_top_k([0, 1], [[0.1, 0.9], [0.2, 0.8]], 1).numpy().tolist()
    [False, True]
    """
    scores, classes = numbers(predictions, "math.in_top_k", "f"), numbers(targets, "in_top_k", "iu")
    ns = xp(scores, classes)
    is_class = (classes >= 0) & (classes < scores.shape[-1])
    own = ns.take_along_axis(scores, ns.where(is_class, classes, 0)[:, None], axis=-1)
    num_above = (scores > own).sum(axis=-1)
    is_finite = ns.isfinite(scores).all(axis=-1)
    return (num_above < integer(k, "k")) & is_class & is_finite


@op
def unique(x: Value, out_idx: DTypeLike = dtypes.int32, name: str | None = None) -> Unique:
    """Returns the distinct elements in their order, and which one each element is.

    Does not work in a compiled function.

    >>> y, idx = unique([3, 1, 3])
    >>> y.numpy().tolist(), idx.numpy().tolist()
    ([3, 1], [0, 1, 0])
    """
    y, idx, _ = _distinct(x, out_idx, "unique")
    return Unique(y, idx)


@op
def unique_with_counts(
    x: Value, out_idx: DTypeLike = dtypes.int32, name: str | None = None
) -> UniqueWithCounts:
    """Returns what `unique` does, and how often each element occurs."""
    return UniqueWithCounts(*_distinct(x, out_idx, "unique_with_counts"))


def _distinct(x: Value, out_idx: DTypeLike, name: str) -> tuple[Array, Array, Array]:
    given = array(x)
    (known,) = require_values(
        name, given, advice="Call it outside tf.function, or in `dataset.map`."
    )
    if known.ndim != 1:
        raise errors.InvalidArgumentError(
            f"`tf.{name}` takes a vector", f"the shape is {known.shape}", "Use tf.reshape(x, [-1])."
        )
    y, first, inverse, counts = np.unique(
        known, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    rank = np.argsort(order)
    index_type = numpy_dtype(out_idx)
    parts = (y[order], rank[inverse].astype(index_type), counts[order].astype(index_type))
    if xp(given) is np or kind_of(known.dtype) == "O":
        return parts
    return jnp.asarray(parts[0]), jnp.asarray(parts[1]), jnp.asarray(parts[2])
