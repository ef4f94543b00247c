"""The demo's third act: `replicax run` restarts a group that lost a worker, with the same result.

examples/train.py is launched on two workers, first undisturbed, then with a worker that is killed
on the way. The launcher restarts the group, which goes on from its last checkpoint, and both runs
end with the same weights. Run it alone, or with `make demo`.
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

TRAIN = Path(__file__).resolve().parent / "train.py"
VICTIM = 1
# When the first checkpoint of so many steps is there, the worker is killed.
SAVE_EVERY, KILL_AFTER_STEPS = 20, 100
TIMEOUT_S = 240.0
# Without the tracebacks of workers that lost another one; they are in the logs.
SHOWN = re.compile(r"^replicax|starts at|step \d+:|The cause|of unseen digits")


def launch(console: Console, directory: Path, kill: bool) -> tuple[str, int]:
    """Launches the program; returns what it says of its result, and the number of restarts."""
    checkpoints, logs = directory / "checkpoints", directory / "logs"
    command = [sys.executable, "-m", "replicax", "run", "--workers", "2", "--show", "chief"]
    command += ["--logs", str(logs), str(TRAIN), "--directory", str(checkpoints)]
    command += ["--save-every", str(SAVE_EVERY)]
    console.print(f"$ replicax run --workers 2 {TRAIN.name}", style="bold", highlight=False)
    result, num_restarts = "", 0
    deadline = time.monotonic() + TIMEOUT_S
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                assert time.monotonic() < deadline, "the demo takes too long"
                if SHOWN.search(line):
                    console.print(f"  {line.rstrip()}", style="dim", no_wrap=True, markup=False)
                if kill and f"step {KILL_AFTER_STEPS}:" in line:
                    kill = False
                    kill_task(console, logs, "worker", VICTIM)
                num_restarts += "Restarting all workers" in line
                if "of unseen digits" in line:
                    result = line.partition(" | ")[2].strip()
            assert process.wait(TIMEOUT_S) == 0, process.returncode
        finally:
            process.kill()
    return result, num_restarts


def kill_task(console: Console, logs: Path, job: str, index: int) -> None:
    """Kills the process of a task, as a machine that fails does."""
    processes = json.loads((logs / "processes.json").read_text())
    (pid,) = [p["pid"] for p in processes if (p["job"], p["index"]) == (job, index)]
    console.print(f"$ kill -9 {pid}  # {job} {index}", style="bold red", highlight=False)
    os.kill(pid, signal.SIGKILL)


def main(console: Console) -> None:
    console.print("Third act: one command starts, watches and restarts a group of workers")
    with tempfile.TemporaryDirectory() as directory:
        undisturbed, none = launch(console, Path(directory) / "undisturbed", kill=False)
        disturbed, restarts = launch(console, Path(directory) / "disturbed", kill=True)
    assert undisturbed and undisturbed == disturbed, (undisturbed, disturbed)
    assert (none, restarts) == (0, 1), (none, restarts)
    console.print(
        "A worker was killed and the group restarted: the result is the same, digit by digit"
    )


if __name__ == "__main__":
    main(Console())
