"""Grain datasets with random access: arrays, and plans of which rows come when.

Note [Indices beyond the end]
    As everywhere in Grain, index `i` of a dataset of length `n` means element `i % n` of pass
    `i // n`. A repeated dataset is only longer; a shuffle below it takes the number of the
    pass from the index, so each pass has an order of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import grain
import jax
import numpy as np

from replicax.input import builder_elements

Indices = range | np.ndarray


class Indexed(grain.MapDataset[Any]):
    """A dataset that can return many elements at once, as one batch."""

    def rows(self, indices: Indices) -> Any:
        """Returns the elements at the given indices, stacked."""
        return builder_elements.stack([self[int(i)] for i in indices])


def gather(node: grain.MapDataset[Any], indices: Indices) -> Any:
    """Returns elements of any dataset with random access, stacked."""
    if isinstance(node, Indexed):
        return node.rows(indices)
    return builder_elements.stack([node[int(i)] for i in indices])


class Rows(Indexed):
    """The rows of a structure of arrays; always copies."""

    def __init__(self, arrays: Any) -> None:
        super().__init__()
        self._leaves, self._structure = jax.tree.flatten(arrays)
        self._length = len(self._leaves[0])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        row = index % self._length
        # Text and records lie in arrays of objects, and leave them as they are.
        leaves = [
            leaf[row] if leaf.dtype == object else np.array(leaf[row]) for leaf in self._leaves
        ]
        return jax.tree.unflatten(self._structure, leaves)

    def rows(self, indices: Indices) -> Any:
        if isinstance(indices, range):
            if indices.start >= 0 and indices.stop <= self._length:
                part = slice(indices.start, indices.stop, indices.step)
                leaves = [leaf[part].copy() for leaf in self._leaves]
                return jax.tree.unflatten(self._structure, leaves)
            indices = _as_array(indices)
        chosen = indices % self._length
        leaves = [leaf.take(chosen, axis=0) for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)


class Counting(Indexed):
    """The numbers `start`, `start + step` and so on, without keeping them."""

    def __init__(self, start: float, step: float, length: int, dtype: Any) -> None:
        super().__init__()
        self._start, self._step = start, step
        self._length, self._dtype = length, dtype

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return np.array(self._start + index % self._length * self._step, self._dtype)

    def rows(self, indices: Indices) -> Any:
        chosen = _as_array(indices) % self._length
        return (self._start + chosen * self._step).astype(self._dtype)


class Listed(Indexed):
    """The elements of a list: file names, or one structure."""

    def __init__(self, elements: Sequence[Any]) -> None:
        super().__init__()
        self._elements = elements

    def __len__(self) -> int:
        return len(self._elements)

    def __getitem__(self, index: Any) -> Any:
        return builder_elements.copied(self._elements[index % len(self._elements)])


class Sliced(Indexed):
    """Every `step`-th element from `start` on: take, skip and shard."""

    def __init__(self, parent: grain.MapDataset[Any], start: int, stop: int, step: int) -> None:
        super().__init__(parent)
        self._start, self._step = start, step
        self._length = len(range(start, min(stop, len(parent)), step))

    def __len__(self) -> int:
        return self._length

    def _source(self, index: Any) -> Any:
        pass_number, within = divmod(index, self._length)
        return pass_number * len(self._parent) + self._start + within * self._step

    def __getitem__(self, index: Any) -> Any:
        return self._parent[self._source(index)]

    def rows(self, indices: Indices) -> Any:
        if isinstance(indices, range) and indices and indices[-1] < self._length:
            first, last = self._source(indices[0]), self._source(indices[-1])
            step = indices.step * self._step
            return gather(self._parent, range(first, last + 1, step))
        return gather(self._parent, self._source(_as_array(indices)))


class Repeated(Indexed):
    """Several passes over a dataset; all that changes is the length."""

    def __init__(self, parent: grain.MapDataset[Any], count: int) -> None:
        super().__init__(parent)
        is_endless = count < 0 and len(parent)
        self._length = sys.maxsize if is_endless else min(len(parent) * max(count, 0), sys.maxsize)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._parent[index]

    def rows(self, indices: Indices) -> Any:
        return gather(self._parent, indices)


class Shuffled(Indexed):
    """All elements in an order that `seed` and the number of the pass decide."""

    def __init__(
        self, parent: grain.MapDataset[Any], seed: Sequence[int], is_new_each_pass: bool
    ) -> None:
        super().__init__(parent)
        self._seed = list(seed)
        self._is_new_each_pass = is_new_each_pass
        # The order of the pass that was asked for last, and the number of that pass.
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._parent)

    def _order_of(self, pass_number: int) -> np.ndarray:
        key = pass_number if self._is_new_each_pass else 0
        known = self._order
        if known is None or known[0] != key:
            length = len(self._parent)
            order = np.arange(length, dtype=np.uint32 if length < 2**32 else np.int64)
            np.random.default_rng([*self._seed, key]).shuffle(order)
            known = self._order = key, order
        return known[1]

    def __getitem__(self, index: Any) -> Any:
        pass_number, within = divmod(index, len(self._parent))
        chosen = int(self._order_of(pass_number)[within])
        return self._parent[pass_number * len(self._parent) + chosen]

    def rows(self, indices: Indices) -> Any:
        length = len(self._parent)
        if isinstance(indices, range) and indices and indices[-1] < length:
            return gather(self._parent, self._order_of(0)[_as_slice(indices)].astype(np.int64))
        passes, within = np.divmod(_as_array(indices), length)
        chosen = np.empty_like(within)
        for number in np.unique(passes):
            mine = passes == number
            chosen[mine] = self._order_of(int(number))[within[mine]]
        return gather(self._parent, passes * length + chosen)


class Batched(Indexed):
    """Groups of consecutive elements, gathered in one go."""

    def __init__(self, parent: grain.MapDataset[Any], size: int, drops_remainder: bool) -> None:
        super().__init__(parent)
        self._size = size
        full, rest = divmod(len(parent), size)
        self._length = full if drops_remainder or not rest else full + 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        pass_number, within = divmod(index, self._length)
        start = pass_number * len(self._parent)
        stop = min((within + 1) * self._size, len(self._parent))
        return gather(self._parent, range(start + within * self._size, start + stop))


class Concatenated(Indexed):
    """The elements of one dataset after those of the other."""

    def __init__(self, parents: Sequence[grain.MapDataset[Any]]) -> None:
        super().__init__(parents)
        self._ends = np.cumsum([0, *(len(p) for p in parents)]).tolist()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        pass_number, within = divmod(index, self._ends[-1])
        which = int(np.searchsorted(self._ends, within, side="right")) - 1
        parent = self._parents[which]
        return parent[pass_number * len(parent) + within - self._ends[which]]


class Zipped(Indexed):
    """Elements of several datasets side by side, as long as the shortest lasts."""

    def __init__(self, parents: Sequence[grain.MapDataset[Any]], structure: Any) -> None:
        super().__init__(parents)
        self._structure = structure
        self._length = min(len(p) for p in parents)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        pass_number, within = divmod(index, self._length)
        found = [p[pass_number * len(p) + within] for p in self._parents]
        return jax.tree.unflatten(self._structure, found)

    def rows(self, indices: Indices) -> Any:
        if not isinstance(indices, range) or indices.stop > self._length:
            return super().rows(indices)
        return jax.tree.unflatten(self._structure, [gather(p, indices) for p in self._parents])


class Numbered(Indexed):
    """Each element with its number in the pass."""

    def __init__(self, parent: grain.MapDataset[Any], start: int) -> None:
        super().__init__(parent)
        self._start = start

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        number = np.array(self._start + index % len(self._parent), np.int64)
        return number, self._parent[index]

    def rows(self, indices: Indices) -> Any:
        numbers = self._start + _as_array(indices) % len(self._parent)
        return numbers, gather(self._parent, indices)


def _as_array(indices: Indices) -> np.ndarray:
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step)
    return indices


def _as_slice(indices: range) -> slice:
    return slice(indices.start, indices.stop, indices.step)
