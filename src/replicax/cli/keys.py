"""`replicax keys`: manages the certificates that authenticate the tasks of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from replicax.cli.failures import errors_in_one_line
from replicax.foundation import settings
from replicax.protocol.tasks import Role
from replicax.transport import authority, keys

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Certificates of tasks that connect over TCP.",
)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the job.")]
Days = Annotated[float, typer.Option(help="The validity of the certificates.")]


@app.command()
def make(
    directory: Directory,
    job: Annotated[str, typer.Option(help="The name of the job; random by default.")] = "",
    workers: Annotated[int, typer.Option(help="One certificate for each of so many.")] = 0,
    ps: Annotated[int, typer.Option(help="One certificate for each of so many.")] = 0,
    days: Days = 365.0,
) -> None:
    """Make an authority, and certificates for each role, or for each task of it."""
    with errors_in_one_line():
        counts: dict[Role, int] = {"worker": workers, "ps": ps, "coordinator": 0}
        path = keys.make(directory, job, counts, days)
        typer.echo(
            f"certificates in {path}; set {settings.REPLICAX_KEYS}={path.absolute()} for each "
            "task, and keep 'authority' on this host"
        )


@app.command()
def add(
    directory: Directory,
    role: Annotated[str, typer.Argument(help="coordinator, worker or ps.")],
    index: Annotated[int, typer.Argument(help="The index of the task.")],
    days: Days = 365.0,
) -> None:
    """Make the certificate of one more task."""
    with errors_in_one_line():
        typer.echo(f"a certificate in {keys.add(directory, cast('Role', role), index, days)}")


@app.command()
def show(directory: Directory) -> None:
    """Print the task and the last day of every certificate, never the keys."""
    with errors_in_one_line():
        keys.check_private(directory)
        for path in sorted(directory.glob(f"**/{keys.CERTIFICATE}")):
            identity, end = authority.read(path)
            typer.echo(f"{identity}\tvalid until {end:%Y-%m-%d %H:%M} UTC")


@app.command()
def renew(directory: Directory, days: Days = 365.0) -> None:
    """Make a new authority and new certificates; the old ones are accepted until `retire`."""
    with errors_in_one_line():
        keys.renew(directory, days)
        typer.echo(
            "copy each ca.crt to its hosts first, then tls.crt and tls.key: running tasks use them "
            "for new connections; then run `replicax keys retire`"
        )


@app.command()
def retire(directory: Directory) -> None:
    """Trust the newest authority only."""
    with errors_in_one_line():
        keys.retire(directory)
        typer.echo("copy each ca.crt to its hosts: they reject older certificates from then on")
