"""`replicax run` in a process of its own, and what is left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

RUN = [sys.executable, "-m", "replicax", "run"]
EXAMPLES = Path(__file__).parents[2] / "examples"


def script(directory: Path, text: str) -> str:
    """Writes a program whose tasks know their index and their number of runs so far."""
    head = """
        import json, os, pathlib, signal, subprocess, sys, time
        config = json.loads(os.environ["TF_CONFIG"])
        index = config["task"]["index"]
        here = pathlib.Path(__file__).parent
        runs = here / f"runs-{index}"
        number = len(runs.read_text()) if runs.exists() else 0
        with runs.open("a") as file:
            file.write("x")
    """
    path = directory / "program.py"
    path.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    return str(path)


def run(
    directory: Path, *options: object, seconds: float = 60.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs `replicax run` to its end."""
    return subprocess.run(
        [*RUN, *map(str, options)],
        cwd=directory,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )


@contextlib.contextmanager
def running(directory: Path, *options: object, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `replicax run` in the background."""
    command = [*RUN, *map(str, options)]
    with subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def becomes(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def has_ended(pid: int) -> bool:
    """Returns whether a process has exited; there may be none that reaps an orphan."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def of_directory(directory: Path) -> list[psutil.Process]:
    """Returns the processes that run in a directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
