"""Arithmetic, element by element: the operations of `tf.math` with one or two tensors."""

from __future__ import annotations

import builtins

import jax
import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes
from replicax.tf.ops.extremes import larger, magnitude, smaller
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
    is_concrete,
    kind_of,
    numbers,
    numpy_dtype,
    operands,
    quiet_op,
    require_kind,
    xp,
)

__all__ = [
    "abs",
    "accumulate_n",
    "acos",
    "acosh",
    "add",
    "add_n",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "divide",
    "exp",
    "expm1",
    "floor",
    "floordiv",
    "floormod",
    "is_finite",
    "is_inf",
    "is_nan",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "negative",
    "nextafter",
    "polyval",
    "pow",
    "realdiv",
    "reciprocal",
    "rint",
    "round",
    "rsqrt",
    "scalar_mul",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "squared_difference",
    "subtract",
    "tan",
    "tanh",
    "truediv",
    "truncatediv",
    "truncatemod",
]


@quiet_op
def exp(x: Value, name: str | None = None) -> Array:
    """Returns e to the power of x."""
    x = numbers(x, "exp", "fc")
    return xp(x).exp(x)


@quiet_op
def expm1(x: Value, name: str | None = None) -> Array:
    """Returns exp(x) - 1, exactly for small x."""
    x = numbers(x, "expm1", "fc")
    return xp(x).expm1(x)


@quiet_op
def log(x: Value, name: str | None = None) -> Array:
    """Returns the natural logarithm."""
    x = numbers(x, "log", "fc")
    return xp(x).log(x)


@quiet_op
def log1p(x: Value, name: str | None = None) -> Array:
    """Returns log(1 + x), exactly for small x."""
    x = numbers(x, "log1p", "fc")
    return xp(x).log1p(x)


@quiet_op
def sqrt(x: Value, name: str | None = None) -> Array:
    """Returns the square root."""
    x = numbers(x, "sqrt", "fc")
    return xp(x).sqrt(x)


@quiet_op
def square(x: Value, name: str | None = None) -> Array:
    """Returns x * x."""
    x = numbers(x, "square", "fciu")
    return xp(x).square(x)


@quiet_op
def negative(x: Value, name: str | None = None) -> Array:
    """Returns -x."""
    x = numbers(x, "negative", "fci")
    return xp(x).negative(x)


@quiet_op
def sin(x: Value, name: str | None = None) -> Array:
    """Returns the sine."""
    x = numbers(x, "sin", "fc")
    return xp(x).sin(x)


@quiet_op
def cos(x: Value, name: str | None = None) -> Array:
    """Returns the cosine."""
    x = numbers(x, "cos", "fc")
    return xp(x).cos(x)


@quiet_op
def tan(x: Value, name: str | None = None) -> Array:
    """Returns the tangent."""
    x = numbers(x, "tan", "fc")
    return xp(x).tan(x)


@quiet_op
def asin(x: Value, name: str | None = None) -> Array:
    """Returns the inverse sine."""
    x = numbers(x, "asin", "fc")
    return xp(x).arcsin(x)


@quiet_op
def acos(x: Value, name: str | None = None) -> Array:
    """Returns the inverse cosine."""
    x = numbers(x, "acos", "fc")
    return xp(x).arccos(x)


@quiet_op
def atan(x: Value, name: str | None = None) -> Array:
    """Returns the inverse tangent."""
    x = numbers(x, "atan", "fc")
    return xp(x).arctan(x)


@quiet_op
def sinh(x: Value, name: str | None = None) -> Array:
    """Returns the hyperbolic sine."""
    x = numbers(x, "sinh", "fc")
    return xp(x).sinh(x)


@quiet_op
def cosh(x: Value, name: str | None = None) -> Array:
    """Returns the hyperbolic cosine."""
    x = numbers(x, "cosh", "fc")
    return xp(x).cosh(x)


@quiet_op
def tanh(x: Value, name: str | None = None) -> Array:
    """Returns the hyperbolic tangent."""
    x = numbers(x, "tanh", "fc")
    return xp(x).tanh(x)


