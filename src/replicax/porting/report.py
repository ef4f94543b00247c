"""What a port comes to: numbers of names and lines, and the report as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from replicax.porting.files import PortedFile
from replicax.porting.findings import Finding
from replicax.porting.names import Kind

VERSION = 1
# The order in which the worst finding of a line or a name counts.
_SEVERITY = (Kind.RUNS, Kind.CHANGES, Kind.OUTSIDE, Kind.REFUSED)


@dataclass(frozen=True)
class Count:
    """How many names or lines there are of each kind.

    Attributes:
      runs: Those that run as they are.
      changes: Those that are rewritten.
      refused: Those that are not offered.
      outside: Those of other packages that need TensorFlow.
    """

    runs: int = 0
    changes: int = 0
    refused: int = 0
    outside: int = 0

    @property
    def total(self) -> int:
        return self.runs + self.changes + self.refused + self.outside

    @property
    def percent(self) -> float:
        """The share that runs or is rewritten; 100 if there is nothing."""
        return 100.0 * (self.runs + self.changes) / self.total if self.total else 100.0


@dataclass(frozen=True)
class Summary:
    """What a port comes to.

    Attributes:
      files: The number of files that were read.
      changed: The number of files that change.
      problems: The number of files or cells that could not be ported.
      names: The distinct names of TensorFlow.
      lines: The lines that use TensorFlow.
    """

    files: int
    changed: int
    problems: int
    names: Count
    lines: Count

    @property
    def runs(self) -> bool:
        """Whether everything runs or is rewritten."""
        bad = self.lines.refused + self.lines.outside + self.problems
        return bad == 0


def summarize(files: Sequence[PortedFile]) -> Summary:
    """Returns the numbers of some files."""
    names: dict[str, Kind] = {}
    lines: dict[object, Kind] = {}
    problems = 0
    for file in files:
        cell_problems = [source.problem for number, source in file.sources if number is not None]
        problems += bool(file.problem) + len([one for one in cell_problems if one])
        for cell, one in findings_of(file):
            place = (file.path, cell, one.line)
            lines[place] = _worse(lines.get(place), one.kind)
            if one.name.startswith("tf."):
                names[one.name] = _worse(names.get(one.name), one.kind)
    changed = sum(file.is_changed for file in files)
    return Summary(len(files), changed, problems, _count(names), _count(lines))


def findings_of(file: PortedFile) -> Iterator[tuple[int | None, Finding]]:
    """Yields the findings of a file, with the cells of a notebook."""
    for cell, source in file.sources:
        for one in source.findings:
            yield cell, one


def to_json(files: Sequence[PortedFile]) -> dict[str, Any]:
    """Returns the report for other programs."""
    summary = summarize(files)
    return {
        "version": VERSION,
        "files": [_file_to_json(file) for file in files],
        "summary": {
            "files": summary.files,
            "changed": summary.changed,
            "problems": summary.problems,
            "runs": summary.runs,
            "names": _count_to_json(summary.names),
            "lines": _count_to_json(summary.lines),
        },
    }


def _file_to_json(file: PortedFile) -> dict[str, Any]:
    problems = [
        {"cell": cell, "problem": source.problem} for cell, source in file.sources if source.problem
    ]
    if file.problem and not problems:
        problems = [{"cell": None, "problem": file.problem}]
    return {
        "path": str(file.path),
        "changed": file.is_changed,
        "written": file.is_written,
        "problems": problems,
        "findings": [
            {
                "cell": cell,
                "line": one.line,
                "column": one.column,
                "kind": str(one.kind),
                "name": one.name,
                "message": one.message,
                "rewritten": bool(one.edits),
            }
            for cell, one in findings_of(file)
        ],
    }


def _count_to_json(count: Count) -> dict[str, Any]:
    kinds = {str(kind): getattr(count, kind) for kind in Kind}
    return {**kinds, "total": count.total, "percent": round(count.percent, 1)}


def _count(kinds: dict[Any, Kind]) -> Count:
    found = list(kinds.values())
    return Count(**{str(kind): found.count(kind) for kind in Kind})


def _worse(one: Kind | None, other: Kind) -> Kind:
    return other if one is None else max(one, other, key=_SEVERITY.index)
