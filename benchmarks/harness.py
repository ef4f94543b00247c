"""How contestants are timed, run in processes of their own, and compared.

This module and the top level of every benchmark import the standard library only: peers run
them in environments without this project.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out"

# A contestant takes a case and how long to measure (in seconds), and returns what it found.
Contestant = Callable[[str, float], dict[str, float]]
# Which contestant, which case, what it found: the best of all rounds.
Measured = dict[tuple[str, str], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How thorough a run is."""

    rounds: int
    seconds: float
    # Of one process: imports, compilation and measurement.
    timeout: float
    # The interpreter of each contestant that needs an environment of its own.
    peers: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the final table."""

    what: str
    case: str
    ours: str
    peer: str
    ratio: float | None
    target: str
    # None if there is no target.
    passed: bool | None


class ContestantFailed(RuntimeError):
    """A process of a contestant crashed, hung or printed nothing."""


def at_most(limit: float, ratio: float) -> tuple[str, bool]:
    """Returns the target as text, and whether it is met."""
    return f"≤ {limit:g}", ratio <= limit


def at_least(limit: float, ratio: float) -> tuple[str, bool]:
    """Returns the target as text, and whether it is met."""
    return f"≥ {limit:g}", ratio >= limit


def best_time(step: Callable[[], Any], wait: Callable[[Any], Any], seconds: float) -> float:
    """Returns the time of one step, in seconds: the best of 5 repeats.

    Steps are dispatched one after the other; `wait` waits for the result of the last one.
    """
    for _ in range(3):
        wait(step())
    start = time.perf_counter()
    wait(step())
    once = max(time.perf_counter() - start, 1e-6)
    repeats = 5
    count = max(3, min(2000, int(seconds / repeats / once)))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(count - 1):
            step()
        wait(step())
        best = min(best, (time.perf_counter() - start) / count)
    return best


def taking_turns(
    steps: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    seconds: float,
    steps_in_a_block: int,
) -> dict[str, float]:
    """Returns the time of one step of each program, in ms: the best of its blocks.

    The programs run in one process, block by block in turn, because two processes differ by
    more than two programs do.
    """
    for step in steps.values():
        for _ in range(5):
            wait(step())
    best = dict.fromkeys(steps, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(steps_in_a_block - 1):
                step()
            wait(step())
            best[name] = min(best[name], (time.perf_counter() - start) / steps_in_a_block)
    return {f"{name}_ms": 1e3 * value for name, value in best.items()}


def main(contestants: Mapping[str, Contestant]) -> None:
    """The command line of a benchmark: measures one contestant, prints a line per case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant", choices=sorted(contestants))
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    for case in options.cases:
        found = contestants[options.contestant](case, options.seconds)
        line = {"contestant": options.contestant, "case": case, **found}
        print(json.dumps(line), flush=True)


def measure(
    module: str, contestant: str, cases: Sequence[str], settings: Settings
) -> dict[str, dict[str, float]]:
    """Runs one contestant in a process of its own; returns what it found for each case."""
    python = settings.peers.get(contestant, sys.executable)
    command = [python, "-m", module, contestant, *cases, "--seconds", str(settings.seconds)]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **quiet},
            timeout=settings.timeout,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ContestantFailed(f"{' '.join(command)}: {settings.timeout} s passed") from error
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {
        line["case"]: {k: float(v) for k, v in line.items() if isinstance(v, int | float)}
        for line in lines
    }
    if done.returncode != 0 or set(found) != set(cases):
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise ContestantFailed(f"{' '.join(command)}: exit status {done.returncode}\n{tail}")
    return found


def compete(
    module: str,
    contestants: Iterable[str],
    cases: Iterable[str],
    settings: Settings,
    report: Callable[[str], None],
) -> Measured:
    """Runs the contestants in turns, one process per contestant and case.

    Returns:
      The smallest of every number over the rounds.
    """
    best: Measured = {}
    names = list(contestants)
    for case in cases:
        for turn in range(settings.rounds):
            for name in names:
                found = measure(module, name, [case], settings)[case]
                known = best.setdefault((name, case), found)
                best[name, case] = {k: min(v, known[k]) for k, v in found.items()}
                numbers = ", ".join(f"{k} {v:.4g}" for k, v in found.items())
                report(f"{module} {case} [{turn + 1}/{settings.rounds}] {name}: {numbers}")
    return best
