"""`replicax run` of examples/train.py: every cluster has the same result, also after losses."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launched import EXAMPLES, becomes, of_directory, run, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN = EXAMPLES / "train.py"


def result(text: str) -> str:
    """Returns what the program says of its result."""
    (found,) = re.findall(r"[\d.]+% of unseen digits.*", text)
    return found


@pytest.fixture(scope="module")
def alone() -> str:
    done = subprocess.run(
        [sys.executable, str(TRAIN)], capture_output=True, text=True, timeout=200, check=True
    )
    return result(done.stdout)


@pytest.mark.parametrize("options", [(), ("--ps", 1), ("--devices-per-worker", 2)], ids=str)
def test_the_same_program_has_the_same_result_everywhere(
    tmp_path: Path, alone: str, options: tuple[object, ...]
) -> None:
    done = run(tmp_path, "--workers", 2, *options, TRAIN, seconds=300)
    assert done.returncode == 0, done.stdout
    assert result(done.stdout) == alone


def test_a_killed_worker_changes_nothing_in_the_result(tmp_path: Path, alone: str) -> None:
    checkpoints = tmp_path / "checkpoints"
    options = ["--workers", 2, TRAIN, "--directory", checkpoints, "--save-every", 5]
    with running(tmp_path, *options) as launcher:
        assert becomes(lambda: any(checkpoints.glob("ckpt-*")), seconds=200)
        _process_of(tmp_path, "worker", 1).kill()
        out, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, out
    assert "/job:worker/task:1 was killed by SIGKILL. Restarting all workers (restart 1)" in out
    assert re.findall(r"starts at step (\d+)", out)[1] != "0"
    assert result(out) == alone


@pytest.mark.parametrize(("job", "index"), [("worker", 1), ("ps", 0)])
def test_a_killed_task_of_a_cluster_restarts_alone(tmp_path: Path, job: str, index: int) -> None:
    options = ["--workers", 2, "--ps", 1, TRAIN, "--steps", 3000]
    with running(tmp_path, *options) as launcher:
        assert launcher.stdout is not None
        lines = []
        for line in launcher.stdout:
            lines.append(line)
            if "step 100:" in line:
                break
        _process_of(tmp_path, job, index).kill()
        out, _ = launcher.communicate(timeout=400)
    text = "".join(lines) + out
    assert launcher.returncode == 0, text
    assert f"/job:{job}/task:{index} was killed by SIGKILL. Restarting it in 0.2 s." in text
    assert text.count("starts at step") == 1 and "step 3000:" in text
    assert float(result(text).partition("%")[0]) > 90


def test_an_interrupt_ends_a_cluster_in_order(tmp_path: Path) -> None:
    options = ["--workers", 2, "--ps", 1, TRAIN, "--steps", 100_000]
    with running(tmp_path, *options) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if "step 50:" in line:
                break
        launcher.send_signal(signal.SIGINT)
        out, _ = launcher.communicate(timeout=15)
    assert launcher.returncode == 130
    assert "KeyboardInterrupt" in out
    assert not of_directory(tmp_path)


def _process_of(directory: Path, job: str, index: int) -> psutil.Process:
    """Returns the process of a task of the job that was launched in a directory."""
    wanted = f'"task": {{"type": "{job}", "index": {index}}}'
    (found,) = [p for p in of_directory(directory) if wanted in p.environ().get("TF_CONFIG", "")]
    return found
