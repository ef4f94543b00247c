"""Functions of `tf.compat.v1.image` that version 2 does not have, beside those that it has."""

from __future__ import annotations

from typing import Any

from replicax.foundation import errors
from replicax.tf import image as v2
from replicax.tf.arguments import Number, Value

_OWN = [
    "extract_image_patches",
    "resize_area",
    "resize_bicubic",
    "resize_bilinear",
    "resize_image_with_crop_or_pad",
    "resize_image_with_pad",
    "resize_images",
    "resize_nearest_neighbor",
    "transpose_image",
]


def resize_images(
    images: Value,
    size: Number,
    method: Value = "bilinear",
    align_corners: bool = False,
    preserve_aspect_ratio: bool = False,
    name: str | None = None,
) -> Any:
    """Resizes images; pixels have their centres at half numbers, as in version 2.

    Args:
      images: Images, or one.
      size: The new height and width.
      method: A name or number of `ResizeMethod`.
      align_corners: Not offered as True.
      preserve_aspect_ratio: Whether the images are only made to fit the size.
      name: Accepted for portability.
    """
    del name
    _refuse_corners(align_corners)
    return v2.resize(images, size, _method(method), preserve_aspect_ratio)


def _refuse_corners(align_corners: bool) -> None:
    if align_corners:
        raise errors.UnsupportedError(
            "Images are resized with pixels that have their centres at half numbers",
            "align_corners=True was given",
            "Remove it; values near the edges differ a little.",
        )


def _method(method: Value) -> Any:
    numbered = ("bilinear", "nearest", "bicubic", "area")
    return numbered[method] if isinstance(method, int) else method


def _resizing(method: str) -> Any:
    def resize(
        images: Value,
        size: Number,
        align_corners: bool = False,
        name: str | None = None,
        half_pixel_centers: bool = False,
    ) -> Any:
        del name, half_pixel_centers
        return resize_images(images, size, method, align_corners)

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
    _refuse_corners(align_corners)
    return v2.resize_with_pad(image, target_height, target_width, _method(method))


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
