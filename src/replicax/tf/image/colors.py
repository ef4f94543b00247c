"""Colour spaces of images, and the range of their values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf.dispatch import op
from replicax.tf.image.pixels import as_floats, pixels, require_channels, scaled_to
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Namespace,
    Value,
    quiet_op,
    require_kind,
)

__all__ = [
    "convert_image_dtype",
    "grayscale_to_rgb",
    "hsv_to_rgb",
    "rgb_to_grayscale",
    "rgb_to_hsv",
    "rgb_to_yiq",
    "rgb_to_yuv",
    "yiq_to_rgb",
    "yuv_to_rgb",
]

_GREY = np.asarray([0.2989, 0.5870, 0.1140], np.float32)
# Rows: red, green, blue of the argument; columns: channels of the result.
_TO_YIQ = (
    (0.299, 0.59590059, 0.2115),
    (0.587, -0.27455667, -0.52273617),
    (0.114, -0.32134392, 0.31119955),
)
_FROM_YIQ = (
    (1.0, 1.0, 1.0),
    (0.95598634, -0.27201283, -1.10674021),
    (0.6208248, -0.64720424, 1.70423049),
)
_TO_YUV = (
    (0.299, -0.14714119, 0.61497538),
    (0.587, -0.28886916, -0.51496512),
    (0.114, 0.43601035, -0.10001026),
)
_FROM_YUV = ((1.0, 1.0, 1.0), (0.0, -0.394642334, 2.03206185), (1.13988303, -0.58062185, 0.0))


@quiet_op
def convert_image_dtype(
    image: Value, dtype: DTypeLike, saturate: bool = False, name: str | None = None
) -> Array:
    """Returns images in another type: floats from 0 to 1, integers in their whole range.

    Args:
      image: Images of any shape.
      dtype: The new type.
      saturate: Whether values outside of the range become its ends.
      name: Accepted for portability.

    >>> convert_image_dtype(np.asarray([0, 255], np.uint8), np.float32).numpy()
    array([0., 1.], dtype=float32)
    """
    ns, x = pixels(image)
    return scaled_to(ns, x, dtype, saturate)


@op
def rgb_to_grayscale(images: Value, name: str | None = None) -> Array:
    """Returns colour images in grey, with one channel.

    >>> rgb_to_grayscale(np.asarray([[[100, 100, 100]]], np.uint8)).numpy().tolist()
    [[[100]]]
    """
    ns, x = pixels(images)
    require_channels(x, "rgb_to_grayscale")
    grey = _product(ns, as_floats(ns, x), _GREY[:, None])
    return scaled_to(ns, grey, x.dtype)


@op
def grayscale_to_rgb(images: Value, name: str | None = None) -> Array:
    """Returns grey images with three equal channels.

    >>> grayscale_to_rgb(np.asarray([[[7]]])).numpy().tolist()
    [[[7, 7, 7]]]
    """
    ns, x = pixels(images)
    require_channels(x, "grayscale_to_rgb", 1)
    return ns.repeat(x, 3, axis=-1)


def _product(ns: Namespace, x: Array, matrix: np.ndarray) -> Array:
    if ns is np:
        return np.matmul(x, matrix.astype(x.dtype))
    return jnp.matmul(x, matrix.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)


def _mixed(images: Value, matrix: tuple[tuple[float, ...], ...], name: str) -> Array:
    ns, x = pixels(images)
    require_kind(x, f"image.{name}", "f")
    require_channels(x, name)
    return _product(ns, x, np.asarray(matrix))


@op
def rgb_to_yiq(images: Value) -> Array:
    """Returns red, green and blue as brightness and the two colour channels of NTSC."""
    return _mixed(images, _TO_YIQ, "rgb_to_yiq")


@op
def yiq_to_rgb(images: Value) -> Array:
    """Returns brightness and the two colour channels of NTSC as red, green and blue."""
    return _mixed(images, _FROM_YIQ, "yiq_to_rgb")


@op
def rgb_to_yuv(images: Value) -> Array:
    """Returns red, green and blue as brightness and the two colour channels of PAL."""
    return _mixed(images, _TO_YUV, "rgb_to_yuv")


@op
def yuv_to_rgb(images: Value) -> Array:
    """Returns brightness and the two colour channels of PAL as red, green and blue."""
    return _mixed(images, _FROM_YUV, "yuv_to_rgb")


def hue_and_range(ns: Namespace, x: Array) -> tuple[Array, Array, Array]:
    """Returns the hue from 0 to 1, the largest and the smallest channel of each pixel."""
    red, green, blue = x[..., 0], x[..., 1], x[..., 2]
    # Two calls are quicker than a reduction over three elements.
    top = ns.maximum(ns.maximum(red, green), blue)
    low = ns.minimum(ns.minimum(red, green), blue)
    spread = top - low
    unit = 1 / (6 * ns.where(spread > 0, spread, ns.ones_like(spread)))
    hue = ns.where(
        red == top,
        unit * (green - blue),
        ns.where(green == top, unit * (blue - red) + 2 / 6, unit * (red - green) + 4 / 6),
    )
    hue = ns.where(spread > 0, ns.where(hue < 0, hue + 1, hue), ns.zeros_like(hue))
    return hue.astype(x.dtype), top, low


def colours_of(ns: Namespace, hue: Array) -> tuple[Array, Array, Array]:
    """Returns red, green and blue of pure colours, as arrays of their own."""
    six = hue * 6
    red = ns.abs(six - 3) - 1
    green, blue = (2 - ns.abs(six - middle) for middle in (2, 4))
    limit = lambda x: ns.minimum(ns.maximum(x, 0), 1)  # noqa: E731
    return limit(red), limit(green), limit(blue)


@op
def rgb_to_hsv(images: Value, name: str | None = None) -> Array:
    """Returns red, green and blue, from 0 to 1, as hue, saturation and value.

    >>> rgb_to_hsv(np.asarray([0.0, 0.5, 0.0], np.float32)).numpy().round(3)
    array([0.333, 1.   , 0.5  ], dtype=float32)
    """
    ns, x = pixels(images)
    require_kind(x, "image.rgb_to_hsv", "f")
    require_channels(x, "rgb_to_hsv")
    hue, top, low = hue_and_range(ns, x)
    return ns.stack([hue, saturation_of(ns, top, low), top], axis=-1)


def saturation_of(ns: Namespace, top: Array, low: Array) -> Array:
    """Returns the saturation of pixels by their largest and smallest channel."""
    safe = ns.where(top > 0, top, ns.ones_like(top))
    return ns.where(top > 0, (top - low) / safe, ns.zeros_like(top))


@op
def hsv_to_rgb(images: Value, name: str | None = None) -> Array:
    """Returns hue, saturation and value as red, green and blue.

    >>> hsv_to_rgb(np.asarray([0.0, 1.0, 0.5], np.float32)).numpy()
    array([0.5, 0. , 0. ], dtype=float32)
    """
    ns, x = pixels(images)
    require_kind(x, "image.hsv_to_rgb", "f")
    require_channels(x, "hsv_to_rgb")
    saturation, value = x[..., 1], x[..., 2]
    planes = [(1 - saturation + saturation * c) * value for c in colours_of(ns, x[..., 0])]
    return ns.stack(planes, axis=-1)