@quiet_op
def asinh(x: Value, name: str | None = None) -> Array:
    """Returns the inverse hyperbolic sine."""
    x = numbers(x, "asinh", "fc")
    return xp(x).arcsinh(x)


@quiet_op
def acosh(x: Value, name: str | None = None) -> Array:
    """Returns the inverse hyperbolic cosine."""
    x = numbers(x, "acosh", "fc")
    return xp(x).arccosh(x)


@quiet_op
def atanh(x: Value, name: str | None = None) -> Array:
    """Returns the inverse hyperbolic tangent."""
    x = numbers(x, "atanh", "fc")
    return xp(x).arctanh(x)


@quiet_op
def floor(x: Value, name: str | None = None) -> Array:
    """Returns the largest whole number that is not above x."""
    x = numbers(x, "floor", "f")
    return xp(x).floor(x)


@quiet_op
def ceil(x: Value, name: str | None = None) -> Array:
    """Returns the smallest whole number that is not below x."""
    x = numbers(x, "ceil", "f")
    return xp(x).ceil(x)


@quiet_op
def rint(x: Value, name: str | None = None) -> Array:
    """Returns the nearest whole number; halves go to the even one."""
    x = numbers(x, "rint", "f")
    return xp(x).rint(x)


@quiet_op
def sign(x: Value, name: str | None = None) -> Array:
    """Returns -1, 0 or 1."""
    x = numbers(x, "sign", "fci")
    return xp(x).sign(x)


@quiet_op
def is_nan(x: Value, name: str | None = None) -> Array:
    """Tells which elements are not a number."""
    x = numbers(x, "is_nan", "f")
    return xp(x).isnan(x)


@quiet_op
def is_inf(x: Value, name: str | None = None) -> Array:
    """Tells which elements are infinite."""
    x = numbers(x, "is_inf", "f")
    return xp(x).isinf(x)


@quiet_op
def is_finite(x: Value, name: str | None = None) -> Array:
    """Tells which elements are finite."""
    x = numbers(x, "is_finite", "f")
    return xp(x).isfinite(x)


