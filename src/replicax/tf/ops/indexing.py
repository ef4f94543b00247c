"""Elements by their places: gathering, scattering, choosing and masking.

An index out of range raises an error where values can be read: on the host, and in eager code on a
CPU. In compiled code it reads zeros, and writes nothing, as in TensorFlow on a GPU.
"""

from __future__ import annotations

import math
from typing import Literal

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
    integers,
    is_concrete,
    kind_of,
    normalized,
    numbers,
    numpy_dtype,
    operands,
    require_kind,
    require_values,
    xp,
)

__all__ = [
    "boolean_mask",
    "dynamic_partition",
    "dynamic_stitch",
    "gather",
    "gather_nd",
    "invert_permutation",
    "scatter_nd",
    "searchsorted",
    "tensor_scatter_nd_add",
    "tensor_scatter_nd_max",
    "tensor_scatter_nd_min",
    "tensor_scatter_nd_sub",
    "tensor_scatter_nd_update",
    "unravel_index",
    "where",
]


def _require_in_range(indices: Array, size: int, name: str) -> None:
    """Raises for an index out of range, if the indices can be read."""
    if is_concrete(indices):
        known = np.asarray(indices)
        if known.size and not 0 <= known.min() <= known.max() < size:
            raise errors.InvalidArgumentError(
                f"The indices of `tf.{name}` must be from 0 to {size - 1}",
                f"they are from {known.min()} to {known.max()}",
                "Correct the indices; negative ones do not count from the end.",
            )


@op
def gather(
    params: Value,
    indices: Value,
    validate_indices: bool | None = None,
    axis: Value = None,
    batch_dims: Value = 0,
    name: str | None = None,
) -> Array:
    """Returns slices of `params` along an axis, chosen by their indices.

    Args:
      params: The tensor to take from.
      indices: Whole numbers, in any shape.
      validate_indices: Ignored.
      axis: The dimension; by default the first one after `batch_dims`.
      batch_dims: The number of leading dimensions that both tensors share.
      name: Ignored.

    >>> gather([10, 20, 30], [2, 0]).numpy()
    array([30, 10], dtype=int32)
    """
    x, places = array(params), numbers(indices, "gather", "iu")
    shared = integer(batch_dims, "batch_dims")
    shared = shared + places.ndim if shared < 0 else shared
    along = normalized(shared if axis is None else integer(axis, "axis"), x.ndim)
    if along < shared or shared > places.ndim or x.shape[:shared] != places.shape[:shared]:
        raise errors.InvalidArgumentError(
            f"The first {shared} dimensions must be those of both tensors, and `axis` after them",
            f"the shapes are {tuple(x.shape)} and {tuple(places.shape)}, `axis` is {along}",
            "Correct `batch_dims`.",
        )
    _require_in_range(places, x.shape[along], "gather")
    if shared:
        return _batched_take(x, places, along, shared)
    return _take(x, places, along)


def _take(x: Array, places: Array, along: int) -> Array:
    if xp(x, places) is np:
        return x.take(places, axis=along)
    size = x.shape[along]
    inside = jnp.where((places < 0) | (places >= size), size, places)
    return jnp.take(x, inside, axis=along, mode="fill", fill_value=0)


def _batched_take(x: Array, places: Array, along: int, shared: int) -> Array:
    if xp(x, places) is np:
        rows = x.reshape(-1, *x.shape[shared:])
        chosen = places.reshape(len(rows), *places.shape[shared:])
        taken = [np.take(r, c, axis=along - shared) for r, c in zip(rows, chosen, strict=True)]
        shape = (*x.shape[:along], *places.shape[shared:], *x.shape[along + 1 :])
        return np.asarray(taken, x.dtype).reshape(shape)

    def take(x: jax.Array, places: jax.Array) -> jax.Array:
        return _take(x, places, along - shared)

    for _ in range(shared):
        take = jax.vmap(take)
    return take(jnp.asarray(x), jnp.asarray(places))


