"""Images that are turned over, turned round, or transposed."""

from __future__ import annotations

import jax
import numpy as np

from replicax.foundation import jax_compat
from replicax.tf.dispatch import op
from replicax.tf.image.pixels import pixels, require_images
from replicax.tf.ops import random_sources
from replicax.tf.ops.operands import Array, Namespace, Value, array, integer, static
from replicax.tf.ops.random_sources import Source

__all__ = [
    "flip_left_right",
    "flip_up_down",
    "random_flip_left_right",
    "random_flip_up_down",
    "rot90",
    "stateless_random_flip_left_right",
    "stateless_random_flip_up_down",
    "transpose",
]


def _mirrored(x: Array, axis: int) -> Array:
    return x[..., ::-1, :] if axis == -2 else x[..., ::-1, :, :]


@op
def flip_left_right(image: Value) -> Array:
    """Returns images with left and right exchanged.

    >>> flip_left_right(np.asarray([[[1], [2]]])).numpy().tolist()
    [[[2], [1]]]
    """
    _, x = pixels(image)
    require_images(x, "flip_left_right")
    return _mirrored(x, -2)


@op
def flip_up_down(image: Value) -> Array:
    """Returns images upside down."""
    _, x = pixels(image)
    require_images(x, "flip_up_down")
    return _mirrored(x, -3)


@op
def transpose(image: Value, name: str | None = None) -> Array:
    """Returns images with rows and columns exchanged."""
    ns, x = pixels(image)
    require_images(x, "transpose")
    return ns.swapaxes(x, -3, -2)


@op
def rot90(image: Value, k: Value = 1, name: str | None = None) -> Array:
    """Returns images turned counter-clockwise by k right angles.

    >>> rot90(np.asarray([[[1], [2]]])).numpy()[:, 0, 0].tolist()
    [2, 1]
    """
    ns, x = pixels(image)
    require_images(x, "rot90")
    axes = (x.ndim - 3, x.ndim - 2)
    if not jax_compat.is_traced(k):
        return ns.rot90(x, integer(k, "k"), axes)
    # The result has one shape only if the image is a square.
    turns = [lambda x, n=n: ns.rot90(x, n, axes) for n in range(4)]
    return jax.lax.switch(array(k) % 4, turns, x)


# Random ones: each image of a batch is turned over or not.


def _coins(source: Source, image: Value) -> Array:
    x = array(image)
    require_images(x, "random_flip_left_right")
    sizes = () if x.ndim == 3 else (x.shape[0], 1, 1, 1)
    if isinstance(source, np.random.Generator):
        return np.asarray(source.random(sizes) < 0.5)
    return jax.random.bernoulli(source, 0.5, sizes)


@op(differentiable=False)
def _random_coins(image: Value, seed: Value) -> Array:
    return _coins(random_sources.stateful(seed), image)


@op(differentiable=False)
def _stateless_coins(image: Value, seed: Value) -> Array:
    return _coins(random_sources.stateless(seed), image)


@op
def _mirrored_where(image: Value, coins: Value, axis: int) -> Array:
    ns, x = pixels(image)
    return _chosen(ns, x, coins, axis)


def _chosen(ns: Namespace, x: Array, coins: Array, axis: int) -> Array:
    if ns is np and not coins.ndim:
        return _mirrored(x, axis) if static(coins, "coins") else x
    return ns.where(coins, _mirrored(x, axis), x)


def random_flip_left_right(image: Value, seed: Value = None) -> Value:
    """Returns images with left and right exchanged in half of the calls.

    >>> random_flip_left_right(np.ones((2, 2, 3))).shape
    TensorShape([2, 2, 3])
    """
    return _mirrored_where(image, _random_coins(image, seed), -2)


def random_flip_up_down(image: Value, seed: Value = None) -> Value:
    """Returns images upside down in half of the calls."""
    return _mirrored_where(image, _random_coins(image, seed), -3)


def stateless_random_flip_left_right(image: Value, seed: Value) -> Value:
    """Returns images with left and right exchanged for half of the seeds."""
    return _mirrored_where(image, _stateless_coins(image, seed), -2)


def stateless_random_flip_up_down(image: Value, seed: Value) -> Value:
    """Returns images upside down for half of the seeds."""
    return _mirrored_where(image, _stateless_coins(image, seed), -3)
