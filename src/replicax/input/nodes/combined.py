"""Grain iterators that read several streams, or make one element of several.

Grain's nodes differ: its interleave has no blocks, needs random access and reads ahead in threads,
its repeat repeats the order of the first pass, its cache lasts for one iterator, and its rebatch
takes one size.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import grain
import numpy as np

from replicax.foundation import errors, ordered_trees
from replicax.foundation.ordered_trees import Structure
from replicax.foundation.types import Tree
from replicax.input.dataset import elements
from replicax.input.nodes.streams import Iterator, OpenIterator, Replayed, State, Step


class _WithInner(grain.DatasetIterator[Tree]):
    """An iterator that has at most one inner stream open."""

    _inner: Iterator | None = None

    def _close_inner(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def close(self) -> None:
        super().close()
        self._close_inner()


class Chained(_WithInner):
    """Streams one after the other: passes of a repeat, files, concatenated datasets.

    Args:
      open_inner: Opens the stream with a number.
      count: How many streams there are; endless if negative.
      stops_at_empty: Whether an empty stream is the last one. An endless repeat of an empty
        dataset is empty.
    """

    def __init__(
        self, open_inner: Callable[[int], Iterator], count: int, stops_at_empty: bool = False
    ) -> None:
        super().__init__()
        self._open_inner, self._count, self._stops_at_empty = open_inner, count, stops_at_empty
        self._number = 0
        self._is_empty = True
        self._is_over = count == 0

    def __next__(self) -> Tree:
        while not self._is_over:
            if self._inner is None:
                self._inner = self._open_inner(self._number)
                self._is_empty = True
            try:
                element = next(self._inner)
            except StopIteration:
                self._close_inner()
                self._number += 1
                is_last = self._number == self._count
                self._is_over = is_last or (self._is_empty and self._stops_at_empty)
            else:
                self._is_empty = False
                return element
        raise StopIteration

    def get_state(self) -> State:
        inner = None if self._inner is None else self._inner.get_state()
        own = {"number": self._number, "is_empty": self._is_empty, "is_over": self._is_over}
        return {**own, "inner": inner}

    def set_state(self, state: State) -> None:
        self._close_inner()
        self._number, self._is_empty = state["number"], state["is_empty"]
        self._is_over = state["is_over"]
        if state["inner"] is not None:
            self._inner = self._open_inner(self._number)
            self._inner.set_state(state["inner"])


class Interleaved(grain.DatasetIterator[Tree]):
    """Cycles through the streams that elements of the parent are mapped to.

    Each slot of the cycle holds a stream, opened when its turn comes and it is empty. A slot
    gives a block of elements, then the next slot has its turn.
    """

    def __init__(
        self,
        parent: Iterator,
        open_inner: Callable[[Tree], Iterator],
        cycle_length: int,
        block_length: int,
    ) -> None:
        super().__init__(parent)
        self._open_inner, self._block_length = open_inner, block_length
        # Per slot: the parent's state before its element, and the stream.
        self._slots: list[tuple[State, Iterator] | None] = [None] * cycle_length
        self._turn = self._given = 0
        self._has_more = True

    def __next__(self) -> Tree:
        while self._has_more or any(self._slots):
            slot = self._slots[self._turn]
            if slot is None:
                if not self._has_more or not self._fill():
                    self._advance()
                continue
            try:
                element = next(slot[1])
            except StopIteration:
                slot[1].close()
                self._slots[self._turn] = None
                self._advance()
                continue
            self._given += 1
            if self._given == self._block_length:
                self._advance()
            return element
        raise StopIteration

    def _fill(self) -> bool:
        before = self._parent.get_state()
        try:
            element = next(self._parent)
        except StopIteration:
            self._has_more = False
            return False
        self._slots[self._turn] = before, self._open_inner(element)
        return True

    def _advance(self) -> None:
        self._given = 0
        self._turn = (self._turn + 1) % len(self._slots)

    def get_state(self) -> State:
        slots = [
            slot and {"before": slot[0], "stream": slot[1].get_state()} for slot in self._slots
        ]
        own = {"turn": self._turn, "given": self._given, "has_more": self._has_more}
        return {**own, "slots": slots, "parent": self._parent.get_state()}

    def set_state(self, state: State) -> None:
        self._close_slots()
        for i, slot in enumerate(state["slots"]):
            if slot is not None:
                self._parent.set_state(slot["before"])
                stream = self._open_inner(next(self._parent))
                stream.set_state(slot["stream"])
                self._slots[i] = slot["before"], stream
        self._turn, self._given = state["turn"], state["given"]
        self._has_more = state["has_more"]
        self._parent.set_state(state["parent"])

    def _close_slots(self) -> None:
        for i, slot in enumerate(self._slots):
            if slot is not None:
                slot[1].close()
                self._slots[i] = None

    def close(self) -> None:
        super().close()
        self._close_slots()


class Chosen(Step):
    """Takes each element from the stream whose index the selector gives.

    Args:
      selector: Gives the indices.
      streams: The streams to choose from.
      stops_at_empty: Whether the end of a chosen stream ends the iteration; otherwise choices
        of a stream that has ended are skipped.
    """

    saved = ("has_more",)

    def __init__(
        self, selector: Iterator, streams: Sequence[Iterator], stops_at_empty: bool
    ) -> None:
        super().__init__([selector, *streams])
        self._selector, self._streams = selector, list(streams)
        self._stops_at_empty = stops_at_empty
        # Replaced, never changed: saved positions refer to it.
        self._has_more = [True] * len(self._streams)
        # The structure and types of the first element, and which streams were compared with it.
        self._kind: tuple[object, ...] | None = None
        self._is_checked = [False] * len(self._streams)

    def __next__(self) -> Tree:
        while any(self._has_more):
            chosen = elements.choice(next(self._selector), len(self._streams))
            if not self._has_more[chosen]:
                continue
            try:
                element = next(self._streams[chosen])
            except StopIteration:
                self._has_more = [
                    has_more and i != chosen and not self._stops_at_empty
                    for i, has_more in enumerate(self._has_more)
                ]
                continue
            if not self._is_checked[chosen]:
                self._check(chosen, element)
            return element
        raise StopIteration

    def _check(self, chosen: int, element: Tree) -> None:
        kind = elements.kind_of(element)
        self._kind = self._kind or kind
        if kind != self._kind:
            raise errors.ArgumentTypeError(
                "Datasets to choose from must have elements of one structure, with arrays of one "
                "type and number of dimensions",
                f"there are {self._kind} and, in dataset {chosen}, {kind}",
                "Convert them to one structure with `map`.",
            )
        self._is_checked[chosen] = True


class Cached(_WithInner, Replayed):
    """Reads a stream in the first pass, and its cached elements in later ones."""

    def __init__(self, open_stream: OpenIterator, cache: elements.Cache) -> None:
        self._open, self._cache = open_stream, cache
        # The elements that this iterator has read from the stream.
        self._read: list[Tree] = []
        super().__init__()

    def _following(self) -> Tree:
        if self._cache.elements is None and self._count == len(self._read):
            self._read_one()
        found = self._read if self._cache.elements is None else self._cache.elements
        if self._count >= len(found):
            raise StopIteration
        return elements.copied(found[self._count])

    def _read_one(self) -> None:
        if self._inner is None:
            self._inner = self._open()
        try:
            self._read.append(next(self._inner))
        except StopIteration:
            self._close_inner()
            self._cache.elements = self._read


class Windowed(grain.DatasetIterator[Tree]):
    """Windows of `size` elements, `stride` apart, that begin every `shift` elements.

    The position is the parent's at the first element of the next window. Windows may overlap,
    so it is kept for each window that has begun.
    """

    def __init__(
        self,
        parent: Iterator,
        size: int,
        shift: int,
        stride: int,
        drops_remainder: bool,
        make_window: Callable[[list[Tree]], Tree],
    ) -> None:
        super().__init__(parent)
        self._stride, self._shift, self._make_window = stride, shift, make_window
        self._drops_remainder = drops_remainder
        # From the first element of a window to its last one.
        self._span = (size - 1) * stride + 1
        self._begin(skip=0)

    def _begin(self, skip: int) -> None:
        # The number of elements between the buffer and the next window.
        self._skip = skip
        self._buffer: collections.deque[Tree] = collections.deque()
        # The parent's states before the elements of the buffer that begin a window.
        self._starts: collections.deque[State] = collections.deque()
        # The number of elements added to the buffer since the start of a window.
        self._added = 0

    def __next__(self) -> Tree:
        while self._skip:
            next(self._parent)
            self._skip -= 1
        while len(self._buffer) < self._span and self._add():
            pass
        if not self._buffer or (self._drops_remainder and len(self._buffer) < self._span):
            raise StopIteration
        window = self._make_window(list(self._buffer)[:: self._stride])
        if self._shift >= len(self._buffer):
            self._begin(skip=self._shift - len(self._buffer))
        else:
            self._starts.popleft()
            for _ in range(self._shift):
                self._buffer.popleft()
        return window

    def _add(self) -> bool:
        before = self._parent.get_state() if self._added % self._shift == 0 else None
        try:
            self._buffer.append(next(self._parent))
        except StopIteration:
            return False
        if before is not None:
            self._starts.append(before)
        self._added += 1
        return True

    def get_state(self) -> State:
        start = self._starts[0] if self._starts else self._parent.get_state()
        return {"skip": self._skip, "parent": start}

    def set_state(self, state: State) -> None:
        self._parent.set_state(state["parent"])
        self._begin(state["skip"])


class Rebatched(grain.DatasetIterator[Tree]):
    """Batches of other sizes, used in turn.

    The position is the parent's before the current batch, and the number of its rows that were
    used.
    """

    def __init__(self, parent: Iterator, sizes: Sequence[int], drops_remainder: bool) -> None:
        super().__init__(parent)
        self._sizes, self._drops_remainder = list(sizes), drops_remainder
        self._turn = 0
        self._is_over = False
        self._leaves: list[np.ndarray] = []
        self._structure: Structure | None = None
        self._row = self._num_rows = 0
        self._before: State = {}

    def __next__(self) -> Tree:
        wanted = self._sizes[self._turn]
        # A batch without rows needs no row, only the types of an earlier batch.
        is_ready = self._structure is not None and not wanted
        if self._is_over or not (is_ready or self._has_rows()):
            raise StopIteration
        assert self._structure is not None
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
        return ordered_trees.unflatten(self._structure, leaves)

    def _has_rows(self) -> bool:
        """Reads until the current batch has a row left; returns False at the end."""
        while self._row >= self._num_rows:
            before = self._parent.get_state()
            try:
                element = next(self._parent)
            except StopIteration:
                self._is_over = True
                return False
            self._start_batch(element, before)
        return True

    def _start_batch(self, element: Tree, before: State) -> None:
        self._leaves, self._structure = ordered_trees.flatten(element)
        sizes = {np.shape(leaf)[:1] for leaf in self._leaves}
        if len(sizes) != 1 or () in sizes:
            raise errors.InvalidArgumentError(
                "`rebatch` needs batches: arrays with one number of rows",
                f"the shapes are {[np.shape(leaf) for leaf in self._leaves]}",
                "Add a `batch` step before it.",
            )
        self._num_rows, self._row, self._before = len(self._leaves[0]), 0, before

    def _cut(self, wanted: int) -> list[np.ndarray]:
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
            self._start_batch(next(self._parent), state["parent"])
            self._row = state["row"]


class GroupedByKey(_WithInner, Replayed):
    """Collects elements by key, and reads the streams that full groups are reduced to.

    Groups that are not full at the end of the stream follow, the smallest key first.

    Args:
      parent: The stream.
      key_of: Returns the key of an element.
      size_of: Returns the size of a full group with a key.
      open_group: Opens the stream of a key and the elements of its group.
    """

    def __init__(
        self,
        parent: Iterator,
        key_of: Callable[[Tree], int],
        size_of: Callable[[int], int],
        open_group: Callable[[int, list[Tree]], Iterator],
    ) -> None:
        self._key_of, self._size_of, self._open = key_of, size_of, open_group
        super().__init__(parent)

    def _restart(self) -> None:
        self._close_inner()
        # Per key: the size of a full group, and the elements so far.
        self._groups: dict[int, tuple[int, list[Tree]]] = {}

    def _following(self) -> Tree:
        while True:
            if self._inner is None:
                self._inner = self._open_group()
            try:
                return next(self._inner)
            except StopIteration:
                self._close_inner()

    def _open_group(self) -> Iterator:
        for element in self._parent:
            key = self._key_of(element)
            if key not in self._groups:
                self._groups[key] = self._size_of(key), []
            size, group = self._groups[key]
            group.append(element)
            if len(group) >= size:
                break
        else:
            if not self._groups:
                raise StopIteration
            key = min(self._groups)
        return self._open(key, self._groups.pop(key)[1])
