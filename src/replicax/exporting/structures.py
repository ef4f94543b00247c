"""Structures of arguments and results as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from replicax.foundation import errors
from replicax.foundation.types import Tree

Described = Any
# Types of keys of mappings. Items are stored as lists, since keys of JSON objects are text.
_KEYS = (str, int)


def describe(tree: Tree, describe_leaf: Callable[[Tree], dict[str, Any]]) -> Described:
    """Describes a structure, and each leaf with `describe_leaf`.

    Named tuples become tuples, and mappings of every class become dicts.

    >>> describe({"x": (1, None)}, lambda leaf: {"leaf": leaf})
    {'dict': [['x', {'tuple': [{'leaf': 1}, None]}]]}
    """
    if tree is None:
        return None
    if isinstance(tree, str):
        return {"constant": tree}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [describe(item, describe_leaf) for item in tree]}
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, _KEYS) or isinstance(key, bool):
                raise errors.ArgumentTypeError(
                    "Keys of exported dicts must be text or whole numbers",
                    f"{key!r} is a {type(key).__name__}",
                    "Use other keys, or a list.",
                )
        return {"dict": [[key, describe(value, describe_leaf)] for key, value in tree.items()]}
    return describe_leaf(tree)


def build(described: Described, make_leaf: Callable[[dict[str, Any]], Any]) -> Any:
    """Builds a described structure, and each leaf with `make_leaf`.

    >>> build({"list": [{"leaf": 0}, None]}, lambda leaf: leaf["leaf"])
    [0, None]
    """
    if described is None:
        return None
    if "constant" in described:
        return described["constant"]
    if "list" in described:
        return [build(item, make_leaf) for item in described["list"]]
    if "tuple" in described:
        return tuple(build(item, make_leaf) for item in described["tuple"])
    if "dict" in described:
        return {key: build(item, make_leaf) for key, item in described["dict"]}
    return make_leaf(described)


def leaves_of(described: Described) -> list[dict[str, Any]]:
    """Returns the descriptions of the leaves, in order."""
    found: list[dict[str, Any]] = []
    build(described, found.append)
    return found


def flatten(described: Described, tree: Tree, where: str) -> list[Tree]:
    """Returns the leaves of a structure; raises if it is not the described one."""
    if described is None or "constant" in described:
        expected = None if described is None else described["constant"]
        if tree is expected or (expected is not None and tree == expected):
            return []
        raise _mismatch(where, repr(expected), tree)
    if "list" in described or "tuple" in described:
        items = described.get("list", described.get("tuple"))
        if not isinstance(tree, list | tuple) or len(tree) != len(items):
            raise _mismatch(where, f"a sequence of length {len(items)}", tree)
        pairs = zip(items, tree, strict=True)
        return [x for i, (d, t) in enumerate(pairs) for x in flatten(d, t, f"{where}[{i}]")]
    if "dict" in described:
        keys = [key for key, _ in described["dict"]]
        if not isinstance(tree, Mapping) or set(tree) != set(keys):
            raise _mismatch(where, f"a dict with keys {keys}", tree)
        return [
            x for key, d in described["dict"] for x in flatten(d, tree[key], f"{where}[{key!r}]")
        ]
    return [tree]


def _mismatch(where: str, wanted: str, found: object) -> errors.StructureError:
    text = f"a dict with keys {list(found)}" if isinstance(found, Mapping) else repr(found)[:80]
    return errors.StructureError(
        f"{where} must be {wanted}", f"it is {text}", "Pass what the model was saved with."
    )
