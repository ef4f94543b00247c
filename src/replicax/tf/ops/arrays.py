"""The shapes of tensors: reading, changing, joining and cutting them."""

from __future__ import annotations

import builtins
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf import dtypes
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Value,
    array,
    axes_of,
    integer,
    integers,
    is_concrete,
    normalized,
    numpy_dtype,
    operands,
    static,
    xp,
)
from replicax.tf.tensor import TensorShape

__all__ = [
    "broadcast_dynamic_shape",
    "broadcast_static_shape",
    "broadcast_to",
    "concat",
    "ensure_shape",
    "expand_dims",
    "pad",
    "parallel_stack",
    "rank",
    "repeat",
    "reshape",
    "reverse",
    "reverse_sequence",
    "roll",
    "shape",
    "shape_n",
    "size",
    "slice",
    "split",
    "squeeze",
    "stack",
    "strided_slice",
    "tile",
    "transpose",
    "unstack",
]


@op(differentiable=False)
def shape(input: Value, out_type: DTypeLike = None, name: str | None = None) -> Array:
    """Returns the shape as a tensor, which is known while a function is compiled.

    >>> shape([[1, 2, 3]]).numpy()
    array([1, 3], dtype=int32)
    """
    sizes = _shape_of(input)
    dtype = numpy_dtype(dtypes.int32 if out_type is None else out_type)
    if any(jax_compat.is_open_size(size) for size in sizes):
        return jnp.asarray([jnp.asarray(size) for size in sizes], dtype)
    return np.asarray(sizes, dtype)


def _shape_of(value: Value) -> tuple[int, ...]:
    return tuple(value.shape if hasattr(value, "shape") else array(value).shape)


@op(differentiable=False)
def shape_n(
    input: Value, out_type: DTypeLike = dtypes.int32, name: str | None = None
) -> list[Array]:
    """Returns the shapes of several tensors."""
    return [shape.raw(value, out_type) for value in input]


@op(differentiable=False)
def size(input: Value, out_type: DTypeLike = None, name: str | None = None) -> Array:
    """Returns the number of elements."""
    sizes = shape.raw(input, out_type)
    return sizes.prod(dtype=sizes.dtype)


@op(differentiable=False)
def rank(input: Value, name: str | None = None) -> Array:
    """Returns the number of dimensions."""
    return np.asarray(len(_shape_of(input)), np.int32)


@op
def reshape(tensor: Value, shape: Value, name: str | None = None) -> Array:
    """Returns the elements in another shape; one size may be -1.

    >>> reshape([1, 2, 3, 4], [2, -1]).numpy().tolist()
    [[1, 2], [3, 4]]
    """
    found, sizes = array(tensor), _sizes(shape)
    known = math.prod(size for size in sizes if not _is_rest(size))
    num_rest = sum(map(_is_rest, sizes))
    fits = found.size % known == 0 if num_rest and known else found.size == known
    if num_rest > 1 or not fits:
        raise errors.InvalidArgumentError(
            f"`shape` must hold the {found.size} elements of a tensor of {tuple(found.shape)}",
            f"it is {list(sizes)}",
            "Change a size, or set one to -1.",
        )
    if num_rest and not known:
        # Of an empty tensor: what the other dimensions leave, zeros left out.
        left = math.prod(n for n in found.shape if n) // math.prod(n for n in sizes if n > 0)
        sizes = tuple(left if _is_rest(size) else size for size in sizes)
    return xp(found).reshape(found, sizes)


def _sizes(shape: Value) -> tuple[int, ...]:
    """Returns a shape; sizes that are open in an export stay as they are."""
    if isinstance(shape, list | tuple):
        if all(type(size) is int for size in shape):
            return tuple(shape)
        return tuple(
            size if jax_compat.is_open_size(size) else integers([size], "shape")[0]
            for size in shape
        )
    return integers(shape, "shape")


def _is_rest(size: int) -> bool:
    return isinstance(size, int) and size == -1


@op
def ensure_shape(x: Value, shape: Value, name: str | None = None) -> Array:
    """Returns the tensor, or raises if its shape does not fit; None fits any size."""
    found = array(x)
    if not TensorShape(found.shape).is_compatible_with(shape):
        raise errors.InvalidArgumentError(
            f"The tensor must have the shape {shape}", f"it has {tuple(found.shape)}", "Reshape it."
        )
    return found


