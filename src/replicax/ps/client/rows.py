"""Row numbers of lookups and sparse updates: sorted, deduplicated, and split by part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# How the rows of duplicate numbers are combined, by the kind of change.
_COMBINED: dict[str, np.ufunc] = {
    "scatter_add": np.add,
    "scatter_sub": np.add,
    "scatter_mul": np.multiply,
    "scatter_div": np.multiply,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "gradient": np.add,
}


_ALIGNMENT = 64
# Up to this many duplicates are combined one after the other, for all numbers at once.
_MOST_RANKS = 32


class RowPlan:
    """A sorted list of row numbers.

    Row numbers that are out of range belong to no part.

    Attributes:
      ids: The row numbers as given, in one dimension.
      pieces: By part: the row numbers within the part, sorted and unique.

    >>> plan = RowPlan(np.array([4, 0, 4, 3]), starts=[0, 3], num_rows=5)
    >>> [piece.tolist() for piece in plan.pieces]
    [[0], [0, 1]]
    >>> plan.spread([np.array([[0.5]]), np.array([[3.5], [4.5]])]).tolist()
    [[4.5], [0.5], [4.5], [3.5]]
    """

    def __init__(self, ids: np.ndarray, starts: Sequence[int], num_rows: int) -> None:
        # The caller may overwrite its array later.
        self.ids = ids = ids.copy() if ids.flags.writeable else ids
        self._order: np.ndarray | None = None
        ordered = ids
        if ids.size > 1 and not (ids[1:] > ids[:-1]).all():
            self._order = np.argsort(ids, kind="stable")
            ordered = ids[self._order]
        # In sorted order, the first index of each unique number, and the index of its unique number
        # for each one; None if there are no duplicates.
        self._firsts: np.ndarray | None = None
        self._groups: np.ndarray | None = None
        unique = ordered
        if self._order is not None:
            is_new = np.empty(ordered.size, bool)
            is_new[0] = True
            np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
            if not is_new.all():
                self._firsts = np.flatnonzero(is_new)
                self._groups = np.cumsum(is_new) - 1
                unique = ordered[self._firsts]
        self._unique = unique
        # The index of the row of each id among the rows of all parts; computed when needed.
        self._indices: np.ndarray | None = None
        self._cuts = np.searchsorted(unique, [*starts, num_rows]).tolist()
        self.pieces = [
            unique[a:b] - start
            for a, b, start in zip(self._cuts[:-1], self._cuts[1:], starts, strict=True)
        ]

    @property
    def is_out_of_range(self) -> bool:
        """Whether some row numbers are out of range."""
        return self._cuts[0] > 0 or self._cuts[-1] < self._unique.size

    def is_for(self, ids: np.ndarray) -> bool:
        """Returns whether this is the plan for a list of row numbers."""
        return ids is self.ids or (ids.size == self.ids.size and np.array_equal(ids, self.ids))

    def spread(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the rows of all parts in the order of `ids`."""
        if len(rows) == 1 and self._order is None:
            return rows[0]
        count = self._unique.size if self._order is not None else self.ids.size
        whole = rows[0]
        if len(rows) > 1:
            whole = _aligned((count, *rows[0].shape[1:]), rows[0].dtype)
            np.concatenate(rows, out=whole)
        if self._order is None:
            return whole
        if self._indices is None:
            self._indices = np.empty(self.ids.size, np.intp)
            groups = np.arange(self.ids.size) if self._groups is None else self._groups
            self._indices[self._order] = groups
        result = _aligned((self.ids.size, *whole.shape[1:]), whole.dtype)
        return np.take(whole, self._indices, axis=0, out=result, mode="clip")

    def gather(self, kind: str, rows: np.ndarray) -> list[np.ndarray]:
        """Returns, by part, the rows of its row numbers.

        Rows of duplicate numbers are combined according to the kind of change; for kinds that
        replace rows, the last one is used.
        """
        if self._order is None:
            ordered = rows
        elif self._firsts is None or self._groups is None:
            ordered = _taken(rows, self._order)
        elif kind in _COMBINED:
            ordered = self._combined(_COMBINED[kind], rows)
        else:
            lasts = np.append(self._firsts[1:], self.ids.size) - 1
            ordered = _taken(rows, self._order[lasts])
        return [ordered[a:b] for a, b in zip(self._cuts[:-1], self._cuts[1:], strict=True)]

    def _combined(self, ufunc: np.ufunc, rows: np.ndarray) -> np.ndarray:
        """Combines the rows of each number."""
        assert self._order is not None and self._firsts is not None and self._groups is not None
        # The rank of each row among those of its number; mostly 0.
        ranks = np.arange(self.ids.size) - self._firsts[self._groups]
        if (highest := int(ranks.max())) > _MOST_RANKS:
            return ufunc.reduceat(_taken(rows, self._order), self._firsts, axis=0, dtype=rows.dtype)
        result = _taken(rows, self._order[self._firsts])
        for rank in range(1, highest + 1):
            indices = np.flatnonzero(ranks == rank)
            groups = self._groups[indices]
            result[groups] = ufunc(result[groups], _taken(rows, self._order[indices]))
        return result


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns aligned memory, which JAX uses without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _taken(rows: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns rows by valid indices."""
    return np.take(rows, indices, axis=0, mode="clip")
