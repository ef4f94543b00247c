"""Random numbers of version 1: names at the top of `tf.compat.v1`."""

from __future__ import annotations

from typing import Any

from replicax.tf.arguments import DTypeLike, Value
from replicax.tf.dtypes import int32, int64
from replicax.tf.ops import arrays, creation, random
from replicax.tf.v1.ops import either

__all__ = [
    "get_seed",
    "multinomial",
    "random_crop",
    "random_gamma",
    "random_normal",
    "random_poisson",
    "random_shuffle",
    "random_uniform",
    "set_random_seed",
    "truncated_normal",
]


def set_random_seed(seed: int) -> None:
    """Sets the seed of all random numbers.

    >>> set_random_seed(1)
    """
    random.set_seed(seed)


def get_seed(op_seed: int | None) -> tuple[int | None, int | None]:
    """Returns a pair of seeds; that of the program is kept inside.

    >>> get_seed(3)
    (None, 3)
    """
    return None, op_seed


def random_uniform(
    shape: Value,
    minval: Value = 0,
    maxval: Value = None,
    dtype: DTypeLike = "float32",
    seed: int | None = None,
    name: str | None = None,
) -> Any:
    """Returns random numbers between two bounds.

    >>> random_uniform([2, 3]).shape.as_list()
    [2, 3]
    """
    del name
    return random.uniform(shape, minval, maxval, dtype, seed)


def random_normal(
    shape: Value,
    mean: Value = 0.0,
    stddev: Value = 1.0,
    dtype: DTypeLike = "float32",
    seed: int | None = None,
    name: str | None = None,
) -> Any:
    """Returns normal random numbers.

    >>> random_normal([2]).shape.as_list()
    [2]
    """
    del name
    return random.normal(shape, mean, stddev, dtype, seed)


def truncated_normal(
    shape: Value,
    mean: Value = 0.0,
    stddev: Value = 1.0,
    dtype: DTypeLike = "float32",
    seed: int | None = None,
    name: str | None = None,
) -> Any:
    """Returns normal random numbers within two standard deviations.

    >>> truncated_normal([2]).shape.as_list()
    [2]
    """
    del name
    return random.truncated_normal(shape, mean, stddev, dtype, seed)


random_shuffle = random.shuffle
random_gamma = random.gamma


def random_poisson(
    lam: Value,
    shape: Value,
    dtype: DTypeLike = "float32",
    seed: int | None = None,
    name: str | None = None,
) -> Any:
    """Returns random numbers of a Poisson distribution.

    >>> random_poisson(2.0, [3]).shape.as_list()
    [3]
    """
    del name
    return random.poisson(shape, lam, dtype, seed)


def multinomial(
    logits: Value,
    num_samples: int,
    seed: int | None = None,
    name: str | None = None,
    output_dtype: DTypeLike | None = None,
) -> Any:
    """Draws classes by their logits.

    >>> multinomial([[0.0, 1.0]], 4).shape.as_list()
    [1, 4]
    """
    del name
    return random.categorical(logits, num_samples, either(output_dtype, None, int64), seed)


def random_crop(value: Value, size: Value, seed: int | None = None, name: str | None = None) -> Any:
    """Returns a random part of a tensor.

    >>> random_crop([1, 2, 3], [2]).shape.as_list()
    [2]
    """
    del name
    value = creation.convert_to_tensor(value)
    sizes = creation.convert_to_tensor(size, int32)
    limit = arrays.shape(value) - sizes + 1
    start = random.uniform([len(value.shape)], 0, 2**31 - 1, int32, seed) % limit
    return arrays.slice(value, start, sizes)
