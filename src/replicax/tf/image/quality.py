"""Measures of images: likeness, edges and variation."""

from __future__ import annotations

import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.image.pixels import pixels, require_images, scaled_to
from replicax.tf.ops.operands import (
    Array,
    Namespace,
    Value,
    array,
    integer,
    kind_of,
    quiet_op,
    static,
)

__all__ = [
    "image_gradients",
    "psnr",
    "sobel_edges",
    "ssim",
    "ssim_multiscale",
    "total_variation",
]

_POWERS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
_ROWS = np.asarray([[-1, -2, -1], [0, 0, 0], [1, 2, 1]], np.float32)


def _pair(a: Value, b: Value, max_val: Value, op: str) -> tuple[Namespace, Array, Array, Array]:
    """Returns two images and the range of their values as float32."""
    ns, first = pixels(a)
    _, second = pixels(b)
    if tuple(first.shape[-3:]) != tuple(second.shape[-3:]) or min(first.ndim, second.ndim) < 3:
        raise errors.InvalidArgumentError(
            f"`tf.image.{op}` compares images of one size and number of channels",
            f"the shapes are {tuple(first.shape)} and {tuple(second.shape)}",
            "Resize one of them.",
        )
    if first.dtype != second.dtype:
        raise errors.ArgumentTypeError(
            f"`tf.image.{op}` compares images of one dtype",
            f"they have {first.dtype} and {second.dtype}",
            "Convert one with tf.image.convert_image_dtype.",
        )
    limit = scaled_to(ns, array(max_val).astype(first.dtype), np.float32)
    return ns, scaled_to(ns, first, np.float32), scaled_to(ns, second, np.float32), limit


@quiet_op
def psnr(a: Value, b: Value, max_val: Value, name: str | None = None) -> Array:
    """Returns the peak signal-to-noise ratio of images in decibels.

    >>> psnr(np.zeros((2, 2, 1), np.float32), np.full((2, 2, 1), 0.1, np.float32), 1.0).numpy()
    np.float32(20.0)
    """
    ns, x, y, limit = _pair(a, b, max_val, "psnr")
    error = ns.square(x - y).mean(axis=(-3, -2, -1))
    decibels = 20 * ns.log(limit) / np.log(10) - 10 / np.log(10) * ns.log(error)
    return decibels.astype(np.float32)


def _bell(size: int, sigma: float) -> np.ndarray:
    distances = np.arange(size, dtype=np.float32) - np.float32(size - 1) / 2
    weights = np.exp(-0.5 * (distances / np.float32(sigma)) ** 2)
    return (weights / weights.sum()).astype(np.float32)


def _blurred(ns: Namespace, x: Array, weights: np.ndarray) -> Array:
    """Returns weighted means of all windows inside the images."""
    for axis in (x.ndim - 3, x.ndim - 2):
        count = x.shape[axis] - len(weights) + 1
        total = None
        for offset, weight in enumerate(weights.tolist()):
            window = [slice(None)] * x.ndim
            window[axis] = slice(offset, offset + count)
            part = x[tuple(window)] * np.float32(weight)
            total = part if total is None else total + part
        x = total
    return x


def _ssim_parts(
    ns: Namespace, x: Array, y: Array, limit: Array, weights: np.ndarray, k1: float, k2: float
) -> tuple[Array, Array]:
    """Returns the likeness of each window, and its part without brightness."""
    first, second = (k1 * limit) ** 2, (k2 * limit) ** 2
    mean_x, mean_y = _blurred(ns, x, weights), _blurred(ns, y, weights)
    product, squares = mean_x * mean_y * 2, mean_x * mean_x + mean_y * mean_y
    brightness = (product + first) / (squares + first)
    product2 = _blurred(ns, x * y, weights) * 2
    squares2 = _blurred(ns, x * x + y * y, weights)
    contrast = (product2 - product + second) / (squares2 - squares + second)
    return brightness * contrast, contrast


def _require_size(x: Array, size: int) -> None:
    if min(x.shape[-3], x.shape[-2]) < size:
        raise errors.InvalidArgumentError(
            f"Images must have at least {size} rows and columns at each scale",
            f"they have {x.shape[-3]} by {x.shape[-2]}",
            "Pass a smaller `filter_size`, or fewer `power_factors`.",
        )


