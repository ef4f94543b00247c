"""How commands fail: one line for people, and an exit code for programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from replicax.foundation import errors


@contextlib.contextmanager
def told_in_one_line(code: int = 1) -> Iterator[None]:
    """Turns an error of the library into one line on stderr, and ends the command."""
    try:
        yield
    except errors.DistributeError as error:
        typer.echo(f"replicax: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(code) from error
