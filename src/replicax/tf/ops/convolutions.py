"""Convolutions of `tf.nn`, and their transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import on_host, op
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
    integers,
    operands,
    require_kind,
    static,
)

__all__ = [
    "atrous_conv2d",
    "conv1d",
    "conv1d_transpose",
    "conv2d",
    "conv2d_transpose",
    "conv3d",
    "conv3d_transpose",
    "conv_transpose",
    "convolution",
    "depthwise_conv2d",
    "dilation2d",
    "erosion2d",
    "separable_conv2d",
]

_SPACES = {1: "W", 2: "HW", 3: "DHW"}


def on_device(compute: Callable[..., Any], *values: Array) -> Any:
    """Computes with JAX; on the host with all dtypes, and results of NumPy."""
    if not on_host():
        return compute(*map(jnp.asarray, values))
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, compute(*map(jnp.asarray, values)))


def is_channels_first(data_format: str | None, rank: int) -> bool:
    """Tells whether a format such as "NCHW" has the channels before the space."""
    space = _SPACES.get(rank, "")
    if data_format in (None, f"N{space}C"):
        return False
    if data_format == f"NC{space}":
        return True
    raise errors.InvalidArgumentError(
        f"`data_format` must be N{space}C or NC{space}", f"it is {data_format!r}", "Pass one."
    )


def per_dimension(value: Value, rank: int, argument: str, is_first: bool) -> tuple[int, ...]:
    """Returns a number for each dimension of space: of one, of all, or with batch and channels."""
    found = (1,) if value is None else integers(value, argument)
    if len(found) == 1:
        return found * rank
    if len(found) == rank + 2:
        found = found[2:] if is_first else found[1:-1]
    if len(found) != rank:
        raise errors.InvalidArgumentError(
            f"`{argument}` must have 1, {rank} or {rank + 2} numbers", f"it is {value}", "Pass one."
        )
    return found


def padding_of(padding: Value, rank: int, is_first: bool) -> Any:
    """Returns "SAME", "VALID", or pairs for the dimensions of space."""
    if isinstance(padding, str):
        if padding.upper() in ("SAME", "VALID"):
            return padding.upper()
    else:
        pairs = static(padding, "padding").astype(int).tolist()
        if len(pairs) == rank + 2:
            pairs = pairs[2:] if is_first else pairs[1:-1]
        if len(pairs) == rank:
            return [(a, b) for a, b in pairs]
    raise errors.InvalidArgumentError(
        "`padding` must be 'SAME', 'VALID' or pairs of numbers", f"it is {padding!r}", "Pass one."
    )


def _convolved(
    input: Value,
    filters: Value,
    strides: Value,
    padding: Value,
    data_format: str | None,
    dilations: Value,
    name: str,
    given_rank: int | None = None,
) -> Array:
    x, kernel = operands(input, filters, op=f"nn.{name}")
    require_kind(x, f"nn.{name}", "f")
    rank: int = kernel.ndim - 2 if given_rank is None else given_rank
    # More dimensions of batches than one are joined.
    lead = tuple(x.shape[: x.ndim - rank - 1])
    x = x.reshape(int(np.prod(lead, dtype=np.int64)), *x.shape[x.ndim - rank - 1 :])
    is_first = is_channels_first(data_format, rank)
    channels = x.shape[1 if is_first else -1]
    if kernel.ndim != rank + 2 or not kernel.shape[-2] or channels % kernel.shape[-2]:
        raise errors.InvalidArgumentError(
            f"`filters` must be [{'size, ' * rank}input channels, output channels]",
            f"its shape is {tuple(kernel.shape)}, and the input has {channels} channels",
            "Check `data_format`.",
        )
    space = _SPACES[rank]
    layout = f"NC{space}" if is_first else f"N{space}C"

    def compute(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            per_dimension(strides, rank, "strides", is_first),
            padding_of(padding, rank, is_first),
            rhs_dilation=per_dimension(dilations, rank, "dilations", is_first),
            dimension_numbers=(layout, f"{space}IO", layout),
            feature_group_count=channels // kernel.shape[-2],
        )

    found = on_device(compute, x, kernel)
    return found.reshape(*lead, *found.shape[1:]) if len(lead) != 1 else found


@op
def convolution(
    input: Value,
    filters: Value,
    strides: Value = None,
    padding: Value = "VALID",
    data_format: str | None = None,
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the convolution over one, two or three dimensions of space."""
    return _convolved(input, filters, strides, padding, data_format, dilations, "convolution")


