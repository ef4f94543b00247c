"""The command line of replicax."""

from __future__ import annotations

from typing import Annotated

import typer

from replicax.cli import checkpoint, doctor, keys, port, serve, top
from replicax.protocol.tasks import library_version

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(keys.app, name="keys")
app.command()(port.port)
app.command()(doctor.doctor)
app.command()(serve.serve)
app.command()(top.top)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"replicax {library_version()}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


@app.callback()
def main(version: _Version = False) -> None:
    """Tools around replicax programs."""
