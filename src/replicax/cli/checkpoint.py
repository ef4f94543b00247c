"""`replicax checkpoint`: shows, verifies and converts checkpoints."""

from __future__ import annotations

import datetime
import enum
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from replicax.bundle.manifest import FILE_NAME
from replicax.checkpointing import orbax_conversion
from replicax.checkpointing.directory import steps_in
from replicax.checkpointing.manifest import ArrayEntry, PlainEntry, SavedCheckpoint
from replicax.cli.failures import errors_in_one_line
from replicax.foundation import errors

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Show, verify and convert checkpoints."
)

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory of checkpoints, or one checkpoint.")
]
Step = Annotated[
    int | None, typer.Option(help="Number of the checkpoint; the newest if not given.")
]


@app.command()
def show(directory: Directory, step: Step = None) -> None:
    """Print the contents of a checkpoint; fail if it is damaged."""
    with errors_in_one_line():
        found = _checkpoints(directory)
        if step is not None and step not in found:
            raise errors.NotFoundError(
                f"{directory} must hold a checkpoint with number {step}",
                f"it holds {', '.join(map(str, found))}",
                "Choose one of these.",
            )
        number = step if step is not None else max(found)
        path = found[number]
        problem = _problem(path)
        with SavedCheckpoint(path) as saved:
            state = "damaged" if problem else "valid"
            lines = [f"checkpoint {path}", f"step {saved.step}", f"saved {_when(saved)}", state]
            if len(found) > 1:
                lines.append(f"steps {' '.join(map(str, found))}")
            typer.echo("\n".join(lines))
            _print_entries(saved)
        if problem:
            raise problem


@app.command()
def verify(directory: Directory) -> None:
    """Read all checkpoints and compare all checksums; fail if one is damaged."""
    with errors_in_one_line():
        problems = {path: _problem(path) for path in _checkpoints(directory).values()}
        for path, problem in problems.items():
            typer.echo(f"{path}: {problem or 'valid'}")
        if any(problems.values()):
            raise typer.Exit(1)


class Format(enum.StrEnum):
    """A format of checkpoints."""

    REPLICAX = "replicax"
    ORBAX = "orbax"


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The checkpoint to read.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The checkpoint to write.")],
    from_: Annotated[Format, typer.Option("--from", help="The format of SRC.")],
    to: Annotated[Format, typer.Option("--to", help="The format of DST.")],
) -> None:
    """Convert a checkpoint to or from Orbax (needs `pip install replicax[orbax]`)."""
    with errors_in_one_line():
        if from_ is to:
            raise errors.InvalidArgumentError(
                "`--from` and `--to` must differ", f"both are {to}", "Copy the directory instead."
            )
        if target.exists():
            raise errors.InvalidArgumentError(
                f"{target} must not exist", "it does", "Choose another directory."
            )
        if to is Format.REPLICAX:
            names = orbax_conversion.from_orbax(source, target)
            typer.echo(f"{target}: {len(names)} objects")
        else:
            left_out = orbax_conversion.to_orbax(source, target)
            typer.echo(f"{target}: written" + "".join(f"\nleft out {name}" for name in left_out))


def _checkpoints(directory: Path) -> dict[int, Path]:
    if (directory / FILE_NAME).exists():
        with SavedCheckpoint(directory) as saved:
            return {saved.step: directory}
    found = steps_in(directory)
    if not found:
        is_there = "holds none" if directory.is_dir() else "does not exist"
        raise errors.NotFoundError(
            f"{directory} must be a checkpoint, or a directory with some",
            f"it {is_there}",
            "Give the directory of a CheckpointManager.",
        )
    return found


def _problem(path: Path) -> errors.CheckpointError | None:
    try:
        with SavedCheckpoint(path) as saved:
            saved.verify()
    except errors.CheckpointError as error:
        return error
    return None


def _when(saved: SavedCheckpoint) -> str:
    moment = datetime.datetime.fromtimestamp(saved.saved_at, datetime.UTC)
    return moment.isoformat(sep=" ", timespec="seconds")


def _print_entries(saved: SavedCheckpoint) -> None:
    rows = [_row(entry) for _, entry in sorted(saved.entries.items())]
    rows += [(alias, f"same as {name}", "", "", "") for alias, name in saved.aliases.items()]
    total = sum(e.nbytes for e in saved.entries.values() if isinstance(e, ArrayEntry))
    heads = ("name", "kind", "shape", "dtype", "bytes")
    if sys.stdout.isatty():
        _print_table(heads, rows)
    else:
        typer.echo("\n".join("\t".join(row) for row in [heads, *rows]))
    typer.echo(f"{len(saved.entries)} entries, {total:,} bytes in arrays")


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for head in heads:
        table.add_column(head, justify="right" if head == "bytes" else "left")
    for row in rows:
        # Names come from files: they are not rich markup.
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    Console().print(table)


def _row(entry: ArrayEntry | PlainEntry) -> tuple[str, str, str, str, str]:
    if isinstance(entry, PlainEntry):
        return entry.name, entry.kind, "", entry.encoded.type, ""
    shape = "x".join(map(str, entry.shape)) or "scalar"
    return entry.name, entry.kind, shape, entry.dtype, str(entry.nbytes)
