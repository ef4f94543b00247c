"""Merging the structures of all replicas into one, and selecting those of one replica."""

from __future__ import annotations

import collections
import copy
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.values.array_surface import ArraySurface
from replicax.values.distributed_values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    register_components,
)
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import ReplicaLayout

_SCALARS = (int, float, bool, complex, str, bytes, np.generic)
# In the order of their cost: `isinstance` of jax.Array runs Python code.
_ATOMS = (*_SCALARS, np.ndarray, jax.Array)
# Structures of more levels reach Python's limit of nested calls sooner or later.
_MOST_LEVELS = 100
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


def is_leaf(value: object) -> bool:
    """Tells whether a value is carried whole instead of being searched for leaves."""
    return isinstance(value, DistributedValues | IndexedSlices | ArraySurface)


def map_structure(fn: Callable[..., Any], *structures: Tree) -> Tree:
    """Applies `fn` to the leaves of one structure, or of several that match.

    Lists, tuples, named tuples, mappings of any class and registered pytree nodes are
    structure; everything else, distributed values too, is a leaf.

    >>> map_structure(lambda a, b: a + b, {"x": [1, 2]}, {"x": [10, 20]})
    {'x': [11, 22]}
    """
    first = structures[0]
    if is_leaf(first) or first is None or isinstance(first, _ATOMS):
        for other in structures[1:]:
            if isinstance(other, list | tuple | Mapping):
                raise _mismatch(first, other)
        return fn(*structures)
    if isinstance(first, list | tuple):
        return _map_sequence(fn, structures)
    if type(first) in _DICTS:
        return _map_mapping(fn, structures)
    # A registered pytree node takes precedence over a mapping.
    children, treedef = _flatten_once(first)
    if treedef is None:
        is_mapping = isinstance(first, Mapping)
        return _map_mapping(fn, structures) if is_mapping else fn(*structures)
    rest = [_flatten_once(s) for s in structures[1:]]
    for other, (_, other_treedef) in zip(structures[1:], rest, strict=True):
        if other_treedef != treedef:
            raise _mismatch(first, other)
    columns = zip(children, *(c for c, _ in rest), strict=True)
    return jax.tree.unflatten(treedef, [map_structure(fn, *column) for column in columns])


def leaves_of(structure: Tree) -> list[Any]:
    """Returns the leaves of a structure, in order."""
    found: list[Any] = []
    map_structure(found.append, structure)
    return found


def require_finite(what: str, structure: Tree) -> None:
    """Raises if a structure contains itself, or is nested too deeply to be traversed.

    For calls that have failed with a RecursionError; a structure that is neither is left alone.
    """
    level = [structure]
    for _ in range(_MOST_LEVELS):
        # An object that occurs twice in a level has the same items.
        items = {id(item): item for value in level for item in _items_of(value)}
        if not items:
            return
        level = list(items.values())
    raise errors.StructureError(
        f"{what} may be nested at most {_MOST_LEVELS} levels deep",
        "a structure among them is deeper, or contains itself",
        "Pass flat lists or arrays.",
    ) from None


def _items_of(value: object) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()


def regroup(
    values: Sequence[Any],
    layout: ReplicaLayout | None = None,
    wrap: type[PerReplica] | type[Mirrored] = PerReplica,
    own: Callable[[int, Any], Any] | None = None,
) -> Any:
    """Merges one structure per replica into a structure of merged leaves.

    Args:
      values: One structure per replica.
      layout: The replicas.
      wrap: What leaves that differ become.
      own: If given, turns a leaf that differs from the others into its replica's component.
    """
    is_whole = layout is None or not layout.spans_processes
    if len(values) == 1 and is_whole:
        return values[0]

    def merge(*leaves: Tree) -> Tree:
        # Other processes may have other arrays, whatever the local replicas have.
        is_apart = not is_whole and is_concrete_array(leaves[0])
        merged = _DIFFERENT if is_apart else _merge_leaf(leaves)
        if merged is not _DIFFERENT:
            return merged
        if own is not None:
            leaves = tuple(own(i, leaf) for i, leaf in enumerate(leaves))
        result = Mirrored(leaves) if wrap is Mirrored else PerReplica(leaves, layout)
        register_components(result, leaves)
        return result

    return map_structure(merge, *values)


def is_concrete_array(leaf: object) -> bool:
    """Tells whether a leaf has one value per process, not one for the program of all of them."""
    if isinstance(leaf, IndexedSlices):
        return is_concrete_array(leaf.values)
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array and not jax_compat.is_traced(leaf)


def select(replica_id: int, structure: Tree) -> Tree:
    """Replaces each distributed value by its component for one replica."""

    def pick(leaf: Tree) -> Tree:
        # A variable stays whole: it selects its copy when it is read.
        if isinstance(leaf, PerReplica | Mirrored):
            values = leaf.values
            if replica_id >= len(values):
                raise errors.InvalidArgumentError(
                    f"Replica {replica_id} needs a component of its own",
                    f"a distributed value has only {len(values)}",
                    "Make the value under the strategy that uses it.",
                )
            return values[replica_id]
        return leaf

    return map_structure(pick, structure)


def select_mirrored(replica_id: int, structure: Tree) -> Tree:
    """Like `select`, for values that must be equal on all replicas."""

    def pick(leaf: Tree) -> Tree:
        if isinstance(leaf, PerReplica):
            raise errors.ArgumentTypeError(
                "Only values that are equal on all replicas can be used here",
                "a PerReplica value was given",
                "Reduce it first.",
            )
        return leaf.values[replica_id] if isinstance(leaf, Mirrored) else leaf

    return map_structure(pick, structure)


