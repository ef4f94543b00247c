"""Arithmetic of `tf.math` that returns 0 where the plain formula has no value."""

from __future__ import annotations

from replicax.tf.ops.maths import divided
from replicax.tf.ops.operands import Array, Value, numbers, operands, quiet_op, require_kind, xp

__all__ = [
    "divide_no_nan",
    "multiply_no_nan",
    "reciprocal_no_nan",
    "xdivy",
    "xlog1py",
    "xlogy",
]


@quiet_op
def divide_no_nan(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x / y, and 0 where y is 0.

    >>> divide_no_nan([1.0, 4.0], [0.0, 2.0]).numpy()
    array([0., 2.], dtype=float32)
    """
    x, y = divided(x, y, "math.divide_no_nan")
    ns = xp(x, y)
    safe = ns.where(y == 0, ns.ones_like(y), y)
    return ns.where(y == 0, ns.zeros_like(x / safe), x / safe)


@quiet_op
def multiply_no_nan(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x * y, and 0 where y is 0, even if x is infinite or not a number."""
    x, y = operands(x, y, op="math.multiply_no_nan")
    require_kind(x, "math.multiply_no_nan", "fc")
    ns = xp(x, y)
    # Finite elements stay, so that y has their gradient.
    return ns.where((y == 0) & ~ns.isfinite(x), ns.zeros_like(x), x) * y


@quiet_op
def reciprocal_no_nan(x: Value, name: str | None = None) -> Array:
    """Returns 1 / x, and 0 where x is 0."""
    x = numbers(x, "math.reciprocal_no_nan")
    ns = xp(x)
    safe = ns.where(x == 0, ns.ones_like(x), x)
    return ns.where(x == 0, ns.zeros_like(x), 1 / safe)


@quiet_op
def xlogy(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x * log(y), and 0 where x is 0."""
    return _unless_zero(x, y, "math.xlogy", lambda ns, x, y: x * ns.log(y))


@quiet_op
def xlog1py(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x * log(1 + y), and 0 where x is 0."""
    return _unless_zero(x, y, "math.xlog1py", lambda ns, x, y: x * ns.log1p(y))


@quiet_op
def xdivy(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x / y, and 0 where x is 0."""
    return _unless_zero(x, y, "math.xdivy", lambda ns, x, y: x / y)


def _unless_zero(x: Value, y: Value, name: str, compute: Value) -> Array:
    x, y = operands(x, y, op=name)
    require_kind(x, name, "fc")
    ns = xp(x, y)
    safe = ns.where(x == 0, ns.ones_like(y), y)
    value = compute(ns, x, safe)
    return ns.where(x == 0, ns.zeros_like(value), value)
