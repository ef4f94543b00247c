"""LocalCluster without parameter servers: programs that all tasks run in lock step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors
from replicax.testing import LocalCluster


def becomes(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture(scope="module")
def cluster(cold_starts: None) -> Iterator[LocalCluster]:
    with LocalCluster(workers=2, ps=0) as cluster:
        yield cluster


def who_am_i(extra: int) -> dict[str, Any]:
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    import jax

    return {
        "task": f"{resolver.task_type} {resolver.task_id}",
        "cluster": resolver.cluster_spec().as_dict(),
        "devices": len(jax.local_devices()),
        "extra": extra,
        "array": np.arange(3) + resolver.task_id,
        "pid": os.getpid(),
    }


def test_a_function_runs_once_per_worker_and_returns_its_value(cluster: LocalCluster) -> None:
    first, second = cluster.run(who_am_i, args=(5,))
    assert [first["task"], second["task"]] == ["worker 0", "worker 1"]
    assert first["cluster"] == second["cluster"] == cluster.cluster_spec.as_dict()
    assert len(set(first["cluster"]["worker"])) == 2
    assert first["devices"] == second["devices"] == 1
    assert first["extra"] == second["extra"] == 5
    np.testing.assert_array_equal(second["array"], [1, 2, 3])
    assert len({first["pid"], second["pid"], os.getpid()}) == 3


def test_a_closure_is_sent_with_what_it_captured(cluster: LocalCluster) -> None:
    captured = {"a": 1}

    def closure(*, b: int) -> dict[str, int]:
        print("printed by the task")
        return {**captured, "b": b}

    assert cluster.run(closure, kwargs={"b": 2}) == [{"a": 1, "b": 2}] * 2
    assert "printed by the task" in cluster.logs("worker", 1)


@pytest.mark.slow
def test_chief_evaluator_and_devices() -> None:
    with LocalCluster(workers=1, ps=0, chief=True, evaluator=True, devices_per_worker=2) as cluster:
        found = cluster.run(who_am_i, args=(0,))
        assert [one["task"] for one in found] == ["chief 0", "worker 0", "evaluator 0"]
        assert [one["devices"] for one in found] == [2, 2, 2]
        assert set(found[0]["cluster"]) == {"chief", "worker", "evaluator"}
        assert "chief" in repr(cluster) and "evaluator" in repr(cluster)


@pytest.mark.slow
def test_raw_jax_processes_meet_on_the_reserved_port(cluster: LocalCluster) -> None:
    def total() -> float:
        import jax

        resolver = rx.cluster_resolver.TFConfigClusterResolver()
        chief = resolver.cluster_spec().task_address("worker", 0)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        index = resolver.task_id
        jax.distributed.initialize(
            chief, 2, index, coordinator_bind_address=chief if index == 0 else None
        )
        mesh = jax.make_mesh((2,), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        mine = np.full((1,), index + 1.0, np.float32)
        whole = jax.make_array_from_process_local_data(sharding, mine)
        return float(jax.jit(lambda x: x.sum())(whole))

    assert cluster.run(total) == [3.0, 3.0]


@pytest.mark.slow
def test_bar_40_a_strategy_over_tcp_listens_on_the_loopback_interface_only() -> None:
    def train() -> dict[str, Any]:
        strategy = rx.MultiWorkerMirroredStrategy()
        total = strategy.reduce("SUM", strategy.run(lambda: np.float32(2)), axis=None)
        found = psutil.Process().net_connections("inet")
        return {
            "total": float(total),
            "replicas": strategy.num_replicas_in_sync,
            "listens": sorted({c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}),
        }

    with LocalCluster(workers=2, ps=0, protocol="tcp", timing="fast") as cluster:
        expected = {"total": 4.0, "replicas": 2, "listens": ["127.0.0.1"]}
        assert cluster.run(train) == [expected] * 2


def test_a_preemption_is_announced_without_a_wait(cluster: LocalCluster) -> None:
    program = cluster.launch(["python", "-c", "import time; time.sleep(1000)"])
    for index in range(2):
        cluster.preempt("worker", index)
    assert [one.exit_code for one in program.wait(timeout=60)] == [-signal.SIGTERM] * 2


def test_a_script_and_a_command(cluster: LocalCluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, sys
            task = json.loads(os.environ["TF_CONFIG"])["task"]
            devices = os.environ["JAX_NUM_CPU_DEVICES"]
            print("I am", task["type"], task["index"], sys.argv[1:], devices)
            """
        )
    )
    assert cluster.run(script, args=("--steps", 3)) == [None, None]
    assert cluster.logs("worker", 1).endswith("I am worker 1 ['--steps', '3'] 1")
    assert cluster.run(["python", "-c", "print('a command')"]) == [None, None]
    assert cluster.logs("worker", 0).endswith("a command")


def test_an_error_keeps_its_type_and_names_the_task(cluster: LocalCluster) -> None:
    def fail() -> None:
        if rx.cluster_resolver.TFConfigClusterResolver().task_id == 1:
            print("before it failed")
            raise ValueError("a bad batch")

    with pytest.raises(ValueError, match="a bad batch") as caught:
        cluster.run(fail)
    notes = "\n".join(caught.value.__notes__)
    assert "/job:worker/task:1" in notes
    assert "before it failed" in notes and "in fail" in notes


