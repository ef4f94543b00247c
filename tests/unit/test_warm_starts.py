"""Processes of tests that are forked are what processes are that were started as usual."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_starts

from replicax.launch import task_process

PROGRAM = str(Path(__file__).parents[1] / "support" / "programs" / "describe_process.py")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives new parents")


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a run that starts its processes as usual, too."""
    monkeypatch.setattr(subprocess, "Popen", subprocess.Popen)
    warm_starts.install()


@contextlib.contextmanager
def started(how: str, *words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, PROGRAM, *words]
    if options.pop("with_parent", False):
        command = task_process.with_parent(command)
    options = {"text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **options}
    with (
        warm_starts.cold() if how == "cold" else contextlib.nullcontext(),
        subprocess.Popen(command, stderr=subprocess.PIPE, **options) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def described(how: str, directory: Path, **options: Any) -> tuple[dict[str, Any], str, int]:
    reading, writing = os.pipe()
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3", "MINE": "x"}
    env.pop("XLA_FLAGS", None)
    options = {"env": env, "cwd": directory, "pass_fds": [writing], **options}
    try:
        with started(how, "7", str(writing), **options) as process:
            out, err = process.communicate("some input", timeout=100)
            found = json.loads(out)
            assert found["parent"] == os.getpid()
            return found, err, process.returncode
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    "options",
    [
        {"process_group": 0, "with_parent": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"start_new_session": True}, marks=pytest.mark.slow),
    ],
)
def test_a_forked_process_is_like_any_other(tmp_path: Path, options: dict[str, Any]) -> None:
    warm, warm_err, warm_code = described("warm", tmp_path, **options)
    assert warm_starts.kept_processes()
    cold, cold_err, cold_code = described("cold", tmp_path, **options)
    # Each has a pipe of its own.
    for found in (warm, cold):
        (pipe,) = found.pop("fds").values()
        assert pipe.startswith("pipe:")
    assert warm == cold
    assert (warm_code, cold_code) == (7, 7)
    assert warm_err == cold_err == "to the other stream\n"
    assert warm["input"] == "some input" and warm["devices"] == 3
    assert warm["leads"][0] == bool(options)


def test_an_error_ends_a_forked_process_as_any_other() -> None:
    with started("warm", "fail") as process:
        _, err = process.communicate("", timeout=100)
    assert process.returncode == 1
    assert err.endswith("\nValueError: as it should\n")


def test_a_forked_process_is_ended_by_signals() -> None:
    with started("warm", "wait") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.slow
def test_a_forked_process_ends_with_its_parent(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
import warm_starts
from replicax.launch import task_process
warm_starts.install()
command = task_process.with_parent([sys.executable, {PROGRAM!r}, "wait"])
options = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
with subprocess.Popen(command, **options) as process:
    process.stdout.readline()
    print(process.pid, *warm_starts.kept_processes(), flush=True)
    time.sleep(100)
"""
    support = str(Path(PROGRAM).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([support, os.environ["PYTHONPATH"]])}
    options = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=env, **options) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
        finally:
            parent.kill()
    assert len(pids) == 2
    ended = [os.pidfd_open(pid) for pid in pids if Path(f"/proc/{pid}").exists()]
    for fd in ended:
        assert select.select([fd], [], [], 20.0)[0], "it is still there"
        os.close(fd)


def test_other_commands_and_environments_are_started_as_usual(monkeypatch: Any) -> None:
    start, thread = warm_starts._WarmProcess.start, threading.get_ident()

    def fork(*args: Any) -> int:
        # The cluster that tests share may restart a task meanwhile, in a thread of its own.
        if threading.get_ident() != thread:
            return start(*args)
        raise AssertionError("it would be forked")

    monkeypatch.setattr(warm_starts._WarmProcess, "start", fork)
    usual: dict[str, Any] = {"check": True, "capture_output": True, "timeout": 100}
    subprocess.run([sys.executable, "-S", "-c", "pass"], **usual)
    subprocess.run("true", shell=True, **usual)
    with pytest.raises(AssertionError, match="it would be forked"):
        subprocess.run([sys.executable, "-m", "replicax", "--help"], **usual)
    env = {**os.environ, "JAX_ENABLE_X64": "1"}
    subprocess.run([sys.executable, "-m", "replicax", "--help"], env=env, **usual)


def test_two_workers_have_different_hash_seeds() -> None:
    """Programs must not depend on the order of sets: groups of real machines differ in it."""
    from replicax.testing import LocalCluster

    with LocalCluster(workers=2, ps=0) as cluster:
        first, second = cluster.run(lambda: hash("text"))
    assert first != second
