"""Brightness, contrast, hue, saturation and gamma of images, by a number or at random."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf.dispatch import op
from replicax.tf.image.colors import colours_of, hue_and_range, saturation_of
from replicax.tf.image.pixels import pixels, require_channels, require_images, scaled_to
from replicax.tf.ops import random_sources
from replicax.tf.ops.operands import Array, Namespace, Value, array, quiet_op
from replicax.tf.ops.random_sources import Source

__all__ = [
    "adjust_brightness",
    "adjust_contrast",
    "adjust_gamma",
    "adjust_hue",
    "adjust_saturation",
    "per_image_standardization",
    "random_brightness",
    "random_contrast",
    "random_hue",
    "random_saturation",
    "stateless_random_brightness",
    "stateless_random_contrast",
    "stateless_random_hue",
    "stateless_random_saturation",
]

_COMPUTED = (np.dtype(np.float16), np.dtype(np.float32))


def _adjusted(images: Value, change: Callable[[Namespace, Array], Array]) -> Array:
    """Changes images as floats, and returns them in their own type, limited to its range."""
    ns, x = pixels(images)
    floats = x if x.dtype in _COMPUTED else scaled_to(ns, x, np.float32)
    return scaled_to(ns, change(ns, floats), x.dtype, saturate=True)


@op
def adjust_brightness(image: Value, delta: Value) -> Array:
    """Returns images with a number added, where 1 is the whole range of values.

    >>> adjust_brightness(np.asarray([0, 200], np.uint8), 0.5).numpy().tolist()
    [127, 255]
    """
    return _adjusted(image, lambda ns, x: x + _like(delta, x))


def _like(number: Value, x: Array) -> Array:
    return array(number).astype(x.dtype)


@op
def adjust_contrast(images: Value, contrast_factor: Value) -> Array:
    """Returns images with the distance of pixels to the mean of their channel multiplied.

    >>> adjust_contrast(np.asarray([[[1.0], [3.0]]], np.float32), 2.0).numpy()[0, :, 0]
    array([0., 4.], dtype=float32)
    """

    def change(ns: Namespace, x: Array) -> Array:
        require_images(x, "adjust_contrast", most=None)
        factor = _like(contrast_factor, x)
        if ns is np and x.dtype == np.float32:
            return _contrasted(x, factor)
        mean = x.mean(axis=(-3, -2), keepdims=True)
        return (x - mean) * factor + mean

    return _adjusted(images, change)


def _contrasted(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    # Rows of columns and channels: NumPy is slow with a last dimension of 3.
    *outer, height, width, channels = x.shape
    means = np.full(height * width, 1 / (height * width), np.float32) @ x.reshape(
        *outer, height * width, channels
    )
    rows = np.tile(means, width)[..., None, :]
    flat = x.reshape(*outer, height, width * channels) - rows
    flat *= factor
    flat += rows
    return flat.reshape(x.shape)


@quiet_op
def adjust_gamma(image: Value, gamma: Value = 1, gain: Value = 1) -> Array:
    """Returns `gain * image ** gamma`.

    >>> adjust_gamma(np.asarray([0.5], np.float32), 2).numpy()
    array([0.25], dtype=float32)
    """
    if not jax_compat.is_traced(gamma) and (np.asarray(gamma) < 0).any():
        raise errors.InvalidArgumentError(
            "`gamma` must not be negative", f"it is {gamma}", "Pass a number from 0."
        )
    return _adjusted(image, lambda ns, x: x ** _like(gamma, x) * _like(gain, x))


@op
def adjust_hue(image: Value, delta: Value, name: str | None = None) -> Array:
    """Returns colour images with a number, from -1 to 1, added to their hue.

    >>> adjust_hue(np.asarray([[[1.0, 0.0, 0.0]]], np.float32), 1 / 3).numpy().round(3).tolist()
    [[[0.0, 1.0, 0.0]]]
    """
    if not jax_compat.is_traced(delta) and not -1 <= float(np.asarray(delta)) <= 1:
        raise errors.InvalidArgumentError(
            "`delta` must be from -1 to 1", f"it is {delta}", "1 is the whole circle of colours."
        )

    def change(ns: Namespace, x: Array) -> Array:
        require_images(x, "adjust_hue", most=None)
        require_channels(x, "adjust_hue")
        hue, top, low = hue_and_range(ns, x)
        colours = colours_of(ns, ns.mod(hue + _like(delta, x), 1).astype(x.dtype))
        spread = top - low
        return ns.stack([colour * spread + low for colour in colours], axis=-1)

    return _adjusted(image, change)


@op
def adjust_saturation(image: Value, saturation_factor: Value, name: str | None = None) -> Array:
    """Returns colour images with their saturation multiplied.

    >>> adjust_saturation(np.asarray([[[0.5, 0.3, 0.3]]], np.float32), 0.0).numpy().tolist()
    [[[0.5, 0.5, 0.5]]]
    """

    def change(ns: Namespace, x: Array) -> Array:
        require_images(x, "adjust_saturation", most=None)
        require_channels(x, "adjust_saturation")
        hue, top, low = hue_and_range(ns, x)
        share = saturation_of(ns, top, low) * _like(saturation_factor, x)
        share = ns.clip(share, 0, 1)
        planes = [(1 - share + share * colour) * top for colour in colours_of(ns, hue)]
        return ns.stack(planes, axis=-1)

    return _adjusted(image, change)


@op
def per_image_standardization(image: Value) -> Array:
    """Returns images as floats with mean 0 and variance 1, each by itself.

    >>> per_image_standardization(np.asarray([[[1.0], [3.0]]], np.float32)).numpy()[0, :, 0]
    array([-1.,  1.], dtype=float32)
    """
    ns, x = pixels(image)
    require_images(x, "per_image_standardization", most=None)
    x = scaled_to(ns, x, np.float32)
    axes = (-3, -2, -1)
    centred = x - x.mean(axis=axes, keepdims=True)
    # Images of one colour have no variance.
    least = np.asarray(1 / np.sqrt(max(1, int(np.prod(x.shape[-3:])))), x.dtype)
    variance = ns.square(centred).mean(axis=axes, keepdims=True)
    return centred / ns.sqrt(ns.maximum(variance, least * least))


# At random: one number for all images of a call.


def _number(source: Source, low: Value, high: Value) -> Array:
    if isinstance(source, np.random.Generator):
        return np.asarray(source.uniform(low, high), np.float32)
    return jax.random.uniform(source, (), minval=low, maxval=high)


@op(differentiable=False)
def _drawn(low: Value, high: Value, seed: Value) -> Array:
    return _number(random_sources.stateful(seed), low, high)


@op(differentiable=False)
def _stateless_drawn(low: Value, high: Value, seed: Value) -> Array:
    return _number(random_sources.stateless(seed), low, high)


def _require_order(low: Value, high: Value, least: float) -> None:
    if not low < high or low < least:
        raise errors.InvalidArgumentError(
            f"`lower` must be below `upper`, and at least {least:g}",
            f"they are {low} and {high}",
            "Exchange them.",
        )


def _require_delta(delta: Value, most: float) -> None:
    if not 0 <= delta <= most:
        raise errors.InvalidArgumentError(
            f"`max_delta` must be from 0 to {most:g}", f"it is {delta}", "Pass 0.1."
        )


def random_brightness(image: Value, max_delta: Value, seed: Value = None) -> Value:
    """Returns images with a random number from -max_delta to max_delta added.

    >>> random_brightness(np.zeros((2, 2, 3), np.uint8), 0.1).dtype
    tf.uint8
    """
    _require_delta(max_delta, np.inf)
    return adjust_brightness(image, _drawn(-max_delta, max_delta, seed))


def stateless_random_brightness(image: Value, max_delta: Value, seed: Value) -> Value:
    """Returns images with the random number of a seed added."""
    _require_delta(max_delta, np.inf)
    return adjust_brightness(image, _stateless_drawn(-max_delta, max_delta, seed))


def random_contrast(image: Value, lower: Value, upper: Value, seed: Value = None) -> Value:
    """Returns images with their contrast multiplied by a random number."""
    _require_order(lower, upper, 0)
    return adjust_contrast(image, _drawn(lower, upper, seed))


def stateless_random_contrast(image: Value, lower: Value, upper: Value, seed: Value) -> Value:
    """Returns images with their contrast multiplied by the random number of a seed."""
    _require_order(lower, upper, 0)
    return adjust_contrast(image, _stateless_drawn(lower, upper, seed))


def random_hue(image: Value, max_delta: Value, seed: Value = None) -> Value:
    """Returns colour images with a random number added to their hue."""
    _require_delta(max_delta, 0.5)
    return adjust_hue(image, _drawn(-max_delta, max_delta, seed))


def stateless_random_hue(image: Value, max_delta: Value, seed: Value) -> Value:
    """Returns colour images with the random number of a seed added to their hue."""
    _require_delta(max_delta, 0.5)
    return adjust_hue(image, _stateless_drawn(-max_delta, max_delta, seed))


def random_saturation(image: Value, lower: Value, upper: Value, seed: Value = None) -> Value:
    """Returns colour images with their saturation multiplied by a random number."""
    _require_order(lower, upper, 0)
    return adjust_saturation(image, _drawn(lower, upper, seed))


def stateless_random_saturation(
    image: Value, lower: Value, upper: Value, seed: Value = None
) -> Value:
    """Returns colour images with their saturation multiplied by the random number of a seed."""
    _require_order(lower, upper, 0)
    return adjust_saturation(image, _stateless_drawn(lower, upper, seed))
