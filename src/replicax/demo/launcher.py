"""`replicax run` restarts a group that lost a worker, with the same result.

The program of examples/train.py is launched on two workers, first undisturbed, then with a worker
that is killed on the way. The launcher restarts the group, which goes on from its last checkpoint,
and both runs end with the same weights. The picture is the timeline of the second run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from replicax.foundation import errors, settings
from replicax.timeline.merging import merge
from replicax.timeline.picture import draw

# The wheel has a copy of the example beside this module.
_PROGRAMS = (
    Path(__file__).with_name("train.py"),
    Path(__file__).parents[3] / "examples" / "train.py",
)
PICTURE = "demo_launcher.png"
_VICTIM = 1
# When the first checkpoint of so many steps is there, the worker is killed.
_SAVE_EVERY, _KILL_AFTER_STEPS = 20, 100
_TIMEOUT_S = 240.0
# Without the tracebacks of workers that lost another one; they are in the logs.
_SHOWN = re.compile(r"^replicax|starts at|step \d+:|The cause|of unseen digits")


def play(console: Console, pictures: Path) -> None:
    """Launches the program twice, and compares the results."""
    console.print("One command starts, watches and restarts a group of workers")
    with tempfile.TemporaryDirectory() as directory:
        undisturbed, none = _launch(console, Path(directory) / "undisturbed", kill=False)
        disturbed, restarts = _launch(console, Path(directory) / "disturbed", kill=True)
        if not undisturbed or undisturbed != disturbed or (none, restarts) != (0, 1):
            raise errors.DataLossError(
                f"The runs ended with {undisturbed!r} and {disturbed!r}, after {none} and "
                f"{restarts} restarts"
            )
        console.print(
            "A worker was killed and the group restarted: the result is the same, digit by digit"
        )
        timeline = merge(Path(directory) / "disturbed" / "trace")
        pictures.mkdir(parents=True, exist_ok=True)
        draw(timeline, pictures / PICTURE, title="A group loses a worker, and continues")
    console.print(f"Picture: {pictures / PICTURE}")


def _launch(console: Console, directory: Path, kill: bool) -> tuple[str, int]:
    """Launches the program; returns what it says of its result, and the number of restarts."""
    program = next(path for path in _PROGRAMS if path.exists())
    checkpoints, logs = directory / "checkpoints", directory / "logs"
    command = [sys.executable, "-m", "replicax", "run", "--workers", "2", "--show", "chief"]
    command += ["--env", f"{settings.REPLICAX_TRACE}={directory / 'trace'}"]
    command += ["--logs", str(logs), str(program), "--directory", str(checkpoints)]
    command += ["--save-every", str(_SAVE_EVERY)]
    console.print(f"$ replicax run --workers 2 {program.name}", style="bold", highlight=False)
    result, num_restarts = "", 0
    deadline = time.monotonic() + _TIMEOUT_S
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if time.monotonic() > deadline:
                    raise errors.DeadlineExceededError(f"The demo took more than {_TIMEOUT_S} s")
                if _SHOWN.search(line):
                    console.print(f"  {line.rstrip()}", style="dim", no_wrap=True, markup=False)
                if kill and f"step {_KILL_AFTER_STEPS}:" in line:
                    kill = False
                    _kill_task(console, logs, "worker", _VICTIM)
                num_restarts += "Restarting all workers" in line
                if "of unseen digits" in line:
                    result = line.partition(" | ")[2].strip()
            process.wait(_TIMEOUT_S)
        finally:
            process.kill()
    return result, num_restarts


def _kill_task(console: Console, logs: Path, job: str, index: int) -> None:
    """Kills the process of a task, as a machine that fails does."""
    processes = json.loads((logs / "processes.json").read_text())
    (pid,) = [p["pid"] for p in processes if (p["job"], p["index"]) == (job, index)]
    console.print(f"$ kill -9 {pid}  # {job} {index}", style="bold red", highlight=False)
    os.kill(pid, signal.SIGKILL)
