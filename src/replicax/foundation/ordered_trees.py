"""Trees as `jax.tree` has them, whose dicts keep the order of their keys.

JAX sorts the keys of a dict, and builds the dicts of its results in that order. Leaves stay with
their keys, but programs also depend on the order: `list(features.values())` in a function of a
dataset is in the order in which the program made the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from typing_extensions import override

from replicax.foundation.types import Tree

IsLeaf: TypeAlias = Callable[[Any], bool] | None


class Structure:
    """The structure of a tree without its leaves; equal to others with the same keys in any order.

    Args:
      tree: The tree.
      is_leaf: Tells what is a leaf, as for `jax.tree.structure`.
    """

    __slots__ = ("_order", "_treedef")

    def __init__(self, tree: Tree, is_leaf: IsLeaf = None) -> None:
        self._treedef = jax.tree.structure(tree, is_leaf=is_leaf)
        self._order = _order_of(tree, is_leaf)

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        return self._treedef.num_leaves

    def flatten_up_to(self, tree: Tree) -> list[Any]:
        """Returns the parts of a tree that are in the places of the leaves."""
        return self._treedef.flatten_up_to(tree)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Returns a tree of this structure."""
        found = jax.tree.unflatten(self._treedef, leaves)
        return found if self._order is None else _in_order(self._order, found)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._treedef == other._treedef

    @override
    def __hash__(self) -> int:
        return hash(self._treedef)

    @override
    def __repr__(self) -> str:
        return repr(self._treedef)


def structure(tree: Tree, is_leaf: IsLeaf = None) -> Structure:
    """Returns the structure of a tree."""
    return Structure(tree, is_leaf)


def flatten(tree: Tree, is_leaf: IsLeaf = None) -> tuple[list[Any], Structure]:
    """Returns the leaves of a tree, and its structure.

    >>> leaves, found = flatten({"b": 1, "a": 2})
    >>> leaves, found.unflatten([20, 10])
    ([2, 1], {'b': 10, 'a': 20})
    """
    return jax.tree.leaves(tree, is_leaf=is_leaf), Structure(tree, is_leaf)


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Returns a tree of a structure."""
    return structure.unflatten(leaves)


def leaves(tree: Tree, is_leaf: IsLeaf = None) -> list[Any]:
    """Returns the leaves of a tree."""
    return jax.tree.leaves(tree, is_leaf=is_leaf)


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf = None) -> Any:
    """Applies a function to the leaves of a tree, or of several with one structure.

    >>> map(abs, {"b": -1, "a": (2, {"d": 3, "c": -4})})
    {'b': 1, 'a': (2, {'d': 3, 'c': 4})}
    """
    found = jax.tree.map(fn, tree, *rest, is_leaf=is_leaf)
    order = _order_of(tree, is_leaf)
    return found if order is None else _in_order(order, found)


class _Keys:
    """The order of the keys of a dict, and the orders below some of them."""

    __slots__ = ("below", "keys")

    def __init__(self, keys: tuple[Any, ...], below: dict[Any, Any]) -> None:
        self.keys, self.below = keys, below


def _order_of(tree: Tree, is_leaf: IsLeaf) -> _Keys | dict[int, Any] | None:
    """Returns what `_in_order` restores; None for trees that JAX builds in their order."""
    if is_leaf is not None and is_leaf(tree):
        return None
    cls = type(tree)
    if cls is dict:
        keys = tuple(tree)
        below = {key: order for key in keys if (order := _order_of(tree[key], is_leaf)) is not None}
        is_sorted = keys == tuple(sorted(keys))
        return None if is_sorted and not below else _Keys(keys, below)
    if cls is tuple or cls is list or isinstance(tree, tuple):
        found = {
            i: order
            for i, part in enumerate(tree)
            if (order := _order_of(part, is_leaf)) is not None
        }
        return found or None
    return None


def _in_order(order: _Keys | dict[int, Any], tree: Tree) -> Any:
    if isinstance(order, _Keys):
        # A leaf may have been a dict, and another value may be in its place.
        if type(tree) is not dict or len(tree) != len(order.keys):
            return tree
        below = order.below
        return {
            key: _in_order(below[key], tree[key]) if key in below else tree[key]
            for key in order.keys
        }
    if not isinstance(tree, tuple | list):
        return tree
    parts = [_in_order(order[i], part) if i in order else part for i, part in enumerate(tree)]
    make = getattr(type(tree), "_make", type(tree))
    return make(parts)
