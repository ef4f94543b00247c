"""The examples run, as a newcomer would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    # Without what the suite set: an example sets up its own devices.
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=env,
        check=True,
        timeout=100,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_quickstart_learns_the_line() -> None:
    assert "y = 3.00 x + 2.00" in run("examples/quickstart.py")


@pytest.mark.slow
def test_demo_trains_alike_under_every_strategy() -> None:
    output = run("examples/demo.py")
    losses = {line.split("│")[3].strip() for line in output.splitlines() if line.startswith("│")}
    assert len(losses) == 1
    assert (ROOT / "out" / "demo.png").stat().st_size > 10_000
