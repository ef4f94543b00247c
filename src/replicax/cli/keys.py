"""`replicax keys`: manages the keys that authenticate the tasks of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from replicax.cli.failures import errors_in_one_line
from replicax.foundation import settings
from replicax.protocol.tasks import ROLES, Role
from replicax.transport import keys

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Keys of a cluster whose tasks connect over TCP.",
)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory with the keys.")]


@app.command()
def make(directory: Directory) -> None:
    """Make new keys for every role, in a private directory."""
    with errors_in_one_line():
        path = keys.make(directory)
        typer.echo(f"keys in {path}; set {settings.REPLICAX_KEYS}={path.absolute()} for each task")


@app.command()
def show(directory: Directory) -> None:
    """Print the public key of every role, never the secrets."""
    with errors_in_one_line():
        # A host may have the secret of one role only; any of them verifies the set.
        own: list[Role] = [role for role in ROLES if (directory / f"{role}.secret").exists()]
        found = keys.load(directory, own[0] if own else ROLES[0])
        for role in ROLES:
            typer.echo(f"{role}\t{found.public_keys[role].decode()}")


@app.command()
def renew(
    directory: Directory,
    role: Annotated[str, typer.Argument(help="coordinator, worker or ps.")],
) -> None:
    """Make a new key for a role; the older one is accepted until `retire`."""
    with errors_in_one_line():
        keys.renew(directory, cast("Role", role))
        typer.echo(
            f"copy {role}.public to all hosts, then {role}.secret to those of the {role}, and "
            "restart its tasks; then run `replicax keys retire`"
        )


@app.command()
def retire(directory: Directory) -> None:
    """Remove all keys but the newest of each role."""
    with errors_in_one_line():
        keys.retire(directory)
        typer.echo("copy the public files to all hosts: they reject older keys from then on")
