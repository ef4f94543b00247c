"""Initializers of `tf.compat.v1`, whose arguments and default values differ from version 2."""

from __future__ import annotations

from typing import Any

from replicax.foundation import lazy
from replicax.tf import initializer_names
from replicax.tf.arguments import DTypeLike, Value

# Imports Keras.
_keras = lazy.module("keras.initializers")

__all__ = [
    "constant_initializer",
    "glorot_normal_initializer",
    "glorot_uniform_initializer",
    "ones_initializer",
    "orthogonal_initializer",
    "random_normal_initializer",
    "random_uniform_initializer",
    "truncated_normal_initializer",
    "variance_scaling_initializer",
    "zeros_initializer",
]


def zeros_initializer(dtype: DTypeLike = None) -> Any:
    """Returns an initializer of zeros.

    >>> zeros_initializer()((1,)).numpy().tolist()
    [0.0]
    """
    del dtype
    return initializer_names.zeros_initializer()


def ones_initializer(dtype: DTypeLike = None) -> Any:
    """Returns an initializer of ones.

    >>> ones_initializer()((1,)).numpy().tolist()
    [1.0]
    """
    del dtype
    return initializer_names.ones_initializer()


def constant_initializer(
    value: Value = 0, dtype: DTypeLike = None, verify_shape: bool = False
) -> Any:
    """Returns an initializer of one value.

    >>> constant_initializer(3)((1,)).numpy().tolist()
    [3.0]
    """
    del dtype, verify_shape
    return initializer_names.constant_initializer(value)


def random_normal_initializer(
    mean: float = 0.0, stddev: float = 1.0, seed: int | None = None, dtype: DTypeLike = None
) -> Any:
    """Returns an initializer of normal random numbers.

    >>> random_normal_initializer()((3,)).shape.as_list()
    [3]
    """
    del dtype
    return initializer_names.random_normal_initializer(mean, stddev, seed)


def random_uniform_initializer(
    minval: float = 0.0,
    maxval: float | None = None,
    seed: int | None = None,
    dtype: DTypeLike = None,
) -> Any:
    """Returns an initializer of random numbers between two bounds.

    >>> random_uniform_initializer()((3,)).shape.as_list()
    [3]
    """
    del dtype
    high = 1.0 if maxval is None else maxval
    return initializer_names.random_uniform_initializer(minval, high, seed)


def truncated_normal_initializer(
    mean: float = 0.0, stddev: float = 1.0, seed: int | None = None, dtype: DTypeLike = None
) -> Any:
    """Returns an initializer of normal random numbers within two standard deviations.

    >>> truncated_normal_initializer(stddev=0.1).stddev
    0.1
    """
    del dtype
    return _keras.TruncatedNormal(mean, stddev, seed)


def variance_scaling_initializer(
    scale: float = 1.0,
    mode: str = "fan_in",
    distribution: str = "truncated_normal",
    seed: int | None = None,
    dtype: DTypeLike = None,
) -> Any:
    """Returns an initializer whose variance depends on the shape.

    >>> variance_scaling_initializer(2.0).scale
    2.0
    """
    del dtype
    kind = "truncated_normal" if distribution == "normal" else distribution
    return _keras.VarianceScaling(scale, mode, kind, seed)


def glorot_uniform_initializer(seed: int | None = None, dtype: DTypeLike = None) -> Any:
    """Returns Glorot's initializer with uniform numbers.

    >>> glorot_uniform_initializer().mode
    'fan_avg'
    """
    del dtype
    return _keras.GlorotUniform(seed)


def glorot_normal_initializer(seed: int | None = None, dtype: DTypeLike = None) -> Any:
    """Returns Glorot's initializer with normal numbers.

    >>> glorot_normal_initializer().mode
    'fan_avg'
    """
    del dtype
    return _keras.GlorotNormal(seed)


def orthogonal_initializer(
    gain: float = 1.0, seed: int | None = None, dtype: DTypeLike = None
) -> Any:
    """Returns an initializer of orthogonal matrices.

    >>> orthogonal_initializer(2.0).gain
    2.0
    """
    del dtype
    return _keras.Orthogonal(gain, seed)
