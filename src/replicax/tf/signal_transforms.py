"""Fourier and cosine transforms."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    Namespace,
    Value,
    array,
    axes_of,
    integer,
    integers,
    normalized,
    require_kind,
    xp,
)

__all__ = [
    "dct",
    "fft",
    "fft2d",
    "fft3d",
    "fftnd",
    "fftshift",
    "idct",
    "ifft",
    "ifft2d",
    "ifft3d",
    "ifftnd",
    "ifftshift",
    "irfft",
    "irfft2d",
    "irfft3d",
    "irfftnd",
    "rfft",
    "rfft2d",
    "rfft3d",
    "rfftnd",
]


def signal_array(value: Value, name: str, kinds: str) -> tuple[Namespace, Array]:
    """Returns the namespace to compute in, and a signal as an array of it."""
    found = array(value)
    require_kind(found, f"signal.{name}", kinds)
    ns = xp(found)
    return ns, found if ns is np else jnp.asarray(found)


def _require_rank(x: Array, count: int, name: str) -> None:
    if x.ndim < count:
        raise errors.InvalidArgumentError(
            f"`tf.signal.{name}` transforms the last {count} dimensions",
            f"the shape is {tuple(x.shape)}",
            "Use a transform of fewer dimensions.",
        )


def _complex(x: Array) -> np.dtype:
    return np.dtype(np.complex128 if x.dtype in (np.float64, np.complex128) else np.complex64)


def _real(x: Array) -> np.dtype:
    return np.dtype(np.float64 if x.dtype in (np.float64, np.complex128) else np.float32)


def _transformed(value: Value, name: str, count: int) -> Array:
    """Returns the complex transform over the last dimensions, or its inverse."""
    ns, x = signal_array(value, name, "c")
    _require_rank(x, count, name)
    transform = ns.fft.ifftn if name.startswith("i") else ns.fft.fftn
    return transform(x, axes=tuple(range(-count, 0))).astype(x.dtype)


@op
def fft(input: Value, name: str | None = None) -> Array:
    """Returns the Fourier transform of complex numbers along the last dimension.

    >>> fft(np.asarray([1, 0, 0, 0], np.complex64)).numpy()
    array([1.+0.j, 1.+0.j, 1.+0.j, 1.+0.j], dtype=complex64)
    """
    return _transformed(input, "fft", 1)


@op
def ifft(input: Value, name: str | None = None) -> Array:
    """Returns the inverse of `fft`."""
    return _transformed(input, "ifft", 1)


@op
def fft2d(input: Value, name: str | None = None) -> Array:
    """Returns the Fourier transform of complex numbers over the last two dimensions."""
    return _transformed(input, "fft2d", 2)


@op
def ifft2d(input: Value, name: str | None = None) -> Array:
    """Returns the inverse of `fft2d`."""
    return _transformed(input, "ifft2d", 2)


@op
def fft3d(input: Value, name: str | None = None) -> Array:
    """Returns the Fourier transform of complex numbers over the last three dimensions."""
    return _transformed(input, "fft3d", 3)


@op
def ifft3d(input: Value, name: str | None = None) -> Array:
    """Returns the inverse of `fft3d`."""
    return _transformed(input, "ifft3d", 3)


def _lengths(fft_length: Value, count: int) -> Sequence[int] | None:
    if fft_length is None:
        return None
    found = integers(fft_length, "fft_length")
    if len(found) != count:
        raise errors.InvalidArgumentError(
            f"`fft_length` must have {count} lengths", f"it has {len(found)}", "Correct it."
        )
    return found


def _real_transformed(value: Value, fft_length: Value, name: str, count: int) -> Array:
    ns, x = signal_array(value, name, "f")
    _require_rank(x, count, name)
    sizes = _lengths(fft_length, count)
    return ns.fft.rfftn(x, sizes, axes=tuple(range(-count, 0))).astype(_complex(x))


def _real_inverse(value: Value, fft_length: Value, name: str, count: int) -> Array:
    ns, x = signal_array(value, name, "c")
    _require_rank(x, count, name)
    sizes = _lengths(fft_length, count)
    return ns.fft.irfftn(x, sizes, axes=tuple(range(-count, 0))).astype(_real(x))


@op
def rfft(input_tensor: Value, fft_length: Value = None, name: str | None = None) -> Array:
    """Returns the Fourier transform of real numbers: the frequencies from 0 on.

    Args:
      input_tensor: (..., samples).
      fft_length: [length], to which the samples are cut or filled with zeros.
      name: Accepted for portability.

    >>> rfft(np.asarray([1, 0, 0, 0], np.float32)).numpy()
    array([1.+0.j, 1.+0.j, 1.+0.j], dtype=complex64)
    """
    return _real_transformed(input_tensor, fft_length, "rfft", 1)


@op
def irfft(input_tensor: Value, fft_length: Value = None, name: str | None = None) -> Array:
    """Returns the inverse of `rfft`."""
    return _real_inverse(input_tensor, fft_length, "irfft", 1)


@op
def rfft2d(input_tensor: Value, fft_length: Value = None, name: str | None = None) -> Array:
    """Returns the Fourier transform of real numbers over the last two dimensions."""
    return _real_transformed(input_tensor, fft_length, "rfft2d", 2)


@op
def irfft2d(input_tensor: Value, fft_length: Value = None, name: str | None = None) -> Array:
    """Returns the inverse of `rfft2d`."""
    return _real_inverse(input_tensor, fft_length, "irfft2d", 2)


@op
def rfft3d(input_tensor: Value, fft_length: Value = None, name: str | None = None) -> Array:
    """Returns the Fourier transform of real numbers over the last three dimensions."""
    return _real_transformed(input_tensor, fft_length, "rfft3d", 3)


@op
def irfft3d(input_tensor: Value, fft_length: Value = None, name: str | None = None) -> Array:
    """Returns the inverse of `rfft3d`."""
    return _real_inverse(input_tensor, fft_length, "irfft3d", 3)


def _over_axes(
    value: Value, fft_length: Value, axes: Value, norm: str | None, name: str, kinds: str
) -> Array:
    ns, x = signal_array(value, name, kinds)
    over = axes_of(axes)
    over = tuple(range(x.ndim)) if over is None else tuple(normalized(a, x.ndim) for a in over)
    sizes = _lengths(fft_length, len(over))
    if norm not in (None, "ortho", "forward", "backward"):
        raise errors.InvalidArgumentError(
            "`norm` must be backward, ortho or forward", f"it is {norm!r}", "Pass 'ortho'."
        )
    found = getattr(ns.fft, name.replace("nd", "n"))(x, sizes, axes=over, norm=norm)
    return found.astype(_real(x) if name == "irfftnd" else _complex(x))


@op
def fftnd(
    input_tensor: Value,
    fft_length: Value = None,
    axes: Value = None,
    norm: str | None = None,
    name: str | None = None,
) -> Array:
    """Returns the Fourier transform of complex numbers over some dimensions."""
    return _over_axes(input_tensor, fft_length, axes, norm, "fftnd", "c")


@op
def ifftnd(
    input_tensor: Value,
    fft_length: Value = None,
    axes: Value = None,
    norm: str | None = None,
    name: str | None = None,
) -> Array:
    """Returns the inverse of `fftnd`."""
    return _over_axes(input_tensor, fft_length, axes, norm, "ifftnd", "c")


@op
def rfftnd(
    input_tensor: Value,
    fft_length: Value = None,
    axes: Value = None,
    norm: str | None = None,
    name: str | None = None,
) -> Array:
    """Returns the Fourier transform of real numbers over some dimensions."""
    return _over_axes(input_tensor, fft_length, axes, norm, "rfftnd", "f")


@op
def irfftnd(
    input_tensor: Value,
    fft_length: Value = None,
    axes: Value = None,
    norm: str | None = None,
    name: str | None = None,
) -> Array:
    """Returns the inverse of `rfftnd`."""
    return _over_axes(input_tensor, fft_length, axes, norm, "irfftnd", "c")


@op
def fftshift(x: Value, axes: Value = None, name: str | None = None) -> Array:
    """Returns a transform with the frequency 0 in the middle.

    >>> fftshift([0, 1, 2, -2, -1]).numpy().tolist()
    [-2, -1, 0, 1, 2]
    """
    ns, found = signal_array(x, "fftshift", "fciub")
    return ns.fft.fftshift(found, axes_of(axes))


@op
def ifftshift(x: Value, axes: Value = None, name: str | None = None) -> Array:
    """Returns the inverse of `fftshift`."""
    ns, found = signal_array(x, "ifftshift", "fciub")
    return ns.fft.ifftshift(found, axes_of(axes))


# Cosine transforms.


def _turned(size: int, sign: int, kind: np.dtype) -> Array:
    """Returns exp(sign * i * pi * k / (2 * size)) for each k."""
    return np.exp(sign * 0.5j * np.pi * np.arange(size) / size).astype(kind)


def dct_of(ns: Namespace, x: Array, kind: int, norm: str | None = None) -> Array:
    """Returns the cosine transform of type 1 to 4 along the last dimension."""
    size, dtype = x.shape[-1], x.dtype
    if norm not in (None, "ortho"):
        raise errors.InvalidArgumentError(
            "`norm` must be None or 'ortho'", f"it is {norm!r}", "Pass 'ortho'."
        )
    if kind == 1:
        if norm is not None or size < 2:
            raise errors.InvalidArgumentError(
                "The cosine transform of type 1 needs two elements and no `norm`",
                f"it has {size} and norm={norm!r}",
                "Use type=2.",
            )
        even = ns.concatenate([x, x[..., -2:0:-1]], axis=-1)
        return ns.fft.rfft(even).real.astype(dtype)
    wide = _complex(x)
    if kind == 2:
        found = (ns.fft.rfft(x, 2 * size)[..., :size] * _turned(size, -1, wide)).real * 2
        if norm == "ortho":
            factors = np.full(size, np.sqrt(0.5 / size))
            factors[0] = np.sqrt(0.25 / size)
            found = found * factors.astype(dtype)
        return found.astype(dtype)
    if kind == 3:
        if norm == "ortho":
            factors = np.full(size, np.sqrt(0.5 / size))
            factors[0] = np.sqrt(1 / size)
            x = x * factors.astype(dtype)
        turned = x * _turned(size, 1, wide)
        return (ns.fft.irfft(turned, 2 * size)[..., :size] * (2 * size)).astype(dtype)
    found = dct_of(ns, ns.concatenate([x, ns.zeros_like(x)], axis=-1), 2)[..., 1::2]
    return (found * np.sqrt(0.5 / size) if norm == "ortho" else found).astype(dtype)


def _cosine(input: Value, kind: Value, n: Value, axis: Value, name: str) -> tuple[Namespace, Array]:
    ns, x = signal_array(input, name, "f")
    if integer(kind, "type") not in (1, 2, 3, 4):
        raise errors.InvalidArgumentError(
            "`type` must be 1, 2, 3 or 4", f"it is {kind}", "Pass 2, the usual one."
        )
    if normalized(integer(axis, "axis"), x.ndim) != x.ndim - 1:
        raise errors.InvalidArgumentError(
            "Cosine transforms use the last dimension", f"`axis` is {axis}", "Transpose it."
        )
    if n is not None:
        size = integer(n, "n")
        x = x[..., :size]
        x = ns.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    return ns, x


@op
def dct(
    input: Value,
    type: Value = 2,
    n: Value = None,
    axis: Value = -1,
    norm: str | None = None,
    name: str | None = None,
) -> Array:
    """Returns the cosine transform along the last dimension.

    Args:
      input: Real numbers.
      type: 1, 2, 3 or 4.
      n: The length, to which the elements are cut or filled with zeros.
      axis: -1.
      norm: None or "ortho".
      name: Accepted for portability.

    >>> dct(np.ones(2, np.float32)).numpy()
    array([4., 0.], dtype=float32)
    """
    ns, x = _cosine(input, type, n, axis, "dct")
    return dct_of(ns, x, integer(type, "type"), norm)


@op
def idct(
    input: Value,
    type: Value = 2,
    n: Value = None,
    axis: Value = -1,
    norm: str | None = None,
    name: str | None = None,
) -> Array:
    """Returns the inverse of `dct`, with the factor 2 n if it has no `norm`.

    >>> idct(dct(np.asarray([3, 4], np.float32), norm="ortho"), norm="ortho").numpy().round(4)
    array([3., 4.], dtype=float32)
    """
    if n is not None:
        raise errors.InvalidArgumentError(
            "`idct` keeps the length", f"`n` is {n}", "Cut the argument instead."
        )
    ns, x = _cosine(input, type, None, axis, "idct")
    return dct_of(ns, x, {1: 1, 2: 3, 3: 2, 4: 4}[integer(type, "type")], norm)
