"""The supervisor of a sync group: it restarts all tasks, and knows when not to."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax
import psutil
import pytest
from vocabulary import refused

import replicax as rx
from replicax.checkpointing import preemption
from replicax.foundation import errors
from replicax.group import exit_codes
from replicax.launch.backoff import Backoff
from replicax.launch.elastic import KeepGlobalBatch, KeepReplicaBatch, run_elastic
from replicax.launch.group_supervisor import GroupSupervisor
from replicax.launch.outcomes import Outcome
from replicax.launch.program import PreparedProgram, prepare
from replicax.launch.restart_rules import (
    Attempt,
    Ending,
    classify,
    lost_tasks,
    next_num_workers,
)
from replicax.launch.sync_group import GroupPlan, SyncGroup, tasks_of
from replicax.protocol.tasks import Task
from replicax.testing import LocalCluster

# A program without JAX: each run of each task appends its TF_CONFIG to a file, and then does what
# the plan says for this run, such as {"1": "kill"} for the task 1.
TASK = """
import json, os, pathlib, signal, sys, time
directory, plans = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
config = json.loads(os.environ["TF_CONFIG"])
mine = directory / f"task-{config['task']['index']}"
with mine.open("a") as file:
    file.write(json.dumps(config) + "\\n")
number = len(mine.read_text().splitlines()) - 1
plan = plans[number] if number < len(plans) else {}
action = plan.get(str(config["task"]["index"]), plan.get("others", "finish"))
print("run", number, action, flush=True)
if action == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif action == "hang":
    time.sleep(1000)
elif action != "finish":
    time.sleep(0.2)
    sys.exit(int(action))
