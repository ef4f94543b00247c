"""Runs one check in this process: `python -m torture.one NUMBER [--quick] [--seed N] …`.

Its progress and its outcome go to the standard output as lines of JSON. Each check has its own
process, so that a check that hangs or dies does not affect the others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax.numpy as jnp
import psutil

from replicax.process import shutdown
from torture import catalogue, safeguards
from torture.checks import Check, Outcome, Plan

# How long threads and sockets may take to close.
_SETTLING_SECONDS = 3.0
_FDS_MORE = 2


def main() -> int:
    """Runs the check of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--saboteur", default="")
    parser.add_argument("--parent", type=int, help="ends when this process does")
    options = parser.parse_args()
    if options.parent is not None:
        shutdown.die_with_parent(options.parent)
    (found,) = catalogue.chosen([options.number])
    # Keeps the output of libraries apart from the lines of JSON.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(text: str) -> None:
        _write(lines, {"report": text})

    directory = Path(tempfile.mkdtemp(prefix="torture-"))
    plan = Plan(options.quick, options.seed, options.minutes, report, directory, options.saboteur)
    start = time.monotonic()
    outcome = run_check(found, plan)
    seconds = time.monotonic() - start
    if outcome.result == "pass" or plan.saboteur:
        shutil.rmtree(directory, ignore_errors=True)
    elif outcome.failures:
        outcome.failures.append(f"its files are in {directory}")
    content = {**dataclasses.asdict(outcome), "result": outcome.result, "seconds": seconds}
    _write(lines, {"outcome": content})
    return 0


def run_check(found: Check, plan: Plan) -> Outcome:
    """Runs a check; errors and leaked threads, files and processes are failures."""
    # The threads and files of the backend are not leaks of the check.
    jnp.zeros(1).block_until_ready()
    gc.collect()
    before = _left()
    outcome = Outcome()
    try:
        with _without(plan.saboteur):
            outcome = found.run(plan)
    except Exception as error:
        traceback.print_exc()
        outcome.measured = outcome.measured or "-"
        text = str(error).splitlines()[0] if str(error) else ""
        outcome.failures.append(f"{type(error).__name__}: {text}")
    _require_clean(before, outcome)
    return outcome


@contextlib.contextmanager
def _without(safeguard: str) -> Iterator[None]:
    """Disables a safeguard in this process and in the tasks that it starts."""
    if not safeguard:
        yield
        return
    with safeguards.disabled(safeguard), safeguards.disabled_in_tasks(safeguard):
        yield


@dataclasses.dataclass(frozen=True)
class _Left:
    """The threads, file descriptors and children of a process."""

    threads: frozenset[threading.Thread]
    num_fds: int
    processes: frozenset[int]


def _left() -> _Left:
    me = psutil.Process()
    alive = {p.pid for p in me.children(recursive=True) if _is_alive(p)}
    return _Left(frozenset(threading.enumerate()), me.num_fds(), frozenset(alive))


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _require_clean(before: _Left, outcome: Outcome) -> None:
    """Requires that no threads, files and processes have leaked."""
    deadline = time.monotonic() + _SETTLING_SECONDS
    while True:
        gc.collect()
        after = _left()
        threads = sorted(t.name for t in after.threads - before.threads)
        processes = sorted(after.processes - before.processes)
        more = after.num_fds - before.num_fds
        if not threads and not processes and abs(more) <= _FDS_MORE:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    outcome.require(not threads, f"leaked threads: {threads}")
    outcome.require(not processes, f"leaked processes: {processes}")
    outcome.require(abs(more) <= _FDS_MORE, f"{more:+} file descriptors")


def _write(lines: TextIO, content: dict[str, Any]) -> None:
    lines.write(json.dumps(content) + "\n")
    lines.flush()


if __name__ == "__main__":
    sys.exit(main())