def test_an_exit_code_is_reported_with_the_log(cluster: LocalCluster) -> None:
    code = "import sys; print('some text'); sys.exit(7)"
    with pytest.raises(errors.UnavailableError, match=r"exit code 7.*:\nsome text$"):
        cluster.run(["python", "-c", code])


def wait_for(path: Path) -> str:
    (path / str(os.getpid())).touch()
    deadline = time.monotonic() + 100
    while not (path / "gate").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return "through"


def started(path: Path, count: int) -> bool:
    return becomes(lambda: len(list(path.iterdir())) >= count)


@pytest.mark.slow
def test_tasks_are_killed_stopped_and_terminated(cluster: LocalCluster, tmp_path: Path) -> None:
    program = cluster.launch(wait_for, args=(tmp_path,))
    assert started(tmp_path, 2)
    process = psutil.Process(cluster.pid("worker", 0))
    cluster.stop("worker", 0)
    assert becomes(lambda: process.status() == psutil.STATUS_STOPPED)
    cluster.cont("worker", 0)
    assert becomes(lambda: process.status() != psutil.STATUS_STOPPED)
    cluster.kill("worker", 1)
    assert not cluster.alive("worker", 1) and cluster.alive("worker", 0)
    first, second = program.outcomes
    assert (first.exit_code, second.exit_code) == (None, -signal.SIGKILL)
    assert second.text == "/job:worker/task:1 was killed by SIGKILL"
    with refused(errors.ContextError, "worker/task:0 still run"):
        cluster.launch(wait_for, args=(tmp_path,))
    (tmp_path / "gate").touch()
    first, second = program.wait(timeout=60)
    assert first.is_ok and first.value == "through" and not second.is_ok
    (tmp_path / "gate").unlink()
    program = cluster.launch(wait_for, args=(tmp_path,))
    assert cluster.terminate("worker", 0) == -signal.SIGTERM
    program.end()
    assert [outcome.was_killed for outcome in program.outcomes] == [False, True]


@pytest.mark.slow
def test_a_program_that_hangs_ends_in_time_with_its_stacks(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    program = cluster.launch(wait_for, args=(tmp_path,))
    assert started(tmp_path, 2)
    begun_s = time.monotonic()
    with pytest.raises(errors.DeadlineExceededError, match="did not end within 0") as e:
        program.wait(timeout=0.2)
    assert time.monotonic() - begun_s < 10
    assert "in wait_for" in str(e.value) and "/job:worker/task:1" in str(e.value)
    assert not cluster.alive("worker", 0) and not cluster.alive("worker", 1)


@pytest.mark.slow
def test_each_program_gets_new_ports(cluster: LocalCluster, tmp_path: Path) -> None:
    def ports() -> set[str]:
        return set(cluster.cluster_spec.as_dict()["worker"])

    (tmp_path / "gate").touch()
    before: set[str] = set()
    for _ in range(2):
        cluster.run(["python", "-c", "pass"])
        assert before.isdisjoint(ports())
        before = ports()


def test_mistakes_are_refused(cluster: LocalCluster) -> None:
    with refused(errors.ArgumentTypeError, "a function, the path of a Python script"):
        cluster.run(5)  # type: ignore[arg-type]
    with refused(errors.NotFoundError, "no file 'train.sh'"):
        cluster.run("train.sh")
    with refused(errors.NotFoundError, "no 'no-such-command'"):
        cluster.run(["no-such-command"])
    with refused(errors.ArgumentTypeError, "no keyword arguments"):
        cluster.run(["python"], kwargs={"a": 1})
    cluster.run(["python", "-c", "pass"])
    with refused(errors.UnsupportedError, "JAX connects its processes directly"):
        cluster.cut("worker", 0)
    with refused(errors.ContextError, "cannot join the others"):
        cluster.restart("worker", 0)
    with refused(errors.InvalidArgumentError, "task:0, /job:worker/task:1"):
        cluster.kill("worker", 2)
    with refused(errors.InvalidArgumentError, "it has 1 parameter servers"):
        LocalCluster(workers=1, ps=1, chief=True)
    with refused(errors.InvalidArgumentError, "`ps` is 0"):
        LocalCluster(workers=1, ps=0, proxied=("worker",))


def test_bar_52_no_orphan_when_the_launcher_is_killed(tmp_path: Path) -> None:
    code = """
import sys, time, replicax.testing as testing
cluster = testing.LocalCluster(workers=2, ps=0)
cluster.start()
cluster.launch([sys.executable, "-c", "import time; time.sleep(100)"])
print(cluster.pid("worker", 0), cluster.pid("worker", 1), flush=True)
time.sleep(100)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with launcher, contextlib.ExitStack() as stack:
        stack.callback(launcher.kill)
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 2
        # Until the commands have replaced the processes that set them up.
        assert becomes(lambda: all(psutil.Process(p).cmdline()[1:2] == ["-c"] for p in pids))
    assert becomes(lambda: not any(psutil.pid_exists(pid) for pid in pids), 3.0)


@pytest.mark.slow
def test_the_environment_of_the_tasks(tmp_path: Path) -> None:
    code = "import os; print(os.environ['MINE'], 'REPLICAX_KEYS' in os.environ)"
    with LocalCluster(
        workers=1, ps=0, env={"MINE": "x"}, protocol="tcp", log_directory=tmp_path
    ) as cluster:
        cluster.run(["python", "-c", code])
    assert (tmp_path / "worker-0.log").read_text() == "x True\n"
    assert json.dumps(os.environ.get("TF_CONFIG")) == "null"
