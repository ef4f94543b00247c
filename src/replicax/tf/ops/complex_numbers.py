"""Complex numbers: their parts, conjugates and angles."""

from __future__ import annotations

import jax
import numpy as np

from replicax.tf.ops.operands import (
    Array,
    Value,
    kind_of,
    numbers,
    operands,
    quiet_op,
    require_kind,
    xp,
)

__all__ = [
    "angle",
    "complex",
    "conj",
    "imag",
    "real",
]


@quiet_op
def complex(real: Value, imag: Value, name: str | None = None) -> Array:
    """Returns complex numbers of their real and imaginary parts."""
    real, imag = operands(real, imag, op="complex")
    require_kind(real, "complex", "f")
    if xp(real, imag) is np:
        target = np.complex64 if real.dtype == np.float32 else np.complex128
        return (real + 1j * imag).astype(target)
    real, imag = xp(real, imag).broadcast_arrays(real, imag)
    return jax.lax.complex(real, imag)


@quiet_op
def real(input: Value, name: str | None = None) -> Array:
    """Returns the real part."""
    x = numbers(input, "math.real", "fciu")
    return xp(x).real(x)


@quiet_op
def imag(input: Value, name: str | None = None) -> Array:
    """Returns the imaginary part; of real numbers, 0."""
    x = numbers(input, "math.imag", "fciu")
    return xp(x).imag(x)


@quiet_op
def conj(x: Value, name: str | None = None) -> Array:
    """Returns the complex conjugate."""
    x = numbers(x, "math.conj", "fciu")
    return xp(x).conj(x) if kind_of(x.dtype) == "c" else x


@quiet_op
def angle(input: Value, name: str | None = None) -> Array:
    """Returns the angle of complex numbers."""
    x = numbers(input, "math.angle", "fc")
    return xp(x).angle(x)
