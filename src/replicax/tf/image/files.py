"""Images that go through a file format: JPEG of another quality, WebP and JPEG XL."""

from __future__ import annotations

import jax
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf import dtypes
from replicax.tf.dispatch import op
from replicax.tf.image.pixels import pixels, require_images, scaled_to
from replicax.tf.io import images as file_images
from replicax.tf.ops import random
from replicax.tf.ops.operands import Array, DTypeLike, Value, array
from replicax.tf.tensor import wrap

__all__ = [
    "adjust_jpeg_quality",
    "decode_webp",
    "random_jpeg_quality",
    "stateless_random_jpeg_quality",
]


@op(differentiable=False)
def adjust_jpeg_quality(
    image: Value, jpeg_quality: Value, dct_method: str = "", name: str | None = None
) -> Array:
    """Returns an image as it is after it was written as a JPEG.

    Args:
      image: (height, width, channels), with 1 or 3 channels.
      jpeg_quality: From 0 to 100.
      dct_method: Accepted for portability.
      name: Accepted for portability.

    >>> adjust_jpeg_quality(np.zeros((4, 4, 3), np.uint8), 50).shape
    TensorShape([4, 4, 3])
    """
    ns, x = pixels(image)
    require_images(x, "adjust_jpeg_quality", most=3)
    whole = scaled_to(ns, x, np.uint8, saturate=True)
    if jax_compat.is_traced(whole) or jax_compat.is_traced(jpeg_quality):
        shape = jax.ShapeDtypeStruct(whole.shape, np.uint8)
        found = jax.pure_callback(_written, shape, whole, array(jpeg_quality))
    else:
        found = _written(np.asarray(whole), np.asarray(jpeg_quality))
    return scaled_to(ns, found if ns is np else ns.asarray(found), x.dtype, saturate=True)


def _written(image: Array, quality: Array) -> np.ndarray:
    pixels = np.asarray(image)
    data = file_images.encode_jpeg(pixels, quality=int(np.asarray(quality)))
    return file_images.decode_jpeg(data, pixels.shape[-1]).numpy()


def _require_qualities(low: Value, high: Value) -> None:
    if not 0 <= low < high <= 100:
        raise errors.InvalidArgumentError(
            "The qualities must be from 0 to 100, the least one first",
            f"they are {low} and {high}",
            "Pass 75 and 95.",
        )


def random_jpeg_quality(
    image: Value, min_jpeg_quality: Value, max_jpeg_quality: Value, seed: Value = None
) -> Value:
    """Returns an image as it is after it was written as a JPEG of random quality."""
    _require_qualities(min_jpeg_quality, max_jpeg_quality)
    limits = min_jpeg_quality, max_jpeg_quality
    return adjust_jpeg_quality(image, random.uniform([], *limits, dtypes.int32, seed))


def stateless_random_jpeg_quality(
    image: Value, min_jpeg_quality: Value, max_jpeg_quality: Value, seed: Value
) -> Value:
    """Returns an image as it is after it was written as a JPEG of the quality of a seed."""
    _require_qualities(min_jpeg_quality, max_jpeg_quality)
    limits = min_jpeg_quality, max_jpeg_quality
    return adjust_jpeg_quality(image, random.stateless_uniform([], seed, *limits, dtypes.int32))


def decode_webp(
    contents: Value, channels: int = 0, dtype: DTypeLike = dtypes.uint8, name: str | None = None
) -> Value:
    """Returns the frames of a WebP as uint8 (frames, height, width, channels).

    Args:
      contents: The bytes of the file.
      channels: 3 for colours, 4 with alpha, 0 for what the file has.
      dtype: tf.uint8.
      name: Accepted for portability.
    """
    if dtypes.as_dtype(dtype) != dtypes.uint8:
        raise errors.InvalidArgumentError(
            "`dtype` of decode_webp must be tf.uint8",
            f"it is {dtypes.as_dtype(dtype).name}",
            "Convert with tf.image.convert_image_dtype.",
        )
    image = file_images._opened(contents, ("WEBP",))
    frames = []
    for index in range(getattr(image, "n_frames", 1)):
        image.seek(index)
        frames.append(file_images._pixels(image, channels))
    return wrap(np.stack(frames))
