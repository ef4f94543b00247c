"""`tf.experimental.numpy.random`: random numbers under NumPy's names."""

from __future__ import annotations

from typing import Any

from replicax.tf.arguments import DTypeLike, Number, Value
from replicax.tf.ops import random as tf_random

__all__ = ["poisson", "rand", "randint", "randn", "random", "seed", "standard_normal", "uniform"]


def seed(s: int) -> None:
    """Sets the seed of all random numbers.

    >>> seed(3)
    """
    tf_random.set_seed(s)


def randn(*args: int) -> Any:
    """Returns normal random numbers of a shape.

    >>> randn(2, 3).shape.as_list()
    [2, 3]
    """
    return tf_random.normal(args)


def standard_normal(size: Number = None) -> Any:
    """Returns normal random numbers.

    >>> standard_normal(4).shape.as_list()
    [4]
    """
    return tf_random.normal(_shape(size))


def uniform(low: Value = 0.0, high: Value = 1.0, size: Number = None) -> Any:
    """Returns random numbers between two bounds.

    >>> uniform(size=[2]).shape.as_list()
    [2]
    """
    return tf_random.uniform(_shape(size), low, high)


def random(size: Number = None) -> Any:
    """Returns random numbers between 0 and 1.

    >>> random((3,)).shape.as_list()
    [3]
    """
    return uniform(0.0, 1.0, size)


def rand(*size: int) -> Any:
    """Returns random numbers between 0 and 1, of a shape.

    >>> rand(2).shape.as_list()
    [2]
    """
    return uniform(0.0, 1.0, size)


def randint(
    low: int, high: int | None = None, size: Number = None, dtype: DTypeLike = "int32"
) -> Any:
    """Returns random integers from `low`, or 0, up to a bound.

    >>> randint(5, size=2).dtype
    tf.int32
    """
    first, last = (0, low) if high is None else (low, high)
    return tf_random.uniform(_shape(size), first, last, dtype)


def poisson(lam: Value = 1.0, size: Number = None) -> Any:
    """Returns random numbers of a Poisson distribution, as int32.

    >>> poisson(2.0, 3).shape.as_list()
    [3]
    """
    return tf_random.poisson(_shape(size), lam, "int32")


def _shape(size: Number) -> Any:
    if size is None:
        return ()
    return (size,) if isinstance(size, int) else tuple(size)
