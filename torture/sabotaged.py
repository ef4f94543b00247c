"""`python -m torture.sabotaged NAME ...`: the command line with one safeguard gone.

For tests that show that they would notice: `python -m torture.sabotaged dedup serve ...`
runs a server that makes repeated updates again.
"""

from __future__ import annotations

import runpy
import sys

from torture import safeguards


def main(arguments: list[str]) -> None:
    """Applies the saboteur that comes first, and runs the command that follows."""
    safeguards.apply(arguments[0] if arguments else "")
    sys.argv = ["replicax", *arguments[1:]]
    runpy.run_module("replicax", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main(sys.argv[1:])