@op
def ssim(
    img1: Value,
    img2: Value,
    max_val: Value,
    filter_size: Value = 11,
    filter_sigma: Value = 1.5,
    k1: float = 0.01,
    k2: float = 0.03,
    return_index_map: bool = False,
) -> Array:
    """Returns the structural similarity of images, 1 for equal ones.

    >>> image = np.linspace(0, 1, 144, dtype=np.float32).reshape(12, 12, 1)
    >>> ssim(image, image, 1.0).numpy()
    np.float32(1.0)
    """
    ns, x, y, limit = _pair(img1, img2, max_val, "ssim")
    size = integer(filter_size, "filter_size")
    _require_size(x, size)
    weights = _bell(size, float(static(filter_sigma, "filter_sigma")))
    likeness, _ = _ssim_parts(ns, x, y, limit, weights, k1, k2)
    found = likeness.mean(axis=-1) if return_index_map else likeness.mean(axis=(-3, -2, -1))
    return found.astype(np.float32)


def _halved(ns: Namespace, x: Array) -> Array:
    """Returns the means of squares of four pixels; the last row or column is used twice."""
    for axis in (-3, -2):
        if x.shape[axis] % 2:
            last = x[..., -1:, :, :] if axis == -3 else x[..., -1:, :]
            x = ns.concatenate([x, last], axis=x.ndim + axis)
    x = x[..., ::2, :, :] + x[..., 1::2, :, :]
    return (x[..., ::2, :] + x[..., 1::2, :]) / 4


@op
def ssim_multiscale(
    img1: Value,
    img2: Value,
    max_val: Value,
    power_factors: Value = _POWERS,
    filter_size: Value = 11,
    filter_sigma: Value = 1.5,
    k1: float = 0.01,
    k2: float = 0.03,
) -> Array:
    """Returns the structural similarity of images over several scales, each half the last."""
    ns, x, y, limit = _pair(img1, img2, max_val, "ssim_multiscale")
    size = integer(filter_size, "filter_size")
    weights = _bell(size, float(static(filter_sigma, "filter_sigma")))
    powers = [float(power) for power in static(power_factors, "power_factors")]
    found = None
    for scale, power in enumerate(powers):
        if scale:
            x, y = _halved(ns, x), _halved(ns, y)
        _require_size(x, size)
        likeness, contrast = _ssim_parts(ns, x, y, limit, weights, k1, k2)
        used = likeness if scale == len(powers) - 1 else contrast
        part = ns.maximum(used.mean(axis=(-3, -2)), 0) ** np.float32(power)
        found = part if found is None else found * part
    if found is None:
        raise errors.InvalidArgumentError(
            "`power_factors` must have a number for each scale", "it is empty", "Pass [0.5, 0.5]."
        )
    return found.mean(axis=-1).astype(np.float32)


@op
def total_variation(images: Value, name: str | None = None) -> Array:
    """Returns the sum of the distances of neighbouring pixels, for each image.

    >>> total_variation(np.asarray([[[1.0], [3.0]]], np.float32)).numpy()
    np.float32(2.0)
    """
    ns, x = pixels(images)
    require_images(x, "total_variation")
    rows = ns.abs(x[..., 1:, :, :] - x[..., :-1, :, :]).sum(axis=(-3, -2, -1), dtype=x.dtype)
    columns = ns.abs(x[..., 1:, :] - x[..., :-1, :]).sum(axis=(-3, -2, -1), dtype=x.dtype)
    return rows + columns


@op
def image_gradients(image: Value) -> tuple[Array, Array]:
    """Returns the differences to the next row and to the next column; the last ones are 0.

    >>> rows, columns = image_gradients(np.arange(4.0).reshape(1, 2, 2, 1))
    >>> columns.numpy()[0, :, :, 0].tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """
    ns, x = pixels(image)
    require_images(x, "image_gradients", least=4)
    rows, columns = x[:, 1:] - x[:, :-1], x[:, :, 1:] - x[:, :, :-1]
    return (
        ns.pad(rows, [(0, 0), (0, 1), (0, 0), (0, 0)]),
        ns.pad(columns, [(0, 0), (0, 0), (0, 1), (0, 0)]),
    )


@op
def sobel_edges(image: Value) -> Array:
    """Returns the edges of images along rows and columns, in a new last dimension.

    >>> sobel_edges(np.zeros((1, 4, 4, 3), np.float32)).shape
    TensorShape([1, 4, 4, 3, 2])
    """
    ns, x = pixels(image)
    require_images(x, "sobel_edges", least=4)
    if kind_of(x.dtype) != "f":
        x = x.astype(np.float32)
    height, width = x.shape[1], x.shape[2]
    x = ns.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="reflect")
    edges = []
    for kernel in (_ROWS, _ROWS.T):
        total = None
        for (row, column), weight in np.ndenumerate(kernel):
            if weight:
                part = x[:, row : row + height, column : column + width]
                part = part * np.asarray(weight, x.dtype)
                total = part if total is None else total + part
        edges.append(total)
    return ns.stack(edges, axis=-1)