def _positions(indices: Array, shape: tuple[int, ...], name: str) -> tuple[Array, ...]:
    """Returns the indices of the last dimension, one array for each dimension of a tensor."""
    count = indices.shape[-1]
    if count > len(shape):
        raise errors.InvalidArgumentError(
            f"`tf.{name}` takes up to {len(shape)} indices for a tensor of that many dimensions",
            f"the last dimension of `indices` is {count}",
            "Reshape `indices`.",
        )
    columns = []
    for i in range(count):
        column = indices[..., i]
        _require_in_range(column, shape[i], name)
        if isinstance(column, jax.Array):
            column = jnp.where(column < 0, shape[i], column)
        columns.append(column)
    return tuple(columns)


@op
def gather_nd(
    params: Value,
    indices: Value,
    batch_dims: Value = 0,
    name: str | None = None,
    bad_indices_policy: str = "",
) -> Array:
    """Returns elements or slices of `params`; the last dimension of `indices` is one place.

    >>> gather_nd([[1, 2], [3, 4]], [[0, 1], [1, 0]]).numpy()
    array([2, 3], dtype=int32)
    """
    x, places = array(params), numbers(indices, "gather_nd", "iu")
    shared = integer(batch_dims, "batch_dims")
    if not shared:
        return _gather_nd(x, places)
    ns = xp(x, places)
    lead = [
        ns.broadcast_to(
            np.arange(n, dtype=places.dtype).reshape(
                [n if j == i else 1 for j in range(places.ndim)]
            ),
            (*places.shape[:-1], 1),
        )
        for i, n in enumerate(x.shape[:shared])
    ]
    return _gather_nd(x, ns.concatenate([*lead, places], axis=-1))


def _gather_nd(x: Array, places: Array) -> Array:
    key = _positions(places, tuple(x.shape), "gather_nd")
    if xp(x, places) is np:
        return x[key] if key else np.broadcast_to(x, (*places.shape[:-1], *x.shape))
    if not key:
        return jnp.broadcast_to(x, (*places.shape[:-1], *x.shape))
    return jnp.asarray(x).at[key].get(mode="fill", fill_value=0)


_HOST_UPDATES = {"add": np.add, "subtract": np.subtract, "min": np.minimum, "max": np.maximum}


def _scattered(tensor: Value, indices: Value, updates: Value, how: str, name: str) -> Array:
    x, changes = operands(tensor, updates, op=name)
    places = numbers(indices, name, "iu")
    key = _positions(places, tuple(x.shape), name)
    expected = (*places.shape[:-1], *x.shape[len(key) :])
    if tuple(changes.shape) not in (expected, ()):
        raise errors.InvalidArgumentError(
            f"`updates` must have the shape {expected}",
            f"it has {tuple(changes.shape)}",
            "Reshape.",
        )
    if xp(x, changes, places) is np:
        found = np.array(x)
        if how == "set":
            found[key] = changes
        else:
            _HOST_UPDATES[how].at(found, key, changes)
        return found
    if x.dtype == np.bool_ and how == "add":
        how = "max"
    return getattr(jnp.asarray(x).at[key], how)(changes, mode="drop")


@op
def scatter_nd(
    indices: Value,
    updates: Value,
    shape: Value,
    bad_indices_policy: str = "",
    name: str | None = None,
) -> Array:
    """Returns zeros with `updates` added at places; those of equal places are summed.

    >>> scatter_nd([[1], [3], [1]], [5, 6, 7], [4]).numpy()
    array([ 0, 12,  0,  6], dtype=int32)
    """
    changes = array(updates)
    ns = xp(changes, indices)
    target = ns.zeros(integers(shape, "shape"), changes.dtype)
    return _scattered(target, indices, changes, "add", "scatter_nd")


@op
def tensor_scatter_nd_update(
    tensor: Value, indices: Value, updates: Value, name: str | None = None
) -> Array:
    """Returns a copy of a tensor with other values at some places.

    >>> tensor_scatter_nd_update([1, 2, 3], [[0]], [9]).numpy()
    array([9, 2, 3], dtype=int32)
    """
    return _scattered(tensor, indices, updates, "set", "tensor_scatter_nd_update")