def local_results(value: Tree) -> tuple[Tree, ...]:
    """Returns one structure per replica; a structure without distributed leaves stays one."""
    counts = [len(parts) for parts in map(_components, leaves_of(value)) if parts is not None]
    if not counts:
        return (value,)

    def pick(i: int) -> Tree:
        def one(leaf: Tree) -> Tree:
            parts = _components(leaf)
            return leaf if parts is None else parts[i]

        return map_structure(one, value)

    return tuple(pick(i) for i in range(max(counts)))


def wrap_all(values: list[Tree], layout: ReplicaLayout | None) -> Tree:
    """Merges one structure per replica; every leaf becomes PerReplica, equal ones too."""

    def wrap(*leaves: Tree) -> PerReplica:
        result = PerReplica(leaves, layout)
        register_components(result, leaves)
        return result

    return map_structure(wrap, *values)


def _components(leaf: object) -> tuple[Tree, ...] | None:
    return leaf.values if isinstance(leaf, DistributedValues) else None


_DIFFERENT = object()


def _merge_leaf(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    container = getattr(first, "container", None)
    # The only local replica may return its copy of a variable.
    if (container is None or len(leaves) > 1) and all(leaf is first for leaf in leaves):
        return first
    if container is not None:
        owned = [getattr(leaf, "container", None) is container for leaf in leaves]
        if all(owned) and [leaf.replica_id for leaf in leaves] == list(range(len(leaves))):
            return container
    if len(leaves) == 1:
        return first
    if isinstance(first, _SCALARS) and all(
        type(leaf) is type(first) and leaf == first for leaf in leaves
    ):
        return first
    return _DIFFERENT


def _map_sequence(fn: Callable[..., Any], structures: tuple[Any, ...]) -> Any:
    first = structures[0]
    for other in structures[1:]:
        if type(other) is not type(first) or len(other) != len(first):
            raise _mismatch(first, other)
    items = [map_structure(fn, *column) for column in zip(*structures, strict=True)]
    return sequence_like(first, items)


def sequence_like(example: list[Any] | tuple[Any, ...], items: Sequence[Any]) -> Any:
    """Returns a list or tuple of the class of `example` with other items.

    No `__new__` and no `__init__` of a subclass is called: their arguments need not be the
    items, or not in this order.
    """
    cls = type(example)
    if cls is list or cls is tuple:
        return cls(items)
    if isinstance(example, list):
        result = copy.copy(example)
        result[:] = items
        return result
    if hasattr(example, "_make"):
        return cls._make(items)  # type: ignore[union-attr]
    result = tuple.__new__(cls, items)  # type: ignore[arg-type]
    vars(result).update(vars(example))
    return result


def _map_mapping(fn: Callable[..., Any], structures: tuple[Any, ...]) -> Any:
    first = structures[0]
    for other in structures[1:]:
        if type(other) is not type(first) or set(other) != set(first):
            raise _mismatch(first, other)
    # Leaves are visited in the order of keys, so that equal mappings have equal leaves.
    keys = sorted(first, key=lambda key: (type(key).__name__, str(key)))
    found = {key: map_structure(fn, *(s[key] for s in structures)) for key in keys}
    mapped = {key: found[key] for key in first}
    if type(first) is dict:
        return mapped
    return mapping_like(first, mapped)


def mapping_like(example: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """Returns a mapping of the class of `example`, with what it carries besides its items."""
    try:
        result: Any = _emptied(example) if isinstance(example, dict) else copy.copy(example)
        for key, value in mapped.items():
            result[key] = value
        return result
    except TypeError:
        pass
    try:
        return type(example)(mapped)  # type: ignore[call-arg]
    except TypeError as error:
        raise errors.ArgumentTypeError(
            "A mapping in what replicas return or are given must be writable, or be made "
            "from a dict",
            f"{type(example).__name__} is neither ({error})",
            "Register it with jax.tree_util.register_pytree_node, or return a dict.",
        ) from None


def _emptied(example: dict[Any, Any]) -> dict[Any, Any]:
    """Returns an empty dict of the class of `example`, whose `__init__` is not called."""
    cls = type(example)
    result = cls.__new__(cls)
    if isinstance(example, collections.defaultdict):
        result.default_factory = example.default_factory  # type: ignore[attr-defined]
    for name, value in getattr(example, "__dict__", {}).items():
        object.__setattr__(result, name, value)
    return result


def _flatten_once(value: Tree) -> tuple[list[Any], Any]:
    """Returns the children of a registered pytree node, or ([], None) for a leaf."""
    if hasattr(type(value), "__next__"):
        # An iterator; JAX warns about some of them.
        return [], None
    children, treedef = jax.tree.flatten(value, is_leaf=lambda x: x is not value)
    if len(children) == 1 and children[0] is value:
        return [], None
    return children, treedef


def _mismatch(first: object, other: object) -> errors.StructureError:
    return errors.StructureError(
        "All replicas must return (or pass) the same structure",
        f"one has {_sketch(first)} and another {_sketch(other)}",
        "Make every replica return the same containers, lengths and keys.",
    )


def _sketch(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {sorted(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of length {len(value)}"
    return reprlib.repr(value)
