"""`replicax top`: shows a running job."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from replicax.cli.failures import errors_in_one_line
from replicax.observe import client
from replicax.top import table, terminal, web
from replicax.top.view import Sampler, View

# The seconds between the two looks from which `--once` computes rates.
_ONCE_S = 1.0
# The width of a table that is not printed to a terminal.
_WIDTH = 160

_Job = Annotated[
    str | None,
    typer.Argument(metavar="[JOB]", help="Its name or directory; not needed if one job runs."),
]
_Once = Annotated[bool, typer.Option("--once", help="Print a table, and exit.")]
_Json = Annotated[bool, typer.Option("--json", help="With --once: print JSON.")]
_Web = Annotated[bool, typer.Option("--web", help="Serve a page on the loopback interface.")]
_Port = Annotated[int, typer.Option(help="The port of the page; 0 takes any.")]


def top(
    job: _Job = None,
    once: _Once = False,
    as_json: _Json = False,
    web_: _Web = False,
    port: _Port = 0,
) -> None:
    """Show the tasks of a running job on this host: states, rates, steps, memory, waits.

    Keys: arrows select a task, s shows its stack, k kills it, q quits.
    """
    with errors_in_one_line():
        sampler = Sampler(client.find_job(job))
        if once or as_json:
            _print(_look_twice(sampler), as_json)
        elif web_:
            with web.Server(sampler, port) as server:
                typer.echo(f"The page is at {server.url}")
                typer.echo("The link holds the token of this page. Ctrl-C ends it.")
                server.serve()
        elif sys.stdin.isatty() and sys.stdout.isatty():
            terminal.run(sampler)
        else:
            _print(_look_twice(sampler), as_json=False)


def _look_twice(sampler: Sampler) -> View:
    sampler.sample()
    time.sleep(_ONCE_S)
    return sampler.sample()


def _print(view: View, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(view), indent=2))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table.render(view, width=console.width))
