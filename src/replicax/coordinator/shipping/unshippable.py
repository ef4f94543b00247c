"""Finds the part of a closure that cannot be sent to a worker, and its path, for error messages."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping

from replicax.foundation import errors
from replicax.tracing.function import Function

_MAX_DEPTH = 20
# A path with more labels than this is shortened.
_MAX_LABELS = 6
# The maximum number of values that the search for a cycle visits.
_MAX_VALUES = 100_000


def find_unpicklable(
    root: object, is_picklable: Callable[[object], bool], culprit: object = None
) -> tuple[str, object]:
    """Finds the innermost part of an object that cannot be pickled.

    Args:
      root: The object, which cannot be pickled as a whole.
      is_picklable: Returns whether a part can be pickled.
      culprit: Where to stop, if that is known.

    Returns:
      The path to the part, and the part.
    """
    path: list[str] = []
    seen = {id(root)}
    for _ in range(_MAX_DEPTH):
        if culprit is not None and root is culprit:
            break
        for label, child in children(root):
            if id(child) not in seen and not is_picklable(child):
                path.append(label)
                seen.add(id(child))
                root = child
                break
        else:
            break
    return "".join(path), root


def children(value: object) -> Iterator[tuple[str, object]]:
    """Yields the parts of an object, each with its label in a path."""
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


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
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


def _of_object(value: object) -> Iterator[tuple[str, object]]:
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


def too_deep(value: object, name: str) -> errors.InvalidArgumentError:
    """Returns the error for lists, tuples and dicts that are too deep, or contain themselves.

    Args:
      value: The value.
      name: Its name in messages.

    >>> loop = [1]
    >>> loop.append(loop)
    >>> str(too_deep((loop,), "args"))[:87]
    'What is passed to workers must be nested finitely and not deeply, but args[0][1] is arg'
    """
    cycle = _find_cycle(value)
    if cycle is None:
        found = f"{name} is nested too deeply to be followed"
        todo = "Pass flat lists or arrays, or make deeply nested objects inside the function."
    else:
        found = f"{_path(name, cycle[0])} is {_path(name, cycle[1])} itself"
        todo = (
            "Pass values that do not contain themselves, or make such objects inside the function."
        )
    return errors.InvalidArgumentError(
        "What is passed to workers must be nested finitely and not deeply", found, todo
    )


def _path(name: str, labels: list[str]) -> str:
    if len(labels) > _MAX_LABELS:
        return name + "".join(labels[:_MAX_LABELS]) + "…"
    return name + "".join(labels)


def _find_cycle(value: object) -> tuple[list[str], list[str]] | None:
    """Returns the paths of a container inside itself, and of its first occurrence."""
    labels: list[str] = []
    # The containers on the path, outermost first, by identity; and the lengths of their paths.
    depths = {id(value): 0}
    stack = [(id(value), _items(value))]
    for _ in range(_MAX_VALUES):
        if not stack:
            return None
        label, child = next(stack[-1][1], (None, None))
        if label is None:
            del depths[stack.pop()[0]]
            if labels:
                labels.pop()
        elif id(child) in depths:
            return [*labels, label], labels[: depths[id(child)]]
        elif isinstance(child, list | tuple | dict):
            labels.append(label)
            depths[id(child)] = len(labels)
            stack.append((id(child), _items(child)))
    return None


def _items(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        items = value.items()
    else:
        items = enumerate(value) if isinstance(value, list | tuple) else ()
    return ((f"[{key!r}]", item) for key, item in items)
