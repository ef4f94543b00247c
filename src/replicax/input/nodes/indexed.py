"""Grain datasets with random access.

Note [Indices beyond the end]
    As everywhere in Grain, index `i` of a dataset of length `n` is element `i % n` of pass
    `i // n`. A repeated dataset is only longer; a shuffle below it derives the number of the
    pass from the index, so each pass has its own order.
"""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import grain
import numpy as np
from jax.typing import DTypeLike

from replicax.foundation import ordered_trees
from replicax.foundation.ordered_trees import Structure
from replicax.foundation.types import Tree
from replicax.input.dataset import elements

Indices: TypeAlias = range | np.ndarray
Node: TypeAlias = grain.MapDataset[Any]


class Indexed(grain.MapDataset[Any]):
    """A dataset that can return many elements at once, as one batch.

    Subclasses set `_length` and define `element`, and `rows` if they are faster than a loop.
    """

    _length: int

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Tree:
        return self.slice(index) if isinstance(index, slice) else self.element(index)

    def element(self, index: int) -> Tree:
        """Returns the element at an index."""
        raise NotImplementedError

    def rows(self, indices: Indices) -> Tree:
        """Returns the elements at the given indices, stacked."""
        return elements.stack([self[int(i)] for i in indices])


def gather(node: Node, indices: Indices) -> Tree:
    """Returns elements of any dataset with random access, stacked."""
    if isinstance(node, Indexed):
        return node.rows(indices)
    return elements.stack([node[int(i)] for i in indices])


class Rows(Indexed):
    """The rows of a structure of arrays; always copies."""

    def __init__(self, arrays: Tree) -> None:
        super().__init__()
        self._leaves, self._structure = ordered_trees.flatten(arrays)
        self._length = len(self._leaves[0])

    def element(self, index: int) -> Tree:
        row = index % self._length
        # Arrays of objects hold text and records, which are immutable.
        leaves = [
            leaf[row] if leaf.dtype == object else np.array(leaf[row]) for leaf in self._leaves
        ]
        return ordered_trees.unflatten(self._structure, leaves)

    def rows(self, indices: Indices) -> Tree:
        if isinstance(indices, range):
            if indices.start >= 0 and indices.stop <= self._length:
                leaves = [leaf[_as_slice(indices)].copy() for leaf in self._leaves]
                return ordered_trees.unflatten(self._structure, leaves)
            indices = _as_array(indices)
        chosen = indices % self._length
        leaves = [leaf.take(chosen, axis=0) for leaf in self._leaves]
        return ordered_trees.unflatten(self._structure, leaves)


class Counting(Indexed):
    """The numbers `start`, `start + step` and so on, computed when they are read."""

    def __init__(self, start: float, step: float, length: int, dtype: DTypeLike) -> None:
        super().__init__()
        self._start, self._step = start, step
        self._length, self._dtype = length, dtype

    def element(self, index: int) -> np.ndarray:
        return np.array(self._start + index % self._length * self._step, self._dtype)

    def rows(self, indices: Indices) -> np.ndarray:
        chosen = _as_array(indices) % self._length
        return (self._start + chosen * self._step).astype(self._dtype)


class Listed(Indexed):
    """The elements of a list."""

    def __init__(self, items: Sequence[Tree]) -> None:
        super().__init__()
        self._items = items
        self._length = len(items)

    def element(self, index: int) -> Tree:
        return elements.copied(self._items[index % self._length])


class Sliced(Indexed):
    """Every `step`-th element from `start` on: take, skip and shard."""

    def __init__(self, parent: Node, start: int, stop: int, step: int) -> None:
        super().__init__(parent)
        self._start, self._step = start, step
        self._length = len(range(start, min(stop, len(parent)), step))

    def element(self, index: int) -> Tree:
        pass_number, within = divmod(index, self._length)
        return self._parent[self._parent_index(pass_number, within)]

    def _parent_index(self, pass_number: Any, within: Any) -> Any:
        """Returns the index, or the indices, in the dataset that is sliced."""
        return pass_number * len(self._parent) + self._start + within * self._step

    def rows(self, indices: Indices) -> Tree:
        if isinstance(indices, range) and indices and indices[-1] < self._length:
            first, last = self._parent_index(0, indices[0]), self._parent_index(0, indices[-1])
            return gather(self._parent, range(first, last + 1, indices.step * self._step))
        passes, within = np.divmod(_as_array(indices), self._length)
        return gather(self._parent, self._parent_index(passes, within))


