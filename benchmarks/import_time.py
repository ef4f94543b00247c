"""How long `import replicax` takes, against `import jax`.

The case `import` is the statement alone; `first name` uses one of the names too, which imports
whatever is imported then. Both are timed in new processes, in turn with those of the peer.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.harness import Measured, Row, Settings, at_most, compete, main

CASES = ("import", "first name")
LIMIT = 1.25
STATEMENTS = {"import": "import replicax", "first name": "import replicax; replicax.Variable"}
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
LEAST_TURNS = 5


def both(case: str, seconds: float) -> dict[str, float]:
    programs = {"ours_ms": STATEMENTS[case], "jax_ms": "import jax"}
    best = dict.fromkeys(programs, float("inf"))
    turns, end = 0, time.perf_counter() + 4 * seconds
    while turns < LEAST_TURNS or time.perf_counter() < end:
        for name, statements in programs.items():
            command = [sys.executable, "-c", TIMED.format(statements)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            best[name] = min(best[name], 1e3 * float(done.stdout))
        turns += 1
    return best


CONTESTANTS = {"both": both}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, CONTESTANTS, CASES, settings, report)
    rows: list[Row] = []
    for case in CASES:
        found = measured["both", case]
        own, peer = found["ours_ms"], found["jax_ms"]
        texts = f"{own:.0f} ms", f"{peer:.0f} ms"
        outcome = at_most(LIMIT, own / peer)
        rows.append(Row("import replicax / import jax", case, *texts, own / peer, *outcome))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
