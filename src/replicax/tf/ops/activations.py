"""Activations of `tf.nn`, and softmax."""

from __future__ import annotations

import jax
import numpy as np

from replicax.tf.ops import special
from replicax.tf.ops.maths import sigmoid
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
    integer,
    kind_of,
    normalized,
    numbers,
    quiet_op,
    xp,
)

__all__ = [
    "crelu",
    "elu",
    "gelu",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "relu",
    "relu6",
    "selu",
    "silu",
    "softmax",
    "softplus",
    "softsign",
    "swish",
]

_SELU_SCALE = 1.0507009873554805
_SELU_ALPHA = 1.6732632423543772


@quiet_op
def relu(features: Value, name: str | None = None) -> Array:
    """Returns max(x, 0)."""
    x = numbers(features, "nn.relu", "fiu")
    return xp(x).maximum(x, np.asarray(0, x.dtype)) if xp(x) is np else jax.nn.relu(x)


@quiet_op
def relu6(features: Value, name: str | None = None) -> Array:
    """Returns min(max(x, 0), 6)."""
    x = numbers(features, "nn.relu6", "fiu")
    six = np.asarray(6, x.dtype)
    if xp(x) is np:
        return np.minimum(np.maximum(x, np.asarray(0, x.dtype)), six)
    # With a gradient of 0 at both ends.
    return xp(x).where(x >= six, six, jax.nn.relu(x))


@quiet_op
def crelu(features: Value, axis: Value = -1, name: str | None = None) -> Array:
    """Returns relu(x) and relu(-x), joined along a dimension."""
    x = numbers(features, "nn.crelu", "fi")
    return xp(x).concatenate([relu.raw(x), relu.raw(-x)], axis=integer(axis, "axis"))


@quiet_op
def leaky_relu(features: Value, alpha: Value = 0.2, name: str | None = None) -> Array:
    """Returns x above 0, and alpha * x below."""
    x = numbers(features, "nn.leaky_relu", "fiu")
    if kind_of(x.dtype) in "iu":
        x = x.astype(np.float32)
    return xp(x).where(x > 0, x, x * array(alpha, x.dtype))


@quiet_op
def elu(features: Value, name: str | None = None) -> Array:
    """Returns x above 0, and exp(x) - 1 below."""
    x = numbers(features, "nn.elu", "f")
    return _exponential_below(x, np.asarray(1, x.dtype))


def _exponential_below(x: Array, alpha: Array) -> Array:
    ns = xp(x)
    below = ns.where(x >= 0, ns.zeros_like(x), x)
    return ns.where(x >= 0, x, alpha * ns.expm1(below))


@quiet_op
def selu(features: Value, name: str | None = None) -> Array:
    """Returns the scaled exponential linear unit."""
    x = numbers(features, "nn.selu", "f")
    alpha = np.asarray(_SELU_ALPHA, x.dtype)
    return np.asarray(_SELU_SCALE, x.dtype) * _exponential_below(x, alpha)


@quiet_op
def gelu(features: Value, approximate: bool = False, name: str | None = None) -> Array:
    """Returns x times the share of a normal distribution below x.

    Args:
      features: x.
      approximate: Whether to compute it with tanh.
      name: Ignored.

    >>> gelu([0.0]).numpy()
    array([0.], dtype=float32)
    """
    x = numbers(features, "nn.gelu", "f")
    ns = xp(x)
    half = np.asarray(0.5, x.dtype)
    if approximate:
        cubic = x + np.asarray(0.044715, x.dtype) * x * x * x
        return half * x * (1 + ns.tanh(np.asarray(np.sqrt(2 / np.pi), x.dtype) * cubic))
    return half * x * (1 + special.erf.raw(x * np.asarray(np.sqrt(0.5), x.dtype)))


@quiet_op
def silu(features: Value, beta: Value = 1.0) -> Array:
    """Returns x * sigmoid(beta * x)."""
    x = numbers(features, "nn.silu", "fc")
    return x * sigmoid.raw(array(beta, x.dtype) * x)


swish = silu


@quiet_op
def softplus(features: Value, name: str | None = None) -> Array:
    """Returns log(1 + exp(x))."""
    x = numbers(features, "math.softplus", "f")
    return xp(x).logaddexp(x, np.asarray(0, x.dtype))


@quiet_op
def softsign(features: Value, name: str | None = None) -> Array:
    """Returns x / (1 + |x|)."""
    x = numbers(features, "math.softsign", "f")
    return x / (1 + xp(x).abs(x))


@quiet_op
def log_sigmoid(x: Value, name: str | None = None) -> Array:
    """Returns log(sigmoid(x))."""
    x = numbers(x, "math.log_sigmoid", "f")
    return -xp(x).logaddexp(-x, np.asarray(0, x.dtype))


def _shifted(x: Array, place: int) -> Array:
    top = xp(x).max(x, axis=place, keepdims=True, initial=-np.inf)
    return x - (jax.lax.stop_gradient(top) if isinstance(top, jax.Array) else top)


@quiet_op
def softmax(logits: Value, axis: Value = None, name: str | None = None) -> Array:
    """Returns exp(x) / sum(exp(x)) along a dimension; the last one by default.

    >>> softmax([1.0, 1.0]).numpy()
    array([0.5, 0.5], dtype=float32)
    """
    x = numbers(logits, "nn.softmax", "f")
    place = normalized(-1 if axis is None else integer(axis, "axis"), x.ndim)
    found = xp(x).exp(_shifted(x, place))
    return found / xp(x).sum(found, axis=place, keepdims=True)


@quiet_op
def log_softmax(logits: Value, axis: Value = None, name: str | None = None) -> Array:
    """Returns log(softmax(x)) along a dimension; the last one by default."""
    x = numbers(logits, "nn.log_softmax", "f")
    place = normalized(-1 if axis is None else integer(axis, "axis"), x.ndim)
    shifted = _shifted(x, place)
    ns = xp(x)
    return shifted - ns.log(ns.sum(ns.exp(shifted), axis=place, keepdims=True))