@op
def conv1d(
    input: Value,
    filters: Value,
    stride: Value,
    padding: Value,
    data_format: str = "NWC",
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the convolution over one dimension of space."""
    return _convolved(input, filters, stride, padding, data_format, dilations, "conv1d", 1)


@op
def conv2d(
    input: Value,
    filters: Value,
    strides: Value,
    padding: Value,
    data_format: str = "NHWC",
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the convolution over two dimensions of space.

    Args:
      input: Images, [batch, height, width, channels].
      filters: [height, width, input channels, output channels].
      strides: One number, two, or four.
      padding: "SAME", "VALID", or pairs of numbers.
      data_format: "NHWC" or "NCHW".
      dilations: The distances between elements of a filter.
      name: Ignored.

    >>> image, box = np.ones((1, 3, 3, 1), np.float32), np.ones((2, 2, 1, 1), np.float32)
    >>> conv2d(image, box, 1, "SAME")[0, :, :, 0].numpy().tolist()
    [[4.0, 4.0, 2.0], [4.0, 4.0, 2.0], [2.0, 2.0, 1.0]]
    """
    return _convolved(input, filters, strides, padding, data_format, dilations, "conv2d", 2)


@op
def conv3d(
    input: Value,
    filters: Value,
    strides: Value,
    padding: Value,
    data_format: str = "NDHWC",
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the convolution over three dimensions of space."""
    return _convolved(input, filters, strides, padding, data_format, dilations, "conv3d", 3)


@op
def atrous_conv2d(
    value: Value, filters: Value, rate: Value, padding: Value, name: str | None = None
) -> Array:
    """Returns the convolution with distances between the elements of a filter."""
    return _convolved(value, filters, 1, padding, "NHWC", rate, "atrous_conv2d", 2)


@op
def depthwise_conv2d(
    input: Value,
    filter: Value,
    strides: Value,
    padding: Value,
    data_format: str | None = None,
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the convolution of each channel with filters of its own."""
    kernel = array(filter)
    h, w, channels, multiplier = kernel.shape
    grouped = kernel.reshape(h, w, 1, channels * multiplier)
    return _convolved(
        input, grouped, strides, padding, data_format, dilations, "depthwise_conv2d", 2
    )


@op
def separable_conv2d(
    input: Value,
    depthwise_filter: Value,
    pointwise_filter: Value,
    strides: Value,
    padding: Value,
    data_format: str | None = None,
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the convolution of each channel, mixed by a filter of size 1."""
    found = depthwise_conv2d.raw(input, depthwise_filter, strides, padding, data_format, dilations)
    return _convolved(found, pointwise_filter, 1, "VALID", data_format, None, "separable_conv2d", 2)


def _transposed(
    input: Value,
    filters: Value,
    output_shape: Value,
    strides: Value,
    padding: Value,
    data_format: str | None,
    dilations: Value,
    rank: int,
) -> Array:
    """Returns the gradient of a convolution: the input spread out, and filters turned around."""
    x, kernel = operands(input, filters, op=f"nn.conv{rank}d_transpose")
    require_kind(x, f"nn.conv{rank}d_transpose", "f")
    is_first = is_channels_first(data_format, rank)
    steps = per_dimension(strides, rank, "strides", is_first)
    gaps = per_dimension(dilations, rank, "dilations", is_first)
    sizes = integers(output_shape, "output_shape")
    if len(sizes) == rank + 2:
        sizes = sizes[2:] if is_first else sizes[1:-1]
    own = x.shape[2:] if is_first else x.shape[1:-1]
    pairs = _transposed_padding(own, kernel.shape[:rank], sizes, steps, gaps, padding, is_first)
    space = _SPACES[rank]
    layout = f"NC{space}" if is_first else f"N{space}C"

    def compute(x: jax.Array, kernel: jax.Array) -> jax.Array:
        turned = jnp.flip(jnp.swapaxes(kernel, -1, -2), tuple(range(rank)))
        return jax.lax.conv_general_dilated(
            x,
            turned,
            (1,) * rank,
            pairs,
            lhs_dilation=steps,
            rhs_dilation=gaps,
            dimension_numbers=(layout, f"{space}IO", layout),
        )

    return on_device(compute, x, kernel)


def _transposed_padding(
    own: Sequence[int],
    kernel: Sequence[int],
    sizes: Sequence[int],
    steps: Sequence[int],
    gaps: Sequence[int],
    padding: Value,
    is_first: bool,
) -> list[tuple[int, int]]:
    rank = len(sizes)
    chosen = padding_of(padding, rank, is_first)
    pairs = []
    for i in range(rank):
        reach = (kernel[i] - 1) * gaps[i] + 1
        spread = (own[i] - 1) * steps[i] + 1
        if chosen == "SAME":
            before = max(spread - 1 + reach - sizes[i], 0) // 2
            expected = -(-sizes[i] // steps[i])
        else:
            before, after = (0, 0) if chosen == "VALID" else chosen[i]
            expected = -(-(sizes[i] + before + after - reach + 1) // steps[i])
        if expected != own[i]:
            raise errors.InvalidArgumentError(
                "`output_shape` must be one whose convolution has the shape of the input",
                f"size {sizes[i]} leads to {expected}, and the input has {own[i]}",
                "Check `strides` and `padding`.",
            )
        start = reach - 1 - before
        pairs.append((start, sizes[i] - spread + reach - 1 - start))
    return pairs


@op
def conv1d_transpose(
    input: Value,
    filters: Value,
    output_shape: Value,
    strides: Value,
    padding: Value = "SAME",
    data_format: str = "NWC",
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the transpose of `conv1d`; filters are [size, output channels, input channels]."""
    return _transposed(input, filters, output_shape, strides, padding, data_format, dilations, 1)


@op
def conv2d_transpose(
    input: Value,
    filters: Value,
    output_shape: Value,
    strides: Value,
    padding: Value = "SAME",
    data_format: str = "NHWC",
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the transpose of `conv2d`; filters are [h, w, output channels, input channels]."""
    return _transposed(input, filters, output_shape, strides, padding, data_format, dilations, 2)


@op
def conv3d_transpose(
    input: Value,
    filters: Value,
    output_shape: Value,
    strides: Value,
    padding: Value = "SAME",
    data_format: str = "NDHWC",
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the transpose of `conv3d`."""
    return _transposed(input, filters, output_shape, strides, padding, data_format, dilations, 3)


@op
def conv_transpose(
    input: Value,
    filters: Value,
    output_shape: Value,
    strides: Value,
    padding: Value = "SAME",
    data_format: str | None = None,
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the transpose of `convolution`."""
    rank = array(filters).ndim - 2
    return _transposed(input, filters, output_shape, strides, padding, data_format, dilations, rank)


@op
def dilation2d(
    input: Value,
    filters: Value,
    strides: Value,
    padding: Value,
    data_format: str,
    dilations: Value,
    name: str | None = None,
) -> Array:
    """Returns the largest sums of image and filter over windows, channel by channel."""
    x, kernel = operands(input, filters, op="nn.dilation2d")
    is_channels_first(data_format, 2)
    steps = per_dimension(strides, 2, "strides", False)
    gaps = per_dimension(dilations, 2, "dilations", False)

    def compute(x: jax.Array, kernel: jax.Array) -> jax.Array:
        h, w = kernel.shape[:2]
        reach = ((h - 1) * gaps[0] + 1, (w - 1) * gaps[1] + 1)
        pairs = jax.lax.padtype_to_pads(x.shape[1:3], reach, steps, padding_of(padding, 2, False))
        lowest = jnp.asarray(-jnp.inf, x.dtype)
        x = jnp.pad(x, [(0, 0), *pairs, (0, 0)], constant_values=lowest)
        size = [(x.shape[1 + i] - reach[i]) // steps[i] + 1 for i in range(2)]
        parts = []
        for i in range(h):
            for j in range(w):
                top, left = i * gaps[0], j * gaps[1]
                ends = (top + (size[0] - 1) * steps[0] + 1, left + (size[1] - 1) * steps[1] + 1)
                part = x[:, top : ends[0] : steps[0], left : ends[1] : steps[1], :]
                parts.append(part + kernel[i, j])
        return jnp.max(jnp.stack(parts), axis=0)

    return on_device(compute, x, kernel)


@op
def erosion2d(
    value: Value,
    filters: Value,
    strides: Value,
    padding: Value,
    data_format: str,
    dilations: Value,
    name: str | None = None,
) -> Array:
    """Returns the smallest differences of image and filter over windows, channel by channel."""
    x, kernel = operands(value, filters, op="nn.erosion2d")
    turned = kernel[::-1, ::-1]
    return -dilation2d.raw(-x, turned, strides, padding, data_format, dilations)
