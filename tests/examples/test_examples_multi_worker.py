"""The example of training in lock step runs alone, on a cluster, and after the loss of a worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "multi_worker.py"


def run(*arguments: str, program: Path = EXAMPLE) -> str:
    # Without what the suite set for its own devices.
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "TF_CONFIG")}
    done = subprocess.run(
        [sys.executable, program, *arguments],
        env={**env, "JAX_PLATFORMS": "cpu"},
        check=False,
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"step \d+: loss [\d.]+, accuracy ([\d.]+)", output)]


@pytest.mark.slow
def test_two_workers_train_and_a_lost_one_costs_the_steps_since_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    output = run(str(tmp_path), "6", "--kill")
    starts = [int(x) for x in re.findall(r"2 replicas start at step (\d+)", output)]
    assert len(starts) == 2 and starts[0] == 0
    assert starts[1] >= 11 and starts[1] % 11 == 0
    assert "restarted 1 times" in output
    assert "/job:worker/task:1" in output and "UnavailableError" in output
    # Each step was counted once: the last checkpoint is that of the last step.
    assert sorted(path.name for path in tmp_path.glob("ckpt-*"))[-1] == "ckpt-132"
    assert accuracies(output)[-1] > 0.9


@pytest.mark.slow
def test_training_goes_on_with_another_run(tmp_path: Path) -> None:
    assert "2 replicas start at step 0" in run(str(tmp_path), "1")
    output = run(str(tmp_path), "3")
    assert "2 replicas start at step 22" in output
    assert len(accuracies(output)) == 2


@pytest.mark.slow
def test_the_snippets_of_the_guide_are_one_program(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guides" / "multi_worker.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    program = tmp_path / "guide.py"
    program.write_text("\n".join(snippets))
    assert run(program=program).splitlines() == ["True", "1 12", "True", "[2, 1] [(32, 0.15)]"]
