"""Images in other sizes.

A pixel is a square whose centre is at one half; version 1 had other rules, see `Rule`.

All methods but the nearest pixel are separable: a row of the result is a weighted sum of a few rows
of the image, then a column of columns. A plan holds these rows and weights for one axis.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.image.crops import pad_to_bounding_box
from replicax.tf.image.pixels import pixels, require_images
from replicax.tf.ops.operands import Array, Namespace, Value, integer, integers

__all__ = ["ResizeMethod", "resize", "resize_with_pad"]

# Where the pixels of the result are in the image: "half" is version 2; with "start" the first
# pixels of both lie on each other, with "corners" the last ones too.
Rule = Literal["half", "start", "corners"]


class ResizeMethod:
    """The ways of computing the pixels of an image in another size.

    >>> ResizeMethod.NEAREST_NEIGHBOR
    'nearest'
    """

    AREA = "area"
    BICUBIC = "bicubic"
    BILINEAR = "bilinear"
    GAUSSIAN = "gaussian"
    LANCZOS3 = "lanczos3"
    LANCZOS5 = "lanczos5"
    MITCHELLCUBIC = "mitchellcubic"
    NEAREST_NEIGHBOR = "nearest"


# The numbers of the methods in programs for version 1.
_NUMBERS = {0: "bilinear", 1: "nearest", 2: "bicubic", 3: "area"}
# Weights of bicubic interpolation are taken at this number of distances between two pixels.
_TABLE_SIZE = 1024
# A dense product of matrices is quicker than more weighted sums.
_MOST_TAPS = 6


class _Plan(NamedTuple):
    """The pixels along one axis whose weighted sum is a pixel of the result.

    Attributes:
      indices: (taps, size of the result).
      weights: The same shape.
      dense: (size of the result, size of the image), if there are many taps.
      is_blend: Whether there are two taps, whose weights add up to 1.
    """

    indices: np.ndarray
    weights: np.ndarray
    dense: np.ndarray | None
    is_blend: bool = False


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(0, 1 - np.abs(x))


def _cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _old_cubic(x: np.ndarray) -> np.ndarray:
    """The kernel of version 1, which is steeper."""
    x = np.abs(x)
    near = (1.25 * x - 2.25) * x * x + 1
    far = ((-0.75 * x + 3.75) * x - 6) * x + 3
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _mitchell(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = ((7 / 6 * x - 2) * x) * x + 8 / 9
    far = ((-7 / 18 * x + 2) * x - 10 / 3) * x + 16 / 9
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _gaussian(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 1.5, np.exp(-2 * x * x), 0)


def _lanczos(radius: float, x: np.ndarray) -> np.ndarray:
    # sinc(x) * sinc(x / radius), in which NumPy's sinc has the factor pi.
    return np.where(np.abs(x) <= radius, np.sinc(x) * np.sinc(x / radius), 0)


# By method: how far a kernel reaches, and its value at a distance.
_KERNELS: dict[str, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    "bilinear": (1.0, _triangle),
    "bicubic": (2.0, _cubic),
    "mitchellcubic": (2.0, _mitchell),
    "gaussian": (1.5, _gaussian),
    "lanczos3": (3.0, functools.partial(_lanczos, 3.0)),
    "lanczos5": (5.0, functools.partial(_lanczos, 5.0)),
}


@functools.lru_cache(maxsize=512)
def _plan(method: str, size: int, new: int, antialias: bool, rule: Rule = "half") -> _Plan:
    if method == "area":
        return _area(size, new, _scale(size, new, rule))
    if not antialias and method == "bilinear":
        return _bilinear(size, _positions(size, new, rule))
    if not antialias and method == "bicubic":
        return _bicubic(size, _positions(size, new, rule), rule)
    return _by_kernel(*_KERNELS[method], size, new, antialias)


def _scale(size: int, new: int, rule: Rule) -> np.float32:
    if rule == "corners" and new > 1:
        return np.float32(size - 1) / np.float32(new - 1)
    return np.float32(size) / np.float32(new)


def _positions(size: int, new: int, rule: Rule) -> np.ndarray:
    """Returns where the pixels of the result are in the image, from the centre of its first."""
    scale, numbers = _scale(size, new, rule), np.arange(new, dtype=np.float32)
    if rule == "half":
        return (numbers + np.float32(0.5)) * scale - np.float32(0.5)
    return numbers * scale


def _finished(indices: np.ndarray, weights: np.ndarray, size: int) -> _Plan:
    weights = weights.astype(np.float32)
    taps, new = indices.shape
    if taps <= _MOST_TAPS:
        return _Plan(indices, weights, None)
    dense = np.zeros((new, size), np.float32)
    np.add.at(dense, (np.arange(new)[None].repeat(taps, 0), indices), weights)
    return _Plan(indices, weights, dense)


def _bilinear(size: int, at: np.ndarray) -> _Plan:
    below = np.floor(at)
    share = at - below
    first = np.maximum(below, 0).astype(np.int32)
    second = np.minimum(np.ceil(at), size - 1).astype(np.int32)
    plan = _finished(np.stack([first, second]), np.stack([1 - share, share]), size)
    return plan._replace(is_blend=True)


def _bicubic(size: int, at: np.ndarray, rule: Rule) -> _Plan:
    below = np.floor(at)
    distance = np.rint((at - below) * _TABLE_SIZE) / _TABLE_SIZE
    offsets = np.arange(-1, 3)[:, None]
    indices = below[None].astype(np.int32) + offsets
    distances = offsets - distance[None].astype(np.float64)
    if rule != "half":
        return _finished(np.clip(indices, 0, size - 1), _old_cubic(distances), size)
    weights = _cubic(distances)
    weights = np.where((indices >= 0) & (indices < size), weights, 0)
    return _finished(np.clip(indices, 0, size - 1), _normalized(weights), size)


def _normalized(weights: np.ndarray) -> np.ndarray:
    total = weights.sum(0, keepdims=True)
    is_usable = np.abs(total) >= 1000 * np.finfo(np.float32).tiny
    return np.where(is_usable, weights / np.where(is_usable, total, 1), 0)


def _area(size: int, new: int, scale: np.float32) -> _Plan:
    start = np.arange(new, dtype=np.float32) * scale
    end = np.arange(1, new + 1, dtype=np.float32) * scale
    first, last = np.floor(start).astype(int), np.ceil(end).astype(int)
    indices = first[None] + np.arange(int((last - first).max()))[:, None]
    weights = np.minimum(indices + 1, end) - np.maximum(indices, start)
    weights = np.where(indices < last, np.maximum(weights, 0), 0) / scale
    return _finished(np.clip(indices, 0, size - 1), weights, size)


def _by_kernel(
    radius: float,
    kernel: Callable[[np.ndarray], np.ndarray],
    size: int,
    new: int,
    antialias: bool,
) -> _Plan:
    inverse = np.float32(1) / (np.float32(new) / np.float32(size))
    stretch = max(float(inverse), 1.0) if antialias else 1.0
    at = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * inverse
    first = np.ceil(at - radius * stretch - 0.5).astype(int)
    last = np.floor(at + radius * stretch - 0.5).astype(int)
    first, last = np.clip(first, 0, size - 1), np.clip(last, 0, size - 1)
    indices = first[None] + np.arange(int((last - first).max()) + 1)[:, None]
    weights = kernel((indices + 0.5 - at) / stretch)
    weights = np.where(indices <= last, weights, 0)
    return _finished(np.clip(indices, 0, size - 1), _normalized(weights), size)


def _applied(ns: Namespace, x: Array, plan: _Plan, axis: int) -> Array:
    """Returns the weighted sums along axis -3 or -2."""
    if plan.dense is not None:
        x = x.astype(np.float32)
        if axis == -2:
            return _product(ns, plan.dense, x)
        flat = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
        found = _product(ns, plan.dense, flat)
        return found.reshape(*found.shape[:-1], *x.shape[-2:])
    at = x.ndim + axis
    if ns is np:
        return _summed_on_host(x, plan, axis)
    shape = (-1, 1, 1) if axis == -3 else (-1, 1)
    pairs = zip(plan.indices, plan.weights, strict=True)
    parts = [ns.take(x, i, axis=at).astype(np.float32) * w.reshape(shape) for i, w in pairs]
    return functools.reduce(operator.add, parts)


def _summed_on_host(x: np.ndarray, plan: _Plan, axis: int) -> np.ndarray:
    """Returns the weighted sums without a new array for each product and sum.

    Rows are one dimension, of columns and channels: NumPy is slow with a last dimension of 3.
    """
    channels = x.shape[-1]
    weights = plan.weights[..., None] if axis == -3 else np.repeat(plan.weights, channels, 1)
    total = _taken(x, plan.indices[0], axis)
    sums = total.reshape(*total.shape[:-2], total.shape[-2] * channels)
    if not plan.is_blend:
        sums *= weights[0]
    for indices, weight in zip(plan.indices[1:], weights[1:], strict=True):
        part = _taken(x, indices, axis).reshape(sums.shape)
        if plan.is_blend:
            # The weights are 1 - share and share.
            part -= sums
        part *= weight
        sums += part
    return total


def _taken(x: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
    found = np.take(x, indices, axis=x.ndim + axis)
    return found if found.dtype == np.float32 else found.astype(np.float32)


def _product(ns: Namespace, left: np.ndarray, right: Array) -> Array:
    if ns is np:
        return np.matmul(left, right)
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


@functools.lru_cache(maxsize=512)
def _nearest(size: int, new: int, rule: Rule = "half") -> np.ndarray:
    at = np.arange(new, dtype=np.float32) + np.float32(0.5 if rule == "half" else 0)
    at *= _scale(size, new, rule)
    at = np.floor(at + np.float32(0.5)) if rule == "corners" else np.floor(at)
    return np.minimum(at.astype(np.int32), size - 1)


def _method(method: Value) -> str:
    found = _NUMBERS.get(method, method) if isinstance(method, int) else method
    if found not in {*_KERNELS, "area", "nearest"}:
        raise errors.InvalidArgumentError(
            f"`method` must be one of {', '.join(sorted({*_KERNELS, 'area', 'nearest'}))}",
            f"it is {method!r}",
            "Pass a value of tf.image.ResizeMethod.",
        )
    return str(found)


def _sizes(size: Value) -> tuple[int, int]:
    found = integers(size, "size")
    if len(found) != 2 or min(found) <= 0:
        raise errors.InvalidArgumentError(
            "`size` must be the new height and width", f"it is {found}", "Pass (224, 224)."
        )
    return found[0], found[1]


def _kept_ratio(old: tuple[int, int], new: tuple[int, int]) -> tuple[int, int]:
    height, width = (np.float32(size) for size in old)
    factor = min(np.float32(new[0]) / height, np.float32(new[1]) / width)
    return int(np.rint(factor * height)), int(np.rint(factor * width))


@op
def resize(
    images: Value,
    size: Value,
    method: Value = ResizeMethod.BILINEAR,
    preserve_aspect_ratio: bool = False,
    antialias: bool = False,
    name: str | None = None,
) -> Array:
    """Returns images in another size, as float32; the nearest pixels keep their type.

    Args:
      images: (height, width, channels), or a batch of such images.
      size: The new height and width.
      method: One of `tf.image.ResizeMethod`.
      preserve_aspect_ratio: Whether the image keeps its proportions and fits into `size`.
      antialias: Whether pixels are averaged where the image becomes smaller.
      name: Accepted for portability.

    >>> resize(np.asarray([[[0.0], [2.0]]], np.float32), (1, 4)).numpy()[0, :, 0]
    array([0. , 0.5, 1.5, 2. ], dtype=float32)
    """
    return resized(images, size, method, preserve_aspect_ratio, antialias)


def resized(
    images: Value,
    size: Value,
    method: Value,
    keep_ratio: bool,
    smooth: bool = False,
    rule: Rule = "half",
) -> Array:
    """Returns images in another size by one of the rules for where pixels are."""
    ns, x = pixels(images)
    require_images(x, "resize")
    how, old = _method(method), (x.shape[-3], x.shape[-2])
    if not all(old):
        raise errors.InvalidArgumentError(
            "`tf.image.resize` takes images with pixels", f"the shape is {x.shape}", "Check it."
        )
    new = _sizes(size)
    if keep_ratio:
        new = _kept_ratio(old, new)
    if how == "nearest":
        rows, columns = _nearest(old[0], new[0], rule), _nearest(old[1], new[1], rule)
        return ns.take(ns.take(x, rows, axis=x.ndim - 3), columns, axis=x.ndim - 2)
    for axis, before, after in ((-3, old[0], new[0]), (-2, old[1], new[1])):
        if before != after or how in ("gaussian", "mitchellcubic"):
            x = _applied(ns, x, _plan(how, before, after, bool(smooth), rule), axis)
    return x.astype(np.float32)


def resize_with_pad(
    image: Value,
    target_height: Value,
    target_width: Value,
    method: Value = ResizeMethod.BILINEAR,
    antialias: bool = False,
) -> Value:
    """Returns images in another size with the same proportions, with zeros around them.

    >>> resize_with_pad(np.ones((2, 4, 1), np.float32), 4, 4).numpy()[:, 0, 0]
    array([0., 1., 1., 0.], dtype=float32)
    """
    scale = functools.partial(resize, antialias=antialias)
    return resized_with_pad(image, target_height, target_width, method, scale)


def resized_with_pad(
    image: Value,
    target_height: Value,
    target_width: Value,
    method: Value,
    scale: Callable[..., Value],
) -> Value:
    """Returns images that a function made fit into a size, with zeros around them."""
    height, width = np.shape(image)[-3:-1] if not hasattr(image, "shape") else image.shape[-3:-1]
    new = integer(target_height, "target_height"), integer(target_width, "target_width")
    old = np.float32(height), np.float32(width)
    ratio = max(old[0] / np.float32(new[0]), old[1] / np.float32(new[1]))
    exact = old[0] / ratio, old[1] / ratio
    fitted = math.floor(exact[0]), math.floor(exact[1])
    top, left = (
        max(0, math.floor((n - e) / 2)) for n, e in zip(new, map(float, exact), strict=True)
    )
    found = scale(image, fitted, method)
    return pad_to_bounding_box(found, top, left, *new)
