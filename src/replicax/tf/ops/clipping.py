"""Norms of tensors, and tensors limited in their values or norms."""

from __future__ import annotations

import numpy as np

from replicax.foundation import errors
from replicax.tf.ops.extremes import larger, smaller
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
    axes_of,
    kind_of,
    numbers,
    operands,
    quiet_op,
    require_kind,
    xp,
)
from replicax.tf.tensor import raw, wrap
from replicax.values.indexed_slices import IndexedSlices

__all__ = [
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "global_norm",
    "l2_normalize",
    "norm",
    "normalize",
]


@quiet_op
def clip_by_value(
    t: Value, clip_value_min: Value, clip_value_max: Value, name: str | None = None
) -> Array:
    """Returns the tensor with its elements limited to a range.

    >>> clip_by_value([-1.0, 0.5, 2.0], 0, 1).numpy()
    array([0. , 0.5, 1. ], dtype=float32)
    """
    x, low, high = operands(t, clip_value_min, clip_value_max, op="clip_by_value")
    require_kind(x, "clip_by_value", "fiu")
    found = larger(smaller(x, high), low)
    if tuple(found.shape) != tuple(x.shape):
        raise errors.InvalidArgumentError(
            f"The limits must fit the shape {tuple(x.shape)}",
            f"they lead to {tuple(found.shape)}",
            "Use tf.minimum and tf.maximum, which broadcast.",
        )
    return found


def _scaled(x: Array, own_norm: Array, limit: Array) -> Array:
    """Returns x * limit / norm where the norm is above the limit."""
    ns = xp(x, own_norm, limit)
    return x * limit / ns.maximum(own_norm, limit)


@quiet_op
def clip_by_norm(t: Value, clip_norm: Value, axes: Value = None, name: str | None = None) -> Array:
    """Returns the tensor, scaled down if its norm is above a limit.

    >>> clip_by_norm([3.0, 4.0], 1.0).numpy()
    array([0.6, 0.8], dtype=float32)
    """
    if isinstance(t, IndexedSlices):
        return t.map_values(lambda rows: wrap(clip_by_norm.raw(raw(rows), clip_norm, axes)))
    x, limit = operands(t, clip_norm, op="clip_by_norm")
    require_kind(x, "clip_by_norm", "fc")
    return _scaled(x, _root_of_squares(x, axes_of(axes)), limit)


def _root_of_squares(x: Array, axes: tuple[int, ...] | None) -> Array:
    """Returns the norm along dimensions, with a gradient of 0 where it is 0."""
    ns = xp(x)
    total = ns.sum(x * x, axis=axes, keepdims=True)
    is_zero = total == 0
    return ns.where(is_zero, total, ns.sqrt(ns.where(is_zero, ns.ones_like(total), total)))


@quiet_op
def clip_by_average_norm(t: Value, clip_norm: Value, name: str | None = None) -> Array:
    """Returns the tensor, scaled down if its norm per element is above a limit."""
    x, limit = operands(t, clip_norm, op="clip_by_average_norm")
    require_kind(x, "clip_by_average_norm", "fc")
    average = _root_of_squares(x, None) / np.asarray(max(x.size, 1), x.dtype)
    return _scaled(x, average, limit)


@quiet_op
def global_norm(t_list: Value, name: str | None = None) -> Array:
    """Returns the norm of all elements of several tensors; None is left out.

    >>> float(global_norm([[3.0], [4.0], None]))
    5.0
    """
    return _global_norm(_listed(t_list))


def _listed(t_list: Value) -> list[Array | None]:
    """Returns arrays, and the rows of sparse gradients; None stays."""
    if not isinstance(t_list, list | tuple):
        raise errors.ArgumentTypeError(
            "`t_list` must be a list of tensors", f"it is {type(t_list).__name__}", "Use [t]."
        )
    rows = [raw(t.values) if isinstance(t, IndexedSlices) else t for t in t_list]
    found = [None if t is None else array(t) for t in rows]
    for t in found:
        if t is not None:
            require_kind(t, "clip_by_global_norm", "fc")
    return found


def _global_norm(tensors: list[Array | None]) -> Array:
    given = [t for t in tensors if t is not None]
    if not given:
        return xp().zeros((), np.float32)
    ns = xp(*given)
    total = ns.sum(ns.stack([ns.sum(ns.square(ns.abs(t))) for t in given]))
    return ns.sqrt(total)


