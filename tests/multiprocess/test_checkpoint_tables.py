"""Tables on parameter servers in checkpoints: written and read by the servers themselves."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from parameter_servers import Desk, own_cluster
from parameter_store_client import Caller
from vocabulary import refused

import replicax as rx
from replicax.bundle.manifest import CHECKPOINT, Part
from replicax.bundle.publishing import BundleWriter
from replicax.checkpointing.manifest import Contents
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.ps.client.variable_client import ParameterClient
from replicax.ps.process.checkpoint_files import CheckpointFiles
from replicax.ps.store.service import ParameterStore

PROGRAMS = Path(__file__).parent.parent / "support" / "programs"
ROWS, WIDTH = 40_000, 16


@pytest.fixture
def table() -> np.ndarray:
    found = np.random.default_rng(0).random((ROWS, WIDTH)).astype(np.float32)
    found[1000:9000] = 0
    return found


def variables(desk: Desk, value: np.ndarray, parts: int) -> tuple[Any, Any]:
    with desk.strategy(parts).scope():
        return rx.Variable(value, name="table"), rx.Variable([1.0, 2.0], name="bias")


@pytest.fixture
def no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if values as large as the table pass through this process."""
    pull = ParameterClient.pull

    def small(self: Any, reads: Any) -> Any:
        assert all(np.prod(read.variable.shape) < ROWS for read in reads if read.ids is None)
        return pull(self, reads)

    monkeypatch.setattr(ParameterClient, "pull", small)


# With servers.


