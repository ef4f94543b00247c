"""Which public names the pages of the reference document, and the directives that do it.

A fenced block `{public-names} replicax.data` becomes the documentation of all public names of that
namespace. Names in the block limit and order it; `rest` in their place stands for the names that
no other page of the namespace lists, so that a new name is documented wherever it is added. A block
`{public-namespaces}` becomes a section for each namespace of `rx` that has no page yet.
"""

from __future__ import annotations

import functools
import importlib
import re
import types
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```\{public-names\} ([\w.]+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_REST = "```{public-namespaces}\n```\n"
_REFERENCE = Path(__file__).parent / "reference"


def expand(text: str) -> str:
    """Returns a page with its blocks of names replaced by directives of autodoc."""
    text = text.replace(_REST, "\n\n".join(_section(path) for path in _namespaces_without_page()))
    return _BLOCK.sub(lambda found: _directives(found[1], found[2].split()), text)


def names_of_pages() -> list[str]:
    """Returns the public path of every name that a page of the reference documents."""
    blocks = [(found[1], found[2].split()) for found in _blocks()]
    blocks += [(path, []) for path in _namespaces_without_page()]
    return [f"{path}.{name}" for path, listed in blocks for name in _names(path, listed)]


def _blocks() -> list[re.Match[str]]:
    texts = [page.read_text() for page in sorted(_REFERENCE.glob("*.md"))]
    return [found for text in texts for found in _BLOCK.finditer(text)]


def _namespaces_without_page() -> list[str]:
    public = importlib.import_module("replicax")
    names = [n for n in public.__all__ if isinstance(getattr(public, n), types.ModuleType)]
    with_page = {found[1] for found in _blocks()}
    return [f"replicax.{n}" for n in sorted(names) if f"replicax.{n}" not in with_page]


def _section(path: str) -> str:
    summary = " ".join((_namespace(path).__doc__ or "").partition("\n\n")[0].split())
    block = f"```{{public-names}} {path}\n```\n"
    return f"## {path.replace('replicax', 'rx', 1)}\n\n{summary}\n\n{block}"


def _namespace(path: str) -> Any:
    """Returns a namespace by its public path, which may lead to a module of another name."""
    parent, _, name = path.rpartition(".")
    if not parent:
        return importlib.import_module(path)
    outer = _namespace(parent)
    return getattr(outer, name) if hasattr(outer, name) else importlib.import_module(path)


def _names(path: str, listed: list[str]) -> list[str]:
    if listed and listed != ["rest"]:
        return listed
    namespace = _namespace(path)
    listed_by_others = _listed_names(path) if listed else set()
    names = sorted(set(namespace.__all__) - listed_by_others, key=lambda name: (name.lower(), name))
    return [n for n in names if not isinstance(getattr(namespace, n), types.ModuleType)]


@functools.cache
def _listed_names(path: str) -> set[str]:
    blocks = [found for found in _blocks() if found[1] == path]
    return {name for block in blocks for name in block[2].split()} - {"rest"}


@functools.cache
def _homes() -> frozenset[str]:
    """Returns the paths under which public names are defined, as `value.__module__` says."""
    return frozenset(names_of_pages())


def _directives(path: str, listed: list[str]) -> str:
    namespace = _namespace(path)
    lines = ["```{eval-rst}", f".. currentmodule:: {path}", ""]
    for name in _names(path, listed):
        value = getattr(namespace, name)
        home = f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', '')}"
        if home != f"{path}.{name}" and home in _homes():
            # Another spelling of a name with an entry of its own.
            lines += [f".. py:attribute:: {name}", "   :no-index-entry:", ""]
            lines += [f"   Another name of `{home}`.", ""]
        elif isinstance(value, type):
            members = [] if issubclass(value, Exception) else ["   :members:"]
            lines += [f".. autoclass:: {name}", *members, ""]
        elif callable(value):
            lines += [f".. autofunction:: {name}", ""]
        else:
            lines += [f".. py:data:: {name}", f"   :value: {value!r}", ""]
    return "\n".join([*lines, "```", ""])
