"""Functions of `tf.compat.v1.image` that version 2 does not have, or has with other rules."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.tf import image as v2
from replicax.tf.arguments import Number, Value
from replicax.tf.dispatch import on_host, op
from replicax.tf.image.pixels import pixels as pixels_of
from replicax.tf.image.resizing import Rule, resized, resized_with_pad
from replicax.tf.ops.operands import integers

_OWN = [
    "extract_image_patches",
    "resize",
    "resize_area",
    "resize_bicubic",
    "resize_bilinear",
    "resize_image_with_crop_or_pad",
    "resize_image_with_pad",
    "resize_images",
    "resize_nearest_neighbor",
    "transpose_image",
]


@op
def resize_images(
    images: Value,
    size: Number,
    method: Value = "bilinear",
    align_corners: bool = False,
    preserve_aspect_ratio: bool = False,
    name: str | None = None,
) -> Any:
    """Resizes images by the rules of version 1; images of the wanted size stay as they are.

    Args:
      images: Images, or one.
      size: The new height and width.
      method: A name or number of `ResizeMethod`.
      align_corners: Whether the last pixels lie on each other, as the first ones do.
      preserve_aspect_ratio: Whether the images are only made to fit the size.
      name: Accepted for portability.
    """
    _, pixels = pixels_of(images)
    is_same = not preserve_aspect_ratio and pixels.shape[-3:-1] == tuple(integers(size, "size"))
    # In functions of datasets TensorFlow seldom knows the shape, and converts to float32.
    if is_same and not on_host():
        return pixels
    return resized(images, size, method, preserve_aspect_ratio, rule=_rule(align_corners, False))


resize = resize_images


def _rule(align_corners: bool, half_pixel_centers: bool) -> Rule:
    if align_corners and half_pixel_centers:
        raise errors.InvalidArgumentError(
            "Pixels have their centres at half numbers, or the corners are aligned",
            "align_corners and half_pixel_centers are both True",
            "Leave one of them out.",
        )
    return "corners" if align_corners else "half" if half_pixel_centers else "start"


def _resizing(method: str) -> Any:
    @op
    def resize(
        images: Value,
        size: Number,
        align_corners: bool = False,
        name: str | None = None,
        half_pixel_centers: bool = False,
    ) -> Any:
        rule = _rule(align_corners, half_pixel_centers)
        found = resized(images, size, method, False, rule=rule)
        return found if method == "nearest" else found.astype(np.float32)

    resize.__doc__ = f"Resizes images by the method {method!r}."
    return resize


resize_area = _resizing("area")
resize_bicubic = _resizing("bicubic")
resize_bilinear = _resizing("bilinear")
resize_nearest_neighbor = _resizing("nearest")


def resize_image_with_crop_or_pad(image: Value, target_height: int, target_width: int) -> Any:
    """Cuts images, or pads them with zeros, to a size around their middle."""
    return v2.resize_with_crop_or_pad(image, target_height, target_width)


def resize_image_with_pad(
    image: Value,
    target_height: int,
    target_width: int,
    method: Value = "bilinear",
    align_corners: bool = False,
) -> Any:
    """Resizes images in their proportions, and pads them with zeros."""
    scale = functools.partial(resize_images, align_corners=align_corners)
    return resized_with_pad(image, target_height, target_width, method, scale)


def transpose_image(image: Value, name: str | None = None) -> Any:
    """Exchanges height and width."""
    return v2.transpose(image, name)


def extract_image_patches(
    images: Value,
    ksizes: Value = None,
    strides: Value = None,
    rates: Value = None,
    padding: Value = None,
    name: str | None = None,
    sizes: Value = None,
) -> Any:
    """Returns windows of images, along the last dimension."""
    found = sizes if ksizes is None else ksizes
    return v2.extract_patches(images, found, strides, rates, padding, name)


def __getattr__(name: str) -> Any:
    return getattr(v2, name)


__all__ = sorted({*_OWN, *dir(v2)})  # pyright: ignore[reportUnsupportedDunderAll]
