"""Comparisons, logic and bits, element by element."""

from __future__ import annotations

import numpy as np

from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
    numbers,
    operands,
    require_kind,
    xp,
)

__all__ = [
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "equal",
    "greater",
    "greater_equal",
    "invert",
    "is_non_decreasing",
    "is_strictly_increasing",
    "left_shift",
    "less",
    "less_equal",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "not_equal",
    "right_shift",
]


@op
def equal(x: Value, y: Value, name: str | None = None) -> Array:
    """Tells which elements are equal; NaN never is.

    >>> equal([1, 2], 2).numpy().tolist()
    [False, True]
    """
    x, y = operands(x, y, op="equal")
    return xp(x, y).equal(x, y)


@op
def not_equal(x: Value, y: Value, name: str | None = None) -> Array:
    """Tells which elements differ."""
    x, y = operands(x, y, op="not_equal")
    return xp(x, y).not_equal(x, y)


@op
def less(x: Value, y: Value, name: str | None = None) -> Array:
    """Tells where x < y."""
    x, y = _ordered(x, y, "less")
    return xp(x, y).less(x, y)


@op
def less_equal(x: Value, y: Value, name: str | None = None) -> Array:
    """Tells where x <= y."""
    x, y = _ordered(x, y, "less_equal")
    return xp(x, y).less_equal(x, y)


@op
def greater(x: Value, y: Value, name: str | None = None) -> Array:
    """Tells where x > y."""
    x, y = _ordered(x, y, "greater")
    return xp(x, y).greater(x, y)


@op
def greater_equal(x: Value, y: Value, name: str | None = None) -> Array:
    """Tells where x >= y."""
    x, y = _ordered(x, y, "greater_equal")
    return xp(x, y).greater_equal(x, y)


def _ordered(x: Value, y: Value, name: str) -> tuple[Array, ...]:
    found = operands(x, y, op=name)
    require_kind(found[0], name, "fiu")
    return found


@op
def logical_and(x: Value, y: Value, name: str | None = None) -> Array:
    """Tells where both are true."""
    x, y = _booleans(x, y, op="logical_and")
    return xp(x, y).logical_and(x, y)


@op
def logical_or(x: Value, y: Value, name: str | None = None) -> Array:
    """Tells where one is true."""
    x, y = _booleans(x, y, op="logical_or")
    return xp(x, y).logical_or(x, y)


@op
def logical_xor(x: Value, y: Value, name: str | None = "LogicalXor") -> Array:
    """Tells where exactly one is true."""
    x, y = _booleans(x, y, op="math.logical_xor")
    return xp(x, y).logical_xor(x, y)


@op
def logical_not(x: Value, name: str | None = None) -> Array:
    """Tells where x is false."""
    (x,) = _booleans(x, op="logical_not")
    return xp(x).logical_not(x)


def _booleans(*values: Value, op: str) -> tuple[Array, ...]:
    found = tuple(array(v) if hasattr(v, "dtype") else array(v, np.bool_) for v in values)
    for value in found:
        require_kind(value, op, "b")
    return found


@op
def bitwise_and(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns the bits that are set in both."""
    x, y = _bits(x, y, "bitwise.bitwise_and")
    return xp(x, y).bitwise_and(x, y)


@op
def bitwise_or(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns the bits that are set in one."""
    x, y = _bits(x, y, "bitwise.bitwise_or")
    return xp(x, y).bitwise_or(x, y)


@op
def bitwise_xor(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns the bits that differ."""
    x, y = _bits(x, y, "bitwise.bitwise_xor")
    return xp(x, y).bitwise_xor(x, y)


@op
def invert(x: Value, name: str | None = None) -> Array:
    """Returns all bits flipped."""
    x = numbers(x, "bitwise.invert", "iu")
    return xp(x).invert(x)


@op
def left_shift(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x with its bits moved up by y."""
    x, y = _bits(x, y, "bitwise.left_shift")
    return xp(x, y).left_shift(x, y)


@op
def right_shift(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x with its bits moved down by y; negative numbers keep their sign."""
    x, y = _bits(x, y, "bitwise.right_shift")
    return xp(x, y).right_shift(x, y)


def _bits(x: Value, y: Value, name: str) -> tuple[Array, ...]:
    found = operands(x, y, op=name)
    require_kind(found[0], name, "iu")
    return found


def joined(x: Value, y: Value, how: str) -> Array:
    """Returns x & y, x | y or x ^ y: of truth values logically, else of bits."""
    x, y = operands(x, y, op=f"bitwise.bitwise_{how}")
    require_kind(x, f"bitwise.bitwise_{how}", "biu")
    return getattr(xp(x, y), f"bitwise_{how}")(x, y)


def inverted(x: Value) -> Array:
    """Returns ~x: of truth values logically, else of bits."""
    return xp(x).invert(numbers(x, "bitwise.invert", "biu"))


def equal_or_unlike(x: Value, y: Value) -> Array:
    """Returns x == y: one False for shapes that do not broadcast."""
    x, y = operands(x, y, op="equal")
    if not _broadcasts(tuple(x.shape), tuple(y.shape)):
        return xp(x, y).zeros((), np.bool_)
    return xp(x, y).equal(x, y)


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(n == m or 1 in (n, m) for n, m in zip(a[::-1], b[::-1], strict=False))


@op
def is_strictly_increasing(x: Value, name: str | None = None) -> Array:
    """Tells whether each element, in row-major order, is above the one before."""
    x = numbers(x, "math.is_strictly_increasing", "fiu").reshape(-1)
    return xp(x).all(x[1:] > x[:-1])


@op
def is_non_decreasing(x: Value, name: str | None = None) -> Array:
    """Tells whether each element, in row-major order, is not below the one before."""
    x = numbers(x, "math.is_non_decreasing", "fiu").reshape(-1)
    return xp(x).all(x[1:] >= x[:-1])
