"""The names that SEMANTICS lists, in its section 1 and its appendix A, as data.

`semantics_names.json` holds them, for clones without that file. To write it again:

    python tests/support/semantics_names.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SEMANTICS = Path(__file__).parents[3] / "shared" / "SEMANTICS.md"
DATA = Path(__file__).with_suffix(".json")

# A code span that is a name, or a call of it: `Strategy.run(fn, args=())`, `.strategy`.
_NAME = re.compile(r"\.?[A-Za-z_][\w.]*(\(.*\))?")


def extracted(text: str) -> dict[str, Any]:
    """Returns the names of a text.

    Returns:
      `appendix`: a list of (name, kind, rest), where kind is class, enum, alias, method, property,
      function or module, and rest the parameters, members, or the name that an alias is of.
      `tables`: a list of (section, codes), with the names in the first cell of each row of the
      tables of section 1.
    """
    return {"appendix": _appendix(text), "tables": _tables(text)}


def kept() -> dict[str, Any]:
    """Returns the names that are kept beside this module."""
    return json.loads(DATA.read_text())


def _appendix(text: str) -> list[list[Any]]:
    block = text.partition("## Appendix A")[2].partition("```text\n")[2].partition("```")[0]
    found: list[list[Any]] = []
    owner = ""
    for line in block.splitlines():
        if not line.strip():
            continue
        if line.startswith("    "):
            _add_member(found, owner, line.strip())
            continue
        kind, _, rest = line.partition(" ")
        name, equals, target = rest.partition("  = ")
        if kind == "module":
            found.append([name, "module", None])
        elif equals:
            found.append([name, "alias", target])
        elif kind == "def":
            name, _, arguments = name.partition("(")
            found.append([name, "function", parameters(arguments.rpartition(")")[0])])
        else:
            owner, has_arguments, arguments = name.partition("(")
            given = parameters(arguments.rpartition(")")[0]) if has_arguments else None
            found.append([owner, "class", given])
    return found


def _add_member(found: list[list[Any]], owner: str, line: str) -> None:
    if line.startswith("["):
        found.append([owner, "enum", re.findall(r"\('(\w+)',", line)])
    elif line.startswith("."):
        found.append([owner + line, "property", None])
    else:
        name, _, arguments = line.partition("(")
        found.append([f"{owner}.{name}", "method", parameters(arguments.rpartition(")")[0])])


def parameters(text: str) -> list[list[Any]]:
    """Returns (name, whether it has a default) of the parameters of a signature.

    >>> parameters("fn, args: Tuple[int, int] = (), *rest, options=None")
    [['fn', False], ['args', True], ['*rest', False], ['options', True]]
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    found: list[list[Any]] = []
    for part in (p.strip() for p in parts):
        if part:
            name = re.match(r"\**\w+", part)
            assert name is not None, part
            found.append([name.group(), "=" in re.sub(r"\[.*?\]", "", part)])
    return found


def _tables(text: str) -> list[list[Any]]:
    section, found = "", []
    for line in text.partition("## 1. ")[2].partition("## 2. ")[0].splitlines():
        if line.startswith("### "):
            section = line.split()[1]
        elif line.startswith("|") and section:
            cell = re.split(r"(?<!\\)\|", line)[1]
            codes = [c for c in re.findall(r"`([^`]+)`", cell) if _NAME.fullmatch(c)]
            if codes:
                found.append([section, codes])
    return found


if __name__ == "__main__":
    names = extracted(SEMANTICS.read_text())
    lines = {
        key: ",\n  ".join(json.dumps(entry) for entry in entries) for key, entries in names.items()
    }
    body = ",\n".join(f' "{key}": [\n  {entries}\n ]' for key, entries in lines.items())
    DATA.write_text(f"{{\n{body}\n}}\n")
