"""Special functions of `tf.math`: errors, gammas, Bessel functions and their relatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.scipy.special as jax_special
import numpy as np

from replicax.foundation import lazy
from replicax.tf.ops.operands import Array, Value, numbers, operands, quiet_op, require_kind, xp

if TYPE_CHECKING:
    import scipy.special as scipy_special
else:
    scipy_special = lazy.module("scipy.special")

__all__ = [
    "bessel_i0",
    "bessel_i0e",
    "bessel_i1",
    "bessel_i1e",
    "betainc",
    "digamma",
    "erf",
    "erfc",
    "erfcinv",
    "erfinv",
    "igamma",
    "igammac",
    "lbeta",
    "lgamma",
    "ndtri",
    "polygamma",
    "zeta",
]


def _apply(name: str, on_host: str, on_device: Callable[..., Any], *values: Value) -> Array:
    """Computes by SciPy on the host, in the dtype of the operands, and by JAX on a device."""
    arrays = operands(*values, op=name)
    require_kind(arrays[0], name, "f")
    if xp(*arrays) is not np:
        return on_device(*(xp(*arrays).asarray(v) for v in arrays))
    dtype = arrays[0].dtype
    wide = arrays if dtype.itemsize >= 4 else [v.astype(np.float32) for v in arrays]
    return np.asarray(getattr(scipy_special, on_host)(*wide)).astype(dtype)


@quiet_op
def erf(x: Value, name: str | None = None) -> Array:
    """Returns the error function."""
    return _apply("math.erf", "erf", jax.lax.erf, x)


@quiet_op
def erfc(x: Value, name: str | None = None) -> Array:
    """Returns 1 - erf(x)."""
    return _apply("math.erfc", "erfc", jax.lax.erfc, x)


@quiet_op
def erfinv(x: Value, name: str | None = None) -> Array:
    """Returns the inverse of the error function."""
    return _apply("math.erfinv", "erfinv", jax.lax.erf_inv, x)


@quiet_op
def erfcinv(x: Value, name: str | None = None) -> Array:
    """Returns the inverse of `erfc`."""
    return _apply("math.erfcinv", "erfcinv", lambda x: -jax_special.ndtri(x / 2) / np.sqrt(2), x)


@quiet_op
def ndtri(x: Value, name: str | None = None) -> Array:
    """Returns the quantile function of the standard normal distribution."""
    return _apply("math.ndtri", "ndtri", jax_special.ndtri, x)


@quiet_op
def lgamma(x: Value, name: str | None = None) -> Array:
    """Returns the logarithm of the absolute value of the gamma function."""
    found = _apply("math.lgamma", "gammaln", jax.lax.lgamma, x)
    # SciPy's is negative at -inf.
    return (
        np.where(np.isinf(found), np.inf, found).astype(found.dtype) if xp(found) is np else found
    )


@quiet_op
def digamma(x: Value, name: str | None = None) -> Array:
    """Returns the derivative of `lgamma`."""
    found = _apply("math.digamma", "digamma", jax.lax.digamma, x)
    if xp(found) is not np:
        return found
    # SciPy has infinities with the sign of a zero.
    return np.where(np.asarray(x) == 0, np.nan, found).astype(found.dtype)


@quiet_op
def polygamma(a: Value, x: Value, name: str | None = None) -> Array:
    """Returns the derivative of order a of `digamma`."""
    a, x = operands(a, x, op="math.polygamma")
    if xp(a, x) is not np:
        return _apply("math.polygamma", "", jax.lax.polygamma, *xp(a, x).broadcast_arrays(a, x))
    return np.asarray(scipy_special.polygamma(a.astype(np.int32), x)).astype(x.dtype)


@quiet_op
def zeta(x: Value, q: Value, name: str | None = None) -> Array:
    """Returns the Hurwitz zeta function."""
    return _apply("math.zeta", "zeta", jax_special.zeta, x, q)


@quiet_op
def igamma(a: Value, x: Value, name: str | None = None) -> Array:
    """Returns the lower regularized incomplete gamma function."""
    return _apply("math.igamma", "gammainc", jax_special.gammainc, a, x)


@quiet_op
def igammac(a: Value, x: Value, name: str | None = None) -> Array:
    """Returns the upper regularized incomplete gamma function."""
    return _apply("math.igammac", "gammaincc", jax_special.gammaincc, a, x)


@quiet_op
def betainc(a: Value, b: Value, x: Value, name: str | None = None) -> Array:
    """Returns the regularized incomplete beta function."""
    return _apply("math.betainc", "betainc", jax_special.betainc, a, b, x)


@quiet_op
def lbeta(x: Value, name: str | None = None) -> Array:
    """Returns the logarithm of the beta function over the last dimension.

    >>> round(float(lbeta([1.0, 2.0])), 3)
    -0.693
    """
    x = numbers(x, "math.lbeta", "f")
    ns = xp(x)
    return ns.sum(lgamma.raw(x), axis=-1) - lgamma.raw(ns.sum(x, axis=-1))


@quiet_op
def bessel_i0(x: Value, name: str | None = None) -> Array:
    """Returns the modified Bessel function of order 0."""
    return _apply("math.bessel_i0", "i0", jax_special.i0, x)


@quiet_op
def bessel_i0e(x: Value, name: str | None = None) -> Array:
    """Returns exp(-|x|) times the modified Bessel function of order 0."""
    return _apply("math.bessel_i0e", "i0e", jax_special.i0e, x)


@quiet_op
def bessel_i1(x: Value, name: str | None = None) -> Array:
    """Returns the modified Bessel function of order 1."""
    return _apply("math.bessel_i1", "i1", jax_special.i1, x)


@quiet_op
def bessel_i1e(x: Value, name: str | None = None) -> Array:
    """Returns exp(-|x|) times the modified Bessel function of order 1."""
    return _apply("math.bessel_i1e", "i1e", jax_special.i1e, x)
