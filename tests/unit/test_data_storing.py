"""Datasets on disk: save, load and snapshot."""

from __future__ import annotations

import collections
import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_data_steps import listed, plain
from vocabulary import refused

import replicax as rx
from replicax.data import UNKNOWN_CARDINALITY, Dataset


def test_a_saved_dataset_is_loaded_as_it_was(tmp_path: Path) -> None:
    Point = collections.namedtuple("Point", "x y")
    elements: list[Dataset] = [
        Dataset.range(6),
        Dataset.from_tensor_slices({"a": [1.5, 2.5], "b": ([[1], [2]], [True, False])}),
        Dataset.from_tensor_slices(Point([1, 2], ["x", "é"])).map(lambda p: p),
        Dataset.from_tensors((b"\x00record\x00", np.array(["a", b"b"], object))),
        Dataset.from_tensors(np.asarray(jnp.arange(3, dtype=jnp.bfloat16))),
        Dataset.range(5).batch(2),
        Dataset.from_generator(
            lambda: [np.ones(1), np.ones(2)], output_signature=rx.TensorSpec((None,), np.float32)
        ),
        Dataset.from_tensors(np.zeros((2, 0), np.complex64)),
    ]
    for number, dataset in enumerate(elements):
        path = tmp_path / str(number)
        dataset.save(path)
        loaded = Dataset.load(path)
        assert listed(loaded) == listed(dataset)
        assert len(loaded) == len(listed(dataset))
        assert loaded.batch_size == dataset.batch_size
        assert loaded.has_examples == dataset.has_examples
        if number != 2:  # A class of its own.
            assert loaded.element_spec == dataset.element_spec
        for one, other in zip(loaded, dataset, strict=True):
            assert str(getattr(one, "dtype", "")) == str(getattr(other, "dtype", ""))
    point = next(iter(Dataset.load(tmp_path / "2")))
    assert (point.x, point.y) == (1, "x")
    assert not list(tmp_path.rglob("*.pkl"))


def test_a_loaded_dataset_has_random_access_and_exact_positions(tmp_path: Path) -> None:
    Dataset.range(10).map(lambda x: x * 2).save(tmp_path)
    shuffled = Dataset.load(tmp_path).shuffle(1000, seed=1).batch(3)
    assert sorted(itertools.chain(*listed(shuffled))) == list(range(0, 20, 2))
    iterator = iter(shuffled)
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    rest = listed(iterator)
    other = iter(Dataset.load(tmp_path).shuffle(1000, seed=1).batch(3))
    other.set_state(state)
    assert listed(other) == rest


@pytest.mark.parametrize("compression", [None, "SNAPPY", "GZIP", "AUTO", "ZSTD"])
def test_compressions(tmp_path: Path, compression: Any) -> None:
    Dataset.from_tensors(np.zeros(500_000)).save(tmp_path, compression=compression)
    assert Dataset.load(tmp_path, compression=compression).get_single_element().sum() == 0
    size = sum(f.stat().st_size for f in tmp_path.rglob("*.arrayrecord"))
    assert (size < 1_000_000) == (compression is not None)


def test_shards_take_turns_unless_a_reader_says_otherwise(tmp_path: Path) -> None:
    Dataset.range(6).save(tmp_path, shard_func=lambda x: x % 2)
    assert listed(Dataset.load(tmp_path)) == [0, 1, 2, 3, 4, 5]
    one_by_one = Dataset.load(tmp_path, reader_func=lambda shards: shards.flat_map(lambda x: x))
    assert listed(one_by_one) == [0, 2, 4, 1, 3, 5]
    assert len(list(tmp_path.rglob("*.arrayrecord"))) == 2
    with refused(rx.errors.ArgumentTypeError, "reader_func"):
        Dataset.load(tmp_path, reader_func=lambda shards: 3)  # type: ignore[arg-type, return-value]


def test_empty_datasets_are_saved_too(tmp_path: Path) -> None:
    Dataset.range(0).save(tmp_path / "a")
    assert listed(Dataset.load(tmp_path / "a")) == []
    assert len(Dataset.load(tmp_path / "a")) == 0


def test_saving_again_replaces_and_a_failure_changes_nothing(tmp_path: Path) -> None:
    Dataset.range(4).save(tmp_path)
    Dataset.range(2).save(tmp_path)
    assert listed(Dataset.load(tmp_path)) == [0, 1]
    assert len(list(tmp_path.glob("data-*"))) == 1
    opened = iter(Dataset.load(tmp_path))
    assert next(opened) == 0

    def fails(x: Any) -> Any:
        if x == 3:
            raise KeyError("user")
        return x

    with pytest.raises(KeyError):
        Dataset.range(9).map(fails).save(tmp_path)
    assert listed(Dataset.load(tmp_path)) == [0, 1]
    assert len(list(tmp_path.glob("data-*"))) == 1
    Dataset.range(7, 9).save(tmp_path)
    # An open reader continues with its files.
    assert listed(opened) == [1]


