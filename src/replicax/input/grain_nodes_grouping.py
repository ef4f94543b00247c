"""Grain iterators that put elements of a stream into groups: windows, batches, keys."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax
import numpy as np

from replicax.foundation import errors
from replicax.input.grain_nodes_streams import Replayed, State


class Windowed(grain.DatasetIterator[Any]):
    """Windows of `size` elements, `stride` apart, that begin every `shift` elements.

    The position is that of the stream at the first element of the next window. Windows may
    overlap, so that position is kept for each window that has begun.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator[Any],
        size: int,
        shift: int,
        stride: int,
        drops_remainder: bool,
        make: Callable[[list[Any]], Any],
    ) -> None:
        super().__init__(parent)
        self._stride, self._shift, self._make = stride, shift, make
        self._drops_remainder = drops_remainder
        # From the first element of a window to its last one.
        self._span = (size - 1) * stride + 1
        self._begin(skip=0)

    def _begin(self, skip: int) -> None:
        # How many elements lie between the buffer and the next window.
        self._skip = skip
        self._buffer: collections.deque[Any] = collections.deque()
        # The positions before the elements of the buffer that begin a window.
        self._starts: collections.deque[State] = collections.deque()
        # How many elements the buffer has taken in, counted from the start of a window.
        self._taken = 0

    def __next__(self) -> Any:
        while self._skip:
            next(self._parent)
            self._skip -= 1
        while len(self._buffer) < self._span and self._take():
            pass
        if not self._buffer or (self._drops_remainder and len(self._buffer) < self._span):
            raise StopIteration
        window = self._make(list(self._buffer)[:: self._stride])
        if self._shift >= len(self._buffer):
            self._begin(skip=self._shift - len(self._buffer))
        else:
            self._starts.popleft()
            for _ in range(self._shift):
                self._buffer.popleft()
        return window

    def _take(self) -> bool:
        before = self._parent.get_state() if self._taken % self._shift == 0 else None
        try:
            self._buffer.append(next(self._parent))
        except StopIteration:
            return False
        if before is not None:
            self._starts.append(before)
        self._taken += 1
        return True

    def get_state(self) -> State:
        at_start = self._starts[0] if self._starts else self._parent.get_state()
        return {"skip": self._skip, "parent": at_start}

    def set_state(self, state: State) -> None:
        self._parent.set_state(state["parent"])
        self._begin(state["skip"])


class Rebatched(grain.DatasetIterator[Any]):
    """Batches of other sizes, which take turns; Grain's own step knows one size only.

    The position is that of the stream before the batch that is being cut, and how many of
    its rows are gone.
    """

    def __init__(
        self, parent: grain.DatasetIterator[Any], sizes: Sequence[int], drops_remainder: bool
    ) -> None:
        super().__init__(parent)
        self._sizes, self._drops_remainder = list(sizes), drops_remainder
        self._turn = 0
        self._is_over = False
        self._leaves: list[Any] = []
        self._structure: Any = None
        self._row = self._num_rows = 0
        self._before: State = {}

    def __next__(self) -> Any:
        wanted = self._sizes[self._turn]
        # A batch without rows needs no row, only the types that a batch has shown.
        is_ready = self._structure is not None and not wanted
        if self._is_over or not (is_ready or self._has_rows()):
            raise StopIteration
        parts = [self._cut(wanted)]
        missing = wanted - len(parts[0][0])
        while missing and self._has_rows():
            parts.append(self._cut(missing))
            missing -= len(parts[-1][0])
        if missing and self._drops_remainder:
            raise StopIteration
        self._turn = (self._turn + 1) % len(self._sizes)
        columns = zip(*parts, strict=True)
        leaves = [c[0] if len(c) == 1 else np.concatenate(c) for c in columns]
        return jax.tree.unflatten(self._structure, leaves)

    def _has_rows(self) -> bool:
        """Reads on until there is a row; tells whether there is one."""
        while self._row >= self._num_rows:
            before = self._parent.get_state()
            try:
                element = next(self._parent)
            except StopIteration:
                self._is_over = True
                return False
            self._hold(element, before)
        return True

    def _hold(self, element: Any, before: State) -> None:
        self._leaves, self._structure = jax.tree.flatten(element)
        sizes = {np.shape(leaf)[:1] for leaf in self._leaves}
        if len(sizes) != 1 or () in sizes:
            raise errors.InvalidArgumentError(
                "`rebatch` needs batches: arrays with one number of rows",
                f"the shapes are {[np.shape(leaf) for leaf in self._leaves]}",
                "Add a `batch` step before it.",
            )
        self._num_rows, self._row, self._before = len(self._leaves[0]), 0, before

    def _cut(self, wanted: int) -> list[Any]:
        stop = min(self._row + wanted, self._num_rows)
        rows = [leaf[self._row : stop] for leaf in self._leaves]
        self._row = stop
        return rows

    def get_state(self) -> State:
        own = {"turn": self._turn, "is_over": self._is_over}
        if self._structure is None:
            return {**own, "row": None, "parent": self._parent.get_state()}
        return {**own, "row": self._row, "parent": self._before}

    def set_state(self, state: State) -> None:
        self._parent.set_state(state["parent"])
        self._turn, self._is_over = state["turn"], state["is_over"]
        self._row = self._num_rows = 0
        self._structure = None
        if state["row"] is not None:
            self._hold(next(self._parent), state["parent"])
            self._row = state["row"]


class GroupedByKey(Replayed):
    """Gathers elements by key, and goes through what a full group is reduced to.

    Groups that are not full at the end of the stream follow, the smallest key first.

    Args:
      parent: The stream.
      key: Returns the key of an element, a number.
      size: Returns how many elements make a group with a key full.
      reduce: Makes a stream of a key and the elements of its group.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator[Any],
        key: Callable[[Any], int],
        size: Callable[[int], int],
        reduce: Callable[[int, list[Any]], grain.DatasetIterator[Any]],
    ) -> None:
        self._key, self._size, self._reduce = key, size, reduce
        self._current: grain.DatasetIterator[Any] | None = None
        super().__init__(parent)

    def _restart(self) -> None:
        self._drop()
        # Per key: how many elements make the group full, and those that are there.
        self._groups: dict[int, tuple[int, list[Any]]] = {}

    def _following(self) -> Any:
        while True:
            if self._current is None:
                self._open_group()
            assert self._current is not None
            try:
                return next(self._current)
            except StopIteration:
                self._drop()

    def _open_group(self) -> None:
        for element in self._parent:
            key = self._key(element)
            if key not in self._groups:
                self._groups[key] = self._size(key), []
            size, elements = self._groups[key]
            elements.append(element)
            if len(elements) >= size:
                break
        else:
            if not self._groups:
                raise StopIteration
            key = min(self._groups)
        self._current = self._reduce(key, self._groups.pop(key)[1])

    def _drop(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None

    def close(self) -> None:
        super().close()
        self._drop()
