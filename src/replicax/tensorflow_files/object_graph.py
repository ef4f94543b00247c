"""The object graph of a checkpoint: the objects that were saved, and the names between them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from replicax.foundation import errors
from replicax.tensorflow_files import wire
from replicax.tensorflow_files.tensor_bundle import OBJECT_GRAPH_KEY, TensorBundle

# The attribute of an object under which a variable has its value.
_VALUE = "VARIABLE_VALUE"
_SUFFIX = "/.ATTRIBUTES/"


@dataclasses.dataclass(frozen=True)
class SlotVariable:
    """A variable that an optimizer holds for another one.

    Attributes:
      owner: The node of the other variable.
      name: The name of the slot, such as "m".
      node: The node of the slot variable.
    """

    owner: int
    name: str
    node: int


@dataclasses.dataclass
class Node:
    """An object.

    Attributes:
      children: The nodes of its children, by name.
      keys: The names of its tensors in the checkpoint, by attribute.
      full_name: The name that its variable had in the program, such as "Adam/m/dense/kernel".
      slots: If it is an optimizer, its slot variables.
    """

    children: dict[str, int] = dataclasses.field(default_factory=dict)
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    full_name: str = ""
    slots: list[SlotVariable] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> str | None:
        """The name of its only tensor, such as the value of a variable; None without one."""
        if _VALUE in self.keys:
            return self.keys[_VALUE]
        return next(iter(self.keys.values())) if len(self.keys) == 1 else None


class ObjectGraph:
    """The objects of a checkpoint; the first is the `tf.train.Checkpoint` itself.

    Args:
      data: The serialized TrackableObjectGraph.

    Attributes:
      nodes: The objects.

    Raises:
      WireError: The bytes are not such a graph.
    """

    def __init__(self, data: bytes) -> None:
        self.nodes: list[Node] = [
            _decode_node(wire.as_bytes(value))
            for number, _, value in wire.fields(data)
            if number == 1
        ]
        for node in self.nodes:
            slots = [number for slot in node.slots for number in (slot.owner, slot.node)]
            if any(
                not 0 <= number < len(self.nodes) for number in (*node.children.values(), *slots)
            ):
                raise wire.WireError("the object graph refers to an object that it does not have")

    def child(self, node: int, name: str) -> int | None:
        """Returns a child of a node, or None."""
        return self.nodes[node].children.get(name)

    def walk(self, node: int, path: str) -> int | None:
        """Returns the node at the end of a path of names, or None."""
        found: int | None = node
        for name in path.split("/"):
            found = None if found is None else self.child(found, name)
        return found

    def paths(self) -> dict[str, str]:
        """Returns the names of all tensors by the paths of their objects, the shortest ones."""
        found: dict[str, str] = {}
        seen = {0} if self.nodes else set()
        queue = collections.deque((number, "") for number in seen)
        while queue:
            number, path = queue.popleft()
            node = self.nodes[number]
            for attribute, key in node.keys.items():
                is_only = len(node.keys) == 1 or attribute == _VALUE
                found[path if is_only else f"{path}{_SUFFIX}{attribute}"] = key
            for name, child in node.children.items():
                if child not in seen:
                    seen.add(child)
                    queue.append((child, f"{path}/{name}" if path else name))
        for key in self.slot_keys():
            found.setdefault(object_path(key), key)
        return found

    def slot_key(self, optimizer: int, owner: int, names: Sequence[str]) -> str | None:
        """Returns the name of the tensor of a slot variable; None unless there is exactly one.

        Optimizers of Keras before 2.11 list their slots. Later ones hold lists of variables. Keras
        3 has one for each kind of slot, in the order of the variables. In Keras 2 the names of
        slots contain those of their variables: "Adam/m/dense/kernel".

        Args:
          optimizer: The node of the optimizer.
          owner: The node of the variable that the slot belongs to.
          names: The names that such a slot may have, such as "m" and "momentum".
        """
        slots = self.nodes[optimizer].slots
        found = {slot.node for slot in slots if slot.owner == owner and slot.name in names}
        found = found or self._keras3_slots(optimizer, owner, names)
        found = found or self._keras2_slots(optimizer, owner, names)
        return self.nodes[found.pop()].key if len(found) == 1 else None

    def _keras3_slots(self, optimizer: int, owner: int, names: Sequence[str]) -> set[int]:
        lists = dict(self.nodes[optimizer].children)
        trained = lists.pop("_trainable_variables", None)
        if trained is None:
            return set()
        order = self.nodes[trained].children
        places = [place for place, node in order.items() if node == owner]
        found = {
            self.nodes[node].children[place]
            for node in lists.values()
            for place in places
            if self.nodes[node].children.keys() == order.keys()
        }
        ends = tuple(f"_{name}" for name in names)
        return {node for node in found if self.nodes[node].full_name.endswith(ends)}

    def _keras2_slots(self, optimizer: int, owner: int, names: Sequence[str]) -> set[int]:
        full_name = self.nodes[owner].full_name
        variables = self.child(optimizer, "_variables")
        is_unique = sum(node.full_name == full_name for node in self.nodes) == 1
        if variables is None or not full_name or not is_unique:
            return set()
        wanted = [f"{name}/{full_name}" for name in names]
        children = self.nodes[variables].children.values()
        return {node for node in children if self.nodes[node].full_name.partition("/")[2] in wanted}

    def slot_keys(self) -> list[str]:
        """Returns the names of the tensors of all slot variables."""
        numbers = [slot.node for node in self.nodes for slot in node.slots]
        return [key for number in numbers if (key := self.nodes[number].key) is not None]


def object_path(key: str) -> str:
    """Returns the path of the object that a tensor belongs to.

    >>> object_path("model/dense/kernel/.ATTRIBUTES/VARIABLE_VALUE")
    'model/dense/kernel'
    """
    path, found, attribute = key.rpartition(_SUFFIX)
    return path if found and attribute == _VALUE else key


def graph_of(bundle: TensorBundle) -> ObjectGraph | None:
    """Returns the object graph of a checkpoint; None for one of TensorFlow 1.

    Raises:
      DataLossError: The graph is damaged.
    """
    if OBJECT_GRAPH_KEY not in bundle.entries:
        return None
    data = bundle.read(OBJECT_GRAPH_KEY)
    try:
        return ObjectGraph(wire.as_bytes(data.item()))
    except (wire.WireError, ValueError) as error:
        raise errors.DataLossError(
            f"The object graph of {bundle.prefix} must be readable",
            str(error),
            "Copy the checkpoint again, or read its tensors with `rx.train.load_variable`.",
        ) from error


def _decode_node(data: bytes) -> Node:
    node = Node()
    for number, _, value in wire.fields(data):
        if number not in (1, 2, 3):
            continue
        parts = {part: inner for part, _, inner in wire.fields(wire.as_bytes(value))}
        if number == 1:
            node.children[_text(parts, 2)] = _number(parts, 1)
        elif number == 2:
            node.keys[_text(parts, 1)] = _text(parts, 3)
            node.full_name = node.full_name or _text(parts, 2)
        else:
            slot = SlotVariable(_number(parts, 1), _text(parts, 2), _number(parts, 3))
            node.slots.append(slot)
    return node


def _text(parts: dict[int, wire.Value], number: int) -> str:
    return wire.as_text(parts.get(number, b""))


def _number(parts: dict[int, wire.Value], number: int) -> int:
    return wire.as_signed(parts.get(number, 0))
