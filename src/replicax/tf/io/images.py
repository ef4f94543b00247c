"""Images in files: decoding and encoding by Pillow, on the host."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.foundation import errors, lazy
from replicax.tf import dtypes
from replicax.tf.arguments import DTypeLike, Value
from replicax.tf.tensor import Tensor, wrap

if TYPE_CHECKING:
    from PIL import Image, ImageSequence
else:
    Image = lazy.module("PIL.Image", "pillow")
    ImageSequence = lazy.module("PIL.ImageSequence", "pillow")

__all__ = [
    "decode_and_crop_jpeg",
    "decode_bmp",
    "decode_gif",
    "decode_image",
    "decode_jpeg",
    "decode_png",
    "encode_jpeg",
    "encode_png",
    "extract_jpeg_shape",
    "is_jpeg",
]

_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_CHANNELS = {"1": 1, "L": 1, "I;16": 1, "I": 1, "LA": 2, "PA": 4, "RGBA": 4}


def content_bytes(contents: Value) -> bytes:
    """Returns the bytes of a scalar tensor of strings, or of Python or NumPy bytes.

    >>> content_bytes(np.array(b"ab", dtype=object))
    b'ab'
    """
    if isinstance(contents, Tensor):
        contents = contents.numpy()
    if isinstance(contents, np.ndarray) and contents.ndim == 0:
        contents = contents.item()
    if isinstance(contents, str):
        return contents.encode("utf-8")
    if not isinstance(contents, bytes):
        raise errors.ArgumentTypeError(
            "The contents of a file are one string of bytes",
            f"{type(contents).__name__} was given",
            "Pass the result of tf.io.read_file, or a record of a TFRecord file.",
        )
    return contents


def _opened(contents: Value, kinds: tuple[str, ...] = ()) -> Any:
    data = content_bytes(contents)
    try:
        image = Image.open(io.BytesIO(data))
    except OSError:
        raise errors.InvalidArgumentError(
            f"The contents must be an image{' (' + ', '.join(kinds) + ')' if kinds else ''}",
            f"{len(data)} bytes that begin with {data[:8]!r} are not",
            "Check the file, and that it was read whole.",
        ) from None
    return image


def _pixels(image: Value, channels: int | None) -> np.ndarray:
    """Returns (height, width, channels); 0 channels keeps those of the file."""
    count = channels or 0
    if count not in (0, *_MODES):
        raise errors.InvalidArgumentError(
            "`channels` must be 0, 1, 2, 3 or 4", f"it is {channels}", "Pass 3 for colours."
        )
    if not count:
        is_transparent = image.mode == "P" and "transparency" in image.info
        count = 4 if is_transparent else _CHANNELS.get(image.mode, 3)
    try:
        if image.mode in ("I;16", "I;16B", "I"):
            wide = np.asarray(image).astype(np.int64)
            image = Image.fromarray((wide >> 8).astype(np.uint8))
        if image.mode != _MODES[count]:
            image = image.convert(_MODES[count])
        array = np.array(image, dtype=np.uint8)
    except OSError as error:
        raise errors.InvalidArgumentError(
            "The image must be complete", str(error), "Check that the file was written whole."
        ) from None
    return array[..., None] if array.ndim == 2 else array


def decode_jpeg(
    contents: Value,
    channels: int = 0,
    ratio: int = 1,
    fancy_upscaling: bool = True,
    try_recover_truncated: bool = False,
    acceptable_fraction: float = 1,
    dct_method: str = "",
    name: str | None = None,
) -> Any:
    """Returns the pixels of a JPEG as uint8 (height, width, channels).

    Args:
      contents: The bytes of the file.
      channels: 1 for grey, 3 for colours, 0 for what the file has.
      ratio: 1, 2, 4 or 8: the factor by which it is made smaller.
      fancy_upscaling: Accepted for portability.
      try_recover_truncated: Whether the missing end of a file is filled with grey.
      acceptable_fraction: Accepted for portability.
      dct_method: Accepted for portability.
      name: Accepted for portability.
    """
    del fancy_upscaling, acceptable_fraction, dct_method, name
    if ratio not in (1, 2, 4, 8):
        raise errors.InvalidArgumentError(
            "`ratio` must be 1, 2, 4 or 8", f"it is {ratio}", "Resize by tf.image.resize."
        )
    data = content_bytes(contents)
    if try_recover_truncated:
        data += b"\xff\xd9"
    image = _opened(data, ("JPEG", "PNG", "GIF", "BMP"))
    if ratio > 1:
        width, height = image.size
        image.draft(None, (-(-width // ratio), -(-height // ratio)))
    return wrap(_pixels(image, channels))


def decode_png(
    contents: Value, channels: int = 0, dtype: DTypeLike = np.uint8, name: str | None = None
) -> Any:
    """Returns the pixels of a PNG as uint8 or uint16 (height, width, channels).

    Args:
      contents: The bytes of the file.
      channels: 1, 2 (grey and alpha), 3, 4 (colours and alpha), or 0 for what the file has.
      dtype: tf.uint8 or tf.uint16.
      name: Accepted for portability.
    """
    del name
    wanted = dtypes.as_dtype(dtype)
    image = _opened(contents, ("PNG", "JPEG", "GIF", "BMP"))
    if wanted == dtypes.uint8:
        return wrap(_pixels(image, channels))
    if wanted != dtypes.uint16:
        raise errors.InvalidArgumentError(
            "`dtype` of decode_png must be tf.uint8 or tf.uint16",
            f"it is {wanted.name}",
            "Convert with tf.image.convert_image_dtype.",
        )
    if image.mode in ("I;16", "I;16B", "I"):
        grey = np.asarray(image).astype(np.uint16)[..., None]
        return wrap(np.repeat(grey, 3, axis=-1) if channels == 3 else grey)
    return wrap(_pixels(image, channels).astype(np.uint16) * 257)


def decode_bmp(contents: Value, channels: int = 0, name: str | None = None) -> Any:
    """Returns the pixels of a BMP as uint8 (height, width, channels)."""
    del name
    return wrap(_pixels(_opened(contents, ("BMP",)), channels))


def decode_gif(contents: Value, name: str | None = None) -> Any:
    """Returns the frames of a GIF as uint8 (frames, height, width, 3)."""
    del name
    image = _opened(contents, ("GIF",))
    frames = [_pixels(frame.convert("RGB"), 3) for frame in ImageSequence.Iterator(image)]
    return wrap(np.stack(frames))


def decode_image(
    contents: Value,
    channels: int | None = None,
    dtype: DTypeLike = np.uint8,
    name: str | None = None,
    expand_animations: bool = True,
) -> Any:
    """Returns the pixels of a JPEG, PNG, BMP or GIF.

    Args:
      contents: The bytes of the file.
      channels: The number of channels; None or 0 for what the file has.
      dtype: uint8, or another type, to which values are scaled as by
        `tf.image.convert_image_dtype`.
      name: Accepted for portability.
      expand_animations: Whether a GIF has a dimension of frames; its first frame otherwise.
    """
    del name
    image = _opened(contents)
    if image.format == "GIF" and expand_animations:
        array = decode_gif(contents).numpy()
    elif image.format == "GIF":
        array = _pixels(image.convert("RGB"), channels or 3)
    elif image.format == "PNG":
        array = decode_png(contents, channels or 0).numpy()
    else:
        array = _pixels(image, channels)
    return wrap(scaled(array, dtypes.as_dtype(dtype).as_numpy_dtype))


def scaled(pixels: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns pixels of uint8 in another type: floats from 0 to 1, integers in their range.

    >>> scaled(np.array([0, 255], np.uint8), np.float32).tolist()
    [0.0, 1.0]
    """
    wanted = np.dtype(dtype)
    if wanted == np.uint8:
        return pixels
    if wanted.kind == "f":
        return (pixels.astype(np.float32) * np.float32(1 / 255)).astype(wanted)
    shift = (np.iinfo(wanted).max + 1) // 256
    return pixels.astype(wanted) * np.array(shift, wanted)


