"""The object graph: the values below named objects that a checkpoint saves, and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from replicax.bundle.names import child_name, child_path, joined
from replicax.checkpointing import plain
from replicax.checkpointing.slots import (
    ArraySlot,
    ForeignVariableSlot,
    HasArray,
    HasState,
    KeySlot,
    Setter,
    Slot,
    StateSlot,
    ValueSlot,
    VariableSlot,
)
from replicax.foundation import errors
from replicax.foundation.peers import Peers
from replicax.foundation.types import Tree
from replicax.variables.module import Module
from replicax.variables.variable import Variable

# Attributes of `Module` that are not its state.
NOT_STATE = ("_name", "on_new_child")


class _Growing(Protocol):
    """An object that reports new children."""

    on_new_child: Callable[[str, object], None] | None


class _HasChildren(Protocol):
    """An object that lists its parts for checkpoints."""

    def checkpoint_children(self) -> Mapping[str, object]: ...


class _HasOwnVariable(Protocol):
    """A variable of another library, whose value a variable of a strategy holds."""

    @property
    def replicax_variable(self) -> Variable | None: ...


class Graph:
    """The values below named objects.

    Attributes:
      slots: Everything that can be saved, by name; each variable once.
      aliases: Further paths of objects that are saved under another name.
      roots: The objects of the Checkpoint itself, by name.
      growing: Objects that report new children (`on_new_child`), by path.
      peers: The processes that save and restore these objects together; None if this one does
        alone.
    """

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.aliases: dict[str, str] = {}
        self.roots: dict[str, object] = {}
        self.growing: dict[str, _Growing] = {}
        self.peers: Peers | None = None
        # Rebuild immutable structures around restored leaves; inner ones come first.
        self._rebuilders: list[Callable[[], None]] = []
        self._first_paths: dict[int, str] = {}
        # Keeps the objects alive whose ids are in `_first_paths`.
        self._seen: list[object] = []

    def add(self, name: str, value: object, put: Setter) -> bool:
        """Adds an object and all below it; returns False if it cannot be saved."""
        value = own_variable(value)
        if isinstance(value, Variable) or _has_array(value):
            self._add_variable(name, value, put)
        elif has_children(value):
            self._add_own_children(name, value)
        elif isinstance(value, Module):
            self._add_children(name, value, list(vars(value).items()), value.__dict__.__setitem__)
        elif _has_state(value):
            self.peers = self.peers or getattr(value, "peers", None)
            self._add_once(StateSlot(name, value, put))
        elif isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            self._add_slot(KeySlot(name, value, put))
        elif isinstance(value, plain.PLAIN_TYPES) and not isinstance(value, np.generic):
            self._add_slot(ValueSlot(name, value, put))
        elif isinstance(value, jax.Array | np.ndarray | np.generic):
            self._add_slot(ArraySlot(name, value, put))
        elif type(value) is dict or type(value) is list:
            keyed = value.items() if isinstance(value, dict) else enumerate(value)
            self._add_children(name, value, list(keyed), value.__setitem__)
        elif not jax.tree_util.all_leaves([value]):
            self._add_pytree(name, value, put)
        else:
            return _is_without_state(value)
        return True

    def _add_variable(self, name: str, value: Variable | HasArray, put: Setter) -> None:
        if isinstance(value, Variable):
            self.peers = self.peers or _peers_of(value)
            value = getattr(value, "container", value)
            self._add_once(VariableSlot(name, value, put))
        else:
            self._add_once(ForeignVariableSlot(name, value, put))

    def paths_of(self, name: str) -> list[str]:
        """Returns all paths of an object, beginning with `name`."""
        found = [name]
        for alias, first in self.aliases.items():
            if name == first or name.startswith(f"{first}/"):
                found.append(alias + name[len(first) :])
        return found

    def path_of(self, value: object) -> str | None:
        """Returns the first path of a variable, or of an object with children; None for others."""
        if isinstance(value, Variable):
            value = getattr(value, "container", value)
        return self._first_paths.get(id(value))

    def rebuild(self) -> None:
        """Rebuilds the immutable structures whose leaves were restored."""
        for rebuilder in reversed(self._rebuilders):
            rebuilder()

    def _add_slot(self, slot: Slot) -> None:
        if slot.name in self.slots:
            raise errors.InvalidArgumentError(
                "Every object in a checkpoint needs a name of its own",
                f"two are named {slot.name!r}",
                "Use keys that differ as text.",
            )
        self.slots[slot.name] = slot

    def _is_known(self, name: str, value: object) -> bool:
        first = self._first_paths.setdefault(id(value), name)
        if first == name:
            self._seen.append(value)
            return False
        self.aliases[name] = first
        return True

    def _add_once(self, slot: Slot) -> None:
        if not self._is_known(slot.name, slot.target):
            self._add_slot(slot)

    def _enter(self, name: str, value: object) -> bool:
        """Returns whether an object with children is found for the first time."""
        if self._is_known(name, value):
            return False
        if _is_growing(value):
            self.growing[name] = value
        return True

    def _add_children(
        self,
        name: str,
        value: object,
        children: Iterable[tuple[Any, object]],
        put: Callable[[Any, Any], None],
    ) -> None:
        if not self._enter(name, value):
            return
        for key, child in children:
            if not (isinstance(value, Module) and key in NOT_STATE):
                self.add(child_name(name, key), child, lambda new, key=key: put(key, new))

    def _add_own_children(self, name: str, value: _HasChildren) -> None:
        """Adds the parts that an object lists; their names may be paths."""
        if not self._enter(name, value):
            return
        for path, child in value.checkpoint_children().items():
            full = child_path(name, path)
            self.add(full, child, lambda new, path=path: setattr(value, path, new))

    def _add_pytree(self, name: str, value: Tree, put: Setter) -> None:
        found, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_object)
        leaves = [leaf for _, leaf in found]
        changed: list[int] = []

        def put_leaf(index: int, new: object) -> None:
            leaves[index] = new
            changed.append(index)

        def rebuild() -> None:
            if changed:
                put(jax.tree_util.tree_unflatten(treedef, leaves))

        self._rebuilders.append(rebuild)
        for index, (path, leaf) in enumerate(found):
            parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
            self.add(joined(name, parts), leaf, lambda new, index=index: put_leaf(index, new))


def _peers_of(variable: Variable) -> Peers | None:
    layout = None if variable.owner is None else variable.owner.layout
    return None if layout is None else layout.peers


def _is_object(value: object) -> bool:
    """Returns whether a part of a pytree is added as an object of its own."""
    is_own = isinstance(value, Variable | Module) or _has_state(value)
    return is_own or hasattr(type(value), "checkpoint_children")


def has_children(value: object) -> TypeGuard[_HasChildren]:
    """Returns whether an object lists its parts for checkpoints."""
    return not isinstance(value, type) and callable(getattr(value, "checkpoint_children", None))


def own_variable(value: object) -> object:
    """Returns the variable that holds the value of one of another library, if there is one."""
    return value.replicax_variable if _has_own_variable(value) else value


def _has_own_variable(value: object) -> TypeGuard[_HasOwnVariable]:
    return hasattr(type(value), "replicax_variable")


def _has_array(value: object) -> TypeGuard[HasArray]:
    return hasattr(type(value), "checkpoint_array")


def _is_growing(value: object) -> TypeGuard[_Growing]:
    return hasattr(value, "on_new_child")


def _has_state(value: object) -> TypeGuard[HasState]:
    methods = (getattr(value, name, None) for name in ("get_state", "set_state"))
    return not isinstance(value, type) and all(map(callable, methods))


def _is_without_state(value: object) -> bool:
    """Returns whether there is nothing to save: functions, classes, strategies, empty trees."""
    is_strategy = hasattr(value, "extended") and hasattr(value, "scope")
    return callable(value) or is_strategy or not jax.tree_util.tree_leaves(value)