class Repeated(Indexed):
    """Several passes over a dataset; only the length differs."""

    def __init__(self, parent: Node, count: int) -> None:
        super().__init__(parent)
        is_endless = count < 0 and len(parent)
        self._length = sys.maxsize if is_endless else min(len(parent) * max(count, 0), sys.maxsize)

    def element(self, index: int) -> Tree:
        return self._parent[index]

    def rows(self, indices: Indices) -> Tree:
        return gather(self._parent, indices)


class Shuffled(Indexed):
    """All elements in an order derived from the seed and the number of the pass."""

    def __init__(self, parent: Node, seed: Sequence[int], is_new_each_pass: bool) -> None:
        super().__init__(parent)
        self._seed = list(seed)
        self._is_new_each_pass = is_new_each_pass
        self._length = len(parent)
        # The number and the order of the pass that was read last.
        self._order: tuple[int, np.ndarray] | None = None

    def _order_of(self, pass_number: int) -> np.ndarray:
        key = pass_number if self._is_new_each_pass else 0
        known = self._order
        if known is None or known[0] != key:
            dtype = np.uint32 if self._length < 2**32 else np.int64
            order = np.arange(self._length, dtype=dtype)
            np.random.default_rng([*self._seed, key]).shuffle(order)
            known = self._order = key, order
        return known[1]

    def element(self, index: int) -> Tree:
        pass_number, within = divmod(index, self._length)
        chosen = int(self._order_of(pass_number)[within])
        return self._parent[pass_number * self._length + chosen]

    def rows(self, indices: Indices) -> Tree:
        if isinstance(indices, range) and indices and indices[-1] < self._length:
            return gather(self._parent, self._order_of(0)[_as_slice(indices)].astype(np.int64))
        passes, within = np.divmod(_as_array(indices), self._length)
        chosen = np.empty_like(within)
        for number in np.unique(passes):
            mine = passes == number
            chosen[mine] = self._order_of(int(number))[within[mine]]
        return gather(self._parent, passes * self._length + chosen)


class Batched(Indexed):
    """Groups of consecutive elements, each gathered in one call."""

    def __init__(self, parent: Node, size: int, drops_remainder: bool) -> None:
        super().__init__(parent)
        self._size = size
        full, rest = divmod(len(parent), size)
        self._length = full if drops_remainder or not rest else full + 1

    def element(self, index: int) -> Tree:
        pass_number, within = divmod(index, self._length)
        start = pass_number * len(self._parent)
        stop = min((within + 1) * self._size, len(self._parent))
        return gather(self._parent, range(start + within * self._size, start + stop))


class Concatenated(Indexed):
    """The elements of several datasets, one dataset after the other."""

    def __init__(self, parents: Sequence[Node]) -> None:
        super().__init__(parents)
        self._ends = list(itertools.accumulate(map(len, parents), initial=0))
        self._length = self._ends[-1]

    def element(self, index: int) -> Tree:
        pass_number, within = divmod(index, self._length)
        which = bisect.bisect_right(self._ends, within) - 1
        parent = self._parents[which]
        return parent[pass_number * len(parent) + within - self._ends[which]]


class Zipped(Indexed):
    """Tuples of elements of several datasets, up to the end of the shortest."""

    def __init__(self, parents: Sequence[Node], structure: Structure) -> None:
        super().__init__(parents)
        self._structure = structure
        self._length = min(len(p) for p in parents)

    def element(self, index: int) -> Tree:
        pass_number, within = divmod(index, self._length)
        found = [p[pass_number * len(p) + within] for p in self._parents]
        return ordered_trees.unflatten(self._structure, found)

    def rows(self, indices: Indices) -> Tree:
        if not isinstance(indices, range) or indices.stop > self._length:
            return super().rows(indices)
        return ordered_trees.unflatten(self._structure, [gather(p, indices) for p in self._parents])


class Numbered(Indexed):
    """Pairs of the number of an element in its pass, and the element."""

    def __init__(self, parent: Node, start: int) -> None:
        super().__init__(parent)
        self._start = start
        self._length = len(parent)

    def element(self, index: int) -> Tree:
        number = np.array(self._start + index % self._length, np.int64)
        return number, self._parent[index]

    def rows(self, indices: Indices) -> Tree:
        numbers = self._start + _as_array(indices) % self._length
        return numbers, gather(self._parent, indices)


def _as_array(indices: Indices) -> np.ndarray:
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step)
    return indices


def _as_slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)
