"""Bundles: safetensors files that anybody reads, with a manifest of checksums."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from vocabulary import refused

import replicax as rx
from replicax.bundle import data_files, manifest
from replicax.bundle.data_files import Source
from replicax.bundle.manifest import CHECKPOINT, SNAPSHOT, merge
from replicax.bundle.publishing import BundleWriter
from replicax.bundle.reading import Bundle
from replicax.foundation import durable_files


class Nothing(msgspec.Struct):
    """Contents without fields."""


def write(path: Path, **arrays: Any) -> Path:
    with BundleWriter(path, CHECKPOINT) as writer:
        hosts = {name: np.asarray(value) for name, value in arrays.items()}
        writer.write_arrays({name: (host.dtype.name, host) for name, host in hosts.items()})
        writer.publish(Nothing())
    return path


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.safetensors")
    return file


# What others read.


def test_safetensors_reads_a_checkpoint_under_the_names_of_its_variables(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kernel = rng.random((3, 5)).astype(np.float32)
    objects = {
        "model": {"dense": {"kernel": rx.Variable(kernel), "bias": rx.Variable(np.arange(5))}},
        "step": rx.Variable(np.int64(7).astype(np.int32)),
        "empty": np.zeros((0, 4), np.float64),
        "mask": np.array([True, False]),
        "phase": np.array([1 + 2j], np.complex64),
        "half": rx.Variable(jnp.arange(4, dtype=jnp.bfloat16)),
    }
    path = Path(rx.train.Checkpoint(**objects).write(tmp_path / "one"))
    found = safetensors.numpy.load_file(data_file(path))
    assert np.array_equal(found["model/dense/kernel"], kernel)
    assert found["model/dense/bias"].tolist() == [0, 1, 2, 3, 4]
    assert found["step"].shape == () and found["step"] == 7
    assert found["empty"].shape == (0, 4) and found["empty"].dtype == np.float64
    assert found["mask"].tolist() == [True, False] and found["phase"].tolist() == [1 + 2j]
    assert found["half"].dtype == ml_dtypes.bfloat16 and found["half"].tolist() == [0, 1, 2, 3]
    assert sorted(found) == [name for name, _, _ in rx.train.list_variables(path)]


def test_types_that_safetensors_lacks_are_stored_as_bytes(tmp_path: Path) -> None:
    """The manifest has their types; keys of `jax.random` are arrays of their data."""
    values: dict[str, Any] = {
        "wide": np.array([1 + 2j, 3], np.complex128),
        "small": np.array([1, -2, 3], ml_dtypes.int4),
        "text": np.array(["ab", "c"]),
        "raw": np.array([b"xyz"]),
        "key": jax.random.key(3),
    }
    path = Path(rx.train.Checkpoint(**values).write(tmp_path / "one"))
    found = safetensors.numpy.load_file(data_file(path))
    assert found["wide"].dtype == np.uint8 and found["wide"].shape == (2, 16)
    assert found["small"].shape == (3, 1) and found["text"].shape == (2, 8)
    assert found["key"].tolist() == jax.random.key_data(values["key"]).tolist()
    for name in ("wide", "small", "text", "raw"):
        loaded = rx.train.load_variable(path, name)
        assert loaded.dtype == values[name].dtype and np.array_equal(loaded, values[name])


def test_narrow_floats_have_the_codes_of_the_format(tmp_path: Path) -> None:
    names = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "bfloat16")
    values = {name: np.arange(4).astype(getattr(ml_dtypes, name)) for name in names}
    path = write(tmp_path / "one", **values)
    with safetensors.safe_open(data_file(path), "np") as file:
        codes = {name: file.get_slice(name).get_dtype() for name in names}
    assert list(codes.values()) == ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "BF16"]
    with Bundle(path, CHECKPOINT) as bundle:
        for name, loaded in bundle.read(names).items():
            assert loaded.dtype == values[name].dtype and np.array_equal(loaded, values[name])


def test_arrays_are_aligned_to_their_elements_for_readers_that_map_files(tmp_path: Path) -> None:
    values = {"a": np.int8([1, 2, 3]), "b": np.float64([1.5]), "c": np.int16([7])}
    path = write(tmp_path / "one", **values)
    with Bundle(path, CHECKPOINT) as bundle:
        for name, entry in bundle.arrays.items():
            assert entry.slices[0].offset % values[name].itemsize == 0
    found = safetensors.numpy.load_file(data_file(path))
    assert all(np.array_equal(found[name], value) for name, value in values.items())


def test_many_arrays_are_spread_over_files(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(data_files, "_LEAST_FILE_BYTES", 1000)
    values = {f"v{i:03d}": np.full(100, i, np.float32) for i in range(64)}
    path = write(tmp_path / "one", **values)
    files = sorted(path.glob("*.safetensors"))
    assert 8 <= len(files) <= 16
    found: dict[str, np.ndarray] = {}
    for file in files:
        found |= safetensors.numpy.load_file(file)
    assert all(np.array_equal(found[name], value) for name, value in values.items())
    with Bundle(path, CHECKPOINT) as bundle:
        bundle.check_files()
        found = bundle.read(values)
    assert all(np.array_equal(found[name], value) for name, value in values.items())


# Only what is needed is read.


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        counted.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    return counted


def test_one_variable_is_loaded_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = np.arange(1000, dtype=np.float32), np.ones(20 << 20, np.float32)
    path = rx.train.Checkpoint(large=large, small=small).write(tmp_path / "one")
    (data,) = {file for file in Path(path).iterdir() if file.stat().st_size > 80 << 20}
    counted = count_bytes(monkeypatch)
    assert len(rx.train.list_variables(path)) == 2 and counted == []
    assert np.array_equal(rx.train.load_variable(path, "small"), small)
    assert sum(counted) == small.nbytes
    # The bytes of the large one may even be wrong, or missing.
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size - 4)
    with refused(rx.errors.DataLossError, "bytes instead of"):
        rx.train.load_variable(path, "large")


def test_variables_are_listed_and_loaded_while_other_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_LEAST_FILE_BYTES", 1)
    objects = {"a": np.arange(3), "b": np.arange(4), "c": np.arange(5)}
    path = rx.train.Checkpoint(**objects).write(tmp_path / "one")
    for file in sorted(Path(path).glob("*.safetensors"))[1:]:
        file.unlink()
    assert [name for name, _, _ in rx.train.list_variables(path)] == ["a", "b", "c"]
    assert rx.train.load_variable(path, "a").tolist() == [0, 1, 2]
    with refused(rx.errors.DataLossError, "missing"):
        rx.train.load_variable(path, "b")


# Several writers.


def rows_of(name: str, whole: np.ndarray, start: int, stop: int, piece_bytes: int) -> Source:
    octets = data_files.as_octets(whole[start:stop])

    def pieces() -> Any:
        for begin in range(0, octets.size, piece_bytes):
            yield begin, octets[begin : begin + piece_bytes]

    rows = start, stop
    return Source(name, whole.dtype.name, whole.shape, rows, piece_bytes, pieces)


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A table of which three writers have written rows, not in order."""
    table = np.random.default_rng(0).random((1000, 7)).astype(np.float32)
    table[600:900] = 0
    path = tmp_path / "shared"
    with BundleWriter(path, CHECKPOINT) as writer:
        for number, (start, stop) in enumerate([(400, 400), (400, 1000), (0, 400)]):
            file = f"ps-{number}.safetensors"
            with durable_files.synced(writer.directory / file) as target:
                source = rows_of("table", table, start, stop, 280)
                writer.add(data_files.write_stream(target, file, [source]))
        writer.write_arrays({"bias": ("float32", np.ones(3, np.float32))})
        writer.publish(Nothing())
    return path, table


