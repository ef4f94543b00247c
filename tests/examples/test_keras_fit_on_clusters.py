"""examples/keras_fit.py is one file for every task of a cluster, too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from replicax.launch.ports import ReservedPorts

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def started(*arguments: str, task: tuple[str, int] | None = None, cluster: object = None):
    # Without what the suite set for its own devices.
    kept = {k: v for k, v in os.environ.items() if k not in ("NPROC", "TF_CONFIG")}
    if task is not None:
        job, index = task
        kept["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    with subprocess.Popen(
        [sys.executable, ROOT / "examples" / "keras_fit.py", *arguments],
        env={**kept, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def printed(process: subprocess.Popen[str]) -> list[tuple[str, ...]]:
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    return re.findall(r"^(epoch \d|test accuracy).*?(\d\.\d+).*?([\d.]+)", output, re.MULTILINE)


@pytest.mark.slow
def test_two_workers_print_the_numbers_of_one_process(tmp_path: Path) -> None:
    with started("--strategy", "none") as alone:
        wanted = printed(alone)
    assert len(wanted) == 7
    with contextlib.ExitStack() as stack:
        reserved = stack.enter_context(contextlib.closing(ReservedPorts(2)))
        cluster = {"worker": [f"127.0.0.1:{port}" for port in reserved.ports]}
        given = ("--strategy", "multi_worker", "--directory", str(tmp_path))
        workers = [
            stack.enter_context(started(*given, task=("worker", index), cluster=cluster))
            for index in range(2)
        ]
        assert [printed(worker) for worker in workers] == [wanted, wanted]


@pytest.mark.slow
def test_the_chief_of_a_parameter_server_cluster_trains_while_the_other_tasks_serve(
    tmp_path: Path,
) -> None:
    with tempfile.TemporaryDirectory(prefix="rx-") as sockets, contextlib.ExitStack() as stack:
        cluster = {
            "chief": [f"ipc://{sockets}/c0"],
            "ps": [f"ipc://{sockets}/p0"],
            "worker": [f"ipc://{sockets}/w0", f"ipc://{sockets}/w1"],
        }
        given = ("--strategy", "parameter_server", "--directory", str(tmp_path))
        tasks = [("ps", 0), ("worker", 0), ("worker", 1), ("chief", 0)]
        *servers, chief = [
            stack.enter_context(started(*given, task=task, cluster=cluster)) for task in tasks
        ]
        *epochs, (_, accuracy, _) = printed(chief)
        assert [server.poll() for server in servers] == [None] * 3
    assert len(epochs) == 6
    assert float(accuracy) > 0.93