@quiet_op
def clip_by_global_norm(
    t_list: Value, clip_norm: Value, use_norm: Value = None, name: str | None = None
) -> tuple[list[Array | None], Array]:
    """Returns tensors, scaled down together if their norm is above a limit, and the norm.

    >>> clipped, norm = clip_by_global_norm([[3.0], [4.0]], 1.0)
    >>> float(norm), [round(float(t[0]), 2) for t in clipped]
    (5.0, [0.6, 0.8])
    """
    tensors = _listed(t_list)
    total = _global_norm(tensors) if use_norm is None else array(use_norm)
    limit, total = operands(clip_norm, total, op="clip_by_global_norm")
    ns = xp(total, limit, *(t for t in tensors if t is not None))
    one = np.asarray(1, total.dtype)
    # Not a number where the norm is infinite, so that it is seen.
    scale = limit * ns.minimum(one / total, one / limit)
    scale = ns.where(ns.isfinite(total), scale, np.asarray(np.nan, total.dtype))
    clipped = [None if t is None else (t * scale.astype(t.dtype)) for t in tensors]
    return [_like(*pair) for pair in zip(t_list, clipped, strict=True)], total


def _like(given: Value, rows: Array | None) -> Value:
    return given.map_values(lambda _: wrap(rows)) if isinstance(given, IndexedSlices) else rows


@quiet_op
def l2_normalize(
    x: Value,
    axis: Value = None,
    epsilon: float = 1e-12,
    name: str | None = None,
    dim: Value = None,
) -> Array:
    """Returns x / sqrt(max(sum(x²), epsilon)) along dimensions.

    >>> l2_normalize([3.0, 4.0]).numpy()
    array([0.6, 0.8], dtype=float32)
    """
    x = numbers(x, "math.l2_normalize", "fc")
    ns, axes = xp(x), axes_of(dim if dim is not None else axis)
    total = ns.sum(ns.square(ns.abs(x)), axis=axes, keepdims=True)
    return x / ns.sqrt(ns.maximum(total, np.asarray(epsilon, total.dtype)))


@quiet_op
def norm(
    tensor: Value,
    ord: Value = "euclidean",
    axis: Value = None,
    keepdims: bool | None = None,
    name: str | None = None,
) -> Array:
    """Returns the norm of vectors (one axis, or all elements) or matrices (two axes).

    >>> float(norm([3.0, 4.0])), float(norm([3.0, -4.0], ord=1))
    (5.0, 7.0)
    """
    x = numbers(tensor, "norm", "fc")
    return _norm(x, ord, axis, bool(keepdims)).astype(x.dtype)


def _norm(x: Array, ord: Value, axis: Value, keepdims: bool) -> Array:
    ns, axes = xp(x), axes_of(axis)
    is_matrix = axes is not None and len(axes) == 2
    wanted = ("euclidean", "fro", 1, 2, np.inf) if is_matrix else ("euclidean", 1, 2, np.inf)
    if ord not in wanted and (is_matrix or not isinstance(ord, int | float) or ord <= 0):
        raise errors.InvalidArgumentError(
            f"`ord` must be one of {wanted}, or a positive number for vectors",
            f"it is {ord!r}",
            "Pass the numbers of two axes for norms of matrices.",
        )
    size = ns.abs(x)
    if is_matrix and ord in (1, 2, np.inf):
        return _matrix_norm(x, ord, axes or (), keepdims)
    if ord in ("euclidean", "fro", 2):
        return ns.sqrt(ns.sum(size * size, axis=axes, keepdims=keepdims))
    if ord == 1:
        return ns.sum(size, axis=axes, keepdims=keepdims)
    if ord == np.inf:
        return ns.max(size, axis=axes, keepdims=keepdims)
    power = np.asarray(ord, size.dtype)
    return ns.power(ns.sum(ns.power(size, power), axis=axes, keepdims=keepdims), 1 / power)


def _matrix_norm(x: Array, ord: Value, axes: tuple[int, ...], keepdims: bool) -> Array:
    ns = xp(x)
    if ord == 2:
        moved = ns.moveaxis(x, axes, (-2, -1))
        found = ns.max(ns.linalg.svd(moved, compute_uv=False), axis=-1)
        return ns.expand_dims(found, sorted(a % x.ndim for a in axes)) if keepdims else found
    inner, outer = axes if ord == 1 else axes[::-1]
    sums = ns.sum(ns.abs(x), axis=inner, keepdims=True)
    found = ns.max(sums, axis=outer, keepdims=True)
    return found if keepdims else ns.squeeze(found, axis=axes)


@quiet_op
def normalize(
    tensor: Value, ord: Value = "euclidean", axis: Value = None, name: str | None = None
) -> tuple[Array, Array]:
    """Returns the tensor divided by its norm, and the norm."""
    x = numbers(tensor, "linalg.normalize", "fc")
    size = _norm(x, ord, axis, keepdims=True)
    return x / size.astype(x.dtype), size.astype(x.dtype) if kind_of(x.dtype) == "c" else size
