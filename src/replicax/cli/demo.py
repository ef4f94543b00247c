"""`replicax demo`: one program under every strategy, and a cluster that loses a worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from replicax.cli.failures import errors_in_one_line
from replicax.demo import acts

_COLUMNS = 110

_Acts = Annotated[
    list[str] | None,
    typer.Argument(metavar=f"[{'|'.join(acts.ACTS)}]...", help="What to show; everything if none."),
]
_Pictures = Annotated[Path, typer.Option("--pictures", help="Where to draw the pictures.")]


def demo(names: _Acts = None, pictures: _Pictures = Path("out")) -> None:
    """Train one program under every strategy, then a recommender that loses a worker.

    Takes about a minute, and needs the extra `demo`. Prints plain lines if it does not run in a
    terminal.
    """
    # A pipe has no width of its own; the tables need more than the 80 columns that are assumed.
    console = Console() if sys.stdout.isatty() else Console(width=_COLUMNS)
    with errors_in_one_line():
        acts.play(names or (), console, pictures)
