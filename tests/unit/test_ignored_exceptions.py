"""The record of exceptions that interpreters ignore, which fails a test run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ignored_exceptions
import pytest

RAISES = {
    "exit handler": "import atexit; atexit.register(lambda: 1 / 0)",
    "finalizer": "class A:\n    def __del__(self): 1 / 0\na = A(); a.itself = a",
}


def run(code: str, record: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, ignored_exceptions.VARIABLE: str(record)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", RAISES)
def test_a_process_of_the_run_records_and_prints_what_it_ignores(kind: str, tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.touch()
    done = run(RAISES[kind], record)
    assert done.returncode == 0
    assert "Exception ignored in" in done.stderr
    assert record.read_text().count("\n") == 1
    assert "ZeroDivisionError" in record.read_text()


@pytest.mark.parametrize("kind", RAISES)
def test_a_run_that_ignores_an_exception_after_its_last_check_fails(
    kind: str, tmp_path: Path
) -> None:
    record = tmp_path / "removed"
    install = f"import ignored_exceptions as i; i.install({str(record)!r}, exit_code=1)"
    done = run(f"{install}\n{RAISES[kind]}", record)
    assert done.returncode == 1
    assert "Exception ignored in" in done.stderr
    assert not record.exists()


def test_a_process_that_ignores_nothing_records_nothing(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.touch()
    assert run("pass", record).returncode == 0
    assert record.read_text() == ""
