"""Partitioners: the number of parts that variables are cut into, and the rows of each part."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from jax.typing import DTypeLike
from typing_extensions import override

from replicax.foundation import errors

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]

# Whatever can be called with a shape and a type; axis 0 is the only one that is cut.
AnyPartitioner = Callable[..., Any]


class Partitioner:
    """Base class of partitioners; any callable of the same signature will do.

    >>> class InHalves(Partitioner):
    ...     def __call__(self, shape, dtype, axis=0):
    ...         return [2 if i == axis else 1 for i in range(len(shape))]
    >>> InHalves()((100, 8), "float32")
    [2, 1]
    """

    def __repr__(self) -> str:
        settings = (f"{name.lstrip('_')}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({', '.join(settings)})"

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of parts along each axis, 1 for all but `axis`."""
        raise errors.UnsupportedError(
            "A Partitioner defines __call__(shape, dtype, axis=0)",
            f"{type(self).__name__} does not",
            "Define it, or use one of the partitioners that do.",
        )


class FixedShardsPartitioner(Partitioner):
    """Cuts every variable into the same number of parts, or one per row if it has fewer.

    Raises:
      ArgumentTypeError: The number is not whole.
      InvalidArgumentError: It is below 1.

    >>> partitioner = FixedShardsPartitioner(num_shards=2)
    >>> partitioner([10, 3], "float32")
    [2, 1]
    >>> partitioner([1, 3], "float32")
    [1, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    @override
    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        return _counts(shape, axis, self._num_shards)


class MinSizePartitioner(Partitioner):
    """Cuts into as many parts as there can be, each with at least so many bytes.

    A variable that is too small for two such parts stays whole.

    Raises:
      ArgumentTypeError: A number is not whole.
      InvalidArgumentError: It is below 1.

    >>> partitioner = MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)
    >>> partitioner([100_000, 10], "float32")
    [2, 1]
    >>> partitioner([100, 10], "float32")
    [1, 1]

    Args:
      min_shard_bytes: The least size of a part.
      max_shards: The most parts; usually the number of parameter servers.
      bytes_per_string: The size that is assumed for an element that is a string.
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = 16,
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    @override
    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        row = _row_bytes(shape, dtype, axis, self._bytes_per_string)
        if row == 0:
            return _counts(shape, axis, 1)
        # The smallest part has floor(rows / parts) rows, so that is what must suffice.
        rows_needed = -(-self._min_shard_bytes // row)
        most = shape[axis] // rows_needed
        return _counts(shape, axis, min(most, self._max_shards))


class MaxSizePartitioner(Partitioner):
    """Cuts into as few parts as there can be, none with more than so many bytes.

    A row is never cut, and `max_shards` wins over the size.

    Raises:
      ArgumentTypeError: A number is not whole.
      InvalidArgumentError: It is below 1.

    >>> partitioner = MaxSizePartitioner(max_shard_bytes=4)
    >>> partitioner([6, 1], "float32")
    [6, 1]
    >>> MaxSizePartitioner(max_shard_bytes=4, max_shards=2)([6, 1], "float32")
    [2, 1]

    Args:
      max_shard_bytes: The greatest size of a part.
      max_shards: The most parts; None and 0 stand for any number.
      bytes_per_string: The size that is assumed for an element that is a string.
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = 16,
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    @override
    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        row = _row_bytes(shape, dtype, axis, self._bytes_per_string)
        if row == 0:
            return _counts(shape, axis, 1)
        rows_allowed = max(1, self._max_shard_bytes // row)
        fewest = -(-shape[axis] // rows_allowed)
        if self._max_shards is not None:
            fewest = min(fewest, self._max_shards)
        return _counts(shape, axis, fewest)


def split_rows(num_rows: int, num_parts: int) -> list[tuple[int, int]]:
    """Returns the rows [start, stop) of each part: the first ones hold one row more.

    >>> split_rows(13, 5)
    [(0, 3), (3, 6), (6, 9), (9, 11), (11, 13)]
    """
    size, longer = divmod(num_rows, num_parts)
    starts = [part * size + min(part, longer) for part in range(num_parts + 1)]
    return list(itertools.pairwise(starts))


def checked_counts(partitioner: AnyPartitioner, shape: Sequence[int], dtype: DTypeLike) -> int:
    """Calls a partitioner and returns the number of parts along the first axis.

    A variable without dimensions has a single part; the partitioner is not called.

    Raises:
      InvalidArgumentError: If the result is not [n, 1, 1, ...] with one entry per
        dimension and n of at least 1.
    """
    if not shape:
        return 1
    result = partitioner(shape=tuple(shape), dtype=dtype)
    counts = _as_counts(result)
    if counts is None or len(counts) != len(shape) or counts[0] < 1:
        raise _bad_result(partitioner, shape, result)
    if any(count != 1 for count in counts[1:]):
        raise _bad_result(partitioner, shape, result)
    return max(1, min(counts[0], shape[0]))


def _as_counts(result: Iterable[SupportsIndex]) -> list[int] | None:
    """Returns a partitioner's result as ints; None if it is no list of them."""
    if isinstance(result, str | bytes):
        return None
    try:
        return [operator.index(count) for count in result]
    except TypeError:
        return None


def _bad_result(
    partitioner: AnyPartitioner, shape: Sequence[int], result: Any
) -> errors.InvalidArgumentError:
    name = getattr(partitioner, "__qualname__", type(partitioner).__name__)
    ones = ", 1" * (len(shape) - 1)
    return errors.InvalidArgumentError(
        "A partitioner returns the number of parts along each axis, and only the "
        "first axis can be cut",
        f"{name} returned {result!r} for the shape {tuple(shape)}",
        f"Return [n{ones}] with n of at least 1.",
    )


def _counts(shape: Sequence[int], axis: int, wanted: int) -> list[int]:
    counts = [1] * len(shape)
    counts[axis] = max(1, min(wanted, shape[axis]))
    return counts


def _row_bytes(shape: Sequence[int], dtype: DTypeLike, axis: int, bytes_per_string: int) -> int:
    """The bytes of everything that has one index along the axis."""
    kind = np.dtype(dtype)
    size = bytes_per_string if kind.kind in "OSUT" else kind.itemsize
    for position, length in enumerate(shape):
        if position != axis % len(shape):
            size *= length
    return size


def _positive(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise errors.ArgumentTypeError(
            f"{name} must be a whole number",
            f"it is {value!r}",
            "Pass an int of at least 1.",
        ) from None
    if number < 1:
        raise errors.InvalidArgumentError(
            f"{name} must be at least 1",
            f"it is {value!r}",
            "Pass a positive number.",
        )
    return number
