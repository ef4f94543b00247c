"""`python -m torture.sabotaged NAME ...`: the command line of replicax with one safeguard disabled.

For example, `python -m torture.sabotaged dedup serve ...` runs a server that applies repeated
updates again.
"""

from __future__ import annotations

import runpy
import sys

from torture import safeguards


def main(arguments: list[str]) -> None:
    """Disables the safeguard of the first argument, and runs the rest as a command."""
    safeguards.disable(arguments[0] if arguments else "")
    sys.argv = ["replicax", *arguments[1:]]
    runpy.run_module("replicax", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main(sys.argv[1:])