def decode_and_crop_jpeg(
    contents: Value,
    crop_window: Value,
    channels: int = 0,
    ratio: int = 1,
    fancy_upscaling: bool = True,
    try_recover_truncated: bool = False,
    acceptable_fraction: float = 1,
    dct_method: str = "",
    name: str | None = None,
) -> Any:
    """Returns a part of a JPEG: `crop_window` is (top, left, height, width)."""
    del fancy_upscaling, acceptable_fraction, dct_method, name
    window = np.asarray(crop_window.numpy() if isinstance(crop_window, Tensor) else crop_window)
    top, left, height, width = (int(size) for size in window)
    image = decode_jpeg(contents, channels, ratio, try_recover_truncated=try_recover_truncated)
    array = image.numpy()
    if top < 0 or left < 0 or top + height > array.shape[0] or left + width > array.shape[1]:
        raise errors.InvalidArgumentError(
            f"The window must be inside the image of {array.shape[0]} by {array.shape[1]}",
            f"it is {window.tolist()}",
            "Pass (top, left, height, width).",
        )
    return wrap(np.ascontiguousarray(array[top : top + height, left : left + width]))


def extract_jpeg_shape(
    contents: Value, output_type: DTypeLike = np.int32, name: str | None = None
) -> Any:
    """Returns (height, width, channels) of a JPEG without decoding it."""
    del name
    image = _opened(contents, ("JPEG",))
    shape = (image.height, image.width, _CHANNELS.get(image.mode, 3))
    return wrap(np.array(shape, dtypes.as_dtype(output_type).as_numpy_dtype))


