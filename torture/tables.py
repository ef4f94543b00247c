"""The table of a run: on the screen, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

_COLUMNS = ("check", "claim", "measured", "limit", "result", "seconds", "code")
_COLORS = {"pass": "green", "fail": "red", "void": "yellow"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      check: The numbers of the checks.
      claim: The claim.
      measured: What was measured.
      limit: The pass measured.
      result: "pass", "fail", or "void" if the faults did not land.
      seconds: How long it took.
      reasons: Why it did not pass.
      numbers: What was measured, for machines.
      code: The commit that was put to the test.
    """

    check: str
    claim: str
    measured: str
    limit: str
    result: str
    seconds: float
    reasons: tuple[str, ...] = ()
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    code: str = ""

    @property
    def has_passed(self) -> bool:
        """Whether the check passed."""
        return self.result == "pass"


def for_screen(rows: Sequence[Row]) -> Table:
    """Returns the table for a terminal."""
    table = Table(title="Torture")
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in ("check", "seconds") else "left")
    for row in rows:
        color = _COLORS[row.result]
        cells = [*_cells(row)]
        cells[4] = f"[{color}]{row.result}"
        table.add_row(*cells)
    return table


def as_markdown(rows: Sequence[Row], machine: Mapping[str, Any]) -> str:
    """Returns the table as Markdown, with the reasons of checks that did not pass."""
    lines = ["# Torture", "", *(f"- {key}: {value}" for key, value in machine.items()), ""]
    lines.append("| " + " | ".join(_COLUMNS) + " |")
    lines.append("|" + " --- |" * len(_COLUMNS))
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in _cells(row)]
        lines.append("| " + " | ".join(cells) + " |")
    reasons = [f"- check {row.check}: {reason}" for row in rows for reason in row.reasons]
    if reasons:
        lines += ["", "What was found:", "", *reasons]
    return "\n".join(lines) + "\n"


def save(directory: Path, rows: Sequence[Row], machine: Mapping[str, Any]) -> None:
    """Writes `table.md` and `table.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {"machine": dict(machine), "table": [dataclasses.asdict(row) for row in rows]}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (directory / "table.json").write_text(text + "\n")
    (directory / "table.md").write_text(as_markdown(rows, machine))


def load(directory: Path, size: str) -> list[Row]:
    """Returns the rows that `save` wrote, if they are of a run of this size."""
    path = directory / "table.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    return [Row(**row) for row in content["table"]] if content["machine"]["size"] == size else []


def _cells(row: Row) -> tuple[str, ...]:
    seconds = f"{row.seconds:.0f}"
    return (row.check, row.claim, row.measured, row.limit, row.result, seconds, row.code)
