"""Errors of commands: one line on stderr, and an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from replicax.foundation import errors


@contextlib.contextmanager
def errors_in_one_line(code: int = 1) -> Iterator[None]:
    """Prints an error of the library in one line on stderr, and exits."""
    try:
        yield
    except errors.DistributeError as error:
        typer.echo(f"replicax: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(code) from error
