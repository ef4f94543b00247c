"""What the tasks of real jobs tell: parameter servers, sync groups, plain programs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from parameter_servers import becomes

import replicax as rx
from replicax.foundation import settings
from replicax.observe import client, job_directory
from replicax.testing import LocalCluster
from replicax.top.view import Sampler, View


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hides the jobs of other tests."""
    monkeypatch.setenv(settings.XDG_RUNTIME_DIR, str(tmp_path))
    return tmp_path


def _wait_for(sampler: Sampler, is_seen: Callable[[View], bool], seconds: float = 60.0) -> View:
    deadline = time.monotonic() + seconds
    while True:
        view = sampler.sample()
        if is_seen(view):
            return view
        assert time.monotonic() < deadline, view
        time.sleep(0.1)


def test_tasks_of_a_cluster_are_seen_until_it_is_closed() -> None:
    with LocalCluster(workers=1, ps=1, timing="fast") as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            counter = rx.Variable(0.0)

        @rx.function
        def count() -> None:
            counter.assign_add(1.0)

        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            for _ in range(7):
                coordinator.schedule(count)
            coordinator.join()
            sampler = Sampler(client.find_job())
            rows = {row.task: row for row in sampler.sample().rows}
            assert list(rows) == [
                "/job:coordinator/task:0", "/job:worker/task:0", "/job:ps/task:0",
            ]  # fmt: skip
            assert rows["/job:coordinator/task:0"].count == rows["/job:worker/task:0"].count == 7
            assert rows["/job:ps/task:0"].held == 4
            # The coordinator asks tasks on other hosts.
            coordinator_socket = sampler.directory / "job-coordinator-task-0.sock"
            asked = client.ask(coordinator_socket, "stack", {"task": "/job:ps/task:0"})
            assert "run_forever" in asked.reply["text"]
        strategy.close()
        becomes(
            lambda: "/job:coordinator/task:0" not in {row.task for row in sampler.sample().rows},
            "the coordinator is seen no more",
        )
    assert job_directory.running() == [] and not sampler.directory.exists()


def _train(num_steps: int) -> int:
    import time

    import jax.numpy as jnp

    import replicax as rx
    from replicax.observe import progress

    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = rx.Variable(jnp.zeros(()), aggregation=rx.VariableAggregation.SUM, name="total")

    @rx.function
    def train_step() -> None:
        strategy.run(lambda: total.assign_add(jnp.ones(())))

    for step in range(num_steps):
        train_step()
        progress.log("loss", 1.0 / (step + 1), step)
        time.sleep(0.02)
    return int(total.numpy())


@pytest.mark.slow
def test_members_of_a_sync_group_show_steps_and_loss_and_the_chief_knows_all() -> None:
    with LocalCluster(workers=2, ps=0) as cluster:
        launched = cluster.launch(_train, (400,))
        deadline = time.monotonic() + 60.0
        while not job_directory.running() and time.monotonic() < deadline:
            time.sleep(0.1)
        sampler = Sampler(client.find_job())

        def trains(view: View) -> bool:
            return len(view.rows) == 2 and all(row.rate and row.values for row in view.rows)

        view = _wait_for(sampler, trains)
        assert [(row.task, row.role, row.unit) for row in view.rows] == [
            ("/job:worker/task:0", "member", "steps"),
            ("/job:worker/task:1", "member", "steps"),
        ]
        assert all(0 < (row.count or 0) <= 400 and row.memory for row in view.rows)
        chief = client.ask(sampler.directory / "job-worker-task-0.sock", "status").reply
        assert [known["task"] for known in chief["tasks"]] == [row.task for row in view.rows]
        assert "_train" in sampler.stack(view.rows[1])
        # A member that is stopped does not answer, and the other one waits.
        cluster.stop("worker", 1)
        _wait_for(sampler, lambda view: view.rows[1].state == "no answer")
        cluster.cont("worker", 1)
        assert launched.values(120.0) == [800, 800]


_PROGRAM = """
import sys
import jax.numpy as jnp
import replicax as rx
strategy = rx.OneDeviceStrategy("CPU:0")
with strategy.scope():
    total = rx.Variable(0.0)
step = rx.function(lambda: total.assign_add(1.0))
for _ in range(5):
    step()
print("ready", flush=True)
sys.stdin.readline()
"""


def test_plain_program_is_seen_if_it_asks(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _PROGRAM]
        pipe = subprocess.PIPE
        made = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert made.stdout is not None and made.stdout.readline() == "ready\n"
        return made

    with start() as process:
        assert job_directory.running() == []
        process.communicate("\n", timeout=60)
    monkeypatch.setenv(settings.REPLICAX_JOB_DIR, str(runtime / "mine"))
    with start() as process:
        (row,) = Sampler(client.find_job(str(runtime / "mine"))).sample().rows
        assert (row.task, row.role, row.pid, row.count) == ("program", "program", process.pid, 5)
        process.communicate("\n", timeout=60)
    assert not (runtime / "mine").exists()
