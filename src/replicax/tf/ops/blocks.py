"""Blocks of images: between space, depth and batch."""

from __future__ import annotations

import builtins
import math

import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import Array, Value, array, integer, integers, static, xp

__all__ = [
    "batch_to_space",
    "depth_to_space",
    "required_space_to_batch_paddings",
    "space_to_batch",
    "space_to_batch_nd",
    "space_to_depth",
]


def _image(input: Value, data_format: str) -> tuple[Array, bool]:
    """Returns images with their channels last, and whether they had them first."""
    found = array(input)
    if found.ndim != 4 or data_format not in ("NHWC", "NCHW"):
        raise errors.InvalidArgumentError(
            "Images must have four dimensions, NHWC or NCHW",
            f"the shape is {tuple(found.shape)} and the format {data_format!r}",
            "Add the dimensions with tf.expand_dims.",
        )
    is_first = data_format == "NCHW"
    return (xp(found).moveaxis(found, 1, 3) if is_first else found), is_first


@op
def space_to_depth(
    input: Value, block_size: Value, data_format: str = "NHWC", name: str | None = None
) -> Array:
    """Returns images whose blocks became channels.

    >>> space_to_depth([[[[1], [2]], [[3], [4]]]], 2).numpy().tolist()
    [[[[1, 2, 3, 4]]]]
    """
    (x, is_first), b = _image(input, data_format), integer(block_size, "block_size")
    n, h, w, c = x.shape
    x = x.reshape(n, h // b, b, w // b, b, c).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(n, h // b, w // b, b * b * c)
    return xp(x).moveaxis(x, 3, 1) if is_first else x


@op
def depth_to_space(
    input: Value, block_size: Value, data_format: str = "NHWC", name: str | None = None
) -> Array:
    """Returns images whose channels became blocks: the inverse of `space_to_depth`."""
    (x, is_first), b = _image(input, data_format), integer(block_size, "block_size")
    n, h, w, c = x.shape
    x = x.reshape(n, h, w, b, b, c // (b * b)).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(n, h * b, w * b, c // (b * b))
    return xp(x).moveaxis(x, 3, 1) if is_first else x


@op
def space_to_batch(
    input: Value, block_shape: Value, paddings: Value, name: str | None = None
) -> Array:
    """Returns a batch with one entry for each place within a block."""
    found = array(input)
    blocks = integers(block_shape, "block_shape")
    widths = static(paddings, "paddings").astype(int).reshape(-1, 2).tolist()
    spatial = len(blocks)
    rest = tuple(found.shape[spatial + 1 :])
    pairs = [(0, 0), *map(tuple, widths), *((0, 0) for _ in rest)]
    x = xp(found).pad(found, pairs)
    outer = [n // b for n, b in zip(x.shape[1 : spatial + 1], blocks, strict=True)]
    parts = [v for pair in zip(outer, blocks, strict=True) for v in pair]
    x = x.reshape(x.shape[0], *parts, *rest)
    order = [2 * i + 2 for i in builtins.range(spatial)]
    order += [0, *(2 * i + 1 for i in builtins.range(spatial))]
    x = x.transpose(*order, *builtins.range(2 * spatial + 1, x.ndim))
    return x.reshape(found.shape[0] * math.prod(blocks), *outer, *rest)


space_to_batch_nd = space_to_batch


@op
def batch_to_space(
    input: Value, block_shape: Value, crops: Value, name: str | None = None
) -> Array:
    """Returns images of a batch with one entry for each place within a block."""
    found = array(input)
    blocks = integers(block_shape, "block_shape")
    cuts = static(crops, "crops").astype(int).reshape(-1, 2).tolist()
    spatial = len(blocks)
    inner, rest = tuple(found.shape[1 : spatial + 1]), tuple(found.shape[spatial + 1 :])
    batch = found.shape[0] // math.prod(blocks)
    x = found.reshape(*blocks, batch, *inner, *rest)
    order = [spatial]
    for i in builtins.range(spatial):
        order += [spatial + 1 + i, i]
    x = x.transpose(*order, *builtins.range(2 * spatial + 1, x.ndim))
    x = x.reshape(batch, *(n * b for n, b in zip(inner, blocks, strict=True)), *rest)
    key = [builtins.slice(a, x.shape[i + 1] - b) for i, (a, b) in enumerate(cuts)]
    return x[(builtins.slice(None), *key)]


@op(differentiable=False)
def required_space_to_batch_paddings(
    input_shape: Value, block_shape: Value, base_paddings: Value = None, name: str | None = None
) -> tuple[Array, Array]:
    """Returns the paddings and crops that make a shape divisible by the blocks."""
    sizes = np.asarray(integers(input_shape, "input_shape"))
    blocks = np.asarray(integers(block_shape, "block_shape"))
    base = np.zeros((len(blocks), 2), int)
    if base_paddings is not None:
        base = static(base_paddings, "base_paddings").astype(int).reshape(-1, 2)
    extra = -(sizes + base.sum(axis=1)) % blocks
    paddings = np.stack([base[:, 0], base[:, 1] + extra], axis=1).astype(np.int32)
    crops = np.stack([np.zeros_like(extra), extra], axis=1).astype(np.int32)
    return paddings, crops
