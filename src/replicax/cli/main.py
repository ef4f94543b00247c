"""The command line of replicax."""

from __future__ import annotations

import importlib
from typing import Annotated, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from replicax.protocol.tasks import library_version

# Each command is imported when it is used: `replicax run` waits neither for JAX nor for what only
# other commands need. The name in the module is a function, or the `typer.Typer` of a group.
_COMMANDS = {
    "checkpoint": ("replicax.cli.checkpoint", "app"),
    "demo": ("replicax.cli.demo", "demo"),
    "doctor": ("replicax.cli.doctor", "doctor"),
    "keys": ("replicax.cli.keys", "app"),
    "new": ("replicax.cli.new", "new"),
    "port": ("replicax.cli.port", "port"),
    "run": ("replicax.cli.run", "app"),
    "serve": ("replicax.cli.serve", "serve"),
    "top": ("replicax.cli.top", "top"),
    "trace": ("replicax.cli.trace", "trace"),
}


class _Commands(TyperGroup):
    """The commands, by name."""

    @override
    def list_commands(self, ctx: object) -> list[str]:
        return sorted(_COMMANDS)

    @override
    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | TyperGroup | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name]
        found = getattr(importlib.import_module(module), name)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(cmd_name)(function)
        command = cast("TyperCommand | TyperGroup", typer.main.get_command(found))
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


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
