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
from vocabulary import refused

import replicax as rx
from replicax.exporting import files


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "saved_model.json").read_text())


def put_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest whose checksum is right, whatever it says."""
    body = {k: v for k, v in manifest.items() if k != "crc32"}
    manifest["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (folder / "saved_model.json").write_text(json.dumps(manifest))


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
    names = sorted(p.name.partition(".")[0] for p in folder.iterdir())
    assert names == ["functions", "saved_model", "variables"]


def test_a_save_replaces_a_model_and_removes_its_files(folder: Path) -> None:
    before = set(os.listdir(folder))
    (folder / "saved_model.json.0123.tmp").write_text("left by a crash")
    rx.saved_model.save({"v": rx.Variable(9.0)}, folder)
    after = set(os.listdir(folder))
    assert after & before == {"saved_model.json"}
    assert len(after) == 3
    assert float(rx.saved_model.load(folder).v) == 9.0


def test_a_save_that_fails_leaves_the_old_model(folder: Path, monkeypatch: Any) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for call in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, call, full)
            with refused(rx.errors.CheckpointError, "No space left"):
                rx.saved_model.save({"v": rx.Variable(9.0)}, folder)
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
        with refused(rx.errors.NotFoundError, "saved_model.json"):
            rx.saved_model.load(place)


@pytest.mark.parametrize("kind", ["variables", "functions"])
def test_a_flipped_bit_is_noticed(folder: Path, kind: str) -> None:
    path = folder / manifest_of(folder)["files"][kind]
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with refused(rx.errors.DataLossError, path.name):
        rx.saved_model.load(folder)


@pytest.mark.parametrize("kind", ["variables", "functions"])
def test_a_short_or_missing_file_is_noticed(folder: Path, kind: str) -> None:
    path = folder / manifest_of(folder)["files"][kind]
    path.write_bytes(path.read_bytes()[:-1])
    with refused(rx.errors.DataLossError, f"{path.name}.*shorter"):
        rx.saved_model.load(folder)
    path.unlink()
    with refused(rx.errors.DataLossError, f"{path.name}.*missing"):
        rx.saved_model.load(folder)


def test_a_manifest_that_was_changed_is_noticed(folder: Path) -> None:
    path = folder / "saved_model.json"
    text = path.read_text()
    path.write_text(text.replace('"name": "v"', '"name": "w"'))
    with refused(rx.errors.DataLossError, "checksum"):
        rx.saved_model.load(folder)
    path.write_text(text[: len(text) // 2])
    with refused(rx.errors.DataLossError, "not JSON"):
        rx.saved_model.load(folder)
    path.write_text("[1, 2]")
    with refused(rx.errors.DataLossError, "not the manifest"):
        rx.saved_model.load(folder)


def test_a_manifest_without_end_is_not_read(folder: Path) -> None:
    with (folder / "saved_model.json").open("ab") as file:
        file.truncate((64 << 20) + 1)
    with refused(rx.errors.DataLossError, "more than any manifest"):
        rx.saved_model.load(folder)


def test_a_newer_format_is_refused(folder: Path) -> None:
    put_manifest(folder, manifest_of(folder) | {"version": 2})
    with refused(rx.errors.CheckpointError, "version 2"):
        rx.saved_model.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"variables": "../secret", "functions": "../secret"}},
        {"files": {"variables": "/etc/passwd", "functions": "/etc/passwd"}},
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
    put_manifest(folder, manifest_of(folder) | change)
    with refused(rx.errors.DataLossError, "saved_model.json"):
        rx.saved_model.load(folder)


@pytest.mark.parametrize(
    "change",
    [{"bytes": 1 << 60}, {"offset": -1}, {"stored_dtype": "object"}, {"stored_shape": [3]}],
    ids=str,
)
def test_a_variable_that_does_not_fit_is_refused(folder: Path, change: dict[str, Any]) -> None:
    manifest = manifest_of(folder)
    manifest["variables"][0] |= change
    put_manifest(folder, manifest)
    with refused(rx.errors.DataLossError):
        rx.saved_model.load(folder)


def test_a_model_that_is_replaced_while_it_is_read(folder: Path, monkeypatch: Any) -> None:
    """The manifest names files that a save removes: the reader starts again."""
    read = files._read_manifest

    def read_and_replace(path: Path) -> Any:
        found = read(path)
        monkeypatch.setattr(files, "_read_manifest", read)
        rx.saved_model.save({"v": rx.Variable(5.0)}, folder)
        return found

    monkeypatch.setattr(files, "_read_manifest", read_and_replace)
    assert float(rx.saved_model.load(folder).v) == 5.0


def test_attributes_cannot_reach_the_class(folder: Path) -> None:
    manifest = manifest_of(folder)
    manifest["nodes"][0]["module"]["__class__"] = manifest["nodes"][0]["module"]["v"]
    put_manifest(folder, manifest)
    assert isinstance(rx.saved_model.load(folder), rx.Module)
