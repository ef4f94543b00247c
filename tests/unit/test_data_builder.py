"""Datasets with the interface of tf.data: orders, positions, facts and errors."""

from __future__ import annotations

import collections
import gc
import gzip
import itertools
import json
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import refused

import replicax as rx
from replicax.data import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from replicax.tensorflow_files.records import RecordWriter, framed


def plain(value: Any) -> Any:
    """An element as Python numbers, lists and bytes."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def listed(dataset: Any) -> list[Any]:
    return [plain(element) for element in dataset]


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """Three files of 4, 1 and 5 lines: a0 to a3, b0, c0 to c4."""
    paths = []
    for letter, count in (("a", 4), ("b", 1), ("c", 5)):
        path = tmp_path / f"{letter}.txt"
        path.write_bytes(b"".join(f"{letter}{i}\n".encode() for i in range(count)))
        paths.append(str(path))
    return paths


# What tf.data documents for each method.


def test_S139_range_is_int64() -> None:
    assert listed(Dataset.range(5)) == [0, 1, 2, 3, 4]
    assert listed(Dataset.range(2, 5)) == [2, 3, 4]
    assert listed(Dataset.range(1, 5, 2)) == [1, 3]
    assert listed(Dataset.range(5, 1, -2)) == [5, 3]
    assert listed(Dataset.range(5, 1)) == []
    assert Dataset.range(5).element_spec == rx.TensorSpec((), np.int64)
    assert next(iter(Dataset.range(2, output_type=np.float32))).dtype == np.float32
    assert list(Dataset.range(2).as_numpy_iterator()) == [np.int64(0), np.int64(1)]
    assert listed(Dataset.range(5, 1, -1).batch(3)) == [[5, 4, 3], [2]]


def test_sources_in_memory() -> None:
    assert listed(Dataset.from_tensors([1, 2, 3])) == [[1, 2, 3]]
    assert listed(Dataset.from_tensors(([1, 2, 3], 4))) == [([1, 2, 3], 4)]
    assert listed(Dataset.from_tensor_slices([1, 2, 3])) == [1, 2, 3]
    assert listed(Dataset.from_tensor_slices([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert listed(Dataset.from_tensor_slices(([1, 2], [3, 4], [5, 6]))) == [(1, 3, 5), (2, 4, 6)]
    slices = Dataset.from_tensor_slices({"a": [1, 2], "b": [3, 4]})
    assert listed(slices) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert slices.element_spec == {
        "a": rx.TensorSpec((), np.int32),
        "b": rx.TensorSpec((), "int32"),
    }
    assert next(iter(Dataset.from_tensors(1.5))).dtype == np.float32
    assert next(iter(Dataset.from_tensors(2**40))).dtype == np.int64
    assert next(iter(Dataset.from_tensors(np.float64(1)))).dtype == np.float64
    assert listed(Dataset.from_tensor_slices(jnp.arange(3))) == [0, 1, 2]
    assert listed(Dataset.from_tensor_slices(["ab", "c"]).batch(2)) == [["ab", "c"]]


def test_datasets_can_be_pickled() -> None:
    datasets = [
        Dataset.range(5).filter(lambda x: x > 1).batch(2),
        Dataset.from_tensors((1, 2)),
        Dataset.range(3).map(lambda x: x + 1).cache().repeat(2),
        Dataset.range(3).interleave(lambda x: Dataset.range(x)),
        Dataset.range(4).window(2).flat_map(lambda window: window.batch(2)),
    ]
    for dataset in datasets:
        copy = pickle.loads(cloudpickle.dumps(dataset))
        assert listed(copy) == listed(dataset)


def test_elements_never_share_memory_with_the_source() -> None:
    source = np.arange(8.0)
    for dataset in (
        Dataset.from_tensor_slices(source),
        Dataset.from_tensor_slices(source).batch(4),
        Dataset.from_tensor_slices(source).shuffle(8).batch(4),
        Dataset.from_tensors(source),
        Dataset.from_tensors(source).cache().repeat(2),
        Dataset.from_tensor_slices(source).batch(4).unbatch(),
    ):
        for element in dataset:
            element[...] = -1
    assert source.tolist() == list(range(8))
    kept = Dataset.from_tensors(source).cache()
    for element in itertools.chain(kept, kept):
        assert element.sum() == 28
        element[:] = 0


def test_map_sees_parts_of_tuples_and_whole_dicts() -> None:
    pairs = Dataset.from_tensor_slices(([1, 2], [3, 4]))
    assert listed(pairs.map(lambda x, y: x + y)) == [4, 6]
    dicts = Dataset.from_tensor_slices({"a": [1, 2]})
    assert listed(dicts.map(lambda d: {"b": d["a"] + 1})) == [{"b": 2}, {"b": 3}]
    Point = collections.namedtuple("Point", "x y")
    points = Dataset.from_tensor_slices(Point([1, 2], [3, 4]))
    assert listed(points.map(lambda p: p.x * p.y)) == [3, 8]
    assert listed(Dataset.range(4).batch(2).map(lambda b: b.sum())) == [1, 5]
    assert listed(Dataset.range(2).map(lambda x: (x, [1.0, 2.0]))) == [
        (0, [1.0, 2.0]),
        (1, [1.0, 2.0]),
    ]
    assert isinstance(next(iter(Dataset.range(1).map(lambda x: jnp.asarray(x)))), np.ndarray)


def test_filter_take_skip_repeat_concatenate_zip_enumerate() -> None:
    ten = Dataset.range(10)
    assert listed(ten.filter(lambda x: x < 3)) == [0, 1, 2]
    assert listed(ten.take(3)) == [0, 1, 2] == listed(ten.filter(lambda x: True).take(3))
    assert listed(ten.take(-1)) == listed(ten) == listed(ten.take(99))
    assert listed(ten.skip(7)) == [7, 8, 9] == listed(ten.filter(lambda x: True).skip(7))
    assert listed(ten.skip(99)) == [] == listed(ten.skip(-1))
    assert listed(Dataset.range(3).repeat(2)) == [0, 1, 2, 0, 1, 2]
    assert listed(Dataset.range(3).repeat(0)) == []
    assert listed(Dataset.range(3).repeat().take(7)) == [0, 1, 2, 0, 1, 2, 0]
    assert listed(Dataset.range(0).repeat()) == []
    assert listed(Dataset.range(3).filter(lambda x: x > 5).repeat()) == []
    assert listed(Dataset.range(1, 4).concatenate(Dataset.range(4, 8))) == [1, 2, 3, 4, 5, 6, 7]
    a, b = Dataset.range(1, 4), Dataset.range(4, 7)
    assert listed(Dataset.zip((a, b))) == [(1, 4), (2, 5), (3, 6)] == listed(Dataset.zip(a, b))
    assert listed(Dataset.zip((b, a.take(2)))) == [(4, 1), (5, 2)]
    assert listed(Dataset.zip({"x": a, "y": (b, a)}).take(1)) == [{"x": 1, "y": (4, 1)}]
    assert listed(Dataset.from_tensor_slices([1, 2, 3]).enumerate(start=5)) == [
        (5, 1),
        (6, 2),
        (7, 3),
    ]
    assert listed(Dataset.range(2).enumerate().repeat(2)) == [(0, 0), (1, 1), (0, 0), (1, 1)]
    assert listed(ten.shard(3, 0)) == [0, 3, 6, 9]
    assert listed(ten.filter(lambda x: True).shard(3, 1)) == [1, 4, 7]


def test_T68_batches() -> None:
    assert listed(Dataset.range(8).batch(3)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert listed(Dataset.range(8).batch(3, drop_remainder=True)) == [[0, 1, 2], [3, 4, 5]]
    assert listed(Dataset.range(5).batch(4, drop_remainder=True)) == [[0, 1, 2, 3]]
    stream = Dataset.range(9).filter(lambda x: x != 0)
    assert listed(stream.batch(3)) == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert listed(stream.batch(3, drop_remainder=True)) == [[1, 2, 3], [4, 5, 6]]
    assert listed(Dataset.range(6).batch(2).batch(2)) == [[[0, 1], [2, 3]], [[4, 5]]]
    # As in tf.data, a batch may contain elements of two passes.
    assert listed(Dataset.range(3).repeat(2).batch(4)) == [[0, 1, 2, 0], [1, 2]]
    assert listed(Dataset.range(3).batch(2).repeat(2)) == [[0, 1], [2], [0, 1], [2]]
    nested = Dataset.from_tensor_slices(([1, 2, 3], {"a": [4, 5, 6]})).batch(2)
    assert listed(nested) == [([1, 2], {"a": [4, 5]}), ([3], {"a": [6]})]
    assert listed(Dataset.range(4).batch(3).unbatch()) == [0, 1, 2, 3]
    assert listed(Dataset.from_tensors(([[1, 2], [3, 4]], [5, 6])).unbatch()) == [
        ([1, 2], 5),
        ([3, 4], 6),
    ]


def test_padded_batches() -> None:
    grown = Dataset.range(1, 5).map(lambda x: np.full(x, x))
    assert listed(grown.padded_batch(2)) == [
        [[1, 0], [2, 2]],
        [[3, 3, 3, 0], [4, 4, 4, 4]],
    ]
    fixed = grown.padded_batch(2, padded_shapes=(5,), padding_values=-1, drop_remainder=True)
    assert listed(fixed.take(1)) == [[[1, -1, -1, -1, -1], [2, 2, -1, -1, -1]]]
    pairs = Dataset.range(1, 3).map(lambda x: (np.full(x, 7), x))
    got = listed(pairs.padded_batch(2, padded_shapes=((None,), ()), padding_values=(9, 0)))
    assert got == [([[7, 9], [7, 7]], [1, 2])]
    assert grown.padded_batch(2).element_spec == rx.TensorSpec((None, None), np.int64)
    with refused(ValueError, match=r"\(2,\)"):
        listed(grown.padded_batch(4, padded_shapes=(2,)))
    with refused(ValueError, match="one number of dimensions"):
        listed(Dataset.range(2).map(lambda x: np.zeros((1,) * int(x))).padded_batch(2))


def test_interleave_follows_the_documented_order() -> None:
    five = Dataset.range(1, 6)
    got = listed(five.interleave(lambda x: Dataset.from_tensors(x).repeat(6), 2, 4))
    want = "1111 2222 11 22 3333 4444 33 44 5555 55".replace(" ", "")
    assert "".join(map(str, got)) == want
    assert listed(Dataset.range(3).flat_map(Dataset.range)) == [0, 0, 1]
    assert listed(five.interleave(lambda x: Dataset.from_tensors(x), cycle_length=9)) == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_reduce_cache_and_prefetch() -> None:
    assert int(Dataset.range(5).reduce(np.int64(0), lambda total, x: total + x)) == 10
    assert int(Dataset.range(5).reduce(0, lambda n, _: n + 1)) == 5
    calls = []
    cached = Dataset.range(4).map(lambda x: calls.append(int(x)) or x).cache()
    first = iter(cached)
    next(first)
    assert listed(cached) == [0, 1, 2, 3] == listed(cached)
    assert calls == [0, 0, 1, 2, 3]
    assert listed(first) == [1, 2, 3]
    # A cache keeps the order of a shuffle before it.
    frozen = Dataset.range(20).shuffle(20, seed=1).cache()
    assert listed(frozen) == listed(frozen) != list(range(20))
    for size in (0, 1, 3, AUTOTUNE):
        assert listed(Dataset.range(9).map(lambda x: x * 2).prefetch(size)) == list(range(0, 18, 2))


def test_an_iterator_that_is_left_early_leaves_nothing_behind(lines: list[str]) -> None:
    before = threading.active_count()
    for dataset in (
        Dataset.range(100).map(lambda x: x).prefetch(2),
        Dataset.range(100).map(lambda x: x, num_parallel_calls=2),
        rx.data.TextLineDataset(lines).prefetch(1).repeat(),
    ):
        iterator = iter(dataset)
        next(iterator)
        del iterator
        gc.collect()
        deadline = time.monotonic() + 60
        while threading.active_count() > before:
            assert time.monotonic() < deadline, threading.enumerate()
            time.sleep(0.01)


@pytest.mark.parametrize("threads", [2, AUTOTUNE])
def test_parallel_map_keeps_the_order(threads: int) -> None:
    dataset = Dataset.range(50).map(lambda x: x + 1, num_parallel_calls=threads).batch(7)
    assert np.concatenate(list(dataset)).tolist() == list(range(1, 51))
    stream = Dataset.range(6).filter(lambda x: x > 1).map(lambda x: x + 1, threads)
    assert listed(stream) == [3, 4, 5, 6]
    iterator = iter(dataset)
    first, state = next(iterator), iterator.get_state()
    iterator.close()
    assert first.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert list(iterator) == []
    assert iterator.get_state() == state


def test_generators() -> None:
    def count(stop: int) -> Any:
        yield from range(stop)

    dataset = Dataset.from_generator(count, args=(4,))
    assert listed(dataset) == [0, 1, 2, 3] == listed(dataset)
    signature = (rx.TensorSpec((None,), np.float32), rx.TensorSpec((), np.int64))
    typed = Dataset.from_generator(
        lambda: (([1] * n, n) for n in (1, 2)), output_signature=signature
    )
    assert typed.element_spec == signature
    first = next(iter(typed))
    assert (first[0].dtype, first[1].dtype) == (np.float32, np.int64)
    wrong = Dataset.from_generator(lambda: iter([1]), output_signature=rx.TensorSpec((2,)))
    with refused(ValueError, match="output_signature"):
        listed(wrong)
    left = iter(dataset)
    next(left)
    left.close()


# Shuffling.


def test_shuffle_reorders_everything_each_iteration() -> None:
    dataset = Dataset.range(100).shuffle(10, seed=3)
    first, second = listed(dataset), listed(dataset)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second != list(range(100))
    # A new dataset of the same steps has the same epochs.
    again = Dataset.range(100).shuffle(10, seed=3)
    assert [listed(again), listed(again)] == [first, second]
    # The whole dataset is shuffled, not a window of ten.
    assert max(first[:20]) > 60
    fixed = Dataset.range(100).shuffle(100, seed=3, reshuffle_each_iteration=False)
    assert listed(fixed) == listed(fixed) == listed(fixed.repeat(2))[100:]
    assert listed(Dataset.range(9).shuffle(1)) == list(range(9))
    assert listed(Dataset.range(30).shuffle(30)) != listed(Dataset.range(30).shuffle(30))


@pytest.mark.parametrize("is_stream", [False, True], ids=["indexed", "stream"])
def test_each_pass_of_repeat_has_its_own_order(is_stream: bool) -> None:
    source = Dataset.range(20)
    if is_stream:
        source = source.filter(lambda x: True)
    got = listed(source.shuffle(20, seed=1).repeat(3))
    passes = [got[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(p) == list(range(20)) for p in passes)
    assert len(set(map(tuple, passes))) == 3
    batches = np.concatenate(list(source.shuffle(20, seed=1).repeat(3).batch(7))).tolist()
    assert batches == got


def test_streams_are_shuffled_by_a_buffer() -> None:
    got = listed(Dataset.range(100).filter(lambda x: True).shuffle(10, seed=5))
    assert sorted(got) == list(range(100)) != got
    # An element comes at most a buffer size too early.
    assert all(value < position + 10 for position, value in enumerate(got))
    endless = Dataset.range(10).repeat().shuffle(5, seed=1).take(20)
    assert len(listed(endless)) == 20


def test_S156_seeds_divide_infinite_data() -> None:
    def stream(seed: int) -> list[Any]:
        return listed(Dataset.range(50).shuffle(50, seed=seed).repeat().take(60))

    assert stream(1) != stream(2)
    assert stream(1) == stream(1)


# Positions.

PIPELINES: dict[str, Any] = {
    "range": lambda: Dataset.range(7),
    "batches": lambda: Dataset.from_tensor_slices({"x": np.arange(10.0)}).batch(3),
    "shuffled": lambda: Dataset.range(11).shuffle(11, seed=4).repeat(2).batch(3),
    "unseeded": lambda: Dataset.range(11).shuffle(11).repeat(2).batch(4),
    "mapped": lambda: Dataset.range(9).map(lambda x: x * x).shuffle(3, seed=2).batch(2),
    "filtered": lambda: Dataset.range(12).filter(lambda x: x % 3 > 0).repeat(2).batch(3),
    "buffer": lambda: Dataset.range(12).filter(lambda x: x > 1).shuffle(4, seed=9).repeat(2),
    "generated": lambda: Dataset.from_generator(lambda: iter(range(9))).batch(2),
    "cached": lambda: Dataset.range(6).map(lambda x: x + 1).cache().repeat(2),
    "sliced": lambda: Dataset.range(20).filter(lambda x: True).skip(3).shard(2, 1).take(6),
    "zipped": lambda: Dataset.zip(Dataset.range(5), Dataset.range(9).filter(lambda x: x > 2)),
    "joined": lambda: Dataset.range(3).concatenate(Dataset.range(9).filter(lambda x: x > 5)),
    "numbered": lambda: Dataset.range(9).filter(lambda x: x > 3).enumerate(2),
    "unbatched": lambda: Dataset.range(9).batch(4).unbatch(),
    "interleaved": lambda: Dataset.range(1, 6).interleave(
        lambda x: Dataset.range(x * 10, x * 11), cycle_length=2, block_length=2
    ),
    "prefetched": lambda: Dataset.range(9).map(lambda x: x + 1).batch(2).prefetch(2),
    "parallel": lambda: Dataset.range(9).map(lambda x: x + 1, num_parallel_calls=2),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_T76_a_position_can_be_set_anywhere_in_a_fresh_dataset(name: str) -> None:
    dataset = PIPELINES[name]()
    iter(dataset).close()
    iterator = iter(dataset)  # the second epoch
    states, elements = [iterator.get_state()], []
    for element in iterator:
        elements.append(plain(element))
        states.append(iterator.get_state())
    following = listed(dataset)
    for position, state in enumerate(states):
        text = json.dumps(state)
        assert len(text) < 1000
        fresh = PIPELINES[name]()
        resumed = iter(fresh)
        resumed.set_state(json.loads(text))
        assert resumed.get_state()["epoch"] == 1
        assert listed(resumed) == elements[position:], position
        if position % 4 == 0:
            assert listed(fresh) == following


def test_a_running_iterator_goes_back_and_forth() -> None:
    iterator = iter(Dataset.range(10).shuffle(10, seed=1))
    start = iterator.get_state()
    elements = listed(iterator)
    assert list(iterator) == []
    iterator.set_state(start)
    assert listed(iterator) == elements


def test_positions_of_other_datasets_are_refused() -> None:
    state = iter(Dataset.range(4).batch(2)).get_state()
    with refused(ValueError, match="range > batch"):
        iter(Dataset.range(4)).set_state(state)
    with refused(ValueError, match="same steps"):
        iter(Dataset.range(4)).set_state({})


@pytest.mark.slow
def test_a_fresh_process_goes_on_in_the_middle_of_a_shuffled_epoch(lines: list[str]) -> None:
    code = textwrap.dedent(
        """
        import json, sys
        from replicax.data import Dataset, TextLineDataset
        rows = Dataset.range(40).shuffle(40).batch(4)
        text = TextLineDataset(sys.argv[1:]).shuffle(4).batch(3)
        states = json.load(sys.stdin)
        result = []
        for dataset, state in zip((rows, text), states or (None, None)):
            iterator = iter(dataset)
            if state:
                iterator.set_state(state)
            else:
                next(iterator), next(iterator)
            state = iterator.get_state()
            rest = [[str(x) for x in batch] for batch in iterator]
            later = [[str(x) for x in batch] for batch in dataset]
            result.append([state, rest, later])
        print(json.dumps(result))
        """
    )

    def run(states: Any) -> Any:
        command = [sys.executable, "-c", code, *lines]
        done = subprocess.run(
            command,
            input=json.dumps(states),
            capture_output=True,
            text=True,
            check=True,
            timeout=250,
        )
        return json.loads(done.stdout)

    first = run(None)
    assert len(first[0][1]) == 8
    assert run([result[0] for result in first]) == first


# What the program keeps is freed after the modules of Grain, and while they are removed.
LEFT_OPEN = {
    "freed last": """
