"""`replicax keys`: makes the keys with which the tasks of a cluster know each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replicax.cli.failures import told_in_one_line
from replicax.transport import keys
from replicax.transport.messages import Role
from replicax.transport.tasks import ROLES

app = typer.Typer(no_args_is_help=True, help="Keys of a cluster whose tasks talk over TCP.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory with the keys.")]


@app.command()
def make(directory: Directory) -> None:
    """Make new keys for every role, in a directory that only you can read."""
    with told_in_one_line():
        path = keys.make(directory)
        typer.echo(f"keys in {path}; set {keys.VARIABLE}={path.absolute()} for each task")


@app.command()
def show(directory: Directory) -> None:
    """Print the public key of every role; secrets are never shown."""
    with told_in_one_line():
        # A host may hold the secret of one role only; any of them proves the set whole.
        own: list[Role] = [role for role in ROLES if (directory / f"{role}.secret").exists()]
        found = keys.load(directory, own[0] if own else ROLES[0])
        for role in ROLES:
            typer.echo(f"{role}\t{found.public_keys[role].decode()}")
