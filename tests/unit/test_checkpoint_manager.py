"""CheckpointManager: what is kept, what is found again, and saving in the background."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocabulary import refused

import replicax as rx
from replicax.bundle import publishing
from replicax.bundle.manifest import CHECKPOINT
from replicax.bundle.reading import Bundle
from replicax.checkpointing.retention import Policy, Record
from replicax.checkpointing.snapshot import Snapshot

PROGRAMS = Path(__file__).parent.parent / "support" / "programs"


def names(manager: Any) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


def make(tmp_path: Path, value: Any = 0.0, **options: Any) -> tuple[Any, Any]:
    variable = rx.Variable(value)
    checkpoint = rx.train.Checkpoint(v=variable)
    return variable, rx.train.CheckpointManager(checkpoint, tmp_path / "run", **options)


def test_S216_manager_keeps_two(tmp_path: Path) -> None:
    variable, manager = make(tmp_path, max_to_keep=2)
    with manager:
        assert manager.latest_checkpoint is None
        paths = []
        for i in range(4):
            variable.assign(float(i))
            paths.append(manager.save())
        assert names(manager) == ["ckpt-3", "ckpt-4"]
        assert manager.latest_checkpoint == paths[-1]
        assert rx.train.latest_checkpoint(manager.directory) == paths[-1]
        assert not Path(paths[0]).exists()
        manager.checkpoint.restore(paths[2]).assert_consumed()
        assert float(variable) == 2.0


def test_numbers_may_be_steps_and_order_is_by_number(tmp_path: Path) -> None:
    variable, manager = make(tmp_path, max_to_keep=None, checkpoint_name="model")
    with manager:
        for step in (100, 9, 1000):
            variable.assign(float(step))
            manager.save(checkpoint_number=rx.Variable(step))
        assert names(manager) == ["model-9", "model-100", "model-1000"]
        # RELIABILITY, clock jump: times of files mean nothing.
        for i, path in enumerate(manager.checkpoints):
            os.utime(path, (1e9 - i * 1e6, 1e9 - i * 1e6))
        assert Path(rx.train.latest_checkpoint(manager.directory) or "").name == "model-1000"
        manager.restore_latest()
        assert float(variable) == 1000.0
        assert Path(manager.save() or "").name == "model-1001"
    with refused(rx.errors.InvalidArgumentError, "-1"):
        manager.save(checkpoint_number=-1)


def test_a_program_that_did_not_restore_writes_over_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        _, manager = make(tmp_path)
        with manager:
            manager.save()
    assert names(manager) == ["ckpt-1", "ckpt-2"]


@pytest.mark.parametrize(
    ("policy", "expired"),
    [
        (Policy(max_to_keep=None), []),
        (Policy(max_to_keep=2), [1, 2, 3, 4]),
        (Policy(max_to_keep=1, every_n_steps=2), [1, 3, 5]),
        (Policy(max_to_keep=1, every_n_hours=2), [2, 4]),
        (Policy(max_to_keep=1, keep_best=2, best_metric="score"), [1, 2, 4]),
        (Policy(max_to_keep=1, keep_best=2, best_metric="-score"), [3, 4, 5]),
        (Policy(max_to_keep=1, keep_best=1, best_metric="absent"), [1, 2, 3, 4, 5]),
    ],
)
def test_which_checkpoints_expire(policy: Policy, expired: list[int]) -> None:
    scores = {1: 0.1, 2: 0.2, 3: 0.9, 4: 0.4, 5: 0.8, 6: float("nan")}
    records = [Record(step, step * 3600.0, {"score": score}) for step, score in scores.items()]
    assert policy.expired(records) == expired


def test_the_best_are_kept_and_found(tmp_path: Path) -> None:
    _, manager = make(tmp_path, max_to_keep=1, keep_best=1, best_metric="-loss")
    with manager:
        for loss in (3.0, 1.0, 2.0):
            manager.save(metrics={"loss": np.float32(loss)})
        assert names(manager) == ["ckpt-2", "ckpt-3"]
        assert manager.best_checkpoint == manager.checkpoints[0]
    for wrong in ({"max_to_keep": 0}, {"keep_best": 1}, {"keep_every_n_steps": 0}):
        with refused(rx.errors.InvalidArgumentError):
            make(tmp_path, **wrong)
    with refused(rx.errors.InvalidArgumentError, "step_counter"):
        make(tmp_path, checkpoint_interval=2)
    with refused(rx.errors.InvalidArgumentError, "checkpoint_name"):
        make(tmp_path, checkpoint_name="../x")


def test_interval_counts_steps_since_the_last_save(tmp_path: Path) -> None:
    step = rx.Variable(0)
    _, manager = make(tmp_path, step_counter=step, checkpoint_interval=5)
    with manager:
        saved = []
        for _ in range(12):
            saved.append(manager.save() is not None)
            step.assign_add(1)
        assert [i for i, was in enumerate(saved) if was] == [0, 5, 10]
        assert manager.save(check_interval=False) is not None


def test_restore_or_initialize(tmp_path: Path) -> None:
    calls: list[int] = []
    variable, manager = make(tmp_path, init_fn=lambda: calls.append(1))
    with manager:
        assert manager.restore_or_initialize() is None and calls == [1]
        path = manager.save()
        variable.assign(5.0)
        assert manager.restore_or_initialize() == path
        assert float(variable) == 0.0 and calls == [1]


def flip_in_arrays(path: str) -> Path:
    file = Path(path) / "data-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    variable, manager = make(tmp_path, max_to_keep=None)
    with manager:
        for i in range(3):
            variable.assign(float(i))
            manager.save()
        one, two, three = manager.checkpoints
        flip_in_arrays(three)
        (Path(two) / "manifest.json").write_text("{")
        with caplog.at_level(logging.WARNING):
            status = manager.restore_latest()
        assert status.path == one and float(variable) == 0.0
        assert [path for path, _ in status.fallbacks] == [three, two]
        assert all(isinstance(e, rx.errors.DataLossError) for _, e in status.fallbacks)
        assert len(caplog.records) == 2
        first = caplog.records[0].getMessage()
        assert "ckpt-1 (step 1)" in first and "ckpt-3" in first and "'v'" in first
        # The next one does not take the number of a damaged one.
        assert Path(manager.save() or "").name == "ckpt-4"


def test_without_a_whole_checkpoint_nothing_is_made_up(tmp_path: Path) -> None:
    variable, manager = make(tmp_path, 7.0)
    with manager:
        flip_in_arrays(manager.save())
        variable.assign(8.0)
        with refused(rx.errors.DataLossError, "ckpt-1.*'v'"):
            manager.restore_or_initialize()
    assert float(variable) == 8.0


def test_a_program_of_another_shape_does_not_fall_back(tmp_path: Path) -> None:
    _, manager = make(tmp_path)
    with manager:
        manager.save()
        manager.save()
    _, other = make(tmp_path, [1.0, 2.0])
    with other, refused(rx.errors.InvalidArgumentError, "ckpt-2"):
        other.restore_latest()


def test_a_save_reads_no_manifest(tmp_path: Path, monkeypatch: Any) -> None:
    """Policies that need numbers only read none; others read those of earlier programs, once."""
    _, manager = make(tmp_path, max_to_keep=None)
    with manager:
        for _ in range(3):
            manager.save(metrics={"loss": 1.0})
    opened: list[str] = []
    read = Bundle._read_manifest
    monkeypatch.setattr(
        Bundle, "_read_manifest", lambda self: (opened.append(self._path.name), read(self))[1]
    )
    _, manager = make(tmp_path, max_to_keep=2)
    with manager:
        manager.save()
    assert opened == [] and names(manager) == ["ckpt-3", "ckpt-4"]
    _, manager = make(tmp_path, max_to_keep=3, keep_best=1, best_metric="-loss")
    with manager:
        for _ in range(3):
            manager.save(metrics={"loss": 2.0})
    assert opened == ["ckpt-3", "ckpt-4"]
    assert names(manager) == ["ckpt-3", "ckpt-5", "ckpt-6", "ckpt-7"]


# In the background.


def test_async_save_keeps_the_values_of_the_call(tmp_path: Path, monkeypatch: Any) -> None:
    variable, manager = make(tmp_path, np.arange(1 << 18, dtype=np.float32))
    go_on = threading.Event()
    write = Snapshot.write

    def slow_write(*args: Any) -> None:
        assert go_on.wait(30)
        write(*args)

    monkeypatch.setattr(Snapshot, "write", slow_write)
    with manager:
        path = manager.save(asynchronous=True)
        # The array behind the variable is overwritten in place: it was donated.
        step = rx.function(lambda: variable.assign(variable * 0.0 - 1.0))
        step()
        step()
        assert manager.latest_checkpoint is None
        go_on.set()
        manager.wait()
        assert manager.latest_checkpoint == path
        assert np.array_equal(rx.train.load_variable(path, "v"), np.arange(1 << 18))


def test_async_errors_are_raised_by_the_next_call(tmp_path: Path, monkeypatch: Any) -> None:
    _, manager = make(tmp_path, save_async=True)
    write = Snapshot.write

    def failing_write(_: Snapshot, path: Path, *args: Any) -> None:
        error = OSError(28, "No space left on device")
        raise publishing.cannot_write(path, error, CHECKPOINT)

    for call in (manager.save, manager.wait, manager.restore_latest, manager.close):
        monkeypatch.setattr(Snapshot, "write", failing_write)
        manager.save()
        with refused(rx.errors.CheckpointError, "No space left"):
            call()
        monkeypatch.setattr(Snapshot, "write", write)
        manager.save()
        manager.wait()
    manager.close()


def test_async_save_blocks_for_a_copy_only(tmp_path: Path, monkeypatch: Any) -> None:
    """RELIABILITY: the blocking part is at most the time of a copy and 50 ms."""
    value = np.random.default_rng(0).random(16 << 20).astype(np.float32)
    variable, manager = make(tmp_path, value)
    fsync, may_sync = os.fsync, threading.Event()

    def held(fd: int) -> None:
        assert may_sync.wait(60)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", held)

    def seconds(work: Any) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    source = np.asarray(variable.read_value())
    blocked, copied = [], []
    with manager:
        # A machine with much else to do may take long for one of them, but not for all.
        while not blocked or (len(blocked) < 10 and min(blocked) > 1.5 * max(copied) + 0.05):
            may_sync.clear()
            copied.append(seconds(source.copy))
            blocked.append(seconds(lambda: manager.save(asynchronous=True)))
            # It has returned, though not a byte is safe.
            may_sync.set()
            manager.wait()
    assert min(blocked) <= 1.5 * max(copied) + 0.05


def test_a_save_in_flight_is_finished_when_the_program_ends(tmp_path: Path) -> None:
    program = [sys.executable, str(PROGRAMS / "checkpoint_exit.py"), str(tmp_path)]
    done = subprocess.run(program, check=True, timeout=250, capture_output=True, text=True)
    assert done.stderr == ""
    saved = rx.train.load_variable(tmp_path / "ckpt-1", "v")
    assert np.array_equal(saved, np.arange(4 << 20))


def test_save_and_restore_work_where_asyncio_runs(tmp_path: Path) -> None:
    variable, manager = make(tmp_path, 3.0)

    async def notebook_cell() -> float:
        manager.save()
        variable.assign(0.0)
        manager.restore_latest().assert_consumed()
        return float(variable)

    with manager:
        assert asyncio.run(notebook_cell()) == 3.0


# Who may write.


def start_writer(directory: Path, mebibytes: float = 1, first: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAMS / "checkpoint_writer.py"), str(directory)]
    return subprocess.Popen(
        [*command, str(mebibytes), str(first)], stdout=subprocess.PIPE, text=True
    )


def test_two_writers_of_one_directory(tmp_path: Path) -> None:
    with start_writer(tmp_path / "run") as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line.strip() == "2":
                break
        start = time.monotonic()
        with refused(rx.errors.CheckpointError, f"process {writer.pid}"):
            make(tmp_path)
        assert time.monotonic() - start < 20, "1 s, on a machine with nothing else to do"
        # Readers are not in the way.
        path = rx.train.latest_checkpoint(tmp_path / "run")
        assert path is not None
        writer.kill()
        writer.communicate()
    _, manager = make(tmp_path)
    with manager:
        # One process may have several managers, as in a notebook whose cell runs again.
        _, again = make(tmp_path)
        again.save()
    again.save()
    again.close()


def test_leftovers_of_a_dead_writer_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, manager = make(tmp_path)
    with manager:
        manager.save()
    (run / "ckpt-2.tmp-123-abcd" / "arrays").mkdir(parents=True)
    os.rename(run / "ckpt-1", run / "ckpt-1.tmp-old-abcd")
    # Readers leave them alone, and see no checkpoint in them.
    assert rx.train.latest_checkpoint(run) is None
    _, manager = make(tmp_path)
    with manager:
        # A checkpoint that was about to be replaced is there again.
        assert names(manager) == ["ckpt-1"]
        assert manager.restore_latest().path == str(run / "ckpt-1")
    assert [p.name for p in run.iterdir() if ".tmp-" in p.name] == []
