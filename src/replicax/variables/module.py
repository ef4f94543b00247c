"""`Module`: an object that finds the variables among its attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replicax.values import printing
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable


class Replacements:
    """Counts replacements of attributes: compiled functions then look attributes up again."""

    count = 0


class Module:
    """Base for models: collects variables from attributes, lists, dicts and submodules.

    >>> import replicax as rx
    >>> class Dense(rx.Module):
    ...     def __init__(self):
    ...         super().__init__(name="dense")
    ...         self.w = rx.Variable([1.0, 2.0], name="w")
    >>> [v.name for v in Dense().trainable_variables]
    ['w']
    """

    # Called with name and value of every attribute that is set: restored checkpoints use it for
    # variables that were created after the restore.
    on_new_child: Callable[[str, Any], None] | None = None

    def __init__(self, name: str | None = None) -> None:
        self._name = name or _snake_case(type(self).__name__)

    def __setattr__(self, name: str, value: object) -> None:
        is_replaced = name in self.__dict__
        object.__setattr__(self, name, value)
        if is_replaced and not isinstance(value, bool | int | float | str):
            Replacements.count += 1
        if self.on_new_child is not None and name != "on_new_child":
            self.on_new_child(name, value)

    def __repr__(self) -> str:
        names = [variable.name for variable in self.variables]
        shown = f": {printing.listing(names)}" if names else ""
        count = printing.count(len(names), "variable")
        return f"<{type(self).__qualname__} {self.name!r}, {count}{shown}>"

    @property
    def name(self) -> str:
        """The name of the module."""
        return getattr(self, "_name", _snake_case(type(self).__name__))

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables, each once, in the order of attribute names."""
        return tuple(_unique(_walk(self, Variable, set())))

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables that optimizers change."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def non_trainable_variables(self) -> tuple[Variable, ...]:
        """The variables that optimizers leave alone."""
        return tuple(v for v in self.variables if not v.trainable)

    @property
    def submodules(self) -> tuple[Module, ...]:
        """All modules below this one."""
        return tuple(m for m in _unique(_walk(self, Module, set())) if m is not self)


def _walk(value: object, kind: type, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, ShardedVariable) and kind is Variable:
        yield from value.variables
    elif isinstance(value, kind):
        yield value
    if isinstance(value, Variable) or id(value) in seen:
        return
    children: list[Any] = []
    if isinstance(value, Module):
        children = [v for _, v in sorted(vars(value).items())]
    elif isinstance(value, Mapping):
        children = [value[key] for key in sorted(value, key=str)]
    elif isinstance(value, list | tuple | set):
        children = list(value)
    if children:
        seen.add(id(value))
    for child in children:
        yield from _walk(child, kind, seen)


def _unique(values: Iterator[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    for value in values:
        found.setdefault(id(value), value)
    return list(found.values())


def _snake_case(name: str) -> str:
    pieces = ["_" + c.lower() if c.isupper() else c for c in name]
    return "".join(pieces).lstrip("_")
