"""The command line of replicax."""

from __future__ import annotations

import typer

from replicax.cli import checkpoint, keys, serve

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(keys.app, name="keys")
app.command()(serve.serve)


@app.callback()
def main() -> None:
    """Tools around replicax programs."""
