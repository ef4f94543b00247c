"""Which rows of a table travel, and where they belong: sorted, each once, cut by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# How the rows of one number become one row, by the kind of change.
_JOINED: dict[str, Any] = {
    "scatter_add": np.add,
    "scatter_sub": np.add,
    "scatter_mul": np.multiply,
    "scatter_div": np.multiply,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "gradient": np.add,
}


_ALIGNMENT = 64
# Up to so many rows of one number are joined one by one, all numbers at once.
_MOST_RANKS = 32


class RowPlan:
    """A list of row numbers, put in order.

    Row numbers outside of the table belong to no part.

    Attributes:
      ids: The row numbers as they were given, in one dimension.
      pieces: Per part: the row numbers within the part, sorted and each once.

    >>> plan = RowPlan(np.array([4, 0, 4, 3]), starts=[0, 3], num_rows=5)
    >>> [piece.tolist() for piece in plan.pieces]
    [[0], [0, 1]]
    >>> plan.spread([np.array([[0.5]]), np.array([[3.5], [4.5]])]).tolist()
    [[4.5], [0.5], [4.5], [3.5]]
    """

    def __init__(self, ids: np.ndarray, starts: Sequence[int], num_rows: int) -> None:
        # A caller may go on to put other numbers into an array of its own.
        self.ids = ids = ids.copy() if ids.flags.writeable else ids
        self._order: np.ndarray | None = None
        ordered = ids
        if ids.size > 1 and not (ids[1:] > ids[:-1]).all():
            self._order = np.argsort(ids, kind="stable")
            ordered = ids[self._order]
        # Where each row number occurs first, in order, and where all are; None if each
        # occurs once.
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
        # Where the row of each id lies among the rows of all parts; made when first needed.
        self._places: np.ndarray | None = None
        self._cuts = np.searchsorted(unique, [*starts, num_rows]).tolist()
        self.pieces = [
            unique[a:b] - start
            for a, b, start in zip(self._cuts[:-1], self._cuts[1:], starts, strict=True)
        ]

    @property
    def has_strangers(self) -> bool:
        """Whether there are row numbers outside of the table."""
        return self._cuts[0] > 0 or self._cuts[-1] < self._unique.size

    def is_for(self, ids: np.ndarray) -> bool:
        """Tells whether this is the plan for a list of row numbers."""
        return ids is self.ids or (ids.size == self.ids.size and np.array_equal(ids, self.ids))

    def spread(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the rows of all parts in the order in which they were asked for."""
        if len(rows) == 1 and self._order is None:
            return rows[0]
        count = self._unique.size if self._order is not None else self.ids.size
        whole = rows[0]
        if len(rows) > 1:
            whole = _aligned((count, *rows[0].shape[1:]), rows[0].dtype)
            np.concatenate(rows, out=whole)
        if self._order is None:
            return whole
        if self._places is None:
            self._places = np.empty(self.ids.size, np.intp)
            groups = np.arange(self.ids.size) if self._groups is None else self._groups
            self._places[self._order] = groups
        result = _aligned((self.ids.size, *whole.shape[1:]), whole.dtype)
        return np.take(whole, self._places, axis=0, out=result, mode="clip")

    def gather(self, kind: str, rows: np.ndarray) -> list[np.ndarray]:
        """Returns, per part, the rows that belong to its row numbers.

        Rows of one number are joined as the kind of change wants it; where it wants one of
        them, it is the last.
        """
        if self._order is None:
            ordered = rows
        elif self._firsts is None or self._groups is None:
            ordered = _taken(rows, self._order)
        elif kind in _JOINED:
            ordered = self._joined(_JOINED[kind], rows)
        else:
            lasts = np.append(self._firsts[1:], self.ids.size) - 1
            ordered = _taken(rows, self._order[lasts])
        return [ordered[a:b] for a, b in zip(self._cuts[:-1], self._cuts[1:], strict=True)]

    def _joined(self, rule: Any, rows: np.ndarray) -> np.ndarray:
        """Joins the rows of each number."""
        assert self._order is not None and self._firsts is not None and self._groups is not None
        # Which of the rows of its number each row is; most are the first.
        ranks = np.arange(self.ids.size) - self._firsts[self._groups]
        if (highest := int(ranks.max())) > _MOST_RANKS:
            return rule.reduceat(_taken(rows, self._order), self._firsts, axis=0, dtype=rows.dtype)
        result = _taken(rows, self._order[self._firsts])
        for rank in range(1, highest + 1):
            places = np.flatnonzero(ranks == rank)
            groups = self._groups[places]
            result[groups] = rule(result[groups], _taken(rows, self._order[places]))
        return result


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns memory that JAX takes as it is."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _taken(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns rows by place; all places are known to be there."""
    return np.take(rows, places, axis=0, mode="clip")
