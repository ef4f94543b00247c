"""What functions and objects hold, by name: where in a closure something lies."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replicax.tracing.function import Function

_DEEPEST = 20


def locate(root: Any, travels: Callable[[Any], bool], culprit: Any = None) -> tuple[str, Any]:
    """Follows what cannot travel down to where it lies.

    Args:
      root: What cannot travel as a whole.
      travels: Tells whether a part of it can.
      culprit: Where to stop, if that is known.

    Returns:
      The names that lead to the innermost part that cannot, and that part.
    """
    path: list[str] = []
    seen = {id(root)}
    for _ in range(_DEEPEST):
        if culprit is not None and root is culprit:
            break
        for label, child in children(root):
            if id(child) not in seen and not travels(child):
                path.append(label)
                seen.add(id(child))
                root = child
                break
        else:
            break
    return "".join(path), root


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object holds, each with the words that lead to it."""
    if isinstance(value, Function):
        yield from children(value.python_function)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield " → self", value.__self__
        yield f" → {value.__func__.__name__}", value.__func__
    elif isinstance(value, functools.partial):
        yield " → func", value.func
        yield from ((f" → args[{i}]", item) for i, item in enumerate(value.args))
        yield from ((f" → {name}=", item) for name, item in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from (("{…}", item) for item in list(value))
    elif not isinstance(value, types.ModuleType):
        yield from _of_object(value)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield f" → captured {name!r}", cell.cell_contents
        except ValueError:  # Not assigned yet.
            continue
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield f" → global {name!r}", function.__globals__[name]
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield " → a default argument", default


def _global_names(code: types.CodeType) -> set[str]:
    inner = [_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    attributes = getattr(value, "__dict__", {})
    yield from ((f".{name}", item) for name, item in list(attributes.items()))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name in ("__dict__", "__weakref__"):
                continue
            try:
                yield f".{name}", getattr(value, name)
            except AttributeError:
                continue