def test_rows_of_several_writers_are_one_array(shared: tuple[Path, np.ndarray]) -> None:
    path, table = shared
    with Bundle(path, CHECKPOINT) as bundle:
        bundle.check_files()
        found = bundle.read(["table", "bias"])
        assert np.array_equal(found["table"], table) and found["bias"].tolist() == [1, 1, 1]
    stored = safetensors.numpy.load_file(path / "ps-1.safetensors")
    assert np.array_equal(stored["table[400:1000]"], table[400:])


@pytest.mark.parametrize("rows", [(0, 1000), (0, 1), (399, 401), (350, 950), (7, 7), (999, 1000)])
def test_rows_are_read_without_the_others(
    shared: tuple[Path, np.ndarray], rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, table = shared
    counted = count_bytes(monkeypatch)
    with Bundle(path, CHECKPOINT) as bundle:
        pieces = [(start, octets.copy()) for start, octets in bundle.pieces("table", rows)]
    expected = table[slice(*rows)].tobytes()
    assert b"".join(octets.tobytes() for _, octets in pieces) == expected
    assert [start for start, _ in pieces] == np.cumsum(
        [0, *(octets.size for _, octets in pieces)]
    ).tolist()[:-1]
    assert sum(counted) <= len(expected) + 4 * 280


def test_missing_rows_are_noticed(shared: tuple[Path, np.ndarray]) -> None:
    path, _ = shared
    with Bundle(path, CHECKPOINT) as bundle:
        entry = bundle.arrays["table"]
        missing = msgspec.structs.replace(entry, slices=entry.slices[:-1])
        found = msgspec.structs.replace(bundle.manifest, arrays=[missing])
    with refused(rx.errors.DataLossError, "rows"):
        manifest.parse(found.encode(), "x", CHECKPOINT)


def test_parts_are_merged_by_row() -> None:
    whole = np.zeros((4, 2))
    parts = []
    for file, rows in (("b.safetensors", (2, 4)), ("a.safetensors", (0, 2))):
        with open(os.devnull, "wb") as sink:
            source = rows_of("t", whole, *rows, 100)
            sink.truncate = lambda size: None  # type: ignore[method-assign]
            parts.append(data_files.write_stream(sink, file, [source]))
    merged = merge(parts)
    assert [one.start for one in merged.arrays[0].slices] == [0, 2] and len(merged.files) == 2


# Publication.


def test_a_bundle_of_another_kind_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "one", a=[1.0])
    with refused(rx.errors.CheckpointError, "must be that of a snapshot.*checkpoint"):
        Bundle(path, SNAPSHOT)


def test_a_bundle_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "one", a=np.arange(1000.0))
    with Bundle(path, CHECKPOINT) as before:
        before.check_files()
        write(path, a=np.zeros(3))
        assert np.array_equal(before.read(["a"])["a"], np.arange(1000.0))
    with Bundle(path, CHECKPOINT) as after:
        assert after.read(["a"])["a"].tolist() == [0, 0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_bundle_is_replaced_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(durable_files.ctypes, "CDLL", lambda *_, **__: object())
    path = write(tmp_path / "one", a=[1.0])
    write(path, a=[2.0])

    def broken(_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "sync_directory", broken)
        with refused(rx.errors.CheckpointError, "Input/output error"):
            write(path, a=[3.0])
    with Bundle(path, CHECKPOINT) as bundle:
        assert bundle.read(["a"])["a"].tolist() == [2.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]


def test_a_reserved_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="__metadata__"):
        write(tmp_path / "one", __metadata__=[1.0])
    assert list(tmp_path.iterdir()) == []
