"""`replicax port`: reports how a TensorFlow program runs here, and rewrites it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from replicax.cli.failures import errors_in_one_line
from replicax.porting import files, report
from replicax.porting.files import PortedFile
from replicax.porting.findings import Finding
from replicax.porting.names import Kind

# The exit code if something does not run, and for wrong arguments.
_NOT_ALL_RUNS = 1
_USAGE = 2

_STYLES = {
    Kind.RUNS: "green",
    Kind.CHANGES: "cyan",
    Kind.OUTSIDE: "magenta",
    Kind.REFUSED: "bold red",
}

_Paths = Annotated[
    list[Path], typer.Argument(metavar="FILE.py|FILE.ipynb|DIR", help="What to port.")
]
_Write = Annotated[bool, typer.Option("--write", help="Write the changes into the files.")]
_Tape = Annotated[
    bool, typer.Option("--tape", help="Rewrite GradientTape as rx.value_and_grad where possible.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
_Brief = Annotated[bool, typer.Option("--brief", help="Leave out lines that run as they are.")]


def port(
    paths: _Paths,
    write: _Write = False,
    tape: _Tape = False,
    as_json: _Json = False,
    brief: _Brief = False,
) -> None:
    """Report what runs of a TensorFlow program, what changes, and what to do about the rest.

    Exits with 0 if all runs or is rewritten, and with 1 if something is refused.
    """
    with errors_in_one_line(_USAGE):
        found = dict.fromkeys(path for given in paths for path in files.find_files(given))
        ported = [files.port_file(path, tape=tape, write=write) for path in found]
    if as_json:
        typer.echo(json.dumps(report.to_json(ported), indent=2))
    else:
        _print(ported, brief)
    if not report.summarize(ported).runs:
        raise typer.Exit(_NOT_ALL_RUNS)


def _print(ported: Sequence[PortedFile], brief: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    is_terminal = sys.stdout.isatty()
    for file in ported:
        if not file.problem and not list(report.findings_of(file)):
            continue
        console.print(Text(str(file.path), style="bold"))
        _print_problems(console, file)
        for text in _lines(file, brief):
            console.print(text)
        if file.is_written:
            console.print(Text("  written", style="green"))
        if is_terminal:
            console.print()
    _print_summary(console, ported)


def _print_problems(console: Console, file: PortedFile) -> None:
    cells = [(cell, one.problem) for cell, one in file.sources if cell is not None and one.problem]
    for cell, problem in cells:
        console.print(Text(f"  cell {cell}: left as it is, {problem}", style="yellow"))
    if file.problem:
        console.print(Text(f"  left as it is, {file.problem}", style="yellow"))


def _lines(file: PortedFile, brief: bool) -> list[Text]:
    """Returns one text for each message; names that run share the one of their line."""
    texts: list[Text] = []
    running: dict[tuple[int | None, int], list[str]] = {}
    by_place: dict[tuple[int | None, int], list[Finding]] = {}
    for cell, one in report.findings_of(file):
        by_place.setdefault((cell, one.line), []).append(one)
    for place, found in by_place.items():
        for one in found:
            if one.kind is Kind.RUNS and not one.message:
                running.setdefault(place, []).append(one.name)
        names = list(dict.fromkeys(running.get(place, [])))
        if names and not brief:
            texts.append(_line(place, Kind.RUNS, ", ".join(names)))
        for one in found:
            if one.message:
                message = one.message
                if one.kind in (Kind.REFUSED, Kind.OUTSIDE):
                    message = message if message.endswith("?") else f"{message}."
                    message = f"{one.name}: {message}" if one.name else message
                elif one.kind is Kind.RUNS:
                    message = f"{one.name}: {message}"
                texts.append(_line(place, one.kind, message))
    return texts


def _line(place: tuple[int | None, int], kind: Kind, message: str) -> Text:
    cell, line = place
    where = f"{line}" if cell is None else f"{cell}:{line}"
    text = Text(f"  {where:>6}  ")
    text.append(f"{kind:<8}", style=_STYLES[kind])
    text.append(message)
    return text


def _print_summary(console: Console, ported: Sequence[PortedFile]) -> None:
    summary = report.summarize(ported)
    names, lines = summary.names, summary.lines
    style = "green" if summary.runs else "yellow"
    text = Text()
    text.append(f"{names.percent:.1f} %", style=f"bold {style}")
    text.append(
        f" of {names.total} names run ({names.runs} as they are, {names.changes} rewritten), "
        f"{lines.percent:.1f} % of {lines.total} lines"
    )
    console.print(text)
    refused, outside = lines.refused, lines.outside
    parts = [
        _number(summary.files, "file"),
        f"{summary.changed} {_verb(summary.changed, 'change')}",
    ]
    parts += [f"{_number(refused, 'line')} refused"] if refused else []
    if outside:
        other = "another package" if outside == 1 else "other packages"
        parts.append(f"{_number(outside, 'line')} {_verb(outside, 'need')} {other}")
    parts += [f"{summary.problems} not readable"] if summary.problems else []
    console.print(Text(", ".join(parts)))


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _verb(count: int, verb: str) -> str:
    return f"{verb}s" if count == 1 else verb