@op
def expand_dims(input: Value, axis: Value, name: str | None = None) -> Array:
    """Returns the tensor with a new dimension of size 1."""
    found = array(input)
    place = normalized(integer(axis, "axis"), found.ndim + 1)
    return xp(found).expand_dims(found, place)


@op
def squeeze(input: Value, axis: Value = None, name: str | None = None) -> Array:
    """Returns the tensor without dimensions of size 1: those in `axis`, or all of them."""
    found = array(input)
    axes = axes_of(axis)
    if not axes:
        return xp(found).squeeze(found)
    places = tuple(normalized(place, found.ndim) for place in axes)
    if any(found.shape[place] != 1 for place in places):
        raise errors.InvalidArgumentError(
            "`tf.squeeze` removes dimensions of size 1",
            f"`axis` is {axes} and the shape {tuple(found.shape)}",
            "Leave out the other dimensions.",
        )
    return xp(found).squeeze(found, places)


@op
def transpose(
    a: Value, perm: Value = None, conjugate: bool = False, name: str | None = "transpose"
) -> Array:
    """Returns the tensor with its dimensions in another order: reversed, or as in `perm`."""
    found = array(a)
    order = None if perm is None else integers(perm, "perm")
    moved = xp(found).transpose(found, order)
    return xp(found).conj(moved) if conjugate else moved


@op
def concat(values: Value, axis: Value, name: str | None = "concat") -> Array:
    """Returns tensors joined along a dimension.

    >>> concat([[1, 2], [3]], 0).numpy()
    array([1, 2, 3], dtype=int32)
    """
    if not isinstance(values, list | tuple):
        values = [values]
    if not values:
        raise errors.InvalidArgumentError("`values` must hold a tensor", "it is empty", "Pass one.")
    parts = operands(*values, op="concat")
    # An empty list has no dtype of its own, and joins to anything.
    if not parts[0].ndim:
        raise errors.InvalidArgumentError(
            "`tf.concat` joins tensors with dimensions", "one is a scalar", "Use tf.stack."
        )
    return xp(*parts).concatenate(parts, axis=normalized(integer(axis, "axis"), parts[0].ndim))


@op
def stack(values: Value, axis: Value = 0, name: str | None = "stack") -> Array:
    """Returns tensors joined along a new dimension."""
    parts = _parts(values)
    if not parts:
        return xp().zeros((0,), np.float32)
    place = normalized(integer(axis, "axis"), parts[0].ndim + 1)
    return xp(*parts).stack(parts, axis=place)


@op
def parallel_stack(values: Value, name: str | None = "parallel_stack") -> Array:
    """Returns tensors joined along a new first dimension."""
    parts = _parts(values)
    return xp(*parts).stack(parts)


def _parts(values: Value) -> tuple[Array, ...]:
    if isinstance(values, list | tuple):
        # Numbers of Python alone take the type that fits all of them.
        if not any(hasattr(value, "dtype") for value in values):
            return tuple(array(list(values)))
        return operands(*values, op="stack")
    return tuple(array(values))


@op
def unstack(
    value: Value, num: Value = None, axis: Value = 0, name: str | None = "unstack"
) -> list[Array]:
    """Returns the slices along a dimension, as a list."""
    found = array(value)
    place = normalized(integer(axis, "axis"), found.ndim)
    if num is not None and integer(num, "num") != found.shape[place]:
        raise errors.InvalidArgumentError(
            f"`num` must be the size {found.shape[place]} of the dimension",
            f"it is {num}",
            "Leave it out.",
        )
    front = (builtins.slice(None),) * place
    # With the ellipsis, NumPy returns an array for a scalar string, too.
    return [found[(*front, i, ...)] for i in range(found.shape[place])]


