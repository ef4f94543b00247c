"""The files of saved models: whole or not at all, checked on the way in, never pickled."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from vocabulary import refused

import replicax as rx
from replicax.bundle.reading import Bundle
from replicax.foundation import durable_files


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def put_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest whose checksum is right, whatever its content."""
    manifest.pop("crc32")
    text = json.dumps(manifest).encode()
    text = b'{"crc32":"%08x",' % zlib.crc32(text) + text[1:]
    (folder / "manifest.json").write_bytes(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    double = rx.function(lambda x: x * 2, input_signature=[rx.TensorSpec((None,))])
    rx.saved_model.save({"v": rx.Variable([1.0, 2.0], name="v"), "double": double}, tmp_path / "m")
    return tmp_path / "m"


DTYPES = ["bfloat16", "float8_e4m3fn", "float16", "int4", "int8", "uint32", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_comes_back(tmp_path: Path, dtype: str) -> None:
    value = jnp.asarray([[0, 1], [2, 3]]).astype(dtype)
    rx.saved_model.save({"v": rx.Variable(value)}, tmp_path)
    again = rx.saved_model.load(tmp_path).v
    assert again.dtype == value.dtype
    np.testing.assert_array_equal(np.asarray(again), np.asarray(value))


def test_wide_types_come_back_without_x64(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        v = rx.Variable(np.array([1e300, 2.0]))
    rx.saved_model.save({"v": v}, tmp_path)
    again = rx.saved_model.load(tmp_path).v
    assert again.dtype == np.float64
    np.testing.assert_array_equal(np.asarray(again.stored), [1e300, 2.0])


def test_random_keys_come_back(tmp_path: Path) -> None:
    key = jax.random.key(7)
    rx.saved_model.save({"key": rx.Variable(key)}, tmp_path)
    again = rx.saved_model.load(tmp_path).key.read_value()
    assert again.dtype == key.dtype
    assert (jax.random.key_data(again) == jax.random.key_data(key)).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_every_shape_comes_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    rx.saved_model.save({"v": rx.Variable(value)}, tmp_path)
    np.testing.assert_array_equal(np.asarray(rx.saved_model.load(tmp_path).v), value)


def test_contains_saved_model(folder: Path, tmp_path: Path) -> None:
    assert rx.saved_model.contains_saved_model(folder)
    assert rx.saved_model.contains_saved_model(str(folder))
    assert not rx.saved_model.contains_saved_model(tmp_path)
    assert not rx.saved_model.contains_saved_model(tmp_path / "nothing")


def test_a_new_model_leaves_nothing_else_behind(folder: Path) -> None:
    assert [p.name for p in folder.parent.iterdir()] == ["m"]
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["data-00000.safetensors", "manifest.json"]


def test_a_save_replaces_a_model_and_removes_its_files(folder: Path) -> None:
    (folder / "manifest.json.0123.tmp").write_text("left by a crash")
    rx.saved_model.save({"v": rx.Variable(9.0)}, folder)
    assert len(os.listdir(folder)) == 2 and os.listdir(folder.parent) == ["m"]
    assert float(rx.saved_model.load(folder).v) == 9.0


def test_a_save_that_fails_leaves_the_old_model(folder: Path, monkeypatch: Any) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for module, call in (
        (os, "fsync"),
        (os, "pwrite"),
        (os, "rename"),
        (durable_files, "exchange"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, call, full)
            if call != "rename":
                with refused(rx.errors.CheckpointError, "No space left"):
                    rx.saved_model.save({"v": rx.Variable(9.0)}, folder)
            if call == "exchange":
                continue
            with refused(rx.errors.CheckpointError, "No space left"):
                rx.saved_model.save({"v": rx.Variable(9.0)}, folder.parent / "new")
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
        assert [p.name for p in folder.parent.iterdir()] == ["m"]


def test_other_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    model = {"v": rx.Variable(1.0)}
    with refused(ValueError, "other files"):
        rx.saved_model.save(model, tmp_path)
    with refused(ValueError, "it is a file"):
        rx.saved_model.save(model, tmp_path / "notes.txt")
    with refused(rx.errors.CheckpointError, "must be written"):
        rx.saved_model.save(model, tmp_path / "notes.txt" / "below")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with refused(rx.errors.NotFoundError, "manifest.json"):
            rx.saved_model.load(place)


@pytest.mark.parametrize("place", ["header", "v", "@functions/0"])
def test_a_flipped_bit_is_noticed(folder: Path, place: str) -> None:
    path = folder / "data-00000.safetensors"
    arrays = {entry["name"]: entry for entry in manifest_of(folder)["arrays"]}
    data = bytearray(path.read_bytes())
    data[3 if place == "header" else arrays[place]["slices"][0]["offset"]] ^= 1
    path.write_bytes(data)
    with refused(rx.errors.DataLossError, path.name):
        rx.saved_model.load(folder)


def test_a_short_or_missing_file_is_noticed(folder: Path) -> None:
    path = folder / "data-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with refused(rx.errors.DataLossError, f"{path.name}.*bytes instead of"):
        rx.saved_model.load(folder)
    path.unlink()
    with refused(rx.errors.DataLossError, f"{path.name}.*missing"):
        rx.saved_model.load(folder)


def test_a_manifest_that_was_changed_is_noticed(folder: Path) -> None:
    path = folder / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"name":"v"', '"name":"w"'))
    with refused(rx.errors.DataLossError, "checksum"):
        rx.saved_model.load(folder)
    path.write_text(text[: len(text) // 2])
    with refused(rx.errors.DataLossError, "checksum"):
        rx.saved_model.load(folder)
    path.write_text("{")
    with refused(rx.errors.DataLossError, "not JSON"):
        rx.saved_model.load(folder)
    path.write_text("[1, 2]")
    with refused(rx.errors.DataLossError, "does not begin with its checksum"):
        rx.saved_model.load(folder)


def test_a_manifest_without_end_is_not_read(folder: Path) -> None:
    with (folder / "manifest.json").open("ab") as file:
        file.truncate((64 << 20) + 1)
    with refused(rx.errors.DataLossError, "larger than 64 MiB"):
        rx.saved_model.load(folder)


def test_a_newer_format_is_refused(folder: Path) -> None:
    put_manifest(folder, manifest_of(folder) | {"version": 3})
    with refused(rx.errors.CheckpointError, "replicax.bundle 3.*newer"):
        rx.saved_model.load(folder)


def test_the_format_before_bundles_is_named(tmp_path: Path) -> None:
    (tmp_path / "saved_model.json").write_text("{}")
    with refused(rx.errors.CheckpointError, "replicax.saved_model 1"):
        rx.saved_model.load(tmp_path)


def test_checkpoints_are_neither_loaded_nor_replaced(tmp_path: Path) -> None:
    path = rx.train.Checkpoint(v=rx.Variable(1.0)).write(tmp_path / "one")
    assert not rx.saved_model.contains_saved_model(path)
    with refused(rx.errors.CheckpointError, "saved model.*of a checkpoint"):
        rx.saved_model.load(path)
    with refused(rx.errors.InvalidArgumentError, "other files"):
        rx.saved_model.save({"v": rx.Variable(1.0)}, path)


def test_safetensors_reads_the_variables_of_a_model(tmp_path: Path) -> None:
    model = {"layers": [{"w": rx.Variable([1.0, 2.0])}, {"a/b": rx.Variable(3)}]}
    rx.saved_model.save(model, tmp_path)
    found = safetensors.numpy.load_file(tmp_path / "data-00000.safetensors")
    assert found["layers/0/w"].tolist() == [1.0, 2.0] and len(found) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": [{"module": {"v": 99}}]},
        {"nodes": [{"tuple": [0]}]},
        {"nodes": [{"list": []}]},
        {"signatures": {"x": 5}},
        {"variables": [{}]},
        {"variables": None},
    ],
    ids=str,
)
def test_a_manifest_that_lies_is_refused(folder: Path, change: dict[str, Any]) -> None:
    manifest = manifest_of(folder)
    manifest["contents"] |= change
    put_manifest(folder, manifest)
    with refused(rx.errors.DataLossError, "manifest.json"):
        rx.saved_model.load(folder)


@pytest.mark.parametrize(
    "change",
    [{"slices": []}, {"dtype": "object"}, {"shape": [3]}, {"shape": [1 << 60]}, {"name": "../v"}],
    ids=str,
)
def test_a_variable_that_does_not_fit_is_refused(folder: Path, change: dict[str, Any]) -> None:
    manifest = manifest_of(folder)
    manifest["arrays"][0] |= change
    put_manifest(folder, manifest)
    with refused(rx.errors.DataLossError):
        rx.saved_model.load(folder)


def test_a_model_that_is_replaced_while_it_is_read(folder: Path, monkeypatch: Any) -> None:
    """The manifest names files that a save removes: the reader starts again."""
    read = Bundle._read_manifest

    def read_and_replace(bundle: Bundle) -> Any:
        found = read(bundle)
        monkeypatch.setattr(Bundle, "_read_manifest", read)
        rx.saved_model.save({"v": rx.Variable(5.0)}, folder)
        return found

    monkeypatch.setattr(Bundle, "_read_manifest", read_and_replace)
    assert float(rx.saved_model.load(folder).v) == 5.0


def test_attributes_cannot_reach_the_class(folder: Path) -> None:
    manifest = manifest_of(folder)
    module = manifest["contents"]["nodes"][0]["module"]
    module["__class__"] = module["v"]
    put_manifest(folder, manifest)
    assert isinstance(rx.saved_model.load(folder), rx.Module)
