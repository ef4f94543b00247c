"""PreemptionCheckpointHandler in a group: SIGTERM at one worker, all save at one step."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import replicax as rx
from replicax.testing import LocalCluster
from replicax.testing.lock_step import LaunchedProgram

pytestmark = pytest.mark.timeout(300)

EPOCHS, STEPS = 8, 15
# The machine may be busy with other things: so much is added to each bound.
SLACK_S = 8.0


def train(directory: str, step_s: float = 0.03, **options: Any) -> Any:
    """Trains as the test of TensorFlow does: each worker adds 1 in each step."""
    strategy = rx.MultiWorkerMirroredStrategy()
    sums = rx.VariableAggregation.SUM
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=sums, name="v")
        counts = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=sums
        )
    saved = Path(directory) / f"saved_by_worker_{strategy.cluster_resolver.task_id}"
    notice = Path(directory) / f"notice_{strategy.cluster_resolver.task_id}"
    if options.pop("uses_save_fn", False):
        options["save_fn"] = lambda: saved.write_text(str(float(v)))
    if options.pop("uses_watcher_fn", False):
        options["termination_watcher_fn"] = notice.exists
    handler = rx.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        rx.train.Checkpoint(v=v, counts=counts),
        f"{directory}/run",
        rx.experimental.TerminationConfig(**options),
    )
    watcher = rx.experimental.PreemptionWatcher()
    begun = handler.total_run_calls
    print("restored", begun, float(v), flush=True)

    @rx.function
    def step() -> None:
        def replica_step() -> None:
            v.assign_add(1.0)
            counts.assign_add(1.0)

        strategy.run(replica_step)

    with handler.watch_preemption_scope():
        for epoch in range(handler.total_run_calls // STEPS, EPOCHS):
            for _ in range(handler.total_run_calls % STEPS, STEPS):
                handler.run(step)
                print("step", handler.total_run_calls, flush=True)
                time.sleep(step_s)
            print("epoch", epoch, flush=True)
    return begun, handler.total_run_calls, float(v), float(counts), watcher.preemption_message


def wait_for_step(cluster: LocalCluster, worker: int, step: int, program: LaunchedProgram) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = re.findall(r"^step (\d+)$", cluster.logs("worker", worker), re.MULTILINE)
        if found and int(found[-1]) >= step:
            return
        assert not any(one.exit_code for one in program.outcomes), program.outcomes
        time.sleep(0.05)
    raise AssertionError(program)


def last_step(cluster: LocalCluster, worker: int) -> int:
    found = re.findall(r"^step (\d+)$", cluster.logs("worker", worker), re.MULTILINE)
    return int(found[-1])


def preempt(cluster: LocalCluster, program: LaunchedProgram, workers: int, victim: int) -> int:
    """Sends SIGTERM to one worker; returns the step at which all have saved."""
    wait_for_step(cluster, victim, 20, program)
    os.kill(cluster.pid("worker", victim), signal.SIGTERM)
    begun = time.monotonic()
    outcomes = program.wait(timeout=60)
    assert time.monotonic() - begun < 10 + SLACK_S
    assert [one.exit_code for one in outcomes] == [42] * workers, [one.log for one in outcomes]
    (step,) = {last_step(cluster, worker) for worker in range(workers)}
    return step


def check_bar_33(tmp_path: Path, workers: int, victim: int) -> None:
    run = tmp_path / "run"
    with LocalCluster(workers=workers, ps=0) as cluster:
        step = preempt(cluster, cluster.launch(train, args=(str(tmp_path),)), workers, victim)
        assert [path.name for path in run.glob("ckpt-*")] == ["ckpt-1"]
        assert rx.train.load_variable(run / "ckpt-1", "v") == step * workers
        results = cluster.run(train, args=(str(tmp_path), 0.0))
    total = EPOCHS * STEPS
    count = float(total * workers)
    assert results == [(step, total, count, count, None)] * workers


def test_bar_33_T121_SIGTERM_at_one_worker_saves_all_and_the_restart_is_exact(
    tmp_path: Path,
) -> None:
    check_bar_33(tmp_path, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_bar_33_a_random_one_of_four_and_480(tmp_path: Path, seed: int) -> None:
    assert EPOCHS * STEPS * 4 == 480
    check_bar_33(tmp_path, 4, random.Random(seed).randrange(4))


@pytest.mark.slow
def test_bar_33_the_chief_is_preempted_and_a_supervisor_restarts_the_group(tmp_path: Path) -> None:
    with LocalCluster(workers=2, ps=0) as cluster:
        program = cluster.launch(train, args=(str(tmp_path),), max_restarts=1)
        wait_for_step(cluster, 0, 20, program)
        os.kill(cluster.pid("worker", 0), signal.SIGTERM)
        results = program.values(timeout=90)
        assert program.num_restarts == 1
    assert [(total, value) for _, total, value, _, _ in results] == [(120, 240.0)] * 2
    assert all(begun >= 20 for begun, *_ in results)


@pytest.mark.slow
def test_T121_a_notice_by_polling_and_a_save_of_the_users_own(tmp_path: Path) -> None:
    options = {"uses_save_fn": True, "uses_watcher_fn": True}
    with LocalCluster(workers=2, ps=0) as cluster:
        program = cluster.launch(train, args=(str(tmp_path),), kwargs=options)
        wait_for_step(cluster, 0, 10, program)
        (tmp_path / "notice_0").touch()
        outcomes = program.wait(timeout=60)
        assert [one.exit_code for one in outcomes] == [42, 42], [one.log for one in outcomes]
        step = last_step(cluster, 1)
        assert last_step(cluster, 0) == step
    # All workers saved, and the manager did not.
    for worker in range(2):
        assert (tmp_path / f"saved_by_worker_{worker}").read_text() == str(step * 2.0)
    assert list((tmp_path / "run").glob("ckpt-*")) == []


@pytest.mark.slow
def test_T121_a_grace_period_delays_the_exit_of_all(tmp_path: Path) -> None:
    with LocalCluster(workers=2, ps=0) as cluster:
        program = cluster.launch(train, args=(str(tmp_path),), kwargs={"grace_period": 3.0})
        wait_for_step(cluster, 1, 10, program)
        os.kill(cluster.pid("worker", 1), signal.SIGTERM)
        begun = time.monotonic()
        outcomes = program.wait(timeout=60)
        took = time.monotonic() - begun
        assert [one.exit_code for one in outcomes] == [42, 42], [one.log for one in outcomes]
        step = last_step(cluster, 1)
        assert last_step(cluster, 0) == step
        first = re.findall(r"saving after (\d+) runs", cluster.logs("worker", 0))
    # The first save was at once, the second near the end; training went on between.
    assert 1.5 < took < 3 + 10 + SLACK_S
    assert [int(first[0]) < step, int(first[1])] == [True, step]
    assert rx.train.load_variable(tmp_path / "run" / "ckpt-2", "v") == step * 2


def fail(directory: str) -> None:
    """One worker raises in its fifth step."""
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    handler = rx.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, rx.train.Checkpoint(v=v), directory
    )

    def step() -> None:
        if strategy.cluster_resolver.task_id == 1 and handler.total_run_calls == 5:
            raise ZeroDivisionError("a bug on one worker")
        strategy.run(lambda: v.assign_add(1.0))

    for _ in range(10):
        handler.run(step)


def test_T121_an_error_in_the_step_of_one_worker_is_raised_on_all(tmp_path: Path) -> None:
    with LocalCluster(workers=2, ps=0, timing="fast") as cluster:
        outcomes = cluster.launch(fail, args=(str(tmp_path),)).wait(timeout=60)
    other, own = outcomes
    assert own.exit_code == 1
    assert isinstance(own.error, ZeroDivisionError)
    assert isinstance(other.error, rx.errors.DistributeError), other.log
    assert "/job:worker/task:1" in str(other.error)


def train_late(directory: str, flag: str) -> Any:
    """Is preempted before its first step, which is not step 0."""
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    checkpoint = rx.train.Checkpoint(v=v)
    handler = rx.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint, directory
    )
    if strategy.cluster_resolver.task_id == 1 and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGTERM)
    # The workers choose the step before the first one begins.
    time.sleep(4.0)
    begun = handler.total_run_calls
    for _ in range(begun, 40):
        handler.run(lambda: strategy.run(lambda: v.assign_add(1.0)))
        time.sleep(0.1)
    return begun, float(v)


@pytest.mark.slow
def test_a_notice_before_the_first_step_of_a_restart_is_not_lost(tmp_path: Path) -> None:
    run, flag = str(tmp_path / "run"), tmp_path / "flag"
    v = rx.Variable(20.0)
    with rx.train.CheckpointManager(rx.train.Checkpoint(v=v, checkpointed_runs=10), run) as manager:
        manager.save()
    with LocalCluster(workers=2, ps=0) as cluster:
        outcomes = cluster.launch(train_late, args=(run, str(flag))).wait(timeout=60)
        assert [one.exit_code for one in outcomes] == [42, 42], [one.log for one in outcomes]
        (begun, value), other = cluster.run(train_late, args=(run, str(flag)))
    assert (begun, value) == other
    assert 10 <= begun < 40
    assert value == 80.0


def watch() -> None:
    """Worker 1 is told that it will end, and ends; worker 0 watches it."""
    strategy = rx.MultiWorkerMirroredStrategy()
    watcher = rx.experimental.PreemptionWatcher()
    if strategy.cluster_resolver.task_id == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(4.0)
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 20
    while watcher.preemption_message is None and time.monotonic() < end:
        time.sleep(0.1)
    print("message", watcher.preemption_message, flush=True)
    watcher.block_until_worker_exit()
    print("the other worker has ended", flush=True)


@pytest.mark.slow
def test_a_watcher_tells_of_the_notice_and_of_the_end_of_another_worker() -> None:
    with LocalCluster(workers=2, ps=0, timing="fast") as cluster:
        begun = time.monotonic()
        outcomes = cluster.launch(watch).wait(timeout=60)
        assert time.monotonic() - begun < 30
        log = cluster.logs("worker", 0)
    assert outcomes[1].exit_code == -9
    assert re.search(r"message SIGTERM at \d{4}-", log), log
    assert "the other worker has ended" in log
