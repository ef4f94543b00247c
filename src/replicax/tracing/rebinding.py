"""Notices that names which led a trace to variables and functions now lead elsewhere.

A program works on the variables that its trace found. When a notebook cell is run again, or
an attribute is set, the same names mean other variables: the function must be traced again.
The check is part of every call, so it compares identities only, in loops that run in C.
"""

from __future__ import annotations

import operator
import types
from typing import Any

from replicax.tracing.reach import Binding, Reach
from replicax.variables.module import Module, Replacements

# So many objects have their attributes compared in every call; modules are not among them.
_MOST_OBJECTS = 16
# Longer lists hold data.
_MOST_ITEMS = 64


class Bindings:
    """The names that the trace of a function followed, and what they led to."""

    def __init__(self, reach: Reach) -> None:
        self._labels: dict[tuple[int, Any], str] = {}
        self._cells: list[tuple[Any, Any, str]] = []
        self._lists: list[tuple[list[Any], tuple[Any, ...], str]] = []
        dictionaries: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        modules: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        for binding in reach.bindings:
            self._add(binding, dictionaries, modules)
        self._dictionaries = _columns(dictionaries)
        self._modules = _columns(modules)
        self._replacements = Replacements.count

    def _add(self, binding: Binding, dictionaries: Any, modules: Any) -> None:
        owner, name, value = binding.owner, binding.name, binding.value
        if isinstance(owner, types.CellType):
            self._cells.append((owner, value, binding.label))
            return
        if isinstance(owner, list):
            if len(value) <= _MOST_ITEMS:
                self._lists.append((owner, value, binding.label))
            return
        group = modules if isinstance(binding.holder, Module) else dictionaries
        if id(owner) not in group and len(group) == _MOST_OBJECTS and group is dictionaries:
            return
        self._labels[id(owner), name] = binding.label
        group.setdefault(id(owner), (owner, {}))[1][name] = value

    def changed(self) -> str | None:
        """Returns a name that means something else now; None if there is none."""
        same = operator.is_
        for owner, names, values in self._dictionaries:
            if not all(map(same, map(owner.get, names), values)):
                return self._first(owner, names, values)
        for cell, value, label in self._cells:
            try:
                if cell.cell_contents is not value:
                    return label
            except ValueError:
                return label
        for items, values, label in self._lists:
            if len(items) != len(values) or not all(map(same, items, values)):
                return label
        if Replacements.count != self._replacements:
            return self._changed_module()
        return None

    def _changed_module(self) -> str | None:
        now = Replacements.count
        for owner, names, values in self._modules:
            if not all(map(operator.is_, map(owner.get, names), values)):
                return self._first(owner, names, values)
        self._replacements = now
        return None

    def _first(self, owner: Any, names: Any, values: Any) -> str:
        found = zip(names, values, strict=True)
        name = next((name for name, value in found if owner.get(name) is not value), names[0])
        return self._labels[id(owner), name]


def _columns(groups: dict[int, tuple[Any, dict[Any, Any]]]) -> list[tuple[Any, Any, Any]]:
    return [(owner, tuple(found), tuple(found.values())) for owner, found in groups.values()]