def test_what_cannot_be_saved_or_loaded_is_refused(tmp_path: Path) -> None:
    with refused(rx.errors.NotFoundError, "holds none"):
        Dataset.load(tmp_path / "nowhere")
    Dataset.range(3).save(tmp_path)
    with refused(rx.errors.InvalidArgumentError, "must be like"):
        Dataset.load(tmp_path, element_spec=rx.TensorSpec((), np.float32))
    with refused(rx.errors.InvalidArgumentError, "compression"):
        Dataset.range(3).save(tmp_path, compression="LZMA")
    with refused(rx.errors.ArgumentTypeError, "Elements on disk"):
        Dataset.range(3).window(2).save(tmp_path / "windows")
    writing = Dataset.range(3).map(lambda x: Dataset.range(2).save(tmp_path) or x)
    with refused(rx.errors.UnavailableError, "exclusive access"):
        writing.save(tmp_path)
    file = next(tmp_path.rglob("*.arrayrecord"))
    content = bytearray(file.read_bytes())
    for i in range(0, len(content), 7):
        content[i] ^= 0xFF
    file.write_bytes(content)
    with refused(rx.errors.DataLossError, "as it was written"):
        listed(Dataset.load(tmp_path))
    (tmp_path / "dataset.json").write_text("{")
    with refused(rx.errors.DataLossError, "describe a dataset"):
        Dataset.load(tmp_path)


def counted(calls: list[int], count: int = 5) -> Dataset:
    def call(x: Any) -> Any:
        calls.append(int(x))
        return x * 2

    return Dataset.range(count).map(call)


def test_snapshot_writes_once_and_reads_later(tmp_path: Path) -> None:
    calls: list[int] = []
    dataset = counted(calls).snapshot(tmp_path)
    assert dataset.cardinality() == 5
    assert dataset.filter(lambda x: True).snapshot(tmp_path).cardinality() == UNKNOWN_CARDINALITY
    assert listed(dataset) == [0, 2, 4, 6, 8] == listed(dataset)
    # One more call: the spec is derived from the first element.
    assert sorted(calls) == [0, 0, 1, 2, 3, 4]
    assert listed(counted(calls).snapshot(tmp_path)) == [0, 2, 4, 6, 8]
    assert len(calls) == 6
    assert dataset.element_spec == rx.TensorSpec((), np.int64)
    # Another dataset has another snapshot in the directory.
    assert listed(counted(calls, 3).snapshot(tmp_path)) == [0, 2, 4]
    for source in ([1, 2], [3, 4]):
        assert listed(Dataset.from_tensor_slices(source).snapshot(tmp_path)) == source
    assert listed(dataset.repeat(2)) == [0, 2, 4, 6, 8] * 2


def test_a_pass_that_is_left_early_writes_no_snapshot(tmp_path: Path) -> None:
    calls: list[int] = []
    dataset = counted(calls).snapshot(tmp_path)
    iterator = iter(dataset)
    next(iterator)
    # While one process writes, another computes its elements.
    assert listed(dataset) == [0, 2, 4, 6, 8]
    assert not list(tmp_path.rglob("dataset.json"))
    iterator.close()
    assert not list(tmp_path.rglob("data-*"))
    assert listed(dataset) == [0, 2, 4, 6, 8]
    assert list(tmp_path.rglob("dataset.json"))


def test_snapshot_order_of_shards_and_shuffles_behind_it(tmp_path: Path) -> None:
    dataset = Dataset.range(6).snapshot(
        tmp_path,
        shard_func=lambda x: x % 2,
        reader_func=lambda shards: shards.flat_map(lambda x: x),
    )
    assert listed(dataset) == [0, 1, 2, 3, 4, 5]
    assert listed(dataset) == [0, 2, 4, 1, 3, 5] == listed(dataset)
    shuffled = Dataset.range(50).shuffle(50).snapshot(tmp_path / "b").shuffle(50, seed=1)
    first, second = listed(shuffled), listed(shuffled)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))


@pytest.mark.parametrize("is_complete", [False, True])
def test_positions_in_snapshots_are_exact(tmp_path: Path, is_complete: bool) -> None:
    def make(name: str) -> Dataset:
        return Dataset.range(6).filter(lambda x: x != 2).snapshot(tmp_path / name).batch(2)

    if is_complete:
        listed(make("a"))
    iterator = iter(make("a"))
    states, elements = [iterator.get_state()], []
    for element in iterator:
        elements.append(plain(element))
        states.append(iterator.get_state())
    for position, state in enumerate(states):
        other = iter(make("a"))
        other.set_state(json.loads(json.dumps(state)))
        assert listed(other) == elements[position:]
        if not is_complete:
            # Also if the snapshot is not complete; this pass writes it.
            fresh = iter(make(f"b{position}"))
            fresh.set_state(state)
            assert listed(fresh) == elements[position:]
            assert list((tmp_path / f"b{position}").rglob("dataset.json"))


def test_cache_in_a_directory(tmp_path: Path) -> None:
    calls: list[int] = []
    assert listed(counted(calls).cache(tmp_path / "c")) == [0, 2, 4, 6, 8]
    seen = len(calls)
    assert listed(counted(calls).cache(str(tmp_path / "c"))) == [0, 2, 4, 6, 8]
    assert len(calls) == seen


@pytest.mark.strategies("mirrored_2", "one_device")
def test_loaded_batches_can_be_distributed(strategy: rx.Strategy, tmp_path: Path) -> None:
    Dataset.range(6).batch(4).save(tmp_path)
    found = [
        [part.tolist() for part in strategy.experimental_local_results(batch)]
        for batch in strategy.experimental_distribute_dataset(Dataset.load(tmp_path))
    ]
    assert [list(itertools.chain(*parts)) for parts in found] == [[0, 1, 2, 3], [4, 5]]
    assert len(found[0]) == strategy.num_replicas_in_sync
