"""Runs one bar in this process: `python -m torture.one NUMBER [--quick] [--seed N] …`.

What it says, and at the end what it found, goes to the standard output as lines of JSON. A bar
has a process of its own, so that one which hangs or dies does not take the others with it.
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
from torture.bars import Bar, Outcome, Plan
from torture.sabotage import sabotaged

# Threads and sockets that end on their own need a moment.
_SETTLING_SECONDS = 3.0
_FDS_MORE = 2


def main() -> int:
    """Runs the bar that the command line names."""
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
    # Nobody else writes lines here, whatever a library prints.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(text: str) -> None:
        _write(lines, {"say": text})

    directory = Path(tempfile.mkdtemp(prefix="torture-"))
    plan = Plan(options.quick, options.seed, options.minutes, say, directory, options.saboteur)
    start = time.monotonic()
    outcome = put_to_the_test(found, plan)
    seconds = time.monotonic() - start
    if outcome.verdict == "pass" or plan.saboteur:
        shutil.rmtree(directory, ignore_errors=True)
    elif outcome.failures:
        outcome.failures.append(f"what it left is in {directory}")
    content = {**dataclasses.asdict(outcome), "verdict": outcome.verdict, "seconds": seconds}
    _write(lines, {"outcome": content})
    return 0


def put_to_the_test(found: Bar, plan: Plan) -> Outcome:
    """Runs a bar; an error is a failure, and so is anything that it leaves behind."""
    # The backend keeps its threads and files for good: they are no leak of the bar.
    jnp.zeros(1).block_until_ready()
    gc.collect()
    before = _left()
    outcome = Outcome()
    try:
        with _without(plan.saboteur):
            outcome = found.run(plan)
    except Exception as error:
        traceback.print_exc()
        outcome.figure = outcome.figure or "-"
        text = str(error).splitlines()[0] if str(error) else ""
        outcome.failures.append(f"{type(error).__name__}: {text}")
    _require_clean(before, outcome)
    return outcome


@contextlib.contextmanager
def _without(safeguard: str) -> Iterator[None]:
    """Takes a safeguard away, here and in the tasks that are started."""
    if not safeguard:
        yield
        return
    with safeguards.at_work(safeguard), sabotaged(safeguard):
        yield


@dataclasses.dataclass(frozen=True)
class _Left:
    """What a process holds."""

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
    """Requires that threads, files and processes are as before, after a moment."""
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
    outcome.require(not threads, f"threads were left: {threads}")
    outcome.require(not processes, f"processes were left: {processes}")
    outcome.require(abs(more) <= _FDS_MORE, f"{more:+} file descriptors")


def _write(lines: TextIO, content: dict[str, Any]) -> None:
    lines.write(json.dumps(content) + "\n")
    lines.flush()


if __name__ == "__main__":
    sys.exit(main())
