"""Names of arrays: paths from the object that is saved, which are safe to store and to print."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

_MAX_NAME_CHARS = 4096
# The key under which a safetensors header holds its metadata.
_RESERVED = "__metadata__"


def child_name(parent: str, key: object) -> str:
    """Returns the path of a child; characters with a meaning in paths are escaped.

    >>> child_name("model", "a/b")
    'model/a%2Fb'
    """
    return joined(parent, [str(key)])


def child_path(parent: str, path: str) -> str:
    """Returns the path of an object below another one, given the path from there.

    >>> child_path("optimizer", "0/mu")
    'optimizer/0/mu'
    """
    return joined(parent, path.split("/"))


def joined(parent: str, parts: Sequence[str]) -> str:
    """Returns a path with further parts, each of them escaped."""
    return "/".join(filter(None, [parent, *map(_escaped, parts)]))


def _escaped(part: str) -> str:
    if part in ("", ".", ".."):
        return part.replace(".", "%2E") or "%"
    return "".join(c if c.isprintable() and c not in "%/\\" else quote(c, safe="") for c in part)


def require_name(name: str) -> str:
    """Returns a path unchanged; ValueError if it cannot be stored.

    >>> require_name("model/dense/w")
    'model/dense/w'
    """
    if not 0 < len(name) <= _MAX_NAME_CHARS or name == _RESERVED:
        raise ValueError("a name is empty, reserved, or too long")
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
        raise ValueError(f"the name {name[:80]!r} is not a plain path")
    if not name.isprintable():
        raise ValueError(f"the name {name[:80]!r} has characters that cannot be printed")
    return name
