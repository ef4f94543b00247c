"""Steps of datasets that group, mix and carry: orders as recorded from tf.data 2.21."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vocabulary import refused

import replicax as rx
from replicax.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset, DatasetSpec

LENGTHS = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22]]
KEYS = [3, 1, 2, 3, 3, 1, 0, 2]


def plain(value: Any) -> Any:
    """An element as Python numbers and lists; a dataset is a list of its elements."""
    if isinstance(value, Dataset):
        return [plain(element) for element in value]
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def listed(dataset: Any) -> list[Any]:
    return [plain(element) for element in dataset]


def sequences() -> Dataset:
    return Dataset.from_generator(
        lambda: (np.array(x) for x in LENGTHS), output_signature=rx.TensorSpec((None,), np.int64)
    )


def in_buckets(**arguments: Any) -> Dataset:
    return sequences().bucket_by_sequence_length(lambda x: len(x), **arguments)


# What tf.data gives for the same calls.

WINDOWS = [
    ((7, 3, None, 1, True), [[0, 1, 2], [3, 4, 5]]),
    ((7, 3, None, 1, False), [[0, 1, 2], [3, 4, 5], [6]]),
    ((7, 3, 1, 1, True), [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]),
    (
        (7, 3, 1, 1, False),
        [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6], [6]],
    ),
    ((7, 3, 1, 2, True), [[0, 2, 4], [1, 3, 5], [2, 4, 6]]),
    ((7, 3, 1, 2, False), [[0, 2, 4], [1, 3, 5], [2, 4, 6], [3, 5], [4, 6], [5], [6]]),
    ((7, 2, 5, 1, False), [[0, 1], [5, 6]]),
    ((7, 2, 5, 3, False), [[0, 3], [5]]),
    ((7, 20, 20, 1, False), [[0, 1, 2, 3, 4, 5, 6]]),
    ((7, 20, 20, 1, True), []),
    ((0, 2, 1, 1, False), []),
    ((6, 2, 7, 1, False), [[0, 1]]),
    ((10, 3, 2, 2, False), [[0, 2, 4], [2, 4, 6], [4, 6, 8], [6, 8], [8]]),
    ((10, 3, 4, 3, True), [[0, 3, 6]]),
    ((3, 2, 10, 1, False), [[0, 1]]),
]


@pytest.mark.parametrize(("arguments", "expected"), WINDOWS)
def test_window_as_in_tf_data(arguments: tuple[Any, ...], expected: list[Any]) -> None:
    count, *rest = arguments
    windows = Dataset.range(count).window(*rest)
    assert listed(windows) == expected
    assert windows.cardinality() == len(expected)
    streamed = Dataset.range(count).filter(lambda x: True).window(*rest)
    assert listed(streamed) == expected


def test_windows_have_the_structure_of_elements() -> None:
    pairs = Dataset.from_tensor_slices(([1, 2, 3], [4, 5, 6])).window(2)
    assert listed(pairs) == [([1, 2], [4, 5]), ([3], [6])]
    named = Dataset.from_tensor_slices({"a": [1, 2, 3]}).window(2)
    assert listed(named) == [{"a": [1, 2]}, {"a": [3]}]
    assert Dataset.range(4).window(2).element_spec == DatasetSpec(rx.TensorSpec((), np.int64))
    zipped = pairs.flat_map(lambda a, b: Dataset.zip((a, b)))
    assert listed(zipped) == [(1, 4), (2, 5), (3, 6)]
    assert listed(Dataset.range(4).window(2).window(2)) == [[[0, 1], [2, 3]]]
    assert listed(Dataset.range(5).window(2).filter(lambda w: len(w) == 2)) == [[0, 1], [2, 3]]
    assert Dataset.range(4).repeat().window(2).cardinality() == INFINITE_CARDINALITY
    batches = Dataset.range(7).window(3, 1).flat_map(lambda w: w.batch(3))
    assert batches.element_spec == rx.TensorSpec((None,), np.int64)
    full = Dataset.range(7).window(3, 1).flat_map(lambda w: w.batch(3, drop_remainder=True))
    assert full.element_spec == rx.TensorSpec((3,), np.int64)


REBATCHED = [
    ((10, 4, 2, False), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]),
    ((10, 3, 5, True), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
    ((10, 3, [1, 2], False), [[0], [1, 2], [3], [4, 5], [6], [7, 8], [9]]),
    (
        (10, 3, [2, 0, 1], False),
        [[0, 1], [], [2], [3, 4], [], [5], [6, 7], [], [8], [9]],
    ),
    ((10, 3, [2, 3], True), [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]),
    ((10, 1, 4, False), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    ((2, 2, [2, 0], False), [[0, 1], []]),
    ((2, 2, [0, 2], False), [[], [0, 1], []]),
    ((3, 2, [3, 0, 0], False), [[0, 1, 2], [], []]),
    ((5, 2, [3, 0, 4], True), [[0, 1, 2], []]),
]


@pytest.mark.parametrize(("arguments", "expected"), REBATCHED)
def test_rebatch_as_in_tf_data(arguments: tuple[Any, ...], expected: list[Any]) -> None:
    count, size, *rest = arguments
    batches = Dataset.range(count).batch(size).rebatch(*rest)
    assert listed(batches) == expected
    assert batches.cardinality() == UNKNOWN_CARDINALITY
    assert all(batch.dtype == np.int64 for batch in batches)


def test_rebatch_knows_sizes() -> None:
    eight = Dataset.range(8).batch(4, drop_remainder=True)
    assert eight.rebatch(2).element_spec == rx.TensorSpec((2,), np.int64)
    assert eight.rebatch(3).element_spec == rx.TensorSpec((None,), np.int64)
    assert eight.rebatch(3, drop_remainder=True).element_spec == rx.TensorSpec((3,), np.int64)
    assert eight.rebatch([2, 2]).element_spec == rx.TensorSpec((2,), np.int64)
    empty = Dataset.from_tensors(np.zeros(0, np.int64)).concatenate(Dataset.range(3).batch(2))
    assert listed(empty.rebatch(2)) == [[0, 1], [2]]
    pairs = Dataset.from_tensor_slices(([1, 2, 3], [[1], [2], [3]])).batch(2).rebatch(3)
    assert listed(pairs) == [([1, 2, 3], [[1], [2], [3]])]
    with refused(rx.errors.InvalidArgumentError, "batch"):
        listed(Dataset.range(3).rebatch(2))
    for size in (0, [], [-1], [0, 0], [[1]], 1.5):
        with refused(rx.errors.InvalidArgumentError, "batch_size"):
            Dataset.range(3).batch(2).rebatch(size)  # type: ignore[arg-type]


def test_scan_carries_a_state() -> None:
    sums = Dataset.range(10).scan(np.int64(0), lambda s, x: (s + x, s + x))
    assert listed(sums) == [0, 1, 3, 6, 10, 15, 21, 28, 36, 45] == listed(sums)
    assert sums.cardinality() == 10
    pairs = Dataset.zip((Dataset.range(3), Dataset.range(3)))
    assert listed(pairs.scan(np.int64(0), lambda s, x: (s + x[0], (s, x[1])))) == [
        (0, 0),
        (0, 1),
        (1, 2),
    ]
    growing = Dataset.range(3).scan(np.zeros(0, np.int64), lambda s, x: ([*s, x], len(s)))
    with refused(rx.errors.ArgumentTypeError, "int64"):
        listed(Dataset.range(3).scan(0, lambda s, x: (s + x, s)))
    with refused(rx.errors.ArgumentTypeError, "pair"):
        listed(Dataset.range(3).scan(np.int64(0), lambda s, x: s))
    with refused(rx.errors.ArgumentTypeError, "int32"):
        listed(growing)


def test_a_function_that_changes_the_state_of_scan_in_place() -> None:
    def count(state: Any, x: Any) -> Any:
        state += x
        return state, state.copy()

    counted = Dataset.range(4).scan(np.int64(0) * np.ones(1, np.int64), count)
    assert listed(counted) == [[0], [1], [3], [6]] == listed(counted)


def test_take_while_and_unique() -> None:
    early = Dataset.range(10).take_while(lambda x: x < 3)
    assert listed(early) == [0, 1, 2]
    assert early.cardinality() == UNKNOWN_CARDINALITY
    assert listed(Dataset.range(5).repeat().take_while(lambda x: x < 9).take(6))[-1] == 0
    with refused(rx.errors.InvalidArgumentError, "True or False"):
        listed(Dataset.range(3).take_while(lambda x: x))
    numbers = Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique()
    assert listed(numbers) == [1, 37, 2]
    assert numbers.cardinality() == UNKNOWN_CARDINALITY
    assert listed(Dataset.from_tensor_slices([[1, 2], [3, 4], [1, 2]]).unique()) == [[1, 2], [3, 4]]
    assert listed(Dataset.from_tensor_slices(["a", "b", "a"]).unique()) == ["a", "b"]
    with refused(rx.errors.ArgumentTypeError, "integers and text"):
        listed(Dataset.from_tensor_slices([1.0, 2.0]).unique())
    with refused(rx.errors.InvalidArgumentError, "one part"):
        listed(Dataset.from_tensor_slices(([1, 1], [3, 3])).unique())


def grouped(**arguments: Any) -> Dataset:
    return Dataset.from_tensor_slices(KEYS).group_by_window(
        lambda x: x, lambda key, window: window.batch(4), **arguments
    )


def test_group_by_window_as_in_tf_data() -> None:
    assert listed(grouped(window_size=2)) == [[3, 3], [1, 1], [2, 2], [0], [3]]
    assert listed(grouped(window_size_func=lambda key: key + 1)) == [[1, 1], [0], [2, 2], [3, 3, 3]]
    assert grouped(window_size=2).element_spec == rx.TensorSpec((None,), np.int32)
    assert grouped(window_size=2).cardinality() == UNKNOWN_CARDINALITY
    endless = Dataset.range(4).repeat().group_by_window(lambda x: x, lambda k, w: w.batch(2), 2)
    assert endless.cardinality() == INFINITE_CARDINALITY
    keys = Dataset.range(4).group_by_window(
        lambda x: x % 2, lambda k, w: Dataset.zip((Dataset.from_tensors(k).repeat(), w)), 2
    )
    assert listed(keys) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    some = Dataset.range(6).group_by_window(
        lambda x: x % 2, lambda k, w: w.filter(lambda x: x > 2), 2
    )
    assert listed(some) == [3, 4, 5]
    for arguments in ({}, {"window_size": 1, "window_size_func": lambda key: 1}):
        with refused(rx.errors.InvalidArgumentError, "window_size"):
            grouped(**arguments)
    with refused(rx.errors.InvalidArgumentError, "window_size"):
        listed(grouped(window_size=0))
    with refused(rx.errors.ArgumentTypeError, "datasets"):
        listed(Dataset.range(4).group_by_window(lambda x: x, lambda k, w: k, 2))  # type: ignore[arg-type]
    with refused(rx.errors.InvalidArgumentError, "whole number"):
        listed(Dataset.range(4).group_by_window(lambda x: [x], lambda k, w: w, 2))


def test_bucket_by_sequence_length_as_in_tf_data() -> None:
    three = {"bucket_boundaries": [3, 5], "bucket_batch_sizes": [2, 2, 2]}
    short, middle, long = (
        [[0, 0], [21, 22]],
        [[1, 2, 3, 4], [5, 6, 7, 0]],
        [[7, 8, 9, 10, 11, 0], [13, 14, 15, 16, 19, 20]],
    )
    assert listed(in_buckets(**three)) == [middle, long, short]
    assert in_buckets(**three).element_spec == rx.TensorSpec((None, None), np.int64)
    dropped = in_buckets(
        bucket_boundaries=[3, 5], bucket_batch_sizes=[2, 3, 3], drop_remainder=True
    )
    assert listed(dropped) == [short]
    padded = in_buckets(
        bucket_boundaries=[3, 5, 8], bucket_batch_sizes=[2] * 4, pad_to_bucket_boundary=True
    )
    assert listed(padded) == [middle, [[*row, 0] for row in long], short]
    assert listed(in_buckets(**three, padding_values=-1))[0] == [[1, 2, 3, 4], [5, 6, 7, -1]]
    with refused(rx.errors.InvalidArgumentError, "bucket_boundaries"):
        listed(in_buckets(**three, pad_to_bucket_boundary=True))
    with refused(rx.errors.InvalidArgumentError, "bucket_batch_sizes"):
        in_buckets(bucket_boundaries=[3, 5], bucket_batch_sizes=[2, 2])
    same = Dataset.range(4).map(lambda x: np.ones(2) * x)
    stacked = same.bucket_by_sequence_length(len, [2], [1, 2], no_padding=True)
    assert listed(stacked) == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


def three_datasets() -> list[Dataset]:
    return [Dataset.range(0, 3), Dataset.range(10, 11), Dataset.range(20, 25)]


def test_choose_from_datasets_as_in_tf_data() -> None:
    words = [Dataset.from_tensors(word).repeat() for word in ("foo", "bar", "baz")]
    choices = Dataset.range(3).repeat(3)
    assert listed(Dataset.choose_from_datasets(words, choices)) == ["foo", "bar", "baz"] * 3
    choices = Dataset.from_tensor_slices(np.array([0, 1, 2, 1, 2, 0, 2]))
    chosen = Dataset.choose_from_datasets(three_datasets(), choices)
    assert listed(chosen) == [0, 10, 20]
    assert chosen.cardinality() == UNKNOWN_CARDINALITY
    going_on = Dataset.choose_from_datasets(three_datasets(), choices, stop_on_empty_dataset=False)
    assert listed(going_on) == [0, 10, 20, 21, 1, 22]
    for wrong in (3, -1):
        bad = Dataset.from_tensor_slices(np.array([0, wrong]))
        with refused(rx.errors.InvalidArgumentError, "from 0 to 2"):
            listed(Dataset.choose_from_datasets(three_datasets(), bad))
    with refused(rx.errors.ArgumentTypeError, "whole numbers"):
        Dataset.choose_from_datasets(three_datasets(), Dataset.from_tensors(1.0))
    with refused(rx.errors.ArgumentTypeError, "datasets"):
        Dataset.choose_from_datasets(three_datasets(), [0, 1])  # type: ignore[arg-type]
    with refused(rx.errors.InvalidArgumentError, "empty"):
        Dataset.choose_from_datasets([], Dataset.range(2))
    mixed = [Dataset.range(2), Dataset.zip((Dataset.range(2), Dataset.range(2)))]
    with refused(rx.errors.ArgumentTypeError, "one structure"):
        listed(Dataset.choose_from_datasets(mixed, Dataset.range(2)))


def test_sample_from_datasets_draws_by_weight() -> None:
    both = [Dataset.from_tensors(0).repeat(), Dataset.from_tensors(1).repeat()]
    drawn = Dataset.sample_from_datasets(both, weights=[0.2, 0.8], seed=7)
    values = listed(drawn.take(4000))
    assert 0.77 < np.mean(values) < 0.83
    assert values == listed(drawn.take(4000))
    assert drawn.cardinality() == INFINITE_CARDINALITY
    redrawn = Dataset.sample_from_datasets(both, seed=7, rerandomize_each_iteration=True).take(99)
    assert listed(redrawn) != listed(redrawn)
    finite = Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(10, 15)], seed=1)
    values = listed(finite)
    assert sorted(values) == [0, 1, 2, 10, 11, 12, 13, 14]
    assert [x for x in values if x < 9] == [0, 1, 2]
    assert finite.cardinality() == UNKNOWN_CARDINALITY
    stopped = Dataset.sample_from_datasets(
        [Dataset.range(3), Dataset.range(10, 15)], seed=1, stop_on_empty_dataset=True
    )
    assert listed(stopped) == values[: len(listed(stopped))]
    assert len(listed(stopped)) < 8


def test_sample_from_datasets_weights_of_zero_and_weights_that_change() -> None:
    endless, three = Dataset.range(2).repeat(), Dataset.range(3)
    only = Dataset.sample_from_datasets([endless, three], weights=[0.0, 1.0])
    assert listed(only) == [0, 1, 2]
    assert only.cardinality() == 3
    assert listed(Dataset.sample_from_datasets([endless, three], weights=[0.0, 0.0])) == []
    weights = Dataset.from_tensor_slices([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    changing = Dataset.sample_from_datasets([three, Dataset.range(10, 13)], weights=weights)
    assert listed(changing) == [0, 10, 11, 1]
    with refused(rx.errors.ArgumentTypeError, "floating-point"):
        Dataset.sample_from_datasets([three, three], weights=[1, 1])
    with refused(rx.errors.InvalidArgumentError, "2 datasets"):
        Dataset.sample_from_datasets([three, three], weights=[0.1, 0.1, 0.2])
    with refused(rx.errors.InvalidArgumentError, "empty"):
        Dataset.sample_from_datasets([])


def test_random_and_counter() -> None:
    numbers = Dataset.random(seed=4).take(3)
    assert listed(numbers) == listed(numbers) == listed(Dataset.random(seed=4).take(3))
    assert listed(numbers.repeat(2)) == listed(numbers) * 2
    assert listed(numbers) != listed(Dataset.random(seed=5).take(3))
    own = Dataset.random().take(2)
    assert listed(own) == listed(own) != listed(Dataset.random().take(2))
    redrawn = Dataset.random(seed=4, rerandomize_each_iteration=True).take(3)
    assert listed(redrawn) != listed(redrawn)
    passes = listed(redrawn.repeat(2))
    assert passes[:3] != passes[3:]
    assert all(0 <= x < 2**32 for x in listed(Dataset.random(seed=1).take(500)))
    assert Dataset.random().cardinality() == INFINITE_CARDINALITY
    assert Dataset.random().element_spec == rx.TensorSpec((), np.int64)
    assert listed(Dataset.counter().take(3)) == [0, 1, 2]
    assert listed(Dataset.counter(2, -3).take(3)) == [2, -1, -4]
    assert listed(Dataset.counter(3, 0).take(3)) == [3, 3, 3]
    assert listed(Dataset.counter(0.5, 0.25, np.float32).take(3)) == [0.5, 0.75, 1.0]
    assert listed(Dataset.counter().batch(2).take(2)) == [[0, 1], [2, 3]]
    assert Dataset.counter().cardinality() == INFINITE_CARDINALITY
    assert Dataset.counter(dtype=np.int32).element_spec == rx.TensorSpec((), np.int32)


def test_apply_and_get_single_element() -> None:
    assert listed(Dataset.range(9).apply(lambda d: d.take(2))) == [0, 1]
    with refused(rx.errors.ArgumentTypeError, "apply"):
        Dataset.range(3).apply(lambda d: 3)  # type: ignore[arg-type, return-value]
    assert plain(Dataset.range(3).batch(3).get_single_element()) == [0, 1, 2]
    for count, found in ((0, "empty"), (2, "more")):
        with refused(rx.errors.InvalidArgumentError, found):
            Dataset.range(count).get_single_element()


@pytest.mark.parametrize("initial", [[0.8, 0.2], None], ids=["given", "estimated"])
def test_rejection_resample_reaches_the_target(initial: Any) -> None:
    classes = (np.random.default_rng(0).random(8000) < 0.2).astype(np.int32)
    dataset = Dataset.from_tensor_slices((classes, np.arange(8000)))
    resampled = dataset.rejection_resample(lambda c, x: c, [0.5, 0.5], initial, seed=3)
    found = listed(resampled)
    assert all(own == c for own, (c, _) in found)
    assert abs(np.mean([own for own, _ in found]) - 0.5) < 0.04
    assert len(found) > 2000


def test_rejection_resample_at_the_ends() -> None:
    dataset = Dataset.from_tensor_slices([0, 1] * 50)
    kept = listed(dataset.rejection_resample(lambda x: x, [0.0, 1.0], [0.5, 0.5], seed=1))
    assert kept == [(1, 1)] * 50
    same = listed(dataset.rejection_resample(lambda x: x, [0.5, 0.5], [0.5, 0.5]))
    assert same == [(0, 0), (1, 1)] * 50
    with refused(rx.errors.InvalidArgumentError, "from 0 to 0"):
        listed(dataset.rejection_resample(lambda x: x, [1.0], [1.0]))


# Positions: a new iterator continues exactly where the saved one was.

RESUMED: dict[str, Callable[[], Dataset]] = {
    "window": lambda: Dataset.range(9).window(3, 2).flat_map(lambda w: w.batch(3)),
    "window with gaps": lambda: Dataset.range(9).window(2, 5, 2).flat_map(lambda w: w),
    "windows of a shuffle": lambda: Dataset.range(12).shuffle(5, seed=1).window(4, 1, 2),
    "rebatch": lambda: Dataset.range(11).batch(3).rebatch([2, 0, 4]),
    "rebatch to the end": lambda: Dataset.range(4).batch(4).rebatch([4, 0, 0]),
    "scan": lambda: Dataset.range(6).scan(
        {"a": np.int64(1), "b": "x"}, lambda s, x: ({"a": s["a"] * 3, "b": s["b"] + "y"}, s)
    ),
    "take_while": lambda: Dataset.range(4).repeat().take_while(lambda x: x < 3),
    "unique": lambda: Dataset.from_tensor_slices([1, 2, 1, 3, 2, 4]).repeat(2).unique(),
    "group_by_window": lambda: grouped(window_size=2).unbatch(),
    "bucket": lambda: in_buckets(bucket_boundaries=[3, 5], bucket_batch_sizes=[2, 2, 2]),
    "choose": lambda: Dataset.choose_from_datasets(
        three_datasets(), Dataset.range(3).repeat(), stop_on_empty_dataset=False
    ),
    "sample": lambda: Dataset.sample_from_datasets(three_datasets(), [0.5, 0.1, 0.4]),
    "random": lambda: Dataset.random(rerandomize_each_iteration=True).take(5),
    "counter": lambda: Dataset.counter(5, 2).shuffle(3).take(6),
    "resample": lambda: Dataset.from_tensor_slices([0, 1, 1, 1] * 9).rejection_resample(
        lambda x: x, [0.5, 0.5]
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_positions_are_exact(name: str) -> None:
    dataset = RESUMED[name]()
    next(iter(dataset), None)
    iterator = iter(dataset)
    states, elements = [iterator.get_state()], []
    for element in iterator:
        elements.append(plain(element))
        states.append(iterator.get_state())
    assert elements
    for position, state in enumerate(states):
        other = iter(RESUMED[name]())
        other.set_state(json.loads(json.dumps(state)))
        assert listed(other) == elements[position:], position
        # The same iterator can be reset, too.
        if position % 3 == 0:
            other.set_state(state)
            assert listed(other) == elements[position:], position


@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device")
def test_new_steps_can_be_distributed(strategy: rx.Strategy) -> None:
    expected = {
        "bucket": [28, 142, 43],
        "rebatch": [3, 12, 13],
        "group": [6, 2, 4, 0, 3],
        "choose": [1, 45, 5],
    }
    found = {
        "bucket": in_buckets(bucket_boundaries=[3, 5], bucket_batch_sizes=[2, 2, 2]),
        "rebatch": Dataset.range(8).batch(2).rebatch(3),
        "group": grouped(window_size=2),
        "choose": Dataset.choose_from_datasets(
            [Dataset.range(4).batch(2), Dataset.range(22, 24).batch(2)], Dataset.range(2).repeat(9)
        ),
    }
    for name, dataset in found.items():
        distributed = strategy.experimental_distribute_dataset(dataset)
        sums = [
            sum(int(part.sum()) for part in strategy.experimental_local_results(batch))
            for batch in distributed
        ]
        assert sums[: len(expected[name])] == expected[name], name


@pytest.mark.strategies("mirrored_2")
def test_a_checkpoint_holds_the_position_of_new_steps(strategy: rx.Strategy, tmp_path: Any) -> None:
    def distributed() -> Any:
        dataset = Dataset.range(20).group_by_window(lambda x: x % 3, lambda k, w: w.batch(4), 4)
        return strategy.experimental_distribute_dataset(dataset)

    iterator = iter(distributed())
    next(iterator)
    path = rx.train.Checkpoint(iterator=iterator).write(tmp_path / "a")
    rest = [[x.tolist() for x in strategy.experimental_local_results(b)] for b in iterator]
    other = iter(distributed())
    rx.train.Checkpoint(iterator=other).restore(path)
    assert [[x.tolist() for x in strategy.experimental_local_results(b)] for b in other] == rest


def test_steps_take_the_arguments_of_tf_data() -> None:
    ten = Dataset.range(10, name="a")
    named: dict[str, Any] = {"name": "b"}
    options: dict[str, Any] = {"num_parallel_calls": 2, "deterministic": False, **named}
    steps = ten.map(lambda x: x + 1, **options).filter(lambda x: x > 1, **named)
    steps = steps.take(8, **named).skip(1, **named).repeat(2, **named).shuffle(1, **named)
    steps = steps.batch(2, **options).unbatch(**named).enumerate(**named).prefetch(1, **named)
    steps = steps.interleave(lambda i, x: Dataset.from_tensors(x, **named), **options)
    steps = steps.flat_map(Dataset.from_tensors, **named).cache(**named).shard(2, 0, **named)
    steps = steps.concatenate(Dataset.from_tensor_slices([7], **named), **named)
    steps = Dataset.zip(steps, **named).padded_batch(9, **named)
    assert listed(steps) == [[3, 5, 7, 9, 4, 6, 8, 7]]


def _keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _keys(part) for key, part in tree.items()}
    return [_keys(part) for part in tree] if isinstance(tree, tuple) else None


ROWS = Dataset.from_tensor_slices({"b": np.arange(4), "a": np.arange(4.0)})
B_A = {"b": None, "a": None}


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        (ROWS, B_A),
        (ROWS.batch(2), B_A),
        (ROWS.padded_batch(2, padded_shapes={"a": [], "b": []}), B_A),
        (ROWS.batch(2).unbatch().shuffle(4).cache().repeat(2).prefetch(1), B_A),
        (ROWS.concatenate(ROWS.skip(1)), B_A),
        (ROWS.window(2).flat_map(lambda x: Dataset.zip(x)), B_A),
        (Dataset.from_generator(lambda: iter([{"b": 1, "a": 2}])), B_A),
        (Dataset.zip({"z": ROWS, "y": ROWS}), {"z": B_A, "y": B_A}),
        (
            ROWS.map(lambda x: {"z": x["b"], "y": (x["a"], {"q": 1, "p": 2})}),
            {"z": None, "y": [None, {"q": None, "p": None}]},
        ),
    ],
)
def test_elements_keep_the_order_of_their_keys(dataset: Dataset, wanted: Any) -> None:
    # As text: dicts are equal in any order.
    assert str(_keys(dataset.element_spec)) == str(wanted)
    assert {str(_keys(element)) for element in dataset} == {str(wanted)}
