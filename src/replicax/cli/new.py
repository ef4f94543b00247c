"""`replicax new`: writes a starter project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replicax.cli.failures import errors_in_one_line
from replicax.starter.writing import write_project

_USAGE = 2

_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it.")]


def new(directory: _Directory) -> None:
    """Write a starter project: train.py, config.toml and a test; it runs under every strategy."""
    with errors_in_one_line(_USAGE):
        paths = write_project(directory)
    for path in paths:
        typer.echo(f"wrote {path}")
    typer.echo(f"Next: cd {directory} && python train.py && pytest")