@op
def split(
    value: Value,
    num_or_size_splits: Value,
    axis: Value = 0,
    num: Value = None,
    name: str | None = "split",
) -> list[Array]:
    """Returns parts of equal size, or of the sizes in a list; one of them may be -1.

    >>> [part.numpy().tolist() for part in split([1, 2, 3], [1, -1])]
    [[1], [2, 3]]
    """
    found = array(value)
    place = normalized(integer(axis, "axis"), found.ndim)
    total = found.shape[place]
    given = static(num_or_size_splits, "num_or_size_splits")
    if given.ndim == 0:
        count = int(given)
        sizes = [total // count] * count if count > 0 else []
    else:
        sizes = [int(size) for size in given]
        if sizes.count(-1) == 1:
            rest = total - sum(size for size in sizes if size != -1)
            sizes = [rest if size == -1 else size for size in sizes]
    if sum(sizes) != total or any(size < 0 for size in sizes):
        raise errors.InvalidArgumentError(
            f"The parts must cover the {total} rows of dimension {place}",
            f"`num_or_size_splits` is {given.tolist()}",
            "Use sizes that add up, or one -1.",
        )
    front = (builtins.slice(None),) * place
    ends = np.cumsum([0, *sizes]).tolist()
    return [found[(*front, builtins.slice(a, b))] for a, b in itertools.pairwise(ends)]


@op
def tile(input: Value, multiples: Value, name: str | None = None) -> Array:
    """Returns the tensor repeated along its dimensions."""
    found, counts = array(input), integers(multiples, "multiples")
    if len(counts) != found.ndim or any(count < 0 for count in counts):
        raise errors.InvalidArgumentError(
            f"`multiples` must have a number for each of the {found.ndim} dimensions",
            f"it is {list(counts)}",
            "Use 1 for dimensions that stay.",
        )
    return xp(found).tile(found, counts)


@op
def repeat(input: Value, repeats: Value, axis: Value = None, name: str | None = None) -> Array:
    """Returns each element, or each slice along `axis`, several times.

    >>> repeat([1, 2], [1, 3]).numpy()
    array([1, 2, 2, 2], dtype=int32)
    """
    found, counts = array(input), static(repeats, "repeats")
    place = None if axis is None else normalized(integer(axis, "axis"), found.ndim)
    return xp(found).repeat(found, counts if counts.ndim else int(counts), axis=place)


_PAD_MODES = {"CONSTANT": "constant", "REFLECT": "reflect", "SYMMETRIC": "symmetric"}


@op
def pad(
    tensor: Value,
    paddings: Value,
    mode: str = "CONSTANT",
    constant_values: Value = 0,
    name: str | None = None,
) -> Array:
    """Returns the tensor with elements added before and after each dimension.

    >>> pad([1, 2], [[1, 2]]).numpy()
    array([0, 1, 2, 0, 0], dtype=int32)
    """
    found = array(tensor)
    widths = static(paddings, "paddings").astype(int).reshape(-1, 2)
    chosen = _PAD_MODES.get(mode.upper())
    if chosen is None or len(widths) != found.ndim or (widths < 0).any():
        raise errors.InvalidArgumentError(
            f"`paddings` must be {found.ndim} pairs of counts, and `mode` one of {[*_PAD_MODES]}",
            f"they are {widths.tolist()} and {mode!r}",
            "Use [0, 0] for dimensions that stay.",
        )
    pairs = [(before, after) for before, after in widths.tolist()]
    if chosen == "constant":
        is_zero = isinstance(constant_values, int) and constant_values == 0
        value = np.zeros((), found.dtype) if is_zero else array(constant_values, found.dtype)
        if not found.ndim:
            return found
        return xp(found, value).pad(found, pairs, mode=chosen, constant_values=value)
    most = [n - (chosen == "reflect") for n in found.shape]
    if any(max(pair) > limit for pair, limit in zip(pairs, most, strict=True)):
        raise errors.InvalidArgumentError(
            f"Paddings of mode {mode} must not exceed {most}", f"they are {pairs}", "Pad twice."
        )
    return xp(found).pad(found, pairs, mode=chosen)


@op
def reverse(tensor: Value, axis: Value, name: str | None = None) -> Array:
    """Returns the tensor with the order along some dimensions reversed."""
    found = array(tensor)
    places = tuple(normalized(place, found.ndim) for place in integers(axis, "axis"))
    return xp(found).flip(found, places)


@op
def reverse_sequence(
    input: Value,
    seq_lengths: Value,
    seq_axis: Value = None,
    batch_axis: Value = None,
    name: str | None = None,
) -> Array:
    """Returns rows whose first `seq_lengths` elements are reversed."""
    found, lengths = array(input), array(seq_lengths)
    along = normalized(integer(0 if seq_axis is None else seq_axis, "seq_axis"), found.ndim)
    batch = normalized(integer(0 if batch_axis is None else batch_axis, "batch_axis"), found.ndim)
    size = found.shape[along]
    if lengths.shape != (found.shape[batch],) or (
        is_concrete(lengths) and lengths.size and int(np.asarray(lengths).max()) > size
    ):
        raise errors.InvalidArgumentError(
            f"`seq_lengths` must be {found.shape[batch]} numbers up to {size}",
            f"it is {lengths}",
            "Pass one length for each row.",
        )
    ns = xp(found, lengths)
    moved = ns.moveaxis(found, (batch, along), (0, 1))
    steps, ends = np.arange(moved.shape[1]), lengths[:, None]
    order = ns.where(steps < ends, ends - 1 - steps, steps)
    order = order.reshape(order.shape + (1,) * (moved.ndim - 2))
    return ns.moveaxis(ns.take_along_axis(moved, order, axis=1), (0, 1), (batch, along))


@op
def roll(input: Value, shift: Value, axis: Value, name: str | None = None) -> Array:
    """Returns the tensor with elements moved around its end to its start."""
    found, places = array(input), integers(axis, "axis")
    if isinstance(shift, jax.Array) or not isinstance(shift, list | tuple | np.ndarray):
        by = shift if isinstance(shift, jax.Array) else int(shift)
    else:
        by = integers(shift, "shift")
    return xp(found, by).roll(found, by, places if len(places) != 1 else places[0])


@op
def broadcast_to(input: Value, shape: Value, name: str | None = None) -> Array:
    """Returns the tensor repeated to a shape that it is compatible with."""
    found, sizes = array(input), _sizes(shape)
    if -1 in sizes:
        offset = len(sizes) - found.ndim
        sizes = tuple(
            found.shape[i - offset] if size == -1 and i >= offset else size
            for i, size in enumerate(sizes)
        )
    return xp(found).broadcast_to(found, sizes)


def broadcast_static_shape(shape_x: Value, shape_y: Value) -> TensorShape:
    """Returns the shape of two tensors after broadcasting.

    >>> broadcast_static_shape([2, 1], [3])
    TensorShape([2, 3])
    """
    return TensorShape(np.broadcast_shapes(tuple(shape_x), tuple(shape_y)))


@op(differentiable=False)
def broadcast_dynamic_shape(shape_x: Value, shape_y: Value) -> Array:
    """Returns the shape of two tensors after broadcasting, as a tensor."""
    x, y = integers(shape_x, "shape_x"), integers(shape_y, "shape_y")
    return np.asarray(np.broadcast_shapes(x, y), np.int32)


@op
def slice(input_: Value, begin: Value, size: Value, name: str | None = None) -> Array:
    """Returns the part that starts at `begin`; a size of -1 takes the rest.

    In a compiled function, `begin` may be computed, if `size` is known.

    >>> slice([1, 2, 3, 4], [1], [2]).numpy()
    array([2, 3], dtype=int32)
    """
    found, sizes = array(input_), integers(size, "size")
    is_computed = any(
        jax_compat.is_traced(v) for v in (begin if isinstance(begin, list | tuple) else [begin])
    )
    if is_computed and -1 not in sizes:
        starts = array(begin)
        return jax.lax.dynamic_slice(
            jnp.asarray(found), [starts[i] for i in range(found.ndim)], sizes
        )
    starts = integers(begin, "begin")
    ends = [n if s == -1 else b + s for b, s, n in zip(starts, sizes, found.shape, strict=True)]
    if any(not 0 <= b <= e <= n for b, e, n in zip(starts, ends, found.shape, strict=True)):
        raise errors.InvalidArgumentError(
            f"The part must be within the shape {tuple(found.shape)}",
            f"`begin` is {list(starts)} and `size` {list(sizes)}",
            "Use -1 for the rest of a dimension.",
        )
    return found[tuple(builtins.slice(b, e) for b, e in zip(starts, ends, strict=True))]


@op
def strided_slice(
    input_: Value,
    begin: Value,
    end: Value,
    strides: Value = None,
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
    var: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the part that Python's `x[begin:end:strides, …]` takes.

    Bit i of a mask says what entry i means: no begin, no end, `...`, a new axis, or one index.
    """
    found = array(input_)
    starts, ends = integers(begin, "begin"), integers(end, "end")
    steps = (1,) * len(starts) if strides is None else integers(strides, "strides")
    key: list[Value] = []
    for i, (start, stop, step) in enumerate(zip(starts, ends, steps, strict=True)):
        bit = 1 << i
        if ellipsis_mask & bit:
            key.append(...)
        elif new_axis_mask & bit:
            key.append(None)
        elif shrink_axis_mask & bit:
            key.append(start)
        else:
            first = None if begin_mask & bit else start
            key.append(builtins.slice(first, None if end_mask & bit else stop, step))
    return found[tuple(key)]
