"""MultiWorkerMirroredStrategy: tasks, initial values, and programs of all workers or of one."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import refused

import replicax as rx
from replicax.collectives.cross_device_ops import CollectiveAllReduce
from replicax.testing import LocalCluster

Resolver = rx.cluster_resolver.SimpleClusterResolver


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalCluster]:
    with LocalCluster(workers=2, ps=0, devices_per_worker=2, timing="fast") as cluster:
        yield cluster


# Without a cluster.


def test_without_a_cluster_it_has_the_devices_of_this_process() -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.local_devices())
    assert strategy.extended.experimental_between_graph
    assert strategy.extended.experimental_should_init
    assert strategy.extended.should_checkpoint and strategy.extended.should_save_summary
    total = strategy.reduce("SUM", strategy.run(lambda: jnp.float32(2)), axis=None)
    assert total == 2 * strategy.num_replicas_in_sync


def test_the_older_form_takes_a_communication() -> None:
    communication = rx.experimental.CollectiveCommunication.RING
    strategy = rx.experimental.MultiWorkerMirroredStrategy(communication)
    assert isinstance(strategy, rx.MultiWorkerMirroredStrategy)
    assert strategy.extended.cross_device_ops.options.implementation is communication
    assert not strategy.cluster_resolver.cluster_spec()


def resolver(**task: Any) -> Resolver:
    spec = rx.train.ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"], "ps": ["127.0.0.1:3"]})
    return Resolver(spec, **task)


def test_bad_arguments_are_refused_before_anything_starts() -> None:
    with refused(ValueError, match="must be a cluster resolver"):
        rx.MultiWorkerMirroredStrategy("worker")  # type: ignore[arg-type]
    with refused(ValueError, match="must be rx.experimental.CommunicationOptions"):
        rx.MultiWorkerMirroredStrategy(None, {"bytes_per_pack": 3})  # type: ignore[arg-type]
    with refused(ValueError, match="type and the index of this task"):
        rx.MultiWorkerMirroredStrategy(resolver())
    with refused(ValueError, match="must be a chief, a worker or an evaluator"):
        rx.MultiWorkerMirroredStrategy(resolver(task_type="ps", task_id=0))
    with refused(ValueError, match="must be one of the cluster"):
        rx.MultiWorkerMirroredStrategy(resolver(task_type="worker", task_id=2))
    nccl = rx.experimental.CommunicationOptions(implementation="NCCL")
    with refused(ValueError, match="NCCL needs GPUs"):
        rx.MultiWorkerMirroredStrategy(None, nccl)


def collectives_of(**options: Any) -> tuple[int, int]:
    """Returns how many all-reduces and swaps reduce four arrays of 400 bytes."""
    ops = CollectiveAllReduce(is_cpu_mesh=True, num_processes=2)
    ops.options = rx.experimental.CommunicationOptions(**options)
    layout = rx.ReplicaLayout(jax.devices()[:2])

    def reduce(*stored: jax.Array) -> list[Any]:
        def on_replica(*local: jax.Array) -> list[Any]:
            return ops.in_trace(rx.ReduceOp.SUM, local, 2, ops.options.bytes_per_pack)

        return layout.map_replicas(on_replica, stored, (), [False] * 4, num_equal=4)

    text = str(jax.make_jaxpr(reduce)(*[jnp.ones(200)] * 4))
    return len(re.findall(r"\bpsum", text)), len(re.findall(r"\bppermute", text))


def test_communication_options_choose_packs_and_collectives() -> None:
    assert collectives_of() == (0, 1)
    assert collectives_of(bytes_per_pack=900) == (0, 2)
    assert collectives_of(implementation="RING") == (1, 0)


def test_a_process_whose_devices_run_already_is_refused() -> None:
    assert jnp.ones(()) == 1
    with refused(rx.errors.ContextError, match="before JAX starts its devices"):
        rx.MultiWorkerMirroredStrategy(resolver(task_type="worker", task_id=0))


# Tasks.


def describe_task() -> dict[str, Any]:
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = rx.Variable(1.0)
    ids = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    found = {
        "replicas": strategy.num_replicas_in_sync,
        "ids": [int(i) for i in strategy.experimental_local_results(ids)],
        "sum": int(strategy.reduce("SUM", ids, axis=None)),
        "devices": list(strategy.extended.worker_devices),
        "variable": v.device,
        "writes": [strategy.extended.should_checkpoint, strategy.extended.should_save_summary],
        "task": (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id),
        "others": rx.MultiWorkerMirroredStrategy().num_replicas_in_sync,
    }
    context = strategy.extended.input_context
    found["input"] = (context.input_pipeline_id, context.num_input_pipelines)
    return found


def test_s15_s59_a_chief_a_worker_and_an_evaluator_have_their_roles() -> None:
    with LocalCluster(workers=1, ps=0, chief=True, evaluator=True, timing="fast") as cluster:
        chief, worker, evaluator = cluster.run(describe_task)
    assert [t["task"] for t in (chief, worker, evaluator)] == [
        ("chief", 0),
        ("worker", 0),
        ("evaluator", 0),
    ]
    assert [t["replicas"] for t in (chief, worker, evaluator)] == [2, 2, 1]
    assert [t["ids"] for t in (chief, worker, evaluator)] == [[0], [1], [0]]
    assert [t["sum"] for t in (chief, worker, evaluator)] == [1, 1, 0]
    assert [t["writes"][0] for t in (chief, worker, evaluator)] == [True, False, True]
    assert chief["devices"] == ["/job:chief/replica:0/task:0/device:CPU:0"]
    assert worker["devices"] == ["/job:worker/replica:0/task:0/device:CPU:0"]
    assert worker["variable"] == worker["devices"][0]
    assert [t["input"] for t in (chief, worker)] == [(0, 2), (1, 2)]
    assert chief["others"] == worker["others"] == 2  # A second strategy shares the group.


def wait_for_a_signal(directory: str) -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    (pathlib.Path(directory) / f"{strategy.cluster_resolver.task_id}").touch()
    for _ in range(600):
        strategy.reduce("SUM", strategy.run(lambda: jnp.ones(())), axis=None)
        time.sleep(0.1)


def test_sigterm_ends_a_worker_that_does_not_watch_for_it(
    workers: LocalCluster, tmp_path: pathlib.Path
) -> None:
    running = workers.launch(wait_for_a_signal, args=(str(tmp_path),))
    end = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert workers.terminate("worker", 1) == -signal.SIGTERM
    first, second = running.wait(timeout=15)
    assert (first.exit_code, second.exit_code) == (75, -signal.SIGTERM)
    assert isinstance(first.error, rx.errors.UnavailableError)
    assert "/job:worker/task:1" in str(first.error)


def leave_before_the_last_step() -> str:
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    step = rx.function(lambda: strategy.run(lambda: v.assign_add(1.0)))
    step()
    assert v.numpy() == strategy.num_replicas_in_sync
    if strategy.cluster_resolver.task_id == 1:
        os._exit(9)
    step()  # Dispatched, and never read.
    return "done"


def test_a_last_step_that_breaks_after_its_dispatch_is_no_success(workers: LocalCluster) -> None:
    first, second = workers.launch(leave_before_the_last_step).wait(timeout=30)
    assert (first.exit_code, second.exit_code) == (75, 9)
    assert "/job:worker/task:1" in workers.logs("worker", 0)


# Variables.


def create_variables() -> dict[str, Any]:
    strategy = rx.MultiWorkerMirroredStrategy()
    own = strategy.cluster_resolver.task_id
    with strategy.scope():
        plain = rx.Variable(np.arange(3.0) + 10 * own)
        number = rx.Variable(7 + own)
        flag = rx.Variable(own == 0)
        key = rx.Variable(jax.random.key(own))
        count = rx.Variable(
            1.0 + own,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
        inside = plain.numpy()  # Read before the scope ends.
        later = rx.Variable(-0.0 if own == 0 else 5.0)
    make = rx.function(lambda: rx.Variable(np.full(2, 3.0)))
    with strategy.scope():
        made = make()
    values = [plain, number, flag, later, made]
    return {
        "values": [np.asarray(v).tolist() for v in values],
        "inside": inside.tolist(),
        "sign": bool(np.signbit(later.numpy())),
        "key": np.asarray(jax.random.key_data(key.read_value())).tolist(),
        "count": float(count.read_value()),
    }


def test_variables_start_from_the_values_of_the_chief(workers: LocalCluster) -> None:
    first, second = workers.run(create_variables)
    assert first == second
    assert first["values"] == [[0.0, 1.0, 2.0], 7, True, -0.0, [3.0, 3.0]]
    assert first["inside"] == [0.0, 1.0, 2.0] and first["sign"]
    assert first["key"] == [0, 0] and first["count"] == 4.0


def create_others() -> str:
    strategy = rx.MultiWorkerMirroredStrategy()
    own = strategy.cluster_resolver.task_id
    try:
        with strategy.scope():
            rx.Variable(np.zeros(3 + own), name="weights")
    except ValueError as error:
        return str(error)
    return ""


def test_other_variables_on_one_worker_are_an_error_on_both(workers: LocalCluster) -> None:
    for found in workers.run(create_others):
        assert "All workers must create the same variables" in found
        assert "/job:worker/task:1 created ['weights', [4]" in found
        assert "/job:worker/task:0 created ['weights', [3]" in found


# Programs.


def evaluate_on_one_worker() -> tuple[float, float]:
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = rx.Variable(np.ones(3, np.float32))
    score = rx.function(lambda x: (x * weights).sum())
    add = rx.function(lambda: weights.assign_add(np.ones(3, np.float32)))
    before = float(score(2.0)) if strategy.extended.should_checkpoint else -1.0
    add()
    after = float(score(2.0)) if strategy.cluster_resolver.task_id == 1 else -1.0
    return before, after


def test_a_function_that_only_reads_copies_runs_on_one_worker(workers: LocalCluster) -> None:
    assert workers.run(evaluate_on_one_worker) == [(6.0, -1.0), (-1.0, 12.0)]


def capture_values() -> dict[str, list[Any]]:
    """Uses values of the replicas that a compiled function captures, eagerly and compiled."""
    strategy = rx.MultiWorkerMirroredStrategy()

    def per_replica(make: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: make(context.replica_id_in_sync_group + 1)
        )

    even = per_replica(lambda number: np.full((2, 3), number, np.float32))
    uneven = per_replica(lambda number: np.full((number, 2), number, np.float32))
    empty = per_replica(lambda number: np.full((number % 2, 2), number, np.int32))

    def with_own(x: Any) -> Any:
        return jax.grad(lambda y: (y * jnp.sum(even)).sum())(x)

    def all_rows(x: Any) -> Any:
        return rx.get_replica_context().all_gather(x, axis=0)

    cases = {
        "mean": lambda: strategy.reduce("MEAN", even, axis=0),
        "mean of uneven": lambda: strategy.reduce("MEAN", uneven, axis=0),
        "sum of uneven": lambda: strategy.reduce("SUM", uneven, axis=0),
        "gather": lambda: strategy.gather(uneven, axis=0),
        "gather of empty": lambda: strategy.gather(empty, axis=0),
        "run": lambda: strategy.gather(strategy.run(lambda: even * 10), axis=0),
        "argument": lambda: strategy.gather(strategy.run(with_own, args=(uneven,)), axis=0),
        "all rows": lambda: strategy.reduce("SUM", strategy.run(all_rows, args=(uneven,)), None),
    }
    return {
        name: [np.asarray(way()).tolist() for way in (case, rx.function(case))]
        for name, case in cases.items()
    }


def test_compiled_functions_capture_values_of_all_workers(workers: LocalCluster) -> None:
    first, second = workers.run(capture_values)
    assert first == second
    for name, (eager, compiled) in first.items():
        assert eager == compiled, name
    assert first["mean"][0] == [2.5] * 3 and first["mean of uneven"][0] == [3.0, 3.0]
    assert first["gather of empty"][0] == [[1, 1], [3, 3]]
    assert first["run"][0] == [[10.0 * (i // 2 + 1)] * 3 for i in range(8)]


def count_replicas_of_tpus() -> tuple[int, int, list[int]]:
    """CPU devices stand for the cores of two hosts."""
    cluster = rx.cluster_resolver.TFConfigClusterResolver()
    strategy = rx.TPUStrategy(cluster, experimental_device_assignment=["CPU:1"])
    ids = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    local = [int(i) for i in strategy.experimental_local_results(ids)]
    return strategy.num_replicas_in_sync, int(strategy.reduce("SUM", ids, axis=None)), local


@pytest.mark.slow
def test_tpu_strategy_has_the_cores_of_all_hosts(workers: LocalCluster) -> None:
    assert workers.run(count_replicas_of_tpus) == [(2, 1, [0]), (2, 1, [1])]