def test_servers_write_and_read_their_rows(
    desk: Desk, table: np.ndarray, tmp_path: Path, no_transfer: None
) -> None:
    variable, bias = variables(desk, table, 2)
    checkpoint = rx.train.Checkpoint(table=variable, bias=bias)
    path = Path(checkpoint.write(tmp_path / "one"))
    assert sorted(p.name for p in path.iterdir()) == [
        "data-00000.safetensors",
        "manifest.json",
        "ps-00000.safetensors",
        "ps-00001.safetensors",
    ]
    stored = safetensors.numpy.load_file(path / "ps-00001.safetensors")
    assert np.array_equal(stored[f"table[{ROWS // 2}:{ROWS}]"], table[ROWS // 2 :])
    assert rx.train.list_variables(path)[-1] == ("table", (ROWS, WIDTH), "float32")
    assert np.array_equal(rx.train.load_variable(path, "table"), table)
    for part in variable.variables:
        part.assign(np.ones(part.shape, np.float32))
    checkpoint.restore(path).assert_consumed()
    rows = np.arange(0, ROWS, 7)
    assert np.array_equal(variable.sparse_read(rows), table[rows])
    assert sorted(os.listdir(tmp_path)) == ["one"]


def test_a_save_in_the_background_has_the_values_of_the_call(
    desk: Desk, table: np.ndarray, tmp_path: Path, no_transfer: None
) -> None:
    variable, bias = variables(desk, table, 2)
    checkpoint = rx.train.Checkpoint(table=variable, bias=bias)
    with rx.train.CheckpointManager(checkpoint, tmp_path, save_async=True) as manager:
        path = manager.save()
        for part in variable.variables:
            part.assign(np.zeros(part.shape, np.float32))
        manager.wait()
        assert np.array_equal(rx.train.load_variable(path, "table"), table)
        assert manager.restore_latest().path == path
    assert np.array_equal(variable.sparse_read([0, ROWS - 1]), table[[0, ROWS - 1]])


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_rows_go_to_another_number_of_parts(
    desk: Desk, table: np.ndarray, tmp_path: Path, parts: int, no_transfer: None
) -> None:
    """Pieces of 4 MiB, of 8 MiB and of one file or two: servers read the rows that they hold."""
    saved, bias = variables(desk, table, 3 if parts == 2 else 2)
    path = rx.train.Checkpoint(table=saved, bias=bias).write(tmp_path / "servers")
    alone = rx.train.Checkpoint(table=rx.Variable(table), bias=rx.Variable([1.0, 2.0]))
    alone_path = alone.write(tmp_path / "alone")
    variable, bias = variables(desk, np.ones_like(table), parts)
    rows = np.arange(0, ROWS, 11)
    for one in (path, alone_path):
        for part in getattr(variable, "variables", [variable]):
            part.assign(np.ones(part.shape, np.float32))
        rx.train.Checkpoint(table=variable, bias=bias).restore(one).assert_consumed()
        assert np.array_equal(variable.sparse_read(rows), table[rows])
    here = rx.Variable(np.zeros_like(table))
    rx.train.Checkpoint(table=here).restore(path).expect_partial()
    assert np.array_equal(here, table)


def test_rows_go_to_another_number_of_servers(
    desk: Desk, table: np.ndarray, tmp_path: Path, no_transfer: None
) -> None:
    saved, bias = variables(desk, table, 2)
    path = rx.train.Checkpoint(table=saved, bias=bias).write(tmp_path / "one")
    desk.leave()
    with own_cluster(workers=1, ps=3) as other:
        variable, bias = variables(other, np.ones_like(table), 3)
        rx.train.Checkpoint(table=variable, bias=bias).restore(path).assert_consumed()
        rows = np.arange(0, ROWS, 13)
        assert np.array_equal(variable.sparse_read(rows), table[rows])


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_found_before_anything_changes(
    desk: Desk, table: np.ndarray, tmp_path: Path, harm: str, no_transfer: None
) -> None:
    variable, bias = variables(desk, table, 2)
    checkpoint = rx.train.Checkpoint(table=variable, bias=bias)
    path = Path(checkpoint.write(tmp_path / "one"))
    file = path / "ps-00001.safetensors"
    content = bytearray(file.read_bytes())
    if harm == "flip":
        content[-5] ^= 1
        file.write_bytes(content)
    elif harm == "cut":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    variable.variables[0].assign(np.ones(variable.variables[0].shape, np.float32))
    bias.assign([5.0, 6.0])
    with refused(rx.errors.DataLossError, "ps-00001"):
        checkpoint.restore(path)
    assert bias.numpy().tolist() == [5.0, 6.0]
    assert np.array_equal(variable.sparse_read([0, 1]), np.ones((2, WIDTH)))


@pytest.mark.parametrize("kind", [errors.NotFoundError, errors.PermissionDeniedError])
def test_without_a_shared_file_system_values_are_transferred(
    desk: Desk,
    table: np.ndarray,
    tmp_path: Path,
    kind: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refusing(*_: Any, **__: Any) -> Any:
        raise kind("/job:ps/task:0 must share the directory", "it is not there", "Share it.")

    monkeypatch.setattr(ParameterClient, "save_rows", refusing)
    monkeypatch.setattr(ParameterClient, "load_rows", refusing)
    variable, bias = variables(desk, table, 2)
    checkpoint = rx.train.Checkpoint(table=variable, bias=bias)
    with caplog.at_level(logging.WARNING):
        path = Path(checkpoint.write(tmp_path / "one"))
    assert "transferred through this process" in caplog.text
    assert not list(path.glob("ps-*")) and os.listdir(tmp_path) == ["one"]
    variable.variables[0].assign(np.ones(variable.variables[0].shape, np.float32))
    checkpoint.restore(path).assert_consumed()
    assert np.array_equal(variable.sparse_read([0, ROWS - 1]), table[[0, ROWS - 1]])


@pytest.mark.slow
def test_the_memory_of_the_coordinator_does_not_depend_on_the_table(tmp_path: Path) -> None:
    """The form with 4 GB is the same program, called with 4096."""
    peaks = []
    for megabytes in (64, 1024):
        directory = tmp_path / str(megabytes)
        directory.mkdir()
        command = [sys.executable, str(PROGRAMS / "checkpoint_table.py"), str(directory)]
        done = subprocess.run(
            [*command, str(megabytes)], check=True, capture_output=True, text=True, timeout=250
        )
        report = json.loads(done.stdout.splitlines()[-1])
        assert report["is_restored"] and report["bytes_on_disk"] > megabytes << 20
        peaks.append(report["peak_mb"])
        shutil.rmtree(directory)
    assert peaks[1] < peaks[0] + 100 and peaks[1] < 600, peaks


# One server, without sockets.


@pytest.fixture
def caller() -> Caller:
    return Caller(ParameterStore(task=3, checkpoints=CheckpointFiles(3))).attach()


def save_one(caller: Caller, path: Path, value: np.ndarray) -> messages.StoredRows:
    caller.create(0, value)
    rows = messages.StoredRows(0, "t", value.shape, 0)
    with BundleWriter(path, CHECKPOINT) as writer:
        found, _ = caller.ask(messages.SaveParts(str(writer.directory), [rows]))
        again, _ = caller.ask(messages.SaveParts(str(writer.directory), [rows]))
        assert found == again, "a repeated request has the same reply"
        writer.add(msgspec.json.decode(found.manifest, type=Part))
        writer.publish(Contents(0, 0.0, {}, [], {}, {}))
    return rows


def test_a_server_touches_only_directories_of_checkpoints(caller: Caller, tmp_path: Path) -> None:
    value = np.arange(30, dtype=np.float32).reshape(10, 3)
    rows = save_one(caller, tmp_path / "one", value)
    (tmp_path / "link.tmp-1").symlink_to(tmp_path / "one")
    for directory, kind in [
        (tmp_path / "nothing.tmp-1", errors.NotFoundError),
        (tmp_path / "one", errors.PermissionDeniedError),
        (tmp_path / "link.tmp-1", errors.PermissionDeniedError),
        (Path(os.path.relpath(tmp_path / "one")), errors.PermissionDeniedError),
    ]:
        with refused(kind):
            caller.ask(messages.SaveParts(str(directory), [rows]))
    assert not (tmp_path / "one" / "ps-00003.safetensors").is_symlink()
    with refused(errors.NotFoundError):
        caller.ask(messages.LoadParts(str(tmp_path / "nothing"), [rows], False))
    with refused(errors.CheckpointError):
        caller.ask(messages.LoadParts(str(tmp_path), [rows], False))
    with refused(errors.PermissionDeniedError, "worker"):
        caller.ask(messages.SaveParts(str(tmp_path), [rows]), role="worker")
    store = Caller(ParameterStore(task=3)).attach()
    store.create(0, value)
    with refused(errors.UnsupportedError, "no access"):
        store.ask(messages.SaveParts(str(tmp_path), [rows]))


def test_directories_of_other_users_are_refused(
    caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = save_one(caller, tmp_path / "one", np.zeros((10, 3), np.float32))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with refused(errors.PermissionDeniedError, "not to 4711"):
        caller.ask(messages.LoadParts(str(tmp_path / "one"), [rows], False))
    (tmp_path / "two.tmp-1").mkdir()
    with refused(errors.PermissionDeniedError, "not to 4711"):
        caller.ask(messages.SaveParts(str(tmp_path / "two.tmp-1"), [rows]))


def test_rows_that_do_not_fit_are_refused(caller: Caller, tmp_path: Path) -> None:
    value = np.arange(30, dtype=np.float32).reshape(10, 3)
    save_one(caller, tmp_path / "one", value)
    (tmp_path / "two.tmp-1").mkdir()
    lies = [
        messages.StoredRows(0, "t", (10, 3), 1),
        messages.StoredRows(0, "t", (10, 3), -1),
        messages.StoredRows(0, "t", (11, 3), 0),
        messages.StoredRows(0, "t", (10, 4), 0),
        messages.StoredRows(0, "t", (), 0),
        messages.StoredRows(0, "other", (10, 3), 0),
    ]
    for lie in lies:
        with refused(errors.InvalidArgumentError):
            caller.ask(messages.LoadParts(str(tmp_path / "one"), [lie], False))
    with refused(errors.InvalidArgumentError):
        caller.ask(messages.SaveParts(str(tmp_path / "two.tmp-1"), [lies[3]]))
    assert np.array_equal(caller.read(0), value)


def test_checking_changes_nothing_and_loading_counts_as_a_change(
    caller: Caller, tmp_path: Path
) -> None:
    value = np.arange(300_000, dtype=np.float64).reshape(-1, 3)
    rows = save_one(caller, tmp_path / "one", value)
    caller.update("assign", 0, np.zeros_like(value))
    before = caller.version(0)
    caller.ask(messages.LoadParts(str(tmp_path / "one"), [rows], True))
    assert caller.version(0) == before and not caller.read(0).any()
    cut = caller.store.snapshot()
    assert cut is not None
    caller.ask(messages.LoadParts(str(tmp_path / "one"), [rows], False))
    assert not any(piece.any() for _, piece in cut.pieces(0)), "a cut keeps its values"
    cut.close()
    assert caller.version(0) > before and np.array_equal(caller.read(0), value)