@op
def tensor_scatter_nd_add(
    tensor: Value,
    indices: Value,
    updates: Value,
    bad_indices_policy: str = "",
    name: str | None = None,
) -> Array:
    """Returns a copy of a tensor with `updates` added at some places."""
    return _scattered(tensor, indices, updates, "add", "tensor_scatter_nd_add")


@op
def tensor_scatter_nd_sub(
    tensor: Value,
    indices: Value,
    updates: Value,
    bad_indices_policy: str = "",
    name: str | None = None,
) -> Array:
    """Returns a copy of a tensor with `updates` subtracted at some places."""
    return _scattered(tensor, indices, updates, "subtract", "tensor_scatter_nd_sub")


@op
def tensor_scatter_nd_max(
    tensor: Value,
    indices: Value,
    updates: Value,
    bad_indices_policy: str = "",
    name: str | None = None,
) -> Array:
    """Returns a copy of a tensor with the larger of value and update at some places."""
    return _scattered(tensor, indices, updates, "max", "tensor_scatter_nd_max")


@op
def tensor_scatter_nd_min(
    tensor: Value,
    indices: Value,
    updates: Value,
    bad_indices_policy: str = "",
    name: str | None = None,
) -> Array:
    """Returns a copy of a tensor with the smaller of value and update at some places."""
    return _scattered(tensor, indices, updates, "min", "tensor_scatter_nd_min")


@op
def where(condition: Value, x: Value = None, y: Value = None, name: str | None = None) -> Array:
    """Returns x where the condition is true and y where not; alone, the places that are true.

    The form with one argument does not work in a compiled function.

    >>> where([True, False], [1, 2], 0).numpy(), where([False, True]).numpy().tolist()
    (array([1, 0], dtype=int32), [[1]])
    """
    test = array(condition)
    if x is None and y is None:
        (known,) = require_values(
            "where", test, advice="Use tf.where(condition, x, y), which keeps the shape."
        )
        return _host_result(np.argwhere(known).astype(numpy_dtype(dtypes.int64)))
    if x is None or y is None:
        raise errors.InvalidArgumentError("`x` and `y` go together", "one is None", "Pass both.")
    require_kind(test, "where", "b")
    x, y = operands(x, y, op="where")
    if kind_of(x.dtype) == "O":
        (test,) = require_values("where", test, advice="Choose between strings outside.")
        return np.where(test, x, y)
    return xp(test, x, y).where(test, x, y)


def _host_result(found: np.ndarray) -> Array:
    """Returns a result that was computed on the host in the namespace of the caller."""
    return found if xp() is np or found.dtype.kind == "O" else jnp.asarray(found)


@op
def boolean_mask(
    tensor: Value, mask: Value, axis: Value = None, name: str | None = "boolean_mask"
) -> Array:
    """Returns the elements where a mask is true; does not work in a compiled function.

    >>> boolean_mask([1, 2, 3], [True, False, True]).numpy()
    array([1, 3], dtype=int32)
    """
    x, test = array(tensor), array(mask)
    (known,) = require_values(
        "boolean_mask",
        test,
        advice="Use tf.where(mask, x, 0), and divide by the sum of the mask for a mean.",
    )
    along = 0 if axis is None else normalized(integer(axis, "axis"), x.ndim)
    if known.ndim == 0 or tuple(x.shape[along : along + known.ndim]) != known.shape:
        raise errors.InvalidArgumentError(
            f"The mask must fit the shape {tuple(x.shape)} from dimension {along} on",
            f"its shape is {known.shape}",
            "Reshape the mask.",
        )
    rows = x.reshape(*x.shape[:along], -1, *x.shape[along + known.ndim :])
    return xp(x).take(rows, np.flatnonzero(known), axis=along)


