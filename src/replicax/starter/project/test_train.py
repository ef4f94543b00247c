"""The program trains under every strategy, and goes on where it was stopped.

Each run is a process of its own, as users start it: devices are set up once in a process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from train import LOCAL_STRATEGIES, STRATEGIES

HERE = Path(__file__).parent


def run(directory: Path, *arguments: str) -> list[tuple[float, float]]:
    """Runs train.py in a directory; returns loss and accuracy of its epochs."""
    command = [sys.executable, str(HERE / "train.py"), *arguments]
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"epoch \d+: loss ([\d.]+), accuracy ([\d.]+)", done.stdout)
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_learns_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    epochs = run(tmp_path, "--strategy", strategy, "--epochs", "4")
    assert len(epochs) == 4
    assert epochs[-1][1] > 0.9


def test_strategies_of_one_machine_compute_the_same(tmp_path: Path) -> None:
    losses = []
    for strategy in LOCAL_STRATEGIES:
        (tmp_path / strategy).mkdir()
        losses.append(run(tmp_path / strategy, "--strategy", strategy, "--epochs", "1")[0][0])
    assert max(losses) - min(losses) < 1e-3


def test_it_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    stopped.mkdir()
    whole.mkdir()
    first = run(stopped, "--epochs", "1")
    assert first + run(stopped, "--epochs", "2") == run(whole, "--epochs", "2")
