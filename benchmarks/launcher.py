"""How long a launcher takes to start four processes on this machine, and to see them end.

Cases: `trivial` starts a script that imports nothing, from the command to the first line of the
last process, and to the end of the command; `imports` starts one that imports JAX, and compares
the time until the last process has done so with that of the slowest process' own imports.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import Measured, Row, Settings, at_least, at_most, compete, main

PEERS = ("torch",)
NUM_TASKS = 4
MOST_OVER_IMPORTS_S = 1.0
TIMEOUT_S = 120.0

SCRIPT = """
import sys, time
begun_s = time.time()
{imports}
with open(f"{{sys.argv[1]}}/{{begun_s}}", "w") as file:
    file.write(str(time.time() - begun_s))
"""


def measured(command: Sequence[str], imports: str, seconds: float) -> dict[str, float]:
    """Returns the best of several launches: start, whole command, and start beside imports."""
    starts, totals, beside = [], [], []
    end = time.perf_counter() + seconds
    while not totals or time.perf_counter() < end:
        with tempfile.TemporaryDirectory() as directory:
            script, found = Path(directory) / "script.py", Path(directory) / "found"
            found.mkdir()
            script.write_text(SCRIPT.format(imports=imports))
            begun_s, begun = time.time(), time.perf_counter()
            subprocess.run(
                [*command, str(script), str(found)],
                cwd=directory,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
            )
            totals.append(time.perf_counter() - begun)
            files = list(found.iterdir())
            assert len(files) == NUM_TASKS, files
            starts.append(max(float(file.name) for file in files) - begun_s)
            took = {float(file.name): float(file.read_text()) for file in files}
            last_s = max(start + imports for start, imports in took.items())
            beside.append(last_s - begun_s - max(took.values()))
    return {"start_s": min(starts), "total_s": min(totals), "beside_s": min(beside)}


def ours(case: str, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "replicax", "run", "--workers", str(NUM_TASKS)]
    return measured(command, "import jax" if case == "imports" else "", seconds)


def torch(case: str, seconds: float) -> dict[str, float]:
    assert case == "trivial", case
    # What `torchrun` runs.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_TASKS)]
    return measured(command, "", seconds)


CONTESTANTS = {"ours": ours, "torch": torch}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    peers = [name for name in PEERS if name in settings.peers]
    found = compete(__name__, ["ours", *peers], ["trivial"], settings, report)
    found |= compete(__name__, ["ours"], ["imports"], settings, report)
    rows = []
    pairs = (("start of 4 processes", "start_s"), ("start and end of 4", "total_s"))
    for what, name in pairs if peers else ():
        mine, peer = found["ours", "trivial"][name], found["torch", "trivial"][name]
        texts = f"{mine:.2f} s", f"torchrun {peer:.2f} s"
        rows.append(Row(what, "trivial", *texts, peer / mine, *at_least(1, peer / mine)))
    for case, name in (("trivial", "total_s"), ("imports", "beside_s")):
        over = found["ours", case][name]
        outcome = at_most(MOST_OVER_IMPORTS_S, over)
        rows.append(
            Row("seconds over the slowest imports", case, f"{over:.2f} s", "", over, *outcome)
        )
    return found, rows


if __name__ == "__main__":
    main(CONTESTANTS)
