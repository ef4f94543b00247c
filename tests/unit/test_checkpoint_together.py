"""Checkpoints of several workers: one writer, one decision, and errors that reach all of them.

The workers are threads here; tests/multiprocess/test_multi_worker_checkpoint.py has processes.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from peers_in_threads import Member, PeersInThreads, run_workers

import replicax as rx
from replicax.bundle.writers import Writers
from replicax.checkpointing import together
from replicax.checkpointing.manifest import SavedCheckpoint
from replicax.checkpointing.snapshot import Snapshot


def program(peers: PeersInThreads, value: float = 0.0, state: Any = 0) -> tuple[Any, Any, Any]:
    v = rx.Variable(value)
    member = Member(peers, state)
    return v, member, rx.train.Checkpoint(v=v, member=member)


def succeeded(results: list[Any]) -> list[Any]:
    failed = [result for result in results if isinstance(result, Exception)]
    if failed:
        raise ExceptionGroup("workers failed", failed)
    return results


def files_of(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.rglob("*"))


def test_S213_the_chief_writes_and_every_worker_restores(tmp_path: Path) -> None:
    written: list[int] = []
    real = Snapshot.write

    def write(self: Snapshot, path: Path, *rest: Any) -> None:
        written.append(threading.get_ident())
        real(self, path, *rest)

    def save(peers: PeersInThreads) -> tuple[str, int]:
        # Each has its own value: that of the chief is saved.
        _, _, checkpoint = program(peers, 5.0 + peers.index, state={"at": 7})
        return checkpoint.save(tmp_path / "ckpt"), threading.get_ident()

    def restore(peers: PeersInThreads) -> tuple[float, Any, int]:
        v, member, checkpoint = program(peers)
        checkpoint.restore(tmp_path / "ckpt-1").assert_consumed()
        return float(v), member.state, checkpoint.save_counter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "write", write)
        saved = succeeded(run_workers(3, save))
    assert [path for path, _ in saved] == [str(tmp_path / "ckpt-1")] * 3
    assert written == [saved[0][1]]
    for count in (1, 2, 4):
        assert succeeded(run_workers(count, restore)) == [(5.0, {"at": 7}, 1)] * count
    # Also by a program without any group.
    v = rx.Variable(0.0)
    rx.train.Checkpoint(v=v).restore(tmp_path / "ckpt-1").expect_partial()
    assert float(v) == 5.0


def test_states_that_differ_go_back_to_their_workers(tmp_path: Path) -> None:
    def save(peers: PeersInThreads) -> None:
        program(peers, state={"row": peers.index * 10})[2].write(tmp_path / "one")

    def restore(peers: PeersInThreads) -> Any:
        _, member, checkpoint = program(peers)
        checkpoint.restore(tmp_path / "one")
        return member.state

    def restore_with(peers: PeersInThreads) -> Any:
        _, member, checkpoint = program(peers)
        member.set_worker_states = lambda states: setattr(member, "state", states)
        checkpoint.restore(tmp_path / "one")
        return member.state

    succeeded(run_workers(2, save))
    assert succeeded(run_workers(2, restore)) == [{"row": 0}, {"row": 10}]
    for result in run_workers(3, restore):
        assert isinstance(result, rx.errors.CheckpointError)
        assert "2 workers" in str(result)
    assert succeeded(run_workers(3, restore_with)) == [[{"row": 0}, {"row": 10}]] * 3


def test_an_error_of_the_disk_raises_on_all_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "one"

    def save(peers: PeersInThreads) -> None:
        program(peers, 1.0)[2].write(target)

    succeeded(run_workers(2, save))
    before = files_of(tmp_path)

    def fail(self: Snapshot, path: Path, *rest: Any) -> None:
        raise OSError(28, os.strerror(28))

    def save_more(peers: PeersInThreads) -> None:
        manager = rx.train.CheckpointManager(program(peers, 2.0)[2], tmp_path / "run")
        with manager:
            manager.save()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replicax.bundle.data_files.write_arrays", fail)
        for index, error in enumerate(run_workers(2, save)):
            assert isinstance(error, rx.errors.CheckpointError), error
            assert error.errno == 28
            assert ("/job:worker/task:0" in str(error)) == (index == 1)
        assert files_of(tmp_path) == before
        for error in run_workers(2, save_more):
            assert isinstance(error, rx.errors.CheckpointError)
    assert rx.train.load_variable(target, "v") == 1.0


def test_an_object_that_fails_on_one_worker_raises_on_all(tmp_path: Path) -> None:
    def save(peers: PeersInThreads) -> None:
        bad = ZeroDivisionError("no position") if peers.index == 1 else None
        program(peers, state=bad or 3)[2].write(tmp_path / "one")

    other, own = run_workers(2, save)
    assert isinstance(own, ZeroDivisionError)
    assert isinstance(other, rx.errors.UnavailableError)
    assert "/job:worker/task:1" in str(other) and "no position" in str(other)
    assert not (tmp_path / "one").exists()


def test_workers_with_different_objects_are_told_which(tmp_path: Path) -> None:
    def save(peers: PeersInThreads) -> None:
        _, _, checkpoint = program(peers)
        if peers.index == 1:
            checkpoint.extra = rx.Variable(1.0)
        checkpoint.write(tmp_path / "one")

    for error in run_workers(2, save):
        assert isinstance(error, rx.errors.StructureError)
        assert "/job:worker/task:1 has 'extra (variable)'" in str(error)


def test_no_worker_restores_another_checkpoint_than_the_others(tmp_path: Path) -> None:
    def save(peers: PeersInThreads) -> None:
        v, _, checkpoint = program(peers)
        for step in (5, 6):
            v.assign(float(step))
            checkpoint.write(tmp_path / f"ckpt-{step}")

    def restore(peers: PeersInThreads) -> float | Exception:
        v, _, checkpoint = program(peers, -1.0)
        step = 5 + peers.index
        with pytest.raises(rx.errors.InvalidArgumentError, match=r"ckpt-5.*task:1 has ckpt-6"):
            checkpoint.restore(tmp_path / f"ckpt-{step}")
        return float(v)

    def restore_or_nothing(peers: PeersInThreads) -> float:
        v, _, checkpoint = program(peers, -1.0)
        with pytest.raises(rx.errors.InvalidArgumentError, match="task:1 has no checkpoint"):
            checkpoint.restore(None if peers.index else tmp_path / "ckpt-5")
        return float(v)

    def restore_same_name(peers: PeersInThreads) -> float:
        v, _, checkpoint = program(peers, -1.0)
        folder = tmp_path if peers.index == 0 else tmp_path / "other"
        with pytest.raises(rx.errors.InvalidArgumentError, match="the same checkpoint"):
            checkpoint.restore(folder / "ckpt-5")
        return float(v)

    succeeded(run_workers(2, save))
    shutil.copytree(tmp_path / "ckpt-6", tmp_path / "other" / "ckpt-5")
    for fn in (restore, restore_or_nothing, restore_same_name):
        assert succeeded(run_workers(2, fn)) == [-1.0, -1.0]


def test_a_directory_that_only_the_chief_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "_VISIBLE_S", 0.3)

    def save(peers: PeersInThreads) -> None:
        with rx.train.CheckpointManager(program(peers, 1.0)[2], tmp_path / "run") as manager:
            manager.save()

    def restore(peers: PeersInThreads) -> float:
        v, _, checkpoint = program(peers, -1.0)
        # What a host without the directory sees.
        folder = tmp_path / ("run" if peers.index == 0 else "nowhere")
        with pytest.raises(rx.errors.NotFoundError, match=r"task:1 cannot find it.*share"):
            checkpoint.restore(folder / "ckpt-1")
        return float(v)

    succeeded(run_workers(2, save))
    assert succeeded(run_workers(2, restore)) == [-1.0, -1.0]


def test_a_checkpoint_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    # As a network file system shows it.
    def save(peers: PeersInThreads) -> None:
        program(peers, 4.0)[2].write(tmp_path / "one")

    def restore(peers: PeersInThreads) -> float:
        v, _, checkpoint = program(peers)
        folder = tmp_path if peers.index == 0 else tmp_path / "late"
        checkpoint.restore(folder / "one")
        return float(v)

    def appear() -> None:
        time.sleep(0.5)
        shutil.copytree(tmp_path / "one", tmp_path / "copy")
        (tmp_path / "late").mkdir()
        os.rename(tmp_path / "copy", tmp_path / "late" / "one")

    succeeded(run_workers(2, save))
    thread = threading.Thread(target=appear)
    thread.start()
    assert succeeded(run_workers(2, restore)) == [4.0, 4.0]
    thread.join(10)


def test_a_set_state_that_fails_on_one_worker_restores_nothing_on_any(tmp_path: Path) -> None:
    def save(peers: PeersInThreads) -> None:
        program(peers, 2.0, state=9)[2].write(tmp_path / "one")

    def restore(peers: PeersInThreads) -> tuple[float, Any]:
        v, member, checkpoint = program(peers, -1.0, state=1)
        if peers.index == 1:
            real = member.set_state
            member.set_state = lambda state: real(state) if state == 1 else 1 / 0
        with pytest.raises(rx.errors.CheckpointError, match="ZeroDivisionError"):
            checkpoint.restore(tmp_path / "one")
        return float(v), member.state

    succeeded(run_workers(2, save))
    assert succeeded(run_workers(2, restore)) == [(-1.0, 1), (-1.0, 1)]


def test_S216_a_manager_decides_once_for_all(tmp_path: Path) -> None:
    def train(peers: PeersInThreads) -> list[Any]:
        v, _, checkpoint = program(peers)
        counter = rx.Variable(0)
        # A worker that gives another directory, as programs for TensorFlow do, follows the chief.
        folder = tmp_path / ("run" if peers.index == 0 else f"workertemp_{peers.index}")
        manager = rx.train.CheckpointManager(
            checkpoint, folder, max_to_keep=2, step_counter=counter, checkpoint_interval=2
        )
        paths = []
        with manager:
            assert manager.restore_or_initialize() is None
            for step in range(5):
                v.assign(float(step))
                # Only the chief's count decides.
                counter.assign(step if peers.index == 0 else 100 * step)
                paths.append(manager.save())
            seen = [Path(path).name for path in manager.checkpoints]
        return [paths, seen, manager.directory, manager.latest_checkpoint]

    first, second = succeeded(run_workers(2, train))
    assert first == second
    run = str(tmp_path / "run")
    assert first[0] == [f"{run}/ckpt-1", None, f"{run}/ckpt-2", None, f"{run}/ckpt-3"]
    assert first[1:] == [["ckpt-2", "ckpt-3"], run, f"{run}/ckpt-3"]
    assert not (tmp_path / "workertemp_1").exists()

    def resume(peers: PeersInThreads) -> tuple[str | None, float, str | None]:
        v, _, checkpoint = program(peers)
        with rx.train.CheckpointManager(checkpoint, run) as manager:
            path = manager.restore_or_initialize()
            return path, float(v), manager.save()

    assert succeeded(run_workers(3, resume)) == [(f"{run}/ckpt-3", 4.0, f"{run}/ckpt-4")] * 3


def test_a_damaged_checkpoint_on_one_worker_is_skipped_by_all(tmp_path: Path) -> None:
    def train(peers: PeersInThreads) -> None:
        v, _, checkpoint = program(peers)
        with rx.train.CheckpointManager(checkpoint, tmp_path / "run") as manager:
            for step in range(3):
                v.assign(float(step))
                manager.save()

    def resume(peers: PeersInThreads) -> tuple[float, int]:
        v, _, checkpoint = program(peers)
        with rx.train.CheckpointManager(checkpoint, tmp_path / "run") as manager:
            status = manager.restore_latest()
        return float(v), len(status.fallbacks)

    succeeded(run_workers(2, train))
    read, spoiled = SavedCheckpoint.read, threading.Lock()

    def read_badly(self: SavedCheckpoint, wanted: Any = None) -> Any:
        if self.step == 3 and spoiled.acquire(blocking=False):
            raise self.bundle.damaged("data-00000.safetensors", "a bit is flipped")
        return read(self, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedCheckpoint, "read", read_badly)
        assert succeeded(run_workers(2, resume)) == [(1.0, 1), (1.0, 1)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_in_the_background_is_the_chiefs(tmp_path: Path, fails: bool) -> None:
    may_write = threading.Event()
    real = Snapshot.write

    def write(self: Snapshot, path: Path, *rest: Any) -> None:
        assert may_write.wait(20)
        if fails:
            raise rx.errors.CheckpointError("The disk must work", "it does not", "Mend it.")
        real(self, path, *rest)

    def train(peers: PeersInThreads) -> Any:
        v, _, checkpoint = program(peers, 3.0)
        manager = rx.train.CheckpointManager(checkpoint, tmp_path / "run", save_async=True)
        manager.save()
        v.assign(-1.0)
        # Not finished, and so not listed, on any worker.
        assert manager.checkpoints == []
        peers.barrier("before")
        may_write.set()
        try:
            manager.wait()
        finally:
            manager.close()
        return manager.checkpoints

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "write", write)
        results = run_workers(2, train)
    if fails:
        assert all(isinstance(error, rx.errors.CheckpointError) for error in results), results
    else:
        assert succeeded(results) == [[str(tmp_path / "run" / "ckpt-1")]] * 2
        assert rx.train.load_variable(tmp_path / "run" / "ckpt-1", "v") == 3.0


def test_a_worker_that_leaves_by_an_error_does_not_wait_for_the_others(tmp_path: Path) -> None:
    def train(peers: PeersInThreads) -> None:
        _, _, checkpoint = program(peers)
        with rx.train.CheckpointManager(checkpoint, tmp_path / "run", save_async=True) as manager:
            manager.save()
            if peers.index == 0:
                raise ZeroDivisionError("a bug of one worker")
            peers.barrier("never reached by the other")

    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peers_in_threads.TIMEOUT_S", 2.0)
        first, second = run_workers(2, train)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, rx.errors.DeadlineExceededError)
    assert time.monotonic() - begun < 10


def test_one_process_alone_pays_for_no_exchange() -> None:
    alone = Writers(None)
    assert alone.together("x", lambda: 1, int) == [1]
    assert (alone.count, alone.index, alone.name_of(0)) == (1, 0, "this process")
    with pytest.raises(KeyError):
        alone.from_chief("x", lambda: {}["a"], str)
