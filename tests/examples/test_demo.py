"""`replicax demo` shows what it says, and its pictures are drawn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Without what the suite set: the demo sets up its own devices.
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    return subprocess.run(
        [sys.executable, "-m", "replicax", "demo", *arguments],
        cwd=cwd,
        env=env,
        check=False,
        timeout=250,
        capture_output=True,
        text=True,
    )


def play(act: str, cwd: Path) -> str:
    done = demo(act, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_digits_are_learnt_alike_under_every_strategy(tmp_path: Path) -> None:
    output = play("digits", tmp_path)
    losses = [line.split("│")[3].strip() for line in output.splitlines() if line.startswith("│")]
    assert len(losses) == 5 and len(set(losses)) == 1, losses
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
    ((alone, mirrored),) = re.findall(r"model.fit: loss ([\d.]+) alone, ([\d.]+) on 2", output)
    assert alone == mirrored


@pytest.mark.slow
def test_the_recommender_loses_a_worker_and_counts_each_step_once(tmp_path: Path) -> None:
    output = play("recommender", tmp_path)
    ((scheduled, counted),) = re.findall(r"(\d+) steps scheduled, (\d+) counted", output)
    assert scheduled == counted
    assert "worker 1 is back" in output
    # The worker is lost on purpose: that is a line of the demo, and not a warning.
    assert "the coordinator notices: /job:worker/task:1 was lost" in output
    assert "WARNING" not in output
    assert (tmp_path / "out" / "demo_parameter_servers.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_group_that_lost_a_worker_ends_with_the_same_result(tmp_path: Path) -> None:
    output = play("launcher", tmp_path)
    assert "worker 1 was killed by SIGKILL" in output.replace("/job:worker/task:1", "worker 1")
    assert "the same, digit by digit" in output
    assert (tmp_path / "out" / "demo_launcher.png").stat().st_size > 10_000


def test_an_unknown_act_is_one_clear_line(tmp_path: Path) -> None:
    done = demo("fireworks", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("replicax: An act must be one of digits, recommender, launcher")
    assert len(done.stderr.splitlines()) == 1