def is_jpeg(contents: Value, name: str | None = None) -> Any:
    r"""Tells whether bytes begin like a JPEG.

    >>> bool(is_jpeg(b"\xff\xd8\xff\xe0"))
    True
    """
    del name
    return wrap(np.array(content_bytes(contents)[:3] == b"\xff\xd8\xff"))


def encode_jpeg(
    image: Value,
    format: str = "",
    quality: int = 95,
    progressive: bool = False,
    optimize_size: bool = False,
    chroma_downsampling: bool = True,
    density_unit: str = "in",
    x_density: int = 300,
    y_density: int = 300,
    xmp_metadata: str = "",
    name: str | None = None,
) -> Any:
    """Returns an image of uint8 as the bytes of a JPEG."""
    del format, density_unit, xmp_metadata, name
    return _encoded(
        image,
        "JPEG",
        (1, 3),
        quality=int(quality),
        progressive=progressive,
        optimize=optimize_size,
        subsampling=2 if chroma_downsampling else 0,
        dpi=(x_density, y_density),
    )


def encode_png(image: Value, compression: int = -1, name: str | None = None) -> Any:
    """Returns an image of uint8 as the bytes of a PNG."""
    del name
    level = {} if compression < 0 else {"compress_level": int(compression)}
    return _encoded(image, "PNG", (1, 2, 3, 4), **level)


def _encoded(image: Value, kind: str, allowed: tuple[int, ...], **options: Any) -> Any:
    array = np.asarray(image.numpy() if isinstance(image, Tensor) else image)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] not in allowed:
        raise errors.InvalidArgumentError(
            f"A {kind} is made of uint8 (height, width, channels), with {allowed} channels",
            f"this is {array.dtype} of shape {array.shape}",
            "Convert it: tf.image.convert_image_dtype(image, tf.uint8).",
        )
    buffer = io.BytesIO()
    picture = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    picture.save(buffer, kind, **options)
    return wrap(np.array(buffer.getvalue(), dtype=object))