import sys
import replicax as rx
sys.kept = iter(rx.data.Dataset.range(100).map(lambda x: x + 1, num_parallel_calls=2))
next(sys.kept)
""",
    "freed with the program": """
import replicax as rx
def plus_one(x):
    return x + 1
kept = iter(rx.data.Dataset.range(100).map(plus_one).prefetch(2))
next(kept)
""",
}


@pytest.mark.parametrize("code", LEFT_OPEN.values(), ids=LEFT_OPEN)
def test_an_iterator_that_is_left_open_is_closed_when_the_program_exits(code: str) -> None:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    assert done.stderr == ""


# Files.


def test_lines_and_their_positions(lines: list[str]) -> None:
    text = rx.data.TextLineDataset(lines)
    everything = [f"{c}{i}".encode() for c, n in (("a", 4), ("b", 1), ("c", 5)) for i in range(n)]
    assert listed(text) == everything
    assert text.element_spec == rx.TensorSpec((), object)
    for position in range(11):
        iterator = iter(text)
        for _ in range(position):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
        resumed = iter(rx.data.TextLineDataset(lines))
        resumed.set_state(state)
        assert listed(resumed) == everything[position:]
    assert listed(rx.data.TextLineDataset(lines[1]).batch(2)) == [[b"b0"]]
    assert listed(rx.data.TextLineDataset(Dataset.list_files(lines, shuffle=False))) == everything


def test_line_ends_and_compression(tmp_path: Path) -> None:
    path = tmp_path / "w.txt"
    path.write_bytes(b"one\r\n\ntwo\x00\nlast")
    assert listed(rx.data.TextLineDataset(path)) == [b"one", b"", b"two\x00", b"last"]
    packed = tmp_path / "w.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert len(listed(rx.data.TextLineDataset(packed, "GZIP"))) == 4
    with refused(ValueError, match="BZIP2"):
        rx.data.TextLineDataset(packed, "BZIP2")


def test_records_of_one_length(tmp_path: Path) -> None:
    path = tmp_path / "r.bin"
    path.write_bytes(b"HH" + bytes(range(12)) + b"F")
    records = rx.data.FixedLengthRecordDataset(str(path), 4, header_bytes=2, footer_bytes=1)
    assert listed(records) == [bytes(range(4)), bytes(range(4, 8)), bytes(range(8, 12))]
    assert listed(records.map(lambda r: np.frombuffer(r, np.uint8)).batch(3)) == [
        np.arange(12).reshape(3, 4).tolist()
    ]
    iterator = iter(records)
    next(iterator)
    resumed = iter(records)
    resumed.set_state(iterator.get_state())
    assert next(resumed) == bytes(range(4, 8))
    resumed.close()
    iterator.close()
    with refused(ValueError, match="1 bytes are left"):
        listed(rx.data.FixedLengthRecordDataset(str(path), 7))


def test_tf_records(tmp_path: Path) -> None:
    path = tmp_path / "r.tfrecord"
    records = [b"a", b"", b"\x00\x00"]
    for compression in (None, "GZIP", "ZLIB"):
        with RecordWriter(path, compression) as writer:
            for record in records:
                writer.write(record)
        dataset = rx.data.TFRecordDataset(path, compression)
        assert listed(dataset) == records == listed(dataset)
        assert listed(dataset.shard_records(2, 0)) == [b"a", b"\x00\x00"]
        iterator = iter(dataset)
        next(iterator)
        resumed = iter(dataset)
        resumed.set_state(iterator.get_state())
        assert [next(resumed), next(resumed)] == records[1:]
        resumed.close()
        iterator.close()
    path.write_bytes(b"".join(map(framed, records))[:-1] + b"x")
    with pytest.raises(rx.errors.DataLossError, match="checksum"):
        listed(rx.data.TFRecordDataset(path))


def test_array_records_are_reached_in_any_order(tmp_path: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    files = []
    for name, count in (("a", 3), ("b", 4)):
        files.append(str(tmp_path / name))
        writer = ArrayRecordWriter(files[-1], "group_size:1")
        for i in range(count):
            writer.write(f"{name}{i}".encode())
        writer.close()
    dataset = rx.data.ArrayRecordDataset(files)
    assert len(dataset) == 7
    everything = [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2", b"b3"]
    assert listed(dataset) == everything
    shuffled = listed(dataset.shuffle(2, seed=1))
    assert sorted(shuffled) == everything != shuffled
    assert listed(dataset.shard_records(2, 1)) == [b"a1", b"b1", b"b3"]
    assert listed(dataset.batch(2).with_files(files[1:])) == [[b"b0", b"b1"], [b"b2", b"b3"]]


def test_list_files(lines: list[str], tmp_path: Path) -> None:
    pattern = str(tmp_path / "*.txt")
    assert listed(Dataset.list_files(pattern, shuffle=False)) == lines
    assert listed(Dataset.list_files(lines[:2], shuffle=False)) == lines[:2]
    names = Dataset.list_files(pattern, seed=1)
    assert sorted(listed(names)) == lines
    assert len({tuple(listed(names)) for _ in range(20)}) > 1
    with refused(rx.errors.NotFoundError, match="nothing"):
        Dataset.list_files(str(tmp_path / "nothing*"))
    with refused(rx.errors.NotFoundError, match=r"gone\.txt"):
        rx.data.TextLineDataset([lines[0], str(tmp_path / "gone.txt")])


# Facts for distribution.


def test_T72_parts_of_files(lines: list[str], tmp_path: Path) -> None:
    paths = []
    for i in range(3):
        paths.append(str(tmp_path / f"{i}.part"))
        Path(paths[-1]).write_text("".join(f"{i}{j}\n" for j in range(10)))
    text = rx.data.TextLineDataset(paths)
    want = [f"{i}{j}".encode() for i in range(3) for j in (0, 5)]
    assert listed(text.shard_records(5, 0)) == want
    # Files are sharded where they are read, whatever the steps after.
    batches = text.map(lambda line: line).batch(4).prefetch(1)
    assert [line for batch in listed(batches.shard_records(5, 0)) for line in batch] == want
    turns = Dataset.list_files(paths, shuffle=False).interleave(rx.data.TextLineDataset, 3)
    assert sorted(listed(turns.batch(2).shard_records(5, 0).unbatch())) == want
    assert listed(text.shard_records(5, 0).shard_records(2, 1)) == [b"05", b"15", b"25"]
    assert text.files == tuple(paths) == batches.files == turns.files
    assert listed(batches.with_files(paths[2:]))[0] == [b"20", b"21", b"22", b"23"]
    assert listed(turns.with_files(paths[:1])) == listed(text.take(10))
    assert listed(text.with_files([])) == []
    assert Dataset.range(3).files is None
    assert Dataset.zip(text, text).files is None
    with refused(rx.errors.NotFoundError, match="starts from files"):
        Dataset.range(3).with_files(paths)
    names = Dataset.list_files(paths, shuffle=False).map(lambda name: name)
    assert listed(names.shard_records(2, 0)) == [paths[0], paths[2]]


def test_T73_data_is_divided_before_a_trailing_prefetch() -> None:
    dataset = Dataset.range(6).map(lambda x: x).prefetch(2)
    part = dataset.shard_records(2, 1)
    assert listed(part) == [1, 3, 5]
    assert "range > map > shard > prefetch" in repr(part)


def test_facts_for_distribution() -> None:
    quick = Dataset.range(10).shuffle(4).repeat(2).batch(3).prefetch(2)
    assert (quick.batch_size, quick.drops_remainder, quick.is_quick) == (3, False, True)
    mapped = Dataset.range(10).batch(3, drop_remainder=True).map(lambda x: x).take(2).repeat()
    assert (mapped.batch_size, mapped.drops_remainder, mapped.is_quick) == (3, True, False)
    assert Dataset.range(3).batch_size is None
    assert Dataset.range(4).batch(2).unbatch().batch_size is None
    assert Dataset.range(4).batch(2).batch(5).batch_size == 5
    pair = Dataset.zip(Dataset.range(4).batch(2), Dataset.range(4).batch(2))
    assert (pair.batch_size, pair.is_quick) == (2, True)
    assert Dataset.range(4).batch(2).concatenate(Dataset.range(4).batch(3)).batch_size is None


def test_element_spec_leaves_the_batch_open() -> None:
    arrays = (np.zeros((5, 3), np.float32), np.zeros(5, np.int64))
    dataset = Dataset.from_tensor_slices(arrays)
    spec = rx.TensorSpec
    assert dataset.element_spec == (spec((3,)), spec((), np.int64))
    assert dataset.batch(2).element_spec == (spec((None, 3)), spec((None,), np.int64))
    fixed = dataset.batch(2, drop_remainder=True).element_spec
    assert fixed == (spec((2, 3)), spec((2,), np.int64))
    assert dataset.batch(8).element_spec == (spec((None, 3)), spec((None,), np.int64))
    reduced = dataset.batch(2).map(lambda x, y: (x.T, y.sum())).element_spec
    assert reduced == (spec((3, 2)), spec((), np.int64))
    # Reading the spec does not count as an iteration.
    shuffled = Dataset.range(9).shuffle(9, seed=1)
    assert shuffled.element_spec == spec((), np.int64)
    assert listed(shuffled) == listed(Dataset.range(9).shuffle(9, seed=1))
    with refused(ValueError, match="empty"):
        _ = Dataset.range(0).element_spec


def test_cardinality() -> None:
    ten = Dataset.range(10)
    known = {
        10: [
            ten,
            ten.map(lambda x: x),
            ten.shuffle(3),
            ten.prefetch(1),
            ten.cache(),
            ten.enumerate(),
        ],
        4: [ten.batch(3), ten.shard(3, 0), ten.take(4), ten.skip(6), ten.repeat().take(4)],
        3: [ten.batch(3, True), ten.shard(3, 1), Dataset.zip(ten, ten.take(3))],
        20: [ten.repeat(2), ten.concatenate(ten)],
        0: [ten.take(0), ten.skip(11), ten.repeat(0), Dataset.range(0).repeat()],
    }
    for count, datasets in known.items():
        for dataset in datasets:
            assert dataset.cardinality() == count == len(dataset), dataset
            assert len(listed(dataset)) == count
    assert ten.repeat().cardinality() == INFINITE_CARDINALITY == -1
    assert ten.repeat().batch(2).skip(1).cardinality() == INFINITE_CARDINALITY
    unknown = ten.filter(lambda x: True)
    for dataset in (unknown, unknown.batch(2), unknown.take(3), ten.flat_map(Dataset.range)):
        assert dataset.cardinality() == UNKNOWN_CARDINALITY == -2
    with refused(TypeError, match="unknown"):
        len(unknown)
    with refused(TypeError, match="infinite"):
        len(ten.repeat())
    assert unknown and Dataset.range(0)


def test_options_are_carried_and_merged() -> None:
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = rx.data.AutoShardPolicy.OFF
    dataset = Dataset.range(4).with_options(options).batch(2)
    assert dataset.auto_shard_policy is rx.data.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = "data"
    assert dataset.options() != options
    assert dataset.with_options(rx.data.Options()).auto_shard_policy.name == "OFF"
    assert dataset.with_options(options).auto_shard_policy.name == "DATA"
    assert Dataset.range(4).auto_shard_policy is rx.data.AutoShardPolicy.AUTO
    assert Dataset.zip(Dataset.range(4), dataset).auto_shard_policy.name == "OFF"
    with refused(ValueError, match="OFF, AUTO, FILE, DATA or HINT"):
        options.experimental_distribute.auto_shard_policy = "sometimes"


# Errors.


def test_wrong_arguments_are_refused() -> None:
    ten = Dataset.range(10)
    for bad in (0, -1, 2.5, True, "3"):
        with refused(ValueError, match="batch_size"):
            ten.batch(bad)  # type: ignore[arg-type]
    with refused(ValueError, match="buffer_size"):
        ten.shuffle(0)
    for method in (ten.take, ten.skip, ten.repeat):
        with refused(ValueError, match="count"):
            method(-2)
    with refused(ValueError, match="below the number of shards, 2"):
        ten.shard(2, 2)
    with refused(ValueError, match=r"\(2,\), \(3,\)"):
        Dataset.from_tensor_slices(([1, 2], [1, 2, 3]))
    with refused(ValueError, match="from_tensors"):
        Dataset.from_tensor_slices(1)
    with refused(ValueError, match="converted to an array"):
        Dataset.from_tensors([[1, 2], [3]])
    with refused(TypeError, match="needs a function"):
        ten.map(3)  # type: ignore[arg-type]
    with refused(TypeError, match="`zip` needs datasets"):
        Dataset.zip(ten, [1, 2])
    with refused(TypeError, match="`flat_map` needs datasets"):
        listed(ten.flat_map(lambda x: [x]))
    with refused(TypeError, match="returned None"):
        listed(ten.map(lambda x: None))


def test_batches_of_different_shapes_name_the_shapes() -> None:
    grown = Dataset.range(1, 4).map(lambda x: np.zeros(int(x)))
    for dataset in (grown, grown.filter(lambda x: True)):
        with refused(ValueError, match=r"\(1,\), \(2,\), \(3,\).*padded_batch"):
            listed(dataset.batch(3))
    mixed = Dataset.range(2).map(lambda x: (x,) if x else {"a": x})
    with refused(ValueError, match="one structure"):
        listed(mixed.batch(2))


@pytest.mark.parametrize("is_stream", [False, True], ids=["indexed", "stream"])
def test_errors_of_the_users_functions_say_where(is_stream: bool) -> None:
    def fails(x: Any) -> Any:
        if x == 2:
            raise KeyError("no such thing")
        return x

    def ends(x: Any) -> Any:
        raise StopIteration

    source = Dataset.range(4).filter(lambda x: True) if is_stream else Dataset.range(4)
    iterator = iter(source.map(fails))
    assert [int(next(iterator)) for _ in range(2)] == [0, 1]
    with pytest.raises(KeyError, match="no such thing") as info:
        next(iterator)
    assert any("`map`" in note and "range" in note for note in info.value.__notes__)
    with pytest.raises(RuntimeError, match="StopIteration") as ended:
        listed(source.filter(ends))
    assert "`filter`" in ended.value.__notes__[0]
    with pytest.raises(KeyError):
        listed(source.map(fails).batch(2).prefetch(1))


# Speed: no cost per element.


def test_batches_from_memory_cost_nothing_per_element() -> None:
    gathered = []

    class Counted(np.ndarray):
        def take(self, *args: Any, **kwargs: Any) -> Any:
            gathered.append("take")
            return super().take(*args, **kwargs)

        def __getitem__(self, index: Any) -> Any:
            gathered.append("slice" if isinstance(index, slice) else "element")
            return super().__getitem__(index)

    array = np.arange(1000.0).view(Counted)
    dataset = Dataset.from_tensor_slices({"x": array}).shuffle(10, seed=1).shard(2, 0).repeat(2)
    batches = list(dataset.skip(3).batch(100))
    assert len(batches) == 10
    assert gathered == ["take"] * 10
    gathered.clear()
    assert len(list(Dataset.from_tensor_slices(array).skip(1).shard(2, 1).batch(50))) == 10
    assert gathered == ["slice"] * 10