@quiet_op
def add(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x + y; joins strings."""
    x, y = operands(x, y, op="add")
    require_kind(x, "add", "fciuO")
    # NumPy returns a joined scalar as `bytes`, no array.
    return np.asarray(np.add(x, y), object) if x.dtype == object else xp(x, y).add(x, y)


@quiet_op
def subtract(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x - y."""
    x, y = operands(x, y, op="subtract")
    require_kind(x, "subtract", "fciu")
    return xp(x, y).subtract(x, y)


@quiet_op
def multiply(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x * y."""
    x, y = operands(x, y, op="multiply")
    require_kind(x, "multiply", "fciu")
    return xp(x, y).multiply(x, y)


def product(x: Value, y: Value) -> Array:
    """Returns x * y; of truth values, where both are true."""
    if np.result_type(getattr(x, "dtype", np.int8)) == np.bool_:
        x, y = operands(x, y, op="multiply")
        return xp(x, y).logical_and(x, y)
    return multiply.raw(x, y)


@quiet_op
def maximum(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns the larger of two elements; NaN if one is."""
    x, y = operands(x, y, op="maximum")
    require_kind(x, "maximum", "fiu")
    return larger(x, y)


@quiet_op
def minimum(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns the smaller of two elements; NaN if one is."""
    x, y = operands(x, y, op="minimum")
    require_kind(x, "minimum", "fiu")
    return smaller(x, y)


@quiet_op
def abs(x: Value, name: str | None = None) -> Array:
    """Returns the absolute value; of complex numbers, the magnitude."""
    x = numbers(x, "abs", "fci")
    return magnitude(x)


@quiet_op
def round(x: Value, name: str | None = None) -> Array:
    """Returns the nearest whole number; halves go to the even one.

    >>> round([0.5, 1.5, 2.5]).numpy()
    array([0., 2., 2.], dtype=float32)
    """
    x = numbers(x, "round", "fciu")
    return x if kind_of(x.dtype) in "iu" else xp(x).round(x)


@quiet_op
def rsqrt(x: Value, name: str | None = None) -> Array:
    """Returns 1 / sqrt(x)."""
    x = numbers(x, "rsqrt")
    return 1 / np.sqrt(x) if xp(x) is np else jax.lax.rsqrt(xp(x).asarray(x))


@quiet_op
def reciprocal(x: Value, name: str | None = None) -> Array:
    """Returns 1 / x."""
    return xp(x).reciprocal(numbers(x, "math.reciprocal"))


@quiet_op
def sigmoid(x: Value, name: str | None = None) -> Array:
    """Returns 1 / (1 + exp(-x))."""
    x = numbers(x, "sigmoid")
    if xp(x) is not np:
        return jax.nn.sigmoid(x)
    if kind_of(x.dtype) == "c":
        return 1 / (1 + np.exp(-x))
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def divided(x: Value, y: Value, name: str) -> tuple[Array, Array]:
    """Returns operands of a true division: small integers as float32, others as float64."""
    x, y = operands(x, y, op=name)
    require_kind(x, name, "fciu")
    if kind_of(x.dtype) in "iu":
        wide = dtypes.float32 if x.dtype.itemsize <= 2 else dtypes.float64
        return x.astype(numpy_dtype(wide)), y.astype(numpy_dtype(wide))
    return x, y


@quiet_op
def divide(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x / y, as Python divides: whole numbers become fractions.

    >>> divide([3.0, 1.0], 2).numpy()
    array([1.5, 0.5], dtype=float32)
    """
    x, y = divided(x, y, "divide")
    return xp(x, y).true_divide(x, y)


@quiet_op
def truediv(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x / y, as Python divides."""
    x, y = divided(x, y, "truediv")
    return xp(x, y).true_divide(x, y)


@quiet_op
def realdiv(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x / y for real numbers."""
    x, y = operands(x, y, op="realdiv")
    require_kind(x, "realdiv", "fc")
    return xp(x, y).true_divide(x, y)


def _require_wide(x: Array, name: str) -> None:
    """Raises an error for integers of 8 and 16 bits."""
    if kind_of(x.dtype) in "iu" and x.dtype.itemsize < 4:
        raise errors.ArgumentTypeError(
            f"`tf.{name}` takes integers of 32 and 64 bits",
            f"the tensor has {np.dtype(x.dtype).name}",
            "Convert it with tf.cast(x, tf.int32).",
        )


def _require_nonzero(y: Array, name: str) -> None:
    if kind_of(y.dtype) in "iu" and is_concrete(y) and not np.all(np.asarray(y)):
        raise errors.InvalidArgumentError(
            f"`tf.{name}` of integers needs divisors that are not zero",
            "one of them is 0",
            "Use tf.where to replace it, or divide floats.",
        )


@quiet_op
def floordiv(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x // y, rounded down.

    >>> floordiv([7, -7], 2).numpy()
    array([ 3, -4], dtype=int32)
    """
    x, y = operands(x, y, op="math.floordiv")
    require_kind(x, "math.floordiv", "fiu")
    _require_nonzero(y, "math.floordiv")
    if kind_of(x.dtype) == "f":
        # Infinite where x is: `floor_divide` of NumPy is not a number there.
        return xp(x, y).floor(xp(x, y).true_divide(x, y))
    return xp(x, y).floor_divide(x, y)


@quiet_op
def floormod(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns the remainder of `floordiv`, which has the sign of y."""
    x, y = operands(x, y, op="math.floormod")
    require_kind(x, "math.floormod", "fiu")
    _require_nonzero(y, "math.floormod")
    return xp(x, y).mod(x, y)


mod = floormod


@quiet_op
def truncatediv(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x / y rounded towards zero."""
    x, y = operands(x, y, op="truncatediv")
    require_kind(x, "truncatediv", "fiu")
    _require_nonzero(y, "truncatediv")
    ns = xp(x, y)
    if kind_of(x.dtype) == "f":
        return ns.trunc(ns.true_divide(x, y))
    return ((x - ns.fmod(x, y)) // y).astype(x.dtype)


@quiet_op
def truncatemod(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns the remainder of `truncatediv`, which has the sign of x."""
    x, y = operands(x, y, op="truncatemod")
    require_kind(x, "truncatemod", "fi")
    _require_wide(x, "truncatemod")
    _require_nonzero(y, "truncatemod")
    return xp(x, y).fmod(x, y)


@quiet_op
def pow(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns x to the power of y."""
    x, y = operands(x, y, op="pow")
    require_kind(x, "pow", "fci")
    if kind_of(x.dtype) == "i" and is_concrete(y) and np.any(np.asarray(y) < 0):
        raise errors.InvalidArgumentError(
            "`tf.pow` of integers needs exponents that are not negative",
            "one of them is",
            "Convert both with tf.cast(x, tf.float32).",
        )
    return xp(x, y).power(x, y)


@quiet_op
def atan2(y: Value, x: Value, name: str | None = None) -> Array:
    """Returns the angle of the point (x, y)."""
    y, x = operands(y, x, op="atan2")
    require_kind(x, "atan2", "f")
    return xp(x, y).arctan2(y, x)


@quiet_op
def squared_difference(x: Value, y: Value, name: str | None = None) -> Array:
    """Returns (x - y)², with the conjugate for complex numbers."""
    x, y = operands(x, y, op="math.squared_difference")
    require_kind(x, "math.squared_difference", "fci")
    _require_wide(x, "math.squared_difference")
    difference = x - y
    return difference * xp(x, y).conj(difference)


@quiet_op
def scalar_mul(scalar: Value, x: Value, name: str | None = None) -> Array:
    """Returns a scalar times x."""
    x = array(x)
    factor = array(scalar, x.dtype)
    if factor.ndim:
        raise errors.InvalidArgumentError(
            "`tf.scalar_mul` needs a scalar",
            f"it has the shape {tuple(factor.shape)}",
            "Use tf.multiply.",
        )
    return factor * x


@quiet_op
def add_n(inputs: Value, name: str | None = None) -> Array:
    """Returns the sum of tensors of one shape."""
    inputs = list(inputs)
    if not inputs:
        raise errors.InvalidArgumentError(
            "`tf.add_n` needs a list with a tensor", "the list is empty", "Pass at least one."
        )
    parts = operands(*inputs, op="add_n")
    if len({builtins.tuple(part.shape) for part in parts}) > 1:
        raise errors.InvalidArgumentError(
            "`tf.add_n` needs tensors of one shape",
            f"they have {[builtins.tuple(part.shape) for part in parts]}",
            "Use `+`, which broadcasts.",
        )
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@quiet_op
def accumulate_n(
    inputs: Value, shape: Value = None, tensor_dtype: Value = None, name: str | None = None
) -> Array:
    """Returns the sum of tensors of one shape, as `add_n` does."""
    return add_n.raw(inputs)


@quiet_op
def nextafter(x1: Value, x2: Value, name: str | None = None) -> Array:
    """Returns the next number after x1 in the direction of x2."""
    x1, x2 = operands(x1, x2, op="math.nextafter")
    require_kind(x1, "math.nextafter", "f")
    return xp(x1, x2).nextafter(x1, x2)


@quiet_op
def polyval(coeffs: Value, x: Value, name: str | None = None) -> Array:
    """Returns the values of a polynomial; the first coefficient is that of the highest power.

    >>> polyval([1.0, 0.0, 2.0], 3.0).numpy()
    np.float32(11.0)
    """
    if not isinstance(coeffs, list):
        raise errors.ArgumentTypeError(
            "`coeffs` must be a list", f"it is {type(coeffs).__name__}", "Pass list(coeffs)."
        )
    x = array(x)
    value = xp(x).zeros_like(x)
    for coefficient in coeffs:
        factor, _ = operands(coefficient, x, op="math.polyval")
        value = value * x + factor
    return value
