"""The programs of README and docs: their code blocks, and what the pages say that they print.

The `python` blocks of a page are one program, in their order; in README.md each is one of its own.
A `text` block right after a `python` block is what the block prints. A comment `<!-- setup` holds
code that a page needs and a reader does not.
"""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_PARTS = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^ *```\n"
    r"|^<!-- setup\n(?P<setup>.*?)^-->\n"
    r"|^```text\n(?P<text>.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)


class Program(NamedTuple):
    """A program of a page, and the lines that it prints, in which `...` stands for anything."""

    source: str
    output: tuple[str, ...]


def pages() -> list[str]:
    """Returns the paths of README and of every page of the docs."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in found]


def programs(page: str) -> list[Program]:
    """Returns the programs of a page."""
    found: list[Program] = []
    end_of_code = -1
    text = (ROOT / page).read_text()
    for part in _PARTS.finditer(text):
        if part["text"] is not None:
            between = text[end_of_code : part.start()]
            is_output = end_of_code >= 0 and re.fullmatch(r"\s*(It prints:?)?\s*", between)
            if is_output:
                source, output = found[-1]
                found[-1] = Program(source, (*output, *part["text"].splitlines()))
            continue
        code = part["setup"] or re.sub(rf"(?m)^{part['indent']}", "", part["code"])
        end_of_code = part.end()
        if found and page != "README.md":
            found[-1] = Program(f"{found[-1].source}\n{code}", found[-1].output)
        else:
            found.append(Program(code, ()))
    return found


def run(program: Program, directory: Path) -> str:
    """Runs a program as a user does; returns what it printed. Paths in /tmp go to `directory`."""
    path = directory / "program.py"
    path.write_text(program.source.replace("/tmp/", f"{directory}/"))
    without = ("NPROC", "KERAS_BACKEND", "XLA_FLAGS")  # what the suite has set
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=directory,
        env={k: v for k, v in os.environ.items() if k not in without},
        check=False,
        timeout=250,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def check(program: Program, printed: str) -> None:
    """Asserts that the lines which the page shows were printed, in their order."""
    lines = iter(printed.splitlines())
    for expected in program.output:
        pattern = re.sub(r"([\[\]?*])", r"[\1]", expected).replace("...", "*")
        assert any(fnmatch.fnmatchcase(line, pattern) for line in lines), (
            f"not printed, or not in this order: {expected!r}\n{printed}"
        )
