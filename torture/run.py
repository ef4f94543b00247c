"""Runs the bars: `python -m torture.run [--only N …] [--rest] [--quick] [--minutes M] [--seed S]`.

Each bar is a promise that is put to the test by real faults. A bar whose faults did not land in
the midst of work proves nothing, and counts as not passed. Prints a table, writes it to
out/torture/table.md and table.json; the exit status is 1 unless all bars passed. With `--rest` it
goes on with the last table: what has passed stays, with the commit that it was, the rest is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import subprocess
import sys

from rich.console import Console

import replicax as rx
from torture import catalogue, tables
from torture.bars import OUT, ROOT
from torture.screen import Screen
from torture.supervision import Supervisor


def main() -> int:
    """Runs the bars that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="numbers of bars to run")
    parser.add_argument("--rest", action="store_true", help="run what has not passed yet")
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke run")
    parser.add_argument("--minutes", type=float, default=30.0, help="the length of the soak")
    parser.add_argument("--seed", type=int, default=0, help="decides every random choice")
    options = parser.parse_args()
    bars = catalogue.chosen(options.only)
    if not bars:
        parser.error(f"there is no bar {options.only}")

    machine = describe_machine(options)
    before = tables.load(OUT, machine["size"]) if options.rest else []
    found = {row.bar: row for row in before if row.has_passed}
    left = [bar for bar in bars if bar.label not in found]
    with Screen(left) as screen:
        supervisor = Supervisor(options.quick, options.seed, options.minutes, screen.say)
        for bar in left:
            screen.begin(bar)
            row = dataclasses.replace(supervisor.run(bar), code=machine["code"])
            found[row.bar] = row
            screen.end(row)
            # What is known so far stays, whatever happens to this run.
            tables.save(OUT, _ordered(found), machine)
    rows = _ordered(found)

    # A table that is cut to 80 columns says little; a pipe has no width of its own.
    console = Console() if sys.stdout.isatty() else Console(width=180)
    console.print(tables.for_screen(rows))
    for row in rows:
        for reason in row.reasons:
            console.print(f"bar {row.bar}: {reason}", markup=False, soft_wrap=True)
    console.print(f"Table: {(OUT / 'table.md').relative_to(OUT.parent.parent)}", markup=False)
    return int(not all(row.has_passed for row in rows))


def _ordered(found: dict[str, tables.Row]) -> list[tables.Row]:
    return [found[bar.label] for bar in catalogue.chosen(None) if bar.label in found]


def describe_machine(options: argparse.Namespace) -> dict[str, str]:
    """Returns what the figures depend on."""
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "size": "quick" if options.quick else "full",
        "seed": str(options.seed),
        "cores": str(os.cpu_count()),
        "load at start": f"{os.getloadavg()[0]:.1f}",
        "system": platform.platform(),
        "python": platform.python_version(),
        "replicax": rx.__version__,
        "code": _commit(),
    }


def _commit() -> str:
    """Returns which commit this is, and whether it was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
