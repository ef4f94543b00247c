"""What was found in a program: a list of findings, some with an edit that ports the place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from replicax.porting.names import Kind


@dataclass(frozen=True, order=True)
class Edit:
    """Replaces bytes of the UTF-8 text of a program.

    Attributes:
      start: The first byte.
      end: The byte after the last one.
      text: What takes their place.
    """

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Finding:
    """What becomes of one place in a program.

    Attributes:
      line: The line, from 1.
      column: The column, from 0.
      kind: Whether it runs.
      name: The name that it is about, such as "tf.keras.Model"; empty for other findings.
      message: What changes, or what to do.
      edits: What ports it; none if it runs, or if a person has to decide.
    """

    line: int
    column: int
    kind: Kind
    name: str
    message: str = ""
    edits: tuple[Edit, ...] = ()


@dataclass
class PortedSource:
    """A program, or a cell of a notebook, after the port.

    Attributes:
      text: The ported text.
      findings: What was found, in the order of the lines of the text before the port.
      problem: Why the text could not be read; empty if it could.
    """

    text: str
    findings: list[Finding] = field(default_factory=list)
    problem: str = ""


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Returns a text with edits applied; of two that overlap, the first one counts.

    >>> apply_edits("a = 1", [Edit(4, 5, "2"), Edit(0, 1, "b")])
    'b = 2'
    """
    data = text.encode()
    pieces: list[bytes] = []
    done = 0
    for edit in sorted(set(edits)):
        if edit.start < done:
            continue
        pieces += [data[done : edit.start], edit.text.encode()]
        done = edit.end
    return b"".join([*pieces, data[done:]]).decode()


def sorted_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Returns findings in the order of their places, each once."""
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda found: (found.line, found.column, found.name))
