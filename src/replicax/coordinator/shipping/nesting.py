"""Arguments that are nested without end, or too deeply to travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replicax.foundation import errors

# A place with more labels than this is shortened.
_LONGEST_PLACE = 6
# So many values are looked at to find one that contains itself.
_MOST_VALUES = 100_000


def too_deep(value: Any, name: str) -> errors.InvalidArgumentError:
    """Makes the error for a value in which following lists, tuples and dicts has no early end.

    Args:
      value: The value.
      name: What messages call it.

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
        found = f"{_place(name, cycle[0])} is {_place(name, cycle[1])} itself"
        todo = (
            "Pass values that do not contain themselves, or make such objects inside the function."
        )
    return errors.InvalidArgumentError(
        "What is passed to workers must be nested finitely and not deeply", found, todo
    )


def _place(name: str, labels: list[str]) -> str:
    if len(labels) > _LONGEST_PLACE:
        return name + "".join(labels[:_LONGEST_PLACE]) + "…"
    return name + "".join(labels)


def _find_cycle(value: Any) -> tuple[list[str], list[str]] | None:
    """Returns where a container is found again inside itself, and where it was found first."""
    labels: list[str] = []
    # What is being followed, outermost first, by identity; and how many labels led to it.
    depths = {id(value): 0}
    stack = [(id(value), _items(value))]
    for _ in range(_MOST_VALUES):
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


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return ((f"[{key!r}]", item) for key, item in items)
