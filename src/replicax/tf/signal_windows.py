"""Windows that frames of signals are multiplied by."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf import dtypes
from replicax.tf.dispatch import on_host, op, raw_tree
from replicax.tf.ops.operands import Array, Namespace, Value, integer, static

__all__ = [
    "hamming_window",
    "hann_window",
    "kaiser_bessel_derived_window",
    "kaiser_window",
    "vorbis_window",
]


def window_of(ns: Namespace, make: Callable[..., Value], length: int, dtype: Value) -> Array:
    """Returns the window that a window function makes."""
    found = raw_tree(make(length, dtype=dtypes.as_dtype(dtype)))
    return np.asarray(found) if ns is np and not jax_compat.is_traced(found) else found


def _placed(window: np.ndarray, dtype: Value) -> Array:
    kind = dtypes.as_dtype(dtype)
    if not kind.is_floating:
        raise errors.ArgumentTypeError(
            "A window has a float type", f"`dtype` is {kind.name}", "Pass tf.float32."
        )
    if on_host():
        return window.astype(kind.dtype)
    found = window.astype(dtypes.device_dtype(kind))
    # In a compiled function, a constant.
    return jnp.asarray(found) if jax_compat.is_eager() else found


def _cosine(length: Value, periodic: bool, middle: float) -> np.ndarray:
    size = integer(length, "window_length")
    if size == 1:
        return np.ones(1)
    # A periodic window repeats after an even length; an odd one is symmetric in any case.
    count = size + int(bool(periodic)) * (1 - size % 2) - 1
    return middle - (1 - middle) * np.cos(2 * np.pi * np.arange(size) / count)


@op(differentiable=False)
def hann_window(
    window_length: Value,
    periodic: bool = True,
    dtype: Value = dtypes.float32,
    name: str | None = None,
) -> Array:
    """Returns a Hann window: a raised cosine.

    >>> hann_window(4).numpy()
    array([0. , 0.5, 1. , 0.5], dtype=float32)
    """
    return _placed(_cosine(window_length, periodic, 0.5), dtype)


@op(differentiable=False)
def hamming_window(
    window_length: Value,
    periodic: bool = True,
    dtype: Value = dtypes.float32,
    name: str | None = None,
) -> Array:
    """Returns a Hamming window: a raised cosine that does not reach 0."""
    return _placed(_cosine(window_length, periodic, 0.54), dtype)


def _kaiser(length: int, beta: Value) -> np.ndarray:
    return np.kaiser(length, float(static(beta, "beta")))


@op(differentiable=False)
def kaiser_window(
    window_length: Value,
    beta: Value = 12.0,
    dtype: Value = dtypes.float32,
    name: str | None = None,
) -> Array:
    """Returns a Kaiser window.

    >>> kaiser_window(3).numpy().argmax()
    np.int64(1)
    """
    return _placed(_kaiser(integer(window_length, "window_length"), beta), dtype)


@op(differentiable=False)
def kaiser_bessel_derived_window(
    window_length: Value,
    beta: Value = 12.0,
    dtype: Value = dtypes.float32,
    name: str | None = None,
) -> Array:
    """Returns the window, for `mdct`, of the running sums of a Kaiser window."""
    half = integer(window_length, "window_length") // 2
    sums = np.cumsum(_kaiser(half + 1, beta))
    rising = np.sqrt(sums[:-1] / sums[-1])
    return _placed(np.concatenate([rising, rising[::-1]]), dtype)


@op(differentiable=False)
def vorbis_window(
    window_length: Value, dtype: Value = dtypes.float32, name: str | None = None
) -> Array:
    """Returns the window of the Vorbis codec.

    >>> vorbis_window(4).numpy().round(3)
    array([0.228, 0.974, 0.974, 0.228], dtype=float32)
    """
    size = integer(window_length, "window_length")
    angles = np.pi * (np.arange(size) + 0.5) / size
    return _placed(np.sin(np.pi / 2 * np.sin(angles) ** 2), dtype)
