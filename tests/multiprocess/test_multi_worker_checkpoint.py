"""Checkpoints and exports of MultiWorkerMirroredStrategy: real processes, files and faults."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multi_worker_state import (
    BATCH,
    ROWS,
    Failure,
    Training,
    caught,
    index_of_worker,
    names_in,
    on_workers,
    small_files,
)

import replicax as rx
from replicax.bundle.publishing import BundleWriter
from replicax.checkpointing import together
from replicax.testing import LocalCluster

pytestmark = pytest.mark.timeout(180)


def approx(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: pytest.approx(value, rel=1e-5) for key, value in facts.items()}


# Saving on some workers, restoring anywhere.


def go_on(source: str, target: str, steps: int) -> Any:
    """Restores what another strategy has saved, trains, saves, and exports."""
    training = on_workers()
    training.checkpoint.restore(source).assert_consumed()
    restored = training.facts()
    training.train(steps)
    path = training.checkpoint.write(target)
    exported: Any = rx.Module()
    exported.w, exported.total = training.w, training.total
    exported.double = rx.function(
        lambda x: x * training.w.read_value()[1], input_signature=[rx.TensorSpec((None,))]
    )
    rx.saved_model.save(exported, f"{target}-model")
    with training.strategy.scope():
        loaded = rx.saved_model.load(f"{target}-model")
    doubled = np.asarray(loaded.double([1.0, 2.0])).tolist()
    assert loaded.total.is_per_replica
    assert float(loaded.total) == float(training.total)
    return restored, training.facts(), path, doubled, training.rest()


def check_round_trip(tmp_path: Path, workers: int, devices: int) -> None:
    first = Training(rx.MirroredStrategy(["CPU:0", "CPU:1"]))
    first.train(2)
    source = first.checkpoint.write(tmp_path / "mirrored")
    saved = first.facts()
    with LocalCluster(workers=workers, ps=0, devices_per_worker=devices) as cluster:
        results = cluster.run(go_on, args=(source, str(tmp_path / "group"), 3))
    first.train(3)
    assert names_in(tmp_path) == ["group", "group-model", "mirrored"]
    for restored, trained, path, doubled, _ in results:
        assert restored == approx(saved)
        assert trained == approx(first.facts())
        assert path == str(tmp_path / "group")
        assert doubled == pytest.approx([saved_w(trained), 2 * saved_w(trained)])
    # All rows that were left, each on one worker.
    left = sorted(row for *_, rest in results for row in rest)
    assert left == list(range(5 * BATCH, ROWS))
    others = {
        "default": rx.get_strategy(),
        "one": rx.OneDeviceStrategy("CPU:0"),
        "mirrored": rx.MirroredStrategy(["CPU:0", "CPU:1"]),
        "virtual": rx.MirroredStrategy(["CPU:0"], virtual_replicas=3),
    }
    for name in ("one", "mirrored", "virtual"):
        again = Training(others[name])
        again.checkpoint.restore(tmp_path / "group").assert_consumed()
        assert again.facts() == approx(first.facts()), name
        assert again.rest() == list(range(5 * BATCH, ROWS)), name
    loaded = rx.saved_model.load(tmp_path / "group-model")
    assert float(loaded.total) == pytest.approx(first.facts()["total"])
    assert np.asarray(loaded.double([1.0])) == pytest.approx([saved_w(first.facts())])


def saved_w(facts: dict[str, Any]) -> float:
    return facts["w"][1]


def test_S213_two_workers_and_one_process_restore_from_each_other(tmp_path: Path) -> None:
    check_round_trip(tmp_path, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "devices"), [(2, 2), (4, 1), (3, 1)])
def test_S213_groups_of_other_sizes(tmp_path: Path, workers: int, devices: int) -> None:
    check_round_trip(tmp_path, workers, devices)


def train_and_save(directory: str, steps: int) -> Any:
    training = on_workers()
    with rx.train.CheckpointManager(training.checkpoint, directory) as manager:
        restored = manager.restore_or_initialize()
        training.train(steps)
        return restored, manager.save(), training.facts()


@pytest.mark.slow
def test_S216_other_numbers_of_workers_continue(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    path = None
    for number, workers in enumerate((2, 4, 1, 3), start=1):
        with LocalCluster(workers=workers, ps=0) as cluster:
            results = cluster.run(train_and_save, args=(run, 2))
        assert [result[0] for result in results] == [path] * workers
        path = f"{run}/ckpt-{number}"
        assert [result[1] for result in results] == [path] * workers
    alone = Training(rx.OneDeviceStrategy("CPU:0"))
    alone.train(8)
    assert results[0][2] == approx(alone.facts())


# Faults, and the decisions of a manager; several scenes in one group.


def scenes(directory: str) -> dict[str, Any]:
    index, seen = index_of_worker(), {}
    together._VISIBLE_S = 0.5
    training = on_workers()
    failures: list[Failure] = []
    own = Path(directory) / ("run" if index == 0 else f"workertemp_{index}")
    manager = rx.train.CheckpointManager(
        training.checkpoint,
        own,
        max_to_keep=2,
        step_counter=training.optimizer.iterations,
        checkpoint_interval=2,
    )
    with manager:
        assert manager.restore_or_initialize() is None
        saved = []
        for _ in range(5):
            training.train()
            saved.append(manager.save())
        seen["saved"] = saved
        seen["kept"] = [Path(path).name for path in manager.checkpoints]
        # The disk of the chief is full: at once, and in the background.
        with small_files(index == 0), caught(failures, rx.errors.CheckpointError):
            manager.save(check_interval=False)
        with small_files(index == 0):
            manager.save(check_interval=False, asynchronous=True)
            with caught(failures, rx.errors.CheckpointError):
                manager.wait()
        with small_files(index == 0):
            manager.save(check_interval=False, asynchronous=True)
            with caught(failures, rx.errors.CheckpointError):
                manager.save(check_interval=False)
        seen["left"] = [Path(path).name for path in manager.checkpoints]
        # Values are combined before `save` returns; later changes do not reach the checkpoint.
        at_save = training.facts()
        path = manager.save(check_interval=False, asynchronous=True)
        training.spoil()
        manager.wait()
        assert manager.latest_checkpoint == path
        manager.restore_latest()
        seen["in_background"] = training.facts() == at_save
        _save_other_kinds(training.strategy, directory)
        # One worker asks for another checkpoint, or for one that the others do not have.
        other = manager.checkpoints[index]
        with caught(failures, rx.errors.InvalidArgumentError):
            training.checkpoint.restore(other)
        if index == 1:
            shutil.copytree(str(path), f"{directory}/only_here/ckpt-9")
        with caught(failures, rx.errors.NotFoundError):
            training.checkpoint.restore(
                f"{directory}/{'run' if index == 0 else 'only_here'}/ckpt-9"
            )
        # Objects that only one worker has.
        if index == 1:
            training.checkpoint.extra = rx.Variable(0.0)
        with caught(failures, rx.errors.StructureError):
            manager.save(check_interval=False)
        seen["after_all"] = training.facts() == at_save
    seen["failures"] = failures
    return seen


def _save_other_kinds(strategy: Any, directory: str) -> None:
    """Saves datasets that differ on each worker, and objects that are created later."""

    def dataset_of(context: rx.InputContext) -> Any:
        start = 100 * context.input_pipeline_id
        return rx.data.Dataset.range(start, start + 6).batch(1)

    data = rx.data.Dataset.range(12).batch(2)
    data = data.with_options(no_sharding())
    iterators = {
        "function": iter(strategy.distribute_datasets_from_function(dataset_of)),
        "off": iter(strategy.experimental_distribute_dataset(data)),
    }
    for name, iterator in iterators.items():
        # An iterator alone belongs to all workers, too.
        checkpoint = rx.train.Checkpoint(iterator=iterator)
        next(iterator)
        path = checkpoint.write(f"{directory}/iterators/{name}")
        first = [rows_of(strategy, next(iterator)) for _ in range(3)]
        checkpoint.restore(path)
        again = [rows_of(strategy, next(iterator)) for _ in range(3)]
        assert first == again, name
    # Arrays of all workers: equal copies are saved, and parts are refused on all workers.
    layout = strategy.extended.layout
    arrays = rx.train.Checkpoint(copies=layout.replicate(np.arange(3.0, dtype=np.float32)))
    with strategy.scope():
        path = arrays.write(f"{directory}/arrays")
        arrays.copies = layout.replicate(np.zeros(3, np.float32))
        arrays.restore(path)
        assert np.asarray(arrays.copies.addressable_data(0)).tolist() == [0.0, 1.0, 2.0]
        assert not arrays.copies.is_fully_addressable
        arrays.parts = layout.assemble([np.ones(2, np.float32)])
        with caught([], rx.errors.UnsupportedError):
            arrays.write(f"{directory}/arrays")
    # The directory is managed by all before any of them has a variable.
    late = rx.train.Checkpoint()
    with rx.train.CheckpointManager(late, f"{directory}/late") as manager:
        with strategy.scope():
            late.v = rx.Variable(3.0)
        path = manager.save()
        assert manager.latest_checkpoint == path
        late.v.assign(0.0)
        assert manager.restore_or_initialize() == path
        assert float(late.v) == 3.0
    # Which one is the best is the same everywhere, also if the workers measured different numbers.
    best = {"max_to_keep": 1, "keep_best": 1, "best_metric": "-loss"}
    with rx.train.CheckpointManager(late, f"{directory}/best", **best) as manager:
        for loss in (0.5, 0.2, 0.4):
            manager.save(metrics={"loss": loss + index_of_worker() * late.save_counter})
        assert manager.best_checkpoint == f"{directory}/best/ckpt-{late.save_counter - 1}"


def no_sharding() -> Any:
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = rx.data.AutoShardPolicy.OFF
    return options


def rows_of(strategy: Any, batch: Any) -> list[Any]:
    parts = strategy.experimental_local_results(batch)
    return [np.asarray(part).tolist() for part in parts]


def test_S216_one_decision_and_one_error_for_all_workers(tmp_path: Path) -> None:
    with LocalCluster(workers=2, ps=0) as cluster:
        first, second = cluster.run(scenes, args=(str(tmp_path),))
    run = f"{tmp_path}/run"
    for seen in (first, second):
        assert seen["saved"] == [f"{run}/ckpt-1", None, f"{run}/ckpt-2", None, f"{run}/ckpt-3"]
        assert seen["kept"] == ["ckpt-2", "ckpt-3"]
        assert seen["left"] == ["ckpt-2", "ckpt-3"]
        assert seen["in_background"] and seen["after_all"]
        kinds = [failure[0] for failure in seen["failures"]]
        assert kinds == [
            *["CheckpointError"] * 3,
            "InvalidArgumentError",
            "NotFoundError",
            "StructureError",
        ]
        assert [failure[2] for failure in seen["failures"][:3]] == [errno.EFBIG] * 3
    assert "/job:worker/task:0" in second["failures"][0][1]
    assert "/job:worker/task:1 has ckpt-" in first["failures"][3][1]
    assert "/job:worker/task:0 cannot find it" in first["failures"][4][1]
    assert "'extra (variable)'" in first["failures"][5][1]
    # Only the chief has written, and only in its directory.
    assert names_in(tmp_path) == ["arrays", "best", "iterators", "late", "only_here", "run"]
    # The saves that failed have left nothing; their numbers are not used again.
    assert names_in(run) == ["ckpt-3", "ckpt-7"]


# A chief that is killed.


def save_twice(directory: str, flag: str) -> None:
    """Saves; then the chief stops in the middle of the second save."""
    training = on_workers()
    manager = rx.train.CheckpointManager(training.checkpoint, directory)
    training.train()
    manager.save()
    training.train()

    def stuck(*_: Any) -> int:
        # All data is written; the name is not.
        Path(flag).touch()
        time.sleep(60)
        raise AssertionError("not reached")

    if index_of_worker() == 0:
        BundleWriter.publish = stuck  # type: ignore[method-assign]
    manager.save()


@pytest.mark.slow
def test_a_chief_that_is_killed_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run, flag = tmp_path / "run", tmp_path / "flag"
    with LocalCluster(workers=2, ps=0, timing="fast") as cluster:
        program = cluster.launch(save_twice, args=(str(run), str(flag)))
        end = time.monotonic() + 60
        while not flag.exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert flag.exists(), program.outcomes
        # The data of the second is on disk, under another name.
        assert any(".tmp-" in name for name in names_in(run))
        cluster.kill("worker", 0)
        killed = time.monotonic()
        outcomes = program.wait(timeout=60)
        assert time.monotonic() - killed < 15
        assert outcomes[0].exit_code == -9
        assert outcomes[1].exit_code == 75, outcomes[1].log
        assert "/job:worker/task:0" in outcomes[1].log
        results = cluster.run(train_and_save, args=(str(run), 1))
    assert [result[:2] for result in results] == [(f"{run}/ckpt-1", f"{run}/ckpt-2")] * 2
    assert names_in(run) == ["ckpt-1", "ckpt-2"]
    assert results[0][2]["iterations"] == 2


# Other mistakes, and other tasks.


def save_on_chief_only(directory: str) -> None:
    training = on_workers()
    for _ in range(2):
        training.train()
        if index_of_worker() == 0:
            training.checkpoint.save(f"{directory}/ckpt")
    # Steps are dispatched; what they computed is needed here.
    training.w.numpy()


@pytest.mark.slow
def test_a_save_that_one_worker_leaves_out_is_an_error_of_all(tmp_path: Path) -> None:
    with LocalCluster(workers=2, ps=0, timing="fast") as cluster:
        begun = time.monotonic()
        outcomes = cluster.launch(save_on_chief_only, args=(str(tmp_path),)).wait(timeout=60)
        assert time.monotonic() - begun < 40
    for outcome in outcomes:
        assert isinstance(outcome.error, rx.errors.InvalidArgumentError), outcome.log
        assert "/job:worker/task:0 waits at 'Checkpoint.save'" in str(outcome.error)
    assert names_in(tmp_path) == []


def train_or_evaluate(directory: str, steps: int) -> list[int]:
    """The workers save each step; the evaluator, which is alone, restores what it finds."""
    training = on_workers()
    if rx.cluster_resolver.TFConfigClusterResolver().task_type == "evaluator":
        found: list[int] = []
        for path in rx.train.checkpoints_iterator(directory, timeout=60):
            training.checkpoint.restore(path).assert_consumed()
            found.append(int(training.optimizer.iterations))
            if found[-1] == steps:
                return found
    with rx.train.CheckpointManager(training.checkpoint, directory, max_to_keep=None) as manager:
        for _ in range(steps):
            training.train()
            manager.save(checkpoint_number=training.optimizer.iterations)
    return []


@pytest.mark.slow
def test_an_evaluator_reads_what_the_workers_save(tmp_path: Path) -> None:
    with LocalCluster(workers=2, ps=0, evaluator=True) as cluster:
        *_, seen = cluster.run(train_or_evaluate, args=(str(tmp_path / "run"), 6))
    assert seen[-1] == 6
    assert seen == sorted(set(seen))
