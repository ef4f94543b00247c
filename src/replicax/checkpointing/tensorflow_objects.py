"""Finds the objects of a program in the object graph of a TensorFlow checkpoint.

Both graphs are walked together, from the Checkpoint down, along names that they share, as
TensorFlow itself restores: attributes, list indices, keys. An object whose parts had other names
there lists them in `tensorflow_children`. An optimizer lists its slot variables in
`tensorflow_slots`; there they belong to pairs of an optimizer and a variable.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias, TypeGuard

import jax

from replicax.bundle.names import child_name, joined
from replicax.checkpointing.graph import NOT_STATE, Graph, has_children, own_variable
from replicax.tensorflow_files.object_graph import ObjectGraph
from replicax.variables.module import Module

# A slot variable, the variable that it belongs to, and the names that such slots have.
SlotVariable: TypeAlias = tuple[object, object, Sequence[str]]


class _HasTensorFlowChildren(Protocol):
    """An object whose parts have other names in TensorFlow.

    The argument has the names of the children of the object there. A name may be a path.
    """

    def tensorflow_children(self, names: Sequence[str]) -> Iterable[tuple[str, object]]: ...


class _HasTensorFlowSlots(Protocol):
    """An optimizer.

    `tensorflow_trained` returns the variables that it trains if TensorFlow lists them in the same
    order, otherwise none.
    """

    def tensorflow_slots(self) -> Iterable[SlotVariable]: ...
    def tensorflow_trained(self) -> Sequence[object]: ...


def match(own: Graph, theirs: ObjectGraph) -> tuple[dict[str, str], frozenset[str]]:
    """Returns the names of tensors, by the names of the slots of the program.

    The second result has the names of the slots that TensorFlow does not save.
    """
    done = _Match(own, theirs)
    return done.found, done.unsaved()


class _Match:
    """One walk through both graphs.

    Attributes:
      found: The names of tensors, by the names of slots.
    """

    def __init__(self, own: Graph, theirs: ObjectGraph) -> None:
        self.found: dict[str, str] = {}
        self._own, self._theirs = own, theirs
        # The nodes of objects that were found, by their paths in the program.
        self._nodes: dict[str, int] = {}
        self._optimizers: list[tuple[_HasTensorFlowSlots, int]] = []
        # Slots by name, other objects by id.
        self._seen: set[tuple[str | int, int]] = set()
        # The paths of objects that TensorFlow never saves.
        self._unsaved: list[str] = []
        if not theirs.nodes:
            return
        self._walk()
        for optimizer, node in self._optimizers:
            self._add_trained(optimizer, node)
            self._add_slots(optimizer, node)

    def _walk(self) -> None:
        queue = collections.deque(self._roots())
        while queue:
            path, value, node = queue.popleft()
            value = own_variable(value)
            path = self._own.path_of(value) or path
            visit = (path if path in self._own.slots else id(value), node)
            if visit in self._seen:
                continue
            self._seen.add(visit)
            self._nodes.setdefault(path, node)
            if path in self._own.slots:
                self._add(path, node)
                continue
            unsaved = getattr(type(value), "tensorflow_unsaved", ())
            self._unsaved += [joined(path, [name]) for name in unsaved]
            if _has_slots(value):
                self._optimizers.append((value, node))
            names = list(self._theirs.nodes[node].children)
            for parts, child in _children(value, names):
                found = self._step(node, parts)
                if found is not None:
                    queue.append((joined(path, parts), child, found))

    def unsaved(self) -> frozenset[str]:
        """Returns the names of the slots of objects that TensorFlow never saves."""
        below = tuple(f"{path}/" for path in self._unsaved)
        return frozenset(name for name in self._own.slots if name.startswith(below))

    def _roots(self) -> Iterator[tuple[str, object, int]]:
        roots = self._own.roots
        root = self._theirs.nodes[0]
        for name, value in roots.items():
            if name in root.children:
                yield child_name("", name), value, root.children[name]
            elif len(roots) == 1:
                # What `model.save_weights` wrote, or a SavedModel: the model itself is the root.
                yield child_name("", name), value, 0
        if "save_counter" in root.children:
            yield "save_counter", None, root.children["save_counter"]

    def _step(self, node: int, parts: Sequence[str]) -> int | None:
        """Follows names; one that is private on one side only is the same."""
        found: int | None = node
        for name in parts:
            if found is None:
                return None
            spellings = (name, f"_{name}", name.removeprefix("_"))
            children = (self._theirs.child(found, spelling) for spelling in spellings)
            found = next((child for child in children if child is not None), None)
        return found

    def _add(self, path: str, node: int) -> None:
        key = self._theirs.nodes[node].key
        if key is not None:
            self.found.setdefault(path, key)

    def _add_trained(self, optimizer: _HasTensorFlowSlots, node: int) -> None:
        """Adds variables that are reachable through their optimizer only.

        TensorFlow does not see layers in lists of Keras 3 models, but saves what the optimizer has.
        """
        trained = optimizer.tensorflow_trained()
        listed = self._theirs.child(node, "_trainable_variables")
        children = {} if listed is None else self._theirs.nodes[listed].children
        if len(children) != len(trained):
            return
        for index, variable in enumerate(trained):
            path, found = self._own.path_of(own_variable(variable)), children.get(str(index))
            if path is not None and path not in self._nodes and found is not None:
                self._nodes[path] = found
                self._add(path, found)

    def _add_slots(self, optimizer: _HasTensorFlowSlots, node: int) -> None:
        """Adds the slots of an optimizer: for each variable all of them, or none."""
        by_owner: dict[str, dict[str, str | None]] = {}
        for variable, owner, names in optimizer.tensorflow_slots():
            path = self._own.path_of(own_variable(variable))
            owner_path = self._own.path_of(own_variable(owner))
            if path is None or owner_path is None or owner_path not in self._nodes:
                continue
            key = self._theirs.slot_key(node, self._nodes[owner_path], names)
            by_owner.setdefault(owner_path, {})[path] = key
        for slots in by_owner.values():
            if None not in slots.values():
                self.found.update({path: key for path, key in slots.items() if key is not None})


def _children(value: object, names: Sequence[str]) -> Iterable[tuple[Sequence[str], object]]:
    """Returns the children of an object, by their names; a name may have several parts."""
    if _has_tensorflow_children(value):
        return [(path.split("/"), child) for path, child in value.tensorflow_children(names)]
    if has_children(value):
        return [(path.split("/"), child) for path, child in value.checkpoint_children().items()]
    if isinstance(value, Module):
        return [([name], child) for name, child in vars(value).items() if name not in NOT_STATE]
    if isinstance(value, dict):
        return [([str(key)], child) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [([str(index)], child) for index, child in enumerate(value)]
    if value is None or jax.tree_util.all_leaves([value]):
        return []
    found, _ = jax.tree_util.tree_flatten_with_path(value)
    return [
        ([jax.tree_util.keystr((key,), simple=True) for key in keys], child)
        for keys, child in found
    ]


def _has_tensorflow_children(value: object) -> TypeGuard[_HasTensorFlowChildren]:
    return hasattr(type(value), "tensorflow_children")


def _has_slots(value: object) -> TypeGuard[_HasTensorFlowSlots]:
    return hasattr(type(value), "tensorflow_slots")
