"""Runs checks: `python -m torture.run [--only N …] [--rest] [--quick] [--minutes M] [--seed S]`.

Each check tests a reliability claim with real faults. A check whose faults did not hit running work
proves nothing, and does not pass. Prints a table, and writes it to out/torture/table.md and
table.json; the exit status is 1 unless all checks passed. `--rest` continues the last table: checks
that passed keep their row, with the commit of that run, and the others are run.
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
from torture.checks import OUT, ROOT
from torture.screen import Screen
from torture.supervision import Supervisor


def main() -> int:
    """Runs the checks of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="numbers of checks to run")
    parser.add_argument("--rest", action="store_true", help="run checks that have not passed")
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke run")
    parser.add_argument("--minutes", type=float, default=30.0, help="duration of the soak test")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    options = parser.parse_args()
    checks = catalogue.chosen(options.only)
    if not checks:
        parser.error(f"there is no check {options.only}")

    machine = describe_machine(options)
    before = tables.load(OUT, machine["size"]) if options.rest else []
    found = {row.check: row for row in before if row.has_passed}
    left = [check for check in checks if check.label not in found]
    with Screen(left) as screen:
        supervisor = Supervisor(options.quick, options.seed, options.minutes, screen.report)
        for check in left:
            screen.begin(check)
            row = dataclasses.replace(supervisor.run(check), code=machine["code"])
            found[row.check] = row
            screen.end(row)
            # Saved after each check, in case this run is killed.
            tables.save(OUT, _ordered(found), machine)
    rows = _ordered(found)

    # A pipe has no width, and a table of 80 columns is too narrow.
    console = Console() if sys.stdout.isatty() else Console(width=180)
    console.print(tables.for_screen(rows))
    for row in rows:
        for reason in row.reasons:
            console.print(f"check {row.check}: {reason}", markup=False, soft_wrap=True)
    console.print(f"Table: {(OUT / 'table.md').relative_to(OUT.parent.parent)}", markup=False)
    return int(not all(row.has_passed for row in rows))


def _ordered(found: dict[str, tables.Row]) -> list[tables.Row]:
    return [found[check.label] for check in catalogue.chosen(None) if check.label in found]


def describe_machine(options: argparse.Namespace) -> dict[str, str]:
    """Returns a description of the machine and the code."""
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
    """Returns the current commit, and whether the working tree has changes."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
