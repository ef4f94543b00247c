"""How functions of images take their arguments: arrays, ranks, and values of other types."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes
from replicax.tf.ops.creation import saturate_cast
from replicax.tf.ops.operands import Array, DTypeLike, Namespace, Value, array, kind_of, xp


def pixels(images: Value) -> tuple[Namespace, Array]:
    """Returns the namespace to compute in, and the images as an array of it.

    >>> from replicax.tf import dispatch
    >>> with dispatch.host_mode():
    ...     pixels([[[1.0]]])[0].__name__
    'numpy'
    """
    found = array(images)
    ns = xp(found)
    return ns, found if ns is np else jnp.asarray(found)


def require_images(x: Array, op: str, least: int = 3, most: int | None = 4) -> None:
    """Raises an error unless an array has the dimensions of one image, or of several."""
    if x.ndim >= least and (most is None or x.ndim <= most):
        return
    raise errors.InvalidArgumentError(
        f"`tf.image.{op}` takes an image (height, width, channels) or a batch of them",
        f"the shape is {tuple(x.shape)}",
        "Add the channels with x[..., tf.newaxis], or reshape it.",
    )


def require_channels(x: Array, op: str, count: int = 3) -> None:
    """Raises an error unless the last dimension has a number of channels."""
    if not x.ndim or x.shape[-1] != count:
        raise errors.InvalidArgumentError(
            f"`tf.image.{op}` takes images with {count} channel{'s' if count > 1 else ''} last",
            f"the shape is {tuple(x.shape)}",
            "Use tf.image.grayscale_to_rgb or rgb_to_grayscale to change the channels.",
        )


def scaled_to(ns: Namespace, x: Array, dtype: DTypeLike, saturate: bool = False) -> Array:
    """Returns images in another type: floats from 0 to 1, integers in their whole range.

    >>> scaled_to(np, np.asarray([0, 255], np.uint8), "float32").tolist()
    [0.0, 1.0]
    """
    wanted, own = dtypes.as_dtype(dtype), dtypes.as_dtype(x.dtype)
    if wanted == own:
        return x
    if not (wanted.is_integer or wanted.is_floating):
        raise errors.ArgumentTypeError(
            "`dtype` must be an integer or float type", f"it is {wanted.name}", "Pass tf.float32."
        )
    target = wanted.dtype
    if own.is_integer and wanted.is_integer:
        return _rescaled(ns, x, own, wanted, saturate)
    if own.is_integer:
        if target == np.float32 and own.size <= 2:
            return ns.multiply(x, np.float32(1.0 / own.max))
        return (x.astype(target) * np.asarray(1.0 / own.max, target)).astype(target)
    if wanted.is_floating:
        return x.astype(target)
    grown = x * np.asarray(wanted.max + 0.5, x.dtype)
    return limited(grown, target) if saturate else grown.astype(target)


def _rescaled(
    ns: Namespace, x: Array, own: dtypes.DType, wanted: dtypes.DType, saturate: bool
) -> Array:
    if own.max > wanted.max:
        shrunk = x // np.asarray((own.max + 1) // (wanted.max + 1), x.dtype)
        return limited(shrunk, wanted.dtype) if saturate else shrunk.astype(wanted.dtype)
    factor = np.asarray((wanted.max + 1) // (own.max + 1), wanted.dtype)
    wide = limited(x, wanted.dtype) if saturate else x.astype(wanted.dtype)
    return ns.multiply(wide, factor)


def limited(x: Array, dtype: DTypeLike) -> Array:
    """Returns values in another type, limited to its range."""
    target = np.dtype(dtype)
    if x.dtype == np.float32 and target == np.uint8:
        return xp(x).clip(x, 0, 255).astype(target)
    return saturate_cast.raw(x, target)


def as_floats(ns: Namespace, x: Array) -> Array:
    """Returns images of integers as float32 from 0 to 1; floats stay as they are."""
    return x if kind_of(x.dtype) == "f" else scaled_to(ns, x, dtypes.float32)
