"""Notebooks: the code cells are ported as one program; every other byte stays.

Magics (`%time`, `!pip`) are hidden from the parser behind a line of Python of their own, and come
back afterwards. A cell that is not Python is left as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from replicax.porting.findings import PortedSource
from replicax.porting.program import port_text
from replicax.porting.resolution import syntax_error

_SEPARATOR = "# replicax-port-cell-{}\n"
_SEPARATOR_LINE = re.compile(r"^# replicax-port-cell-(\d+)\n", re.MULTILINE)
_HIDDEN = "pass  # replicax-port-magic-{}"
_HIDDEN_LINE = re.compile(r"pass  # replicax-port-magic-(\d+)")
_MAGIC = re.compile(r"^(\s*)([%!?].*|\S.*\?|[\w., ]+=\s*[%!].*)$")
# Cell magics whose body is Python of the same session.
_PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3")


@dataclass
class _Cell:
    """A code cell: its number, its text, and where its source is in the file."""

    number: int
    text: str
    spans: list[tuple[int, int]]
    is_list: bool
    ported: str = ""
    problem: str = ""


def port_notebook(text: str, *, tape: bool = False) -> tuple[str, list[tuple[int, PortedSource]]]:
    """Ports a notebook.

    Args:
      text: The JSON text.
      tape: Whether tapes become `rx.value_and_grad`.

    Returns:
      The ported text, and for each code cell, by its number from 1, what was found.

    Raises:
      ValueError: The text is not a notebook.
    """
    cells = _code_cells(text)
    sources: dict[int, PortedSource] = {}
    session: list[_Cell] = []
    for cell in cells:
        first = cell.text.partition("\n")[0].strip()
        if first.startswith("%%writefile") and first.endswith(".py"):
            # The file is a program of its own.
            head, newline, body = cell.text.partition("\n")
            found = port_text(body, tape=tape)
            cell.ported = head + newline + found.text
            shifted = [replace(one, line=one.line + 1) for one in found.findings]
            sources[cell.number] = PortedSource(cell.ported, shifted, found.problem)
        elif first.startswith("%%") and not first.startswith(_PYTHON_MAGICS):
            cell.ported = cell.text
            sources[cell.number] = PortedSource(cell.text)
        else:
            session.append(cell)
    sources |= _port_session(session, tape)
    # From the end, so that earlier places stay where they are.
    for cell in reversed(cells):
        if cell.ported != cell.text:
            text = _with_source(text, cell)
    return text, sorted(sources.items())


def _port_session(cells: Sequence[_Cell], tape: bool) -> dict[int, PortedSource]:
    """Ports the cells of one session, in which names of earlier cells are known."""
    sources: dict[int, PortedSource] = {}
    hidden: list[str] = []
    parts: list[str] = []
    first_lines: list[tuple[int, _Cell]] = []
    line = 1
    for cell in cells:
        cell.ported = cell.text
        visible = _visible(cell.text, hidden)
        if isinstance(visible, PortedSource):
            sources[cell.number] = visible
            continue
        part = _SEPARATOR.format(cell.number) + visible.rstrip("\n") + "\n"
        first_lines.append((line + 1, cell))
        line += part.count("\n")
        parts.append(part)
    whole = port_text("".join(parts), tape=tape)
    pieces = _SEPARATOR_LINE.split(whole.text)
    texts = {int(n): piece for n, piece in zip(pieces[1::2], pieces[2::2], strict=True)}
    for index, (start, cell) in enumerate(first_lines):
        end = first_lines[index + 1][0] - 1 if index + 1 < len(first_lines) else line + 1
        own = [
            replace(one, line=one.line - start + 1)
            for one in whole.findings
            if start <= one.line < end
        ]
        ending = cell.text[len(cell.text.rstrip("\n")) :]
        shown = _HIDDEN_LINE.sub(lambda found: hidden[int(found[1])], texts[cell.number])
        cell.ported = shown.rstrip("\n") + ending if cell.text.strip("\n") else cell.text
        sources[cell.number] = PortedSource(cell.ported, own, whole.problem)
    return sources


def _visible(text: str, hidden: list[str]) -> str | PortedSource:
    """Returns the text of a cell as Python; or why it is none."""
    error = syntax_error(text)
    if not error:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        found = _MAGIC.match(line)
        if found is None:
            lines.append(line)
            continue
        lines.append(found[1] + _HIDDEN.format(len(hidden)))
        hidden.append(found[2])
    visible = "\n".join(lines)
    error = syntax_error(visible)
    return PortedSource(text, problem=error) if error else visible


def _code_cells(text: str) -> list[_Cell]:
    """Returns the code cells of a notebook with the places of their sources in the text."""
    reader = _Reader(text)
    notebook, spans = reader.read(), reader.spans
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ValueError("there is no list of cells (format 4 is read)")
    found: list[_Cell] = []
    for index, cell in enumerate(cells):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        path = ("cells", index, "source")
        if isinstance(source, str) and path in spans:
            found.append(_Cell(index + 1, source, [spans[path]], is_list=False))
        elif isinstance(source, list) and all(isinstance(line, str) for line in source):
            places = [spans[*path, number] for number in range(len(source))]
            found.append(_Cell(index + 1, "".join(source), places, is_list=True))
    return found


def _with_source(text: str, cell: _Cell) -> str:
    """Returns the text of a notebook with the ported source of a cell."""
    is_ascii = text.isascii() and "\\u" in text

    def encoded(value: str) -> str:
        return json.dumps(value, ensure_ascii=is_ascii)

    if not cell.is_list:
        start, end = cell.spans[0]
        return text[:start] + encoded(cell.ported) + text[end:]
    before, after = cell.text.splitlines(True), cell.ported.splitlines(True)
    if len(before) == len(after) == len(cell.spans):
        for (start, end), old, new in reversed(list(zip(cell.spans, before, after, strict=True))):
            if old != new:
                text = text[:start] + encoded(new) + text[end:]
        return text
    separator = ", "
    if len(cell.spans) > 1:
        separator = text[cell.spans[0][1] : cell.spans[1][0]]
    start, end = cell.spans[0][0], cell.spans[-1][1]
    return text[:start] + separator.join(map(encoded, after)) + text[end:]


class _Reader:
    """Reads JSON, and keeps the place of every string by the path of keys that leads to it."""

    _SPACE = re.compile(r"[ \t\n\r]*")
    _DEPTH = 200

    def __init__(self, text: str) -> None:
        self._text = text
        self._scalar = json.JSONDecoder(strict=False)
        self.spans: dict[tuple[str | int, ...], tuple[int, int]] = {}

    def read(self) -> Any:
        value, end = self._value(self._skip(0), ())
        if self._skip(end) != len(self._text):
            raise ValueError(f"there is more after the end, at character {end}")
        return value

    def _value(self, at: int, path: tuple[str | int, ...]) -> tuple[Any, int]:
        character = self._text[at : at + 1]
        if len(path) > self._DEPTH:
            raise ValueError("it is nested too deeply")
        if character == '"':
            value, end = self._scalar.raw_decode(self._text, at)
            self.spans[path] = (at, end)
            return value, end
        if character == "{":
            return self._items(at, path, "}")
        if character == "[":
            return self._items(at, path, "]")
        return self._scalar.raw_decode(self._text, at)

    def _items(self, at: int, path: tuple[str | int, ...], closing: str) -> tuple[Any, int]:
        items: dict[str | int, Any] = {}
        at = self._skip(at + 1)
        if self._text[at : at + 1] != closing:
            while True:
                key: str | int = len(items)
                if closing == "}":
                    self._expect(at, '"')
                    key, at = self._scalar.raw_decode(self._text, at)
                    at = self._skip(self._expect(self._skip(at), ":"))
                items[key], at = self._value(at, (*path, key))
                at = self._skip(at)
                if self._text[at : at + 1] == closing:
                    break
                at = self._skip(self._expect(at, ","))
        return (items if closing == "}" else list(items.values())), at + 1

    def _expect(self, at: int, character: str) -> int:
        if self._text[at : at + 1] != character:
            raise ValueError(f"{character!r} is expected at character {at}")
        return at + 1

    def _skip(self, at: int) -> int:
        found = self._SPACE.match(self._text, at)
        return found.end() if found else at