"""
LOST, PREEMPTED = str(exit_codes.RESTART_GROUP), str(exit_codes.PREEMPTED)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=2, ps=0) as cluster:
        yield cluster


def configs(directory: Path, index: int) -> list[Any]:
    import json

    return [json.loads(line) for line in (directory / f"task-{index}").read_text().splitlines()]


def command(directory: Path, plans: list[dict[str, str]]) -> list[str]:
    import json

    return ["python", "-c", TASK, str(directory), json.dumps(plans)]


def outcome(index: int, code: int | None, was_killed: bool = False) -> Outcome:
    return Outcome(Task("worker", index), code, was_killed=was_killed)


@pytest.mark.parametrize(
    ("codes", "ending"),
    [
        ([0, 0], Ending.FINISHED),
        ([exit_codes.RESTART_GROUP, -signal.SIGKILL], Ending.LOST),
        ([exit_codes.RESTART_GROUP, exit_codes.RESTART_GROUP], Ending.LOST),
        ([0, -signal.SIGABRT], Ending.LOST),
        ([exit_codes.PREEMPTED, exit_codes.PREEMPTED], Ending.PREEMPTED),
        # One finished just before the others were preempted.
        ([0, exit_codes.PREEMPTED], Ending.PREEMPTED),
        # A real loss is counted, also during a preemption.
        ([exit_codes.PREEMPTED, -signal.SIGKILL], Ending.LOST),
        ([exit_codes.RESTART_GROUP, 1], Ending.FAILED),
        ([2, -signal.SIGKILL], Ending.FAILED),
    ],
)
def test_why_a_run_has_ended(codes: list[int], ending: Ending) -> None:
    assert classify([outcome(i, code) for i, code in enumerate(codes)]) is ending


def test_lost_tasks_are_those_that_did_not_leave_by_themselves() -> None:
    ended = [outcome(0, exit_codes.RESTART_GROUP), outcome(1, -9), outcome(2, -9, was_killed=True)]
    assert lost_tasks(ended) == [Task("worker", 1), Task("worker", 2)]
    assert classify([outcome(0, exit_codes.RESTART_GROUP), outcome(1, 1, was_killed=True)]) is (
        Ending.LOST
    )


def test_trap_18_restarts_are_counted_in_a_window() -> None:
    backoff = Backoff(most=2, window_s=100.0)
    assert [backoff.next(t) is not None for t in (0.0, 10.0, 20.0, 101.0, 102.0)] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert Backoff(most=3, window_s=math.inf, longest_s=0.1).next(5.0) == 5.1


def test_a_lost_task_restarts_all_on_new_ports(
    cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plans = [{"1": "kill", "0": LOST}, {"0": "kill", "1": LOST}]
    program = cluster.launch(command(tmp_path, plans), max_restarts=2)
    assert [one.exit_code for one in program.wait(timeout=60)] == [0, 0]
    assert program.num_restarts == 2
    assert [attempt.ending.value for attempt in program.attempts] == ["lost", "lost", "finished"]
    clusters = [config["cluster"]["worker"] for config in configs(tmp_path, 0)]
    assert clusters == [config["cluster"]["worker"] for config in configs(tmp_path, 1)]
    assert len({port for ports in clusters for port in ports}) == 6
    assert "restart 2: /job:worker/task:0 was killed by SIGKILL" in caplog.text


@pytest.mark.slow
def test_the_others_are_ended_in_bounded_time(tmp_path: Path) -> None:
    def start(number: int, before: Any) -> SyncGroup:
        group = SyncGroup(plan, tasks_of(2), program)
        group.start()
        return group

    plan = GroupPlan(tmp_path, tmp_path)
    words = command(tmp_path, [{"1": "kill", "0": "hang"}])
    program: PreparedProgram = prepare(words, (), None, directory=tmp_path)
    begun_s = time.monotonic()
    supervisor = GroupSupervisor(start, grace=0.5)
    pid = supervisor.group.processes["worker", 0].pid
    assert pid is not None
    supervisor.begin()
    try:
        ended = supervisor.wait(60)
        assert ended is not None and [one.exit_code for one in ended] == [0, 0]
        first = supervisor.attempts[0]
        assert first.outcomes[0].was_killed and first.outcomes[1].exit_code == -signal.SIGKILL
        assert first.ended_s - begun_s < 20
        assert not psutil.pid_exists(pid)
    finally:
        supervisor.close()


@pytest.mark.slow
def test_an_evaluator_does_not_delay_a_restart(tmp_path: Path) -> None:
    # Both have the index 0: the worker is lost in the first run, the evaluator would wait.
    code = (
        "import json, os, pathlib, signal, sys, time\n"
        "job = json.loads(os.environ['TF_CONFIG'])['task']['type']\n"
        "mine = pathlib.Path(sys.argv[1]) / job\n"
        "is_first = not mine.exists()\n"
        "mine.touch()\n"
        "if is_first and job == 'evaluator': time.sleep(1000)\n"
        "if is_first: time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    begun_s = time.monotonic()
    with LocalCluster(workers=1, ps=0, evaluator=True) as cluster:
        program = cluster.launch(["python", "-c", code, str(tmp_path)], max_restarts=1)
        assert [one.exit_code for one in program.wait(timeout=60)] == [0, 0]
        worker, evaluator = program.attempts[0].outcomes
        assert worker.exit_code == -signal.SIGKILL and evaluator.was_killed
    assert time.monotonic() - begun_s < 20


def test_the_exit_code_of_a_preemption_is_that_of_the_handler() -> None:
    assert exit_codes.PREEMPTED == preemption.RESTART_EXIT_CODE


def test_an_error_of_the_program_is_final(cluster: LocalCluster, tmp_path: Path) -> None:
    program = cluster.launch(command(tmp_path, [{"1": "3", "0": LOST}]), max_restarts=5)
    with pytest.raises(errors.UnavailableError, match="task:1 ended with exit code 3"):
        program.values(timeout=60)
    assert program.num_restarts == 0 and len(configs(tmp_path, 0)) == 1


@pytest.mark.slow
def test_trap_18_announced_preemptions_are_not_counted(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    plans = [{"others": PREEMPTED}] * 4 + [{"0": LOST, "1": "kill"}]
    program = cluster.launch(command(tmp_path, plans), max_restarts=1)
    program.values(timeout=60)
    assert program.num_restarts == 5


def test_a_group_that_fails_again_and_again_is_given_up(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    program = cluster.launch(command(tmp_path, [{"others": "kill"}] * 9), max_restarts=2)
    with pytest.raises(errors.UnavailableError, match=r"2 times .* was killed by SIGKILL"):
        program.values(timeout=60)
    assert len(program.attempts) == 3
    assert not cluster.alive("worker", 0) and not cluster.alive("worker", 1)


@pytest.mark.slow
def test_a_supervised_program_can_be_harmed_and_ended(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    plans = [{"1": "hang", "0": "hang"}] * 5
    program = cluster.launch(command(tmp_path, plans), max_restarts=5)
    for number in range(2):
        deadline = time.monotonic() + 30
        while program.num_restarts < number or not (tmp_path / "task-1").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        cluster.kill("worker", 0)
        cluster.kill("worker", 1)
    deadline = time.monotonic() + 30
    while program.num_restarts < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    program.end()
    assert not cluster.alive("worker", 0) and program.num_restarts == 2


# Elastic.


def attempt(codes: list[int], killed: tuple[int, ...] = ()) -> Attempt:
    ended = tuple(outcome(i, code, i in killed) for i, code in enumerate(codes))
    tasks = tuple(one.task for one in ended)
    return Attempt(0, tasks, ended, classify(ended), 0.0, 1.0)


def test_the_number_of_workers_of_the_next_run() -> None:
    left = exit_codes.RESTART_GROUP
    assert next_num_workers([], 1, 4) == 4
    one_lost = attempt([left, left, left, -9])
    assert next_num_workers([one_lost], 1, 4) == 3
    # The one that was away comes back; another one is lost.
    assert next_num_workers([one_lost, attempt([left, -9, left])], 1, 4) == 3
    assert next_num_workers([attempt([left, -9, -9, -9])], 2, 4) == 2
    assert next_num_workers([attempt([left, left])], 1, 4) == 4
    preempted = attempt([exit_codes.PREEMPTED] * 3)
    assert next_num_workers([one_lost, preempted], 1, 4) == 4
    assert next_num_workers([one_lost], 1, 4, available=4) == 4
    assert next_num_workers([one_lost], 2, 4, available=1) == 2


def test_batch_policies() -> None:
    assert KeepReplicaBatch(4, "square_root").learning_rate(1.0, 1, 4) == 0.5
    assert KeepReplicaBatch(4, "unchanged").learning_rate(0.3, 1, 4) == 0.3
    with refused(errors.InvalidArgumentError, "it is 'log'"):
        KeepReplicaBatch(4, "log")  # type: ignore[arg-type]
    with refused(errors.InvalidArgumentError, "it is 0"):
        KeepGlobalBatch(0)
    with refused(errors.InvalidArgumentError, "at least 3, but it is 2"):
        run_elastic(print, min_workers=3, max_workers=2, batch=KeepGlobalBatch(4))


def elastic_train(run: Any, directory: Path) -> dict[str, Any]:
    """Counts to 6 on the chief's file; worker 1 is killed in run 0, run 1 loses its chief."""
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    assert resolver.cluster_spec().num_tasks("worker") == run.num_workers
    index = resolver.task_id
    assert index is not None
    (directory / f"run-{run.number}-task-{index}").touch()
    deadline = time.monotonic() + 60
    while len(list(directory.glob(f"run-{run.number}-*"))) < run.num_workers:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if (run.number, index) in ((0, 1), (1, 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    if run.number < 2:
        os._exit(exit_codes.RESTART_GROUP)
    return {
        "workers": run.num_workers,
        "batch": run.global_batch_size(run.num_workers),
        "rate": run.learning_rate(0.1),
    }


def test_an_elastic_group_goes_on_with_those_that_are_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = run_elastic(
            elastic_train,
            (tmp_path,),
            min_workers=1,
            max_workers=3,
            batch=KeepReplicaBatch(8, "linear"),
            timeout=120,
        )
    # Worker 1 is away in run 1; it is back in run 2, when another one is away.
    assert result.num_workers == [3, 2, 2]
    assert result.reasons == ["lost", "lost", "finished"]
    rate = pytest.approx(0.1 * 2 / 3)
    assert result.values == [{"workers": 2, "batch": 16, "rate": rate}] * 2


@pytest.mark.slow
def test_an_elastic_training_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    def sleep(run: Any) -> None:
        time.sleep(1000)

    with pytest.raises(errors.DeadlineExceededError, match="within 4 s"):
        run_elastic(sleep, min_workers=1, max_workers=1, batch=KeepGlobalBatch(4), timeout=4)


def elastic_training(run: Any, directory: Path, victim: int | None) -> dict[str, Any]:
    """Fits a line from the last checkpoint; a worker of the first run is killed at step 10."""
    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    batch = run.global_batch_size(strategy.num_replicas_in_sync)
    x = np.linspace(-1, 1, 40, dtype=np.float32)
    with strategy.scope():
        slope = rx.Variable(0.0, name="slope")
        optimizer = rx.optimizers.Optimizer(optax.adam(run.learning_rate(0.1)), [slope])
    dataset = rx.data.Dataset.from_tensor_slices((x, 3 * x)).shuffle(40, seed=3).batch(batch)
    iterator = iter(strategy.experimental_distribute_dataset(dataset.repeat()))

    @rx.function
    def step(batch_: Any) -> None:
        def replica_fn(x: Any, y: Any) -> None:
            def loss() -> Any:
                errors_ = (slope.value() * x - y) ** 2
                return rx.nn.compute_average_loss(errors_, global_batch_size=batch)

            optimizer.apply_gradients(rx.value_and_grad(loss, [slope])()[1])

        strategy.run(replica_fn, args=batch_)

    checkpoint = rx.train.Checkpoint(slope=slope, optimizer=optimizer, iterator=iterator)
    with rx.train.CheckpointManager(checkpoint, directory) as manager:
        manager.restore_or_initialize()
        first = int(optimizer.iterations)
        for number in range(first + 1, 21):
            step(next(iterator))
            if number % 4 == 0:
                manager.save(checkpoint_number=number)
            if run.number == 0 and index == victim and number == 10:
                os.kill(os.getpid(), signal.SIGKILL)
    iterator.close()
    return {"first": first, "slope": slope.numpy(), "replicas": strategy.num_replicas_in_sync}


@pytest.mark.slow
def test_an_elastic_training_goes_on_with_the_same_global_batch(tmp_path: Path) -> None:
    found = {}
    for victim in (None, 1):
        found[victim] = run_elastic(
            elastic_training,
            (tmp_path / str(victim), victim),
            min_workers=1,
            max_workers=2,
            batch=KeepGlobalBatch(8),
            timeout=200,
            env={"REPLICAX_TIMING": "fast"},
        )
    whole, lost = found[None], found[1]
    assert (whole.num_workers, lost.num_workers) == ([2], [2, 1])
    # From the last checkpoint before step 10, with one worker.
    (last,) = lost.values
    assert (last["first"], last["replicas"]) == (8, 1)
    np.testing.assert_allclose(last["slope"], whole.values[0]["slope"], rtol=1e-5)
