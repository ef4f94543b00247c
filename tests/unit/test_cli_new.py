"""`replicax new` writes a project that runs, and overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replicax.cli.main import app


def new(directory: Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["new", str(directory)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def test_a_program_its_config_and_its_test_are_written(tmp_path: Path) -> None:
    code, out, err = new(tmp_path / "deep" / "project")
    assert (code, err) == (0, "")
    names = {path.name for path in (tmp_path / "deep" / "project").iterdir()}
    assert names == {"train.py", "config.toml", "test_train.py"}
    assert len([line for line in out.splitlines() if line.startswith("wrote ")]) == 3


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine")
    code, _, err = new(tmp_path)
    assert code == 2
    assert "config.toml is there already" in err and len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert (tmp_path / "config.toml").read_text() == "mine"
    code, _, err = new(tmp_path / "config.toml")
    assert code == 2 and "is there already" in err


@pytest.mark.slow
def test_its_own_test_passes_under_every_strategy(tmp_path: Path) -> None:
    new(tmp_path)
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=env,
        check=False,
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout
