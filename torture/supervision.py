"""Runs each check in a process of its own with a time limit, and detects leaked processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from torture.checks import OUT, ROOT, Check
from torture.tables import Row

_PR_SET_CHILD_SUBREAPER = 36
# Processes of the check must have ended after this long: a lease in the fast profile and more.
_GONE_SECONDS = 5.0
_END_SECONDS = 20.0


class Supervisor:
    """Runs checks one after the other.

    Args:
      quick: Whether small sizes do.
      seed: Decides every random choice.
      minutes: How long the soak lasts.
      report: Takes lines for people.
    """

    def __init__(
        self, quick: bool, seed: int, minutes: float, report: Callable[[str], None]
    ) -> None:
        self._quick = quick
        self._seed = seed
        self._minutes = minutes
        self._report = report
        # Orphaned processes become children of this one.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._known = set(_children())

    def run(self, check: Check) -> Row:
        """Runs one check."""
        start = time.monotonic()
        if check.needs_root and os.geteuid() != 0:
            return Row(check.label, check.claim, "-", check.limit, "void", 0.0, ("it needs root",))
        limit = check.seconds + 60.0 * self._minutes * (51 in check.numbers)
        outcome = run_alone(
            check.numbers[0],
            seconds=limit,
            options=self._options(),
            report=self._report,
        )
        outcome["failures"] += self._strays()
        result = "fail" if outcome["failures"] else outcome["result"]
        return Row(
            check.label,
            check.claim,
            outcome["measured"],
            check.limit,
            result,
            time.monotonic() - start,
            tuple(outcome["failures"] + outcome["voids"]),
            outcome["numbers"],
        )

    def _options(self) -> list[str]:
        options = ["--seed", str(self._seed), "--minutes", str(self._minutes)]
        return [*options, "--quick"] if self._quick else options

    def _strays(self) -> list[str]:
        """Kills processes that outlived their check, and returns their names."""
        deadline = time.monotonic() + _GONE_SECONDS
        while (left := set(_children()) - self._known) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [f"a process was left: {' '.join(process.cmdline()[:6])}" for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait(5.0)
        return found


def run_alone(
    number: int,
    *,
    seconds: float,
    options: list[str],
    report: Callable[[str], None],
    suffix: str = "",
) -> dict[str, Any]:
    """Runs a check in a process of its own; returns the fields of its outcome.

    Args:
      number: Which one.
      seconds: How long it may take.
      options: Those of `torture.one`.
      report: Takes lines for people.
      suffix: Goes into the name of its log.
    """
    logs = OUT / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"check-{number}{suffix}.log"
    command = [sys.executable, "-m", "torture.one", str(number), *options]
    command += ["--parent", str(os.getpid())]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, process_group=0
        )
    try:
        for content in _lines(process, time.monotonic() + seconds):
            if "outcome" in content:
                return _ended(process, content["outcome"])
            report(content["report"])
        ended = f"the process of the check ended with {process.wait(_END_SECONDS)}"
    except TimeoutError:
        ended = f"it did not end within {seconds:.0f} s"
    except subprocess.TimeoutExpired:
        ended = "the process of the check does not end"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    failure = f"{ended}; see {os.path.relpath(path, ROOT)}"
    return {"measured": "-", "result": "fail", "failures": [failure], "voids": [], "numbers": {}}


def _ended(process: subprocess.Popen[bytes], outcome: dict[str, Any]) -> dict[str, Any]:
    """Waits for the exit of a check that has written its outcome."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        outcome["failures"].append(f"its process was still there after {_END_SECONDS:g} s")
        outcome["result"] = "fail"
    return outcome


def _lines(process: subprocess.Popen[bytes], deadline: float) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    pipe, rest = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            piece = os.read(pipe, 1 << 16)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield json.loads(line)


def _children() -> list[psutil.Process]:
    """Returns the running children of this process, and reaps those that ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
    return found
