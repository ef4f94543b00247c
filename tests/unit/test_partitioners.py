"""How variables are cut into parts: the rules, their limits, and answers that are refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import refused

from replicax.foundation import errors
from replicax.variables import partitioners
from replicax.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    checked_counts,
    split_rows,
)


def sizes(num_rows: int, num_parts: int) -> list[int]:
    return [stop - start for start, stop in split_rows(num_rows, num_parts)]


def test_S178_the_first_parts_hold_one_row_more() -> None:
    ids = list(range(13))
    found = [ids[start:stop] for start, stop in split_rows(13, 5)]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10], [11, 12]]
    assert sizes(7, 2) == [4, 3]
    assert sizes(32, 3) == [11, 11, 10]
    assert split_rows(0, 1) == [(0, 0)]


@pytest.mark.parametrize("num_rows", [1, 2, 9, 10, 97, 1_000_003])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_S178_parts_cover_all_rows_once(num_rows: int, num_parts: int) -> None:
    parts = split_rows(num_rows, min(num_parts, num_rows))
    assert parts[0][0] == 0 and parts[-1][1] == num_rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    lengths = [stop - start for start, stop in parts]
    assert lengths == sorted(lengths, reverse=True) and max(lengths) - min(lengths) <= 1


def test_T82_fixed_number_of_parts() -> None:
    partitioner = FixedShardsPartitioner(num_shards=4)
    assert sizes(10, checked_counts(partitioner, (10,), "float32")) == [3, 3, 2, 2]
    assert sizes(5, checked_counts(FixedShardsPartitioner(2), (5, 2), "float32")) == [3, 2]
    assert partitioner([3, 8], np.float32) == [3, 1]
    assert partitioner([0, 8], np.float32) == [1, 1]
    assert partitioner([3, 8], np.float32, axis=1) == [1, 4]


def test_T82_small_variables_stay_whole_by_their_size() -> None:
    partitioner = MinSizePartitioner(max_shards=2)
    assert partitioner([100, 10], np.float32) == [1, 1]
    assert checked_counts(partitioner, (100, 10), np.float32) == 1


def test_S180_parts_have_the_least_size() -> None:
    partitioner = MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=3)
    assert partitioner([200_000, 4], np.float32) == [3, 1]
    assert partitioner([33_000, 4], np.float32) == [2, 1]
    assert partitioner([32_767, 4], np.float32) == [1, 1]
    assert MinSizePartitioner(4, max_shards=2)([6, 1], np.float32) == [2, 1]
    assert MinSizePartitioner(4, max_shards=10)([6, 1], np.float32) == [6, 1]
    assert MinSizePartitioner(4)([6, 1], np.float32) == [1, 1]
    # Rows are not cut: two parts of five rows with 10 bytes each have 20 bytes or more.
    assert MinSizePartitioner(12, max_shards=9)([5, 10], np.int8) == [2, 1]


def test_S180_sizes_hold_for_any_shape() -> None:
    draw = random.Random(180)
    for _ in range(500):
        shape = [draw.randint(1, 60), draw.randint(1, 9)]
        limit, most = draw.randint(1, 200), draw.randint(1, 12)
        row = 4 * shape[1]
        small = MinSizePartitioner(limit, most)(shape, np.float32)[0]
        parts = sizes(shape[0], small)
        assert small == 1 or min(parts) * row >= limit
        more = small + 1
        assert more > min(most, shape[0]) or min(sizes(shape[0], more)) * row < limit
        large = MaxSizePartitioner(limit)(shape, np.float32)[0]
        assert large == shape[0] or max(sizes(shape[0], large)) * row <= limit
        assert large == 1 or max(sizes(shape[0], large - 1)) * row > limit


def test_the_greatest_size_of_a_part() -> None:
    assert MaxSizePartitioner(max_shard_bytes=4)([6, 1], np.float32) == [6, 1]
    assert MaxSizePartitioner(4, max_shards=2)([6, 1], np.float32) == [2, 1]
    assert MaxSizePartitioner(4, max_shards=0)([6, 1], np.float32) == [6, 1]
    assert MaxSizePartitioner(1024)([6, 1], np.float32) == [1, 1]
    assert MaxSizePartitioner(1)([6, 100], np.float32) == [6, 1]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", 2), (jnp.bfloat16, 2), (np.dtype(bool), 1), ("complex64", 8), (np.str_, 16)],
)
def test_the_size_of_an_element_counts(dtype: Any, size: int) -> None:
    assert MaxSizePartitioner(3 * size)([6], dtype) == [2]
    assert MinSizePartitioner(3 * size, max_shards=9)([6], dtype) == [2]


def test_the_size_of_a_string_can_be_said() -> None:
    assert MaxSizePartitioner(16, bytes_per_string=4)([8], object) == [2]
    assert MinSizePartitioner(16, 9, bytes_per_string=8)([8], object) == [4]


def test_variables_without_elements_are_not_cut() -> None:
    assert MaxSizePartitioner(4)([6, 0], np.float32) == [1, 1]
    assert MinSizePartitioner(4, 9)([6, 0], np.float32) == [1, 1]
    assert checked_counts(FixedShardsPartitioner(3), (0, 4), np.float32) == 1


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (FixedShardsPartitioner, {"num_shards": 0}),
        (MinSizePartitioner, {"min_shard_bytes": 0}),
        (MinSizePartitioner, {"max_shards": 0}),
        (MinSizePartitioner, {"bytes_per_string": 0}),
        (MaxSizePartitioner, {"max_shard_bytes": 0}),
        (MaxSizePartitioner, {"max_shard_bytes": 4, "max_shards": -1}),
        (MaxSizePartitioner, {"max_shard_bytes": 4, "bytes_per_string": -1}),
    ],
)
def test_limits_below_one_are_refused(make: Any, arguments: dict[str, int]) -> None:
    name, value = list(arguments.items())[-1]
    with refused(ValueError, f"{name} must be at least 1, but it is {value}"):
        make(**arguments)


def test_limits_that_are_no_numbers_are_refused() -> None:
    with refused(TypeError, "num_shards must be a whole number, but it is 2.5"):
        FixedShardsPartitioner(2.5)  # type: ignore[arg-type]


def test_the_base_says_nothing() -> None:
    with refused(NotImplementedError, "Partitioner defines __call__"):
        Partitioner()([3], np.float32)


@pytest.mark.parametrize(
    "answer", [None, [], [0, 1, 1], [2, 2, 1], [2, 1], [2.5, 1, 1], "211", 2, [-1, 1, 1]]
)
def test_T84_wrong_answers_are_refused(answer: Any) -> None:
    def mine(shape: Any, dtype: Any) -> Any:
        return answer

    with refused(errors.InvalidArgumentError, r"mine returned .* Return \[n, 1, 1\]"):
        checked_counts(mine, (4, 2, 2), np.float32)


def test_S177_the_second_axis_cannot_be_cut() -> None:
    def second(shape: Any, dtype: Any) -> list[int]:
        return FixedShardsPartitioner(2)(shape, dtype, axis=1)

    with refused(ValueError, "only the first axis can be cut"):
        checked_counts(second, (4, 2), np.float32)


def test_S175_any_callable_is_asked_with_shape_and_type() -> None:
    asked: list[Any] = []

    def mine(shape: Any, dtype: Any, axis: int = 0) -> Any:
        asked.append((shape, dtype, axis))
        return np.array([9, 1])

    assert checked_counts(mine, [4, 2], np.float16) == 4
    assert asked == [((4, 2), np.float16, 0)]
    assert checked_counts(mine, (), np.float32) == 1
    assert len(asked) == 1


def test_S225_the_keywords_of_the_samples() -> None:
    least = partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)
    assert least([1_000_000, 64], "float32") == [2, 1]
    assert FixedShardsPartitioner(num_shards=2)([10], "int32") == [2]
