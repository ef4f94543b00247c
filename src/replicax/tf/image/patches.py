"""Small parts of images at regular or given places."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.image.pixels import pixels
from replicax.tf.ops import random_sources
from replicax.tf.ops.operands import Array, Namespace, Value, array, integers

__all__ = ["extract_glimpse", "extract_patches"]


def _four(value: Value, argument: str) -> tuple[int, int]:
    found = integers(value, argument)
    if len(found) != 4 or found[0] != 1 or found[3] != 1 or min(found) < 1:
        raise errors.InvalidArgumentError(
            f"`{argument}` must be [1, rows, columns, 1]", f"it is {list(found)}", "Correct it."
        )
    return found[1], found[2]


def _windows(size: int, length: int, stride: int, rate: int, padding: str) -> tuple[Array, int]:
    """Returns the indices of windows along an axis, (windows, length), and the zeros before it."""
    reach = (length - 1) * rate + 1
    if padding == "VALID":
        count, before = max(0, -(-(size - reach + 1) // stride)), 0
    else:
        count = -(-size // stride)
        before = max(0, (count - 1) * stride + reach - size) // 2
    return np.arange(count)[:, None] * stride + np.arange(length)[None] * rate, before


@op
def extract_patches(
    images: Value,
    sizes: Value,
    strides: Value,
    rates: Value,
    padding: str,
    name: str | None = None,
) -> Array:
    """Returns the parts of images at regular distances, each along the last dimension.

    Args:
      images: (batch, height, width, channels).
      sizes: [1, rows, columns, 1] of a part.
      strides: [1, rows, columns, 1] between parts.
      rates: [1, rows, columns, 1] between the pixels of a part.
      padding: "VALID", or "SAME" with zeros around the images.
      name: Accepted for portability.

    >>> image = np.arange(9).reshape(1, 3, 3, 1)
    >>> found = extract_patches(image, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID")
    >>> found.numpy()[0, 0, 1].tolist()
    [1, 2, 4, 5]
    """
    ns, x = pixels(images)
    if x.ndim != 4 or padding.upper() not in ("VALID", "SAME"):
        raise errors.InvalidArgumentError(
            "`extract_patches` takes images (batch, height, width, channels) and VALID or SAME",
            f"the shape is {tuple(x.shape)}, the padding {padding!r}",
            "Add a dimension with image[tf.newaxis].",
        )
    lengths, steps = _four(sizes, "sizes"), _four(strides, "strides")
    gaps = _four(rates, "rates")
    rows, columns = (
        _windows(x.shape[1 + i], lengths[i], steps[i], gaps[i], padding.upper()) for i in range(2)
    )
    around = [(0, 0)]
    for (indices, before), size in ((rows, x.shape[1]), (columns, x.shape[2])):
        last = int(indices.max()) + 1 if indices.size else 0
        around.append((before, max(0, last - before - size)))
    x = ns.pad(x, [*around, (0, 0)])
    found = x[:, rows[0][:, None, :, None], columns[0][None, :, None, :], :]
    return found.reshape(*found.shape[:3], -1)


@op
def extract_glimpse(
    input: Value,
    size: Value,
    offsets: Value,
    centered: bool = True,
    normalized: bool = True,
    noise: str = "uniform",
    name: str | None = None,
) -> Array:
    """Returns one part of each image, with noise where it is outside of the image.

    Args:
      input: (batch, height, width, channels).
      size: The height and width of the parts.
      offsets: (batch, 2): the row and column of each part: of its middle, or its corner.
      centered: Whether offsets lead from the middle of the image to that of the part.
      normalized: Whether offsets are shares of the image, not pixels.
      noise: "uniform", "gaussian" or "zero".
      name: Accepted for portability.
    """
    ns, x = pixels(input)
    x = x.astype(np.float32)
    at, sizes = array(offsets).astype(np.float32), integers(size, "size")
    if x.ndim != 4 or tuple(at.shape) != (x.shape[0], 2) or len(sizes) != 2:
        raise errors.InvalidArgumentError(
            "`extract_glimpse` takes a batch of images, two sizes, and two offsets for each image",
            f"the shapes are {tuple(x.shape)}, {sizes} and {tuple(at.shape)}",
            "Correct them.",
        )
    if centered and not normalized:
        raise errors.InvalidArgumentError(
            "Offsets in pixels are counted from the corner",
            "`centered` is True and `normalized` False",
            "Pass centered=False.",
        )
    picks = []
    for axis, length in enumerate(sizes):
        extent = x.shape[1 + axis]
        first = at[:, axis] * extent if normalized else at[:, axis]
        first = first / 2 + extent / 2 - length / 2 if centered else first
        picks.append(ns.trunc(first).astype(np.int32)[:, None] + np.arange(length))
    rows, columns = picks[0][:, :, None], picks[1][:, None, :]
    height, width = x.shape[1], x.shape[2]
    is_inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    batch = np.arange(x.shape[0])[:, None, None]
    found = x[batch, ns.clip(rows, 0, height - 1), ns.clip(columns, 0, width - 1)]
    return ns.where(is_inside[..., None], found, _noise(ns, noise, found))


def _noise(ns: Namespace, kind: str, like: Array) -> Array:
    if kind == "zero":
        return ns.zeros_like(like)
    if kind not in ("uniform", "gaussian"):
        raise errors.InvalidArgumentError(
            "`noise` must be uniform, gaussian or zero", f"it is {kind!r}", "Pass 'zero'."
        )
    source = random_sources.stateful(None)
    if isinstance(source, np.random.Generator):
        drawn = source.random(like.shape) if kind == "uniform" else source.normal(size=like.shape)
        return np.asarray(drawn, np.float32)
    draw = jax.random.uniform if kind == "uniform" else jax.random.normal
    return draw(source, like.shape, jnp.float32)
