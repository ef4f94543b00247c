"""Writes names.md, the list of all public names, from their docstrings.

Run `python docs/reference/write_names.py` after a public name or its first line changed.
"""

from __future__ import annotations

import importlib
import inspect
import types
from pathlib import Path
from typing import Any

import replicax as rx

PAGE = Path(__file__).parent / "names.md"
_HEAD = """# Every public name

One line each, by namespace; `help(rx.Variable)` shows the rest. [By topic](api.md) lists methods
as well, and [what is public](public.md) says how stable it is. `write_names.py` writes this page.
"""
# Constants have no docstring of their own.
_CONSTANTS = {
    "AUTOTUNE": "Lets `map` and `prefetch` choose a number.",
    "INFINITE_CARDINALITY": "What `cardinality` returns for a dataset without an end.",
    "UNKNOWN_CARDINALITY": "What `cardinality` returns for a dataset that has to be counted.",
}


# Namespaces that only lead to others, and these.
_DEEPER = {
    "compat": ["compat.v1.distribute", "compat.v1.distribute.experimental"],
    "contrib": ["contrib.distribute"],
}


def page() -> str:
    """Returns the text of the page."""
    parts = [_HEAD, _section("rx", rx)]
    for name in sorted([*rx.__all__, *rx._LAZY]):
        if isinstance(getattr(rx, name), types.ModuleType):
            for path in _DEEPER.get(name, [name]):
                namespace = importlib.import_module(f"replicax.{path}")
                parts.append(_section(f"rx.{path}", namespace))
    return "\n".join(parts)


def _section(path: str, namespace: types.ModuleType) -> str:
    names = sorted(namespace.__all__, key=lambda name: (name.lower(), name))
    rows = [f"| `{name}` | {_line(name, getattr(namespace, name))} |" for name in names]
    return "\n".join(
        [f"## {path}\n", _first_line(namespace), "", "| name | |", "|---|---|", *rows, ""]
    )


def _line(name: str, value: Any) -> str:
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if isinstance(value, type) and value.__name__ != name:
        return f"Another name of `{value.__name__}`."
    if isinstance(value, type) and issubclass(value, Exception):
        also = next(base.__name__ for base in value.__mro__ if base.__module__ == "builtins")
        return f"{_first_line(value)} A Python `{also}`."
    return _first_line(value)


def _first_line(value: Any) -> str:
    """Returns the first sentence or line of a docstring, as one line."""
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