@op
def unravel_index(indices: Value, dims: Value, name: str | None = None) -> Array:
    """Returns the coordinates of flat indices, one row for each dimension."""
    places = numbers(indices, "unravel_index", "iu")
    sizes = integers(dims, "dims")
    _require_in_range(places, math.prod(sizes), "unravel_index")
    parts = xp(places).unravel_index(places, sizes)
    return xp(places).stack(parts).astype(places.dtype)


@op
def invert_permutation(x: Value, name: str | None = None) -> Array:
    """Returns the permutation that undoes another one."""
    order = numbers(x, "math.invert_permutation", "iu")
    if is_concrete(order) and sorted(np.asarray(order).tolist()) != list(range(order.shape[0])):
        raise errors.InvalidArgumentError(
            "`x` must be a permutation", "a number is missing or occurs twice", "Check it."
        )
    return xp(order).argsort(order).astype(order.dtype)


@op
def searchsorted(
    sorted_sequence: Value,
    values: Value,
    side: Literal["left", "right"] = "left",
    out_type: DTypeLike = dtypes.int32,
    name: str | None = None,
) -> Array:
    """Returns where values belong in sorted rows, before (left) or after (right) equal ones.

    >>> searchsorted([1, 3, 5], [3, 4]).numpy()
    array([1, 2], dtype=int32)
    """
    if side not in ("left", "right"):
        raise errors.InvalidArgumentError(
            "`side` must be 'left' or 'right'", f"it is {side!r}", "Pass one of them."
        )
    rows, wanted = operands(sorted_sequence, values, op="searchsorted")
    shape = wanted.shape
    rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    wanted = wanted.reshape(math.prod(shape[:-1]), shape[-1])
    if xp(rows, wanted) is np:
        found = [np.searchsorted(r, w, side=side) for r, w in zip(rows, wanted, strict=True)]
        return np.asarray(found, numpy_dtype(out_type)).reshape(shape)

    def search(row: jax.Array, wanted: jax.Array) -> jax.Array:
        return jnp.searchsorted(row, wanted, side=side)

    found = jax.vmap(search)(jnp.asarray(rows), jnp.asarray(wanted))
    return found.astype(numpy_dtype(out_type)).reshape(shape)


@op
def dynamic_partition(
    data: Value, partitions: Value, num_partitions: Value, name: str | None = None
) -> list[Array]:
    """Returns the parts of a tensor by number; does not work in a compiled function."""
    x = array(data)
    (known,) = require_values(
        "dynamic_partition",
        array(partitions),
        advice="Use tf.where with a mask for each part.",
    )
    rows = x.reshape(-1, *x.shape[known.ndim :])
    flat = known.reshape(-1)
    count = integer(num_partitions, "num_partitions")
    if flat.size and not 0 <= flat.min() <= flat.max() < count:
        raise errors.InvalidArgumentError(
            f"`partitions` must be from 0 to {count - 1}",
            f"they are from {flat.min()} to {flat.max()}",
            "Correct `num_partitions`.",
        )
    return [xp(x).take(rows, np.flatnonzero(flat == i), axis=0) for i in range(count)]


@op
def dynamic_stitch(indices: Value, data: Value, name: str | None = None) -> Array:
    """Returns the parts put to their indices; the inverse of `dynamic_partition`."""
    parts = operands(*data, op="dynamic_stitch")
    places = [
        np.asarray(v)
        for v in require_values(
            "dynamic_stitch", *map(array, indices), advice="Use tf.tensor_scatter_nd_update."
        )
    ]
    rest = tuple(parts[0].shape[places[0].ndim :])
    flat = np.concatenate([p.reshape(-1) for p in places]).astype(int)
    ns = xp(*parts)
    rows = ns.concatenate([p.reshape(-1, *rest) for p in parts])
    size = int(flat.max()) + 1 if flat.size else 0
    # Of equal indices the last one wins.
    last = {place: row for row, place in enumerate(flat.tolist())}
    target = ns.zeros((size, *rest), rows.dtype)
    if not last:
        return target
    kept, order = np.asarray([*last]), np.asarray([*last.values()])
    if ns is np:
        target[kept] = rows[order]
        return target
    return target.at[kept].set(rows[order])
