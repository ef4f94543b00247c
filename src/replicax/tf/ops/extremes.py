"""The larger and smaller of two elements, and magnitudes, with the gradients of TensorFlow.

JAX shares the gradient between equal elements, and has one of 1 for |0|; in TensorFlow the first of
two equal elements has it, and |0| has none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf.ops.operands import Array, Value, kind_of, xp


@jax.custom_jvp
def _larger(x: Array, y: Array) -> Array:
    return jnp.maximum(x, y)


@_larger.defjvp
def _(primals: Value, tangents: Value) -> Value:
    (x, y), (dx, dy) = primals, tangents
    return _larger(x, y), jnp.where(x >= y, dx, dy)


@jax.custom_jvp
def _smaller(x: Array, y: Array) -> Array:
    return jnp.minimum(x, y)


@_smaller.defjvp
def _(primals: Value, tangents: Value) -> Value:
    (x, y), (dx, dy) = primals, tangents
    return _smaller(x, y), jnp.where(x <= y, dx, dy)


@jax.custom_jvp
def _size(x: Array) -> Array:
    return jnp.abs(x)


@_size.defjvp
def _(primals: Value, tangents: Value) -> Value:
    return _size(primals[0]), jnp.sign(primals[0]) * tangents[0]


def larger(x: Array, y: Array) -> Array:
    """Returns the larger of two elements; of equal ones, the first has the gradient."""
    if xp(x, y) is np or kind_of(x.dtype) != "f":
        return xp(x, y).maximum(x, y)
    return _larger(x, y)


def smaller(x: Array, y: Array) -> Array:
    """Returns the smaller of two elements; of equal ones, the first has the gradient."""
    if xp(x, y) is np or kind_of(x.dtype) != "f":
        return xp(x, y).minimum(x, y)
    return _smaller(x, y)


def magnitude(x: Array) -> Array:
    """Returns |x|."""
    if xp(x) is np or kind_of(x.dtype) == "c":
        return xp(x).abs(x)
    return _size(x)
