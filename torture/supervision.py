"""Runs each bar in a process of its own, in bounded time, and sees what it leaves behind."""

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

from torture.bars import OUT, ROOT, Bar
from torture.tables import Row

_PR_SET_CHILD_SUBREAPER = 36
# Whoever lives on after the bar must be gone by then: a lease in the fast profile and more.
_GONE_SECONDS = 5.0
_END_SECONDS = 20.0


class Supervisor:
    """Starts bars, one after the other.

    Args:
      quick: Whether small sizes do.
      seed: Decides every random choice.
      minutes: How long the soak lasts.
      say: Takes lines for people.
    """

    def __init__(self, quick: bool, seed: int, minutes: float, say: Callable[[str], None]) -> None:
        self._quick = quick
        self._seed = seed
        self._minutes = minutes
        self._say = say
        # Processes that lose their parent become children of this one, and are seen.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._known = set(_children())

    def run(self, bar: Bar) -> Row:
        """Puts one promise to the test."""
        start = time.monotonic()
        if bar.needs_root and os.geteuid() != 0:
            return Row(bar.label, bar.promise, "-", bar.limit, "void", 0.0, ("it needs root",))
        limit = bar.seconds + 60.0 * self._minutes * (51 in bar.numbers)
        outcome = run_alone(
            bar.numbers[0],
            seconds=limit,
            options=self._options(),
            say=self._say,
        )
        outcome["failures"] += self._strays()
        verdict = "fail" if outcome["failures"] else outcome["verdict"]
        return Row(
            bar.label,
            bar.promise,
            outcome["figure"],
            bar.limit,
            verdict,
            time.monotonic() - start,
            tuple(outcome["failures"] + outcome["voids"]),
            outcome["numbers"],
        )

    def _options(self) -> list[str]:
        options = ["--seed", str(self._seed), "--minutes", str(self._minutes)]
        return [*options, "--quick"] if self._quick else options

    def _strays(self) -> list[str]:
        """Ends processes that outlived their bar, and says which they were."""
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
    say: Callable[[str], None],
    suffix: str = "",
) -> dict[str, Any]:
    """Runs a bar in a process of its own; returns the fields of its outcome.

    Args:
      number: Which one.
      seconds: How long it may take.
      options: Those of `torture.one`.
      say: Takes lines for people.
      suffix: Goes into the name of its log.
    """
    logs = OUT / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"bar-{number}{suffix}.log"
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
            say(content["say"])
        ended = f"the process of the bar ended with {process.wait(_END_SECONDS)}"
    except TimeoutError:
        ended = f"it did not end within {seconds:.0f} s"
    except subprocess.TimeoutExpired:
        ended = "the process of the bar does not end"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    failure = f"{ended}; see {os.path.relpath(path, ROOT)}"
    return {"figure": "-", "verdict": "fail", "failures": [failure], "voids": [], "numbers": {}}


def _ended(process: subprocess.Popen[bytes], outcome: dict[str, Any]) -> dict[str, Any]:
    """Waits for the end of a bar that has said what it found."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        outcome["failures"].append(f"its process was still there after {_END_SECONDS:g} s")
        outcome["verdict"] = "fail"
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
    """The living children of this process; those that ended are waved good-bye."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
    return found
