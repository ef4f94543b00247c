"""Parts of images, and images with zeros around them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf.dispatch import op
from replicax.tf.image.pixels import pixels, require_images
from replicax.tf.ops import random_sources
from replicax.tf.ops.operands import Array, Namespace, Value, array, integer, integers, static
from replicax.tf.ops.random_sources import Source

__all__ = [
    "central_crop",
    "crop_to_bounding_box",
    "pad_to_bounding_box",
    "random_crop",
    "resize_with_crop_or_pad",
    "stateless_random_crop",
]


def _cut(
    ns: Namespace, x: Array, top: Value, left: Value, height: int, width: int, name: str
) -> Array:
    """Returns a part of images; in a compiled function, `top` and `left` may be computed."""
    if jax_compat.is_traced(top) or jax_compat.is_traced(left):
        start = [jnp.int32(0)] * (x.ndim - 3) + [jnp.int32(top), jnp.int32(left), jnp.int32(0)]
        return jax.lax.dynamic_slice(x, start, (*x.shape[:-3], height, width, x.shape[-1]))
    top, left = integer(top, "offset_height"), integer(left, "offset_width")
    is_inside = 0 <= top <= x.shape[-3] - height and 0 <= left <= x.shape[-2] - width
    if height <= 0 or width <= 0 or not is_inside:
        raise errors.InvalidArgumentError(
            f"The box of `tf.image.{name}` must be inside the image of {x.shape[-3]} by "
            f"{x.shape[-2]}",
            f"it begins at ({top}, {left}) and is {height} by {width}",
            "Use tf.image.resize_with_crop_or_pad for images that may be smaller.",
        )
    return x[..., top : top + height, left : left + width, :]


def _padded(ns: Namespace, x: Array, top: int, left: int, height: int, width: int) -> Array:
    bottom, right = height - top - x.shape[-3], width - left - x.shape[-2]
    if min(top, left, bottom, right) < 0:
        raise errors.InvalidArgumentError(
            f"An image of {x.shape[-3]} by {x.shape[-2]} must fit into {height} by {width}",
            f"it begins at ({top}, {left})",
            "Use tf.image.resize_with_crop_or_pad for images that may be larger.",
        )
    if not (top or left or bottom or right):
        return x
    if ns is not np:
        around = [(0, 0)] * (x.ndim - 3) + [(top, bottom), (left, right), (0, 0)]
        return ns.pad(x, around)
    # Three times as quick as `np.pad`.
    found = np.zeros((*x.shape[:-3], height, width, x.shape[-1]), x.dtype)
    found[..., top : top + x.shape[-3], left : left + x.shape[-2], :] = x
    return found


@op
def crop_to_bounding_box(
    image: Value,
    offset_height: Value,
    offset_width: Value,
    target_height: Value,
    target_width: Value,
) -> Array:
    """Returns the part of images that begins at a row and a column.

    >>> crop_to_bounding_box(np.arange(9).reshape(3, 3, 1), 1, 0, 1, 2).numpy().tolist()
    [[[3], [4]]]
    """
    ns, x = pixels(image)
    require_images(x, "crop_to_bounding_box")
    sizes = integer(target_height, "target_height"), integer(target_width, "target_width")
    return _cut(ns, x, offset_height, offset_width, *sizes, "crop_to_bounding_box")


@op
def pad_to_bounding_box(
    image: Value,
    offset_height: Value,
    offset_width: Value,
    target_height: Value,
    target_width: Value,
) -> Array:
    """Returns images with zeros around them, which begin at a row and a column.

    >>> pad_to_bounding_box(np.ones((1, 1, 1)), 0, 1, 1, 3).numpy().tolist()
    [[[0.0], [1.0], [0.0]]]
    """
    ns, x = pixels(image)
    require_images(x, "pad_to_bounding_box")
    top, left = integer(offset_height, "offset_height"), integer(offset_width, "offset_width")
    sizes = integer(target_height, "target_height"), integer(target_width, "target_width")
    return _padded(ns, x, top, left, *sizes)


@op
def central_crop(image: Value, central_fraction: Value) -> Array:
    """Returns the middle of images: a share of their height and width.

    >>> central_crop(np.arange(4).reshape(1, 4, 1), 0.5).numpy()[0, :, 0].tolist()
    [1, 2]
    """
    _ns, x = pixels(image)
    require_images(x, "central_crop")
    share = float(static(central_fraction, "central_fraction"))
    if not 0 < share <= 1:
        raise errors.InvalidArgumentError(
            "`central_fraction` must be above 0 and at most 1", f"it is {share}", "Pass 0.875."
        )
    if share == 1:
        return x
    height, width = x.shape[-3], x.shape[-2]
    top, left = int((height - height * share) / 2), int((width - width * share) / 2)
    return x[..., top : height - top, left : width - left, :]


@op
def resize_with_crop_or_pad(image: Value, target_height: Value, target_width: Value) -> Array:
    """Returns images cut to a size around their middle, or with zeros around them.

    >>> resize_with_crop_or_pad(np.ones((1, 3, 1), np.uint8), 3, 1).numpy()[:, 0, 0].tolist()
    [0, 1, 0]
    """
    ns, x = pixels(image)
    require_images(x, "resize_with_crop_or_pad")
    height, width = integer(target_height, "target_height"), integer(target_width, "target_width")
    if height <= 0 or width <= 0:
        raise errors.InvalidArgumentError(
            "The new height and width must be positive",
            f"they are {(height, width)}",
            "Check them.",
        )
    kept = min(height, x.shape[-3]), min(width, x.shape[-2])
    top, left = (x.shape[-3] - kept[0]) // 2, (x.shape[-2] - kept[1]) // 2
    x = x[..., top : top + kept[0], left : left + kept[1], :]
    return _padded(ns, x, (height - kept[0]) // 2, (width - kept[1]) // 2, height, width)


# Random parts, of tensors of any shape.


def _begin(source: Source, value: Value, size: Value) -> Array:
    shape, sizes = tuple(array(value).shape), integers(size, "size")
    if len(shape) != len(sizes) or any(n > s or n < 0 for n, s in zip(sizes, shape, strict=True)):
        raise errors.InvalidArgumentError(
            f"`size` must fit into the shape {shape}", f"it is {sizes}", "Pad the image first."
        )
    ends = np.asarray(shape) - np.asarray(sizes) + 1
    if isinstance(source, np.random.Generator):
        # Quicker than random integers below an array of limits.
        return np.asarray([int(source.random() * end) for end in ends.tolist()], np.int32)
    return jax.random.randint(source, (len(sizes),), 0, jnp.asarray(ends, jnp.int32), jnp.int32)


@op(differentiable=False)
def _random_begin(value: Value, size: Value, seed: Value) -> Array:
    return _begin(random_sources.stateful(seed), value, size)


@op(differentiable=False)
def _stateless_begin(value: Value, size: Value, seed: Value) -> Array:
    return _begin(random_sources.stateless(seed), value, size)


@op
def _part(value: Value, begin: Value, size: Value) -> Array:
    ns, x = pixels(value)
    sizes = integers(size, "size")
    if ns is np:
        pairs = zip(np.asarray(begin).tolist(), sizes, strict=True)
        return x[tuple(slice(first, first + count) for first, count in pairs)]
    return jax.lax.dynamic_slice(x, [begin[i] for i in range(len(sizes))], sizes)


def random_crop(value: Value, size: Value, seed: Value = None, name: str | None = None) -> Value:
    """Returns a random part of a tensor: another one in each call.

    >>> random_crop(np.zeros((8, 8, 3)), (4, 4, 3)).shape
    TensorShape([4, 4, 3])
    """
    return _part(value, _random_begin(value, size, seed), size)


def stateless_random_crop(value: Value, size: Value, seed: Value, name: str | None = None) -> Value:
    """Returns the part of a tensor that belongs to a seed of two integers."""
    return _part(value, _stateless_begin(value, size, seed), size)
