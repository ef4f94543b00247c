"""Runs examples/train.py by a launcher, kills a worker on the way, and compares the results."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "train.py"
REPLICAX = [sys.executable, "-m", "replicax"]
NUM_STEPS, SAVE_EVERY = 150, 25
# What the suite sets for its own process.
_NOT_INHERITED = ("NPROC", "TF_CONFIG", "PYTHONPATH", "PYTHONWARNINGS", "XLA_FLAGS")
ENV = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
ENV |= {"JAX_PLATFORMS": "cpu", "REPLICAX_TIMING": "fast"}
_TIMEOUT_S = 280.0


def arguments(directory: Path) -> list[str]:
    """The command line of the program."""
    return [
        "--steps",
        str(NUM_STEPS),
        "--save-every",
        str(SAVE_EVERY),
        "--directory",
        str(directory),
    ]


@functools.cache
def plain_result() -> tuple[float, float]:
    """The share of digits and the norm of the weights of a process that trains alone."""
    done = subprocess.run(
        [sys.executable, TRAIN, "--steps", str(NUM_STEPS)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return result_in(done.stdout)


def result_in(output: str) -> tuple[float, float]:
    found = re.findall(r"([\d.]+)% of unseen.*weights ([\d.]+)", output)
    assert len(found) == 1, output[-5000:]
    return float(found[0][0]), float(found[0][1])


def require_one_restart(output: str) -> None:
    """Asserts that the program has started twice: at step 0, and at one of its checkpoints.

    A busy machine may be some steps further when the worker is killed.
    """
    first, second = map(int, re.findall(r"starts at step (\d+)", output))
    assert first == 0, output
    assert second in range(SAVE_EVERY, NUM_STEPS, SAVE_EVERY), output


def run(
    command: Sequence[str | Path],
    env: Mapping[str, str],
    *,
    kill: tuple[str, int] | None = None,
    directory: Path | None = None,
) -> str:
    """Runs a launcher to its end, and returns what it printed.

    Args:
      command: Its command line.
      env: Its environment.
      kill: The job and index of a task to kill at step 50.
      directory: The checkpoints of the program, by which its processes are found.
    """
    launcher = subprocess.Popen(
        list(map(str, command)), env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    timer = threading.Timer(_TIMEOUT_S, launcher.kill)
    timer.start()
    lines: list[str] = []
    try:
        assert launcher.stdout is not None
        with launcher.stdout:
            for line in launcher.stdout:
                lines.append(line.decode(errors="replace"))
                if kill is not None and "step 50:" in lines[-1]:
                    assert directory is not None
                    os.kill(pid_of(*kill, directory), signal.SIGKILL)
                    kill = None
        code = launcher.wait(timeout=30)
    finally:
        timer.cancel()
        timer.join()
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait(timeout=30)
    output = "".join(lines)
    assert code == 0, output[-8000:]
    assert kill is None, "the training was over before the task could be killed"
    return output


def pid_of(job: str, index: int, directory: Path) -> int:
    """Returns the process of a task whose command line has a directory."""
    found: list[int] = []
    deadline = time.monotonic() + 10
    while not found and time.monotonic() < deadline:
        for process in psutil.process_iter():
            try:
                words, env = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            task = json.loads(env.get("TF_CONFIG") or "{}").get("task", {})
            is_python = bool(words) and words[0] == sys.executable
            if is_python and str(directory) in words and task == {"type": job, "index": index}:
                found.append(process.pid)
    assert len(found) == 1, f"{job} {index} of {directory}: {found}"
    return found[0]
