"""Grain iterators that open other streams while they run, or keep what a stream gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain

from replicax.foundation import errors
from replicax.input import builder_checks, builder_elements
from replicax.input.grain_nodes_streams import MakeIterator, State, read


class Chained(grain.DatasetIterator[Any]):
    """Streams one after the other: passes of a repeat, files, concatenated datasets.

    Args:
      make: Makes the stream with a number.
      count: How many there are; below 0 for no end.
      stops_at_empty: Whether a stream without elements ends it all, so that an endless
        repeat of nothing is nothing.
    """

    def __init__(
        self,
        make: Callable[[int], grain.DatasetIterator[Any]],
        count: int,
        stops_at_empty: bool = False,
    ) -> None:
        super().__init__()
        self._make, self._count, self._stops_at_empty = make, count, stops_at_empty
        self._number = 0
        self._current: grain.DatasetIterator[Any] | None = None
        self._is_empty = True
        self._is_over = count == 0

    def __next__(self) -> Any:
        while not self._is_over:
            if self._current is None:
                self._current = self._make(self._number)
                self._is_empty = True
            try:
                element = next(self._current)
            except StopIteration:
                self._current.close()
                self._current = None
                self._number += 1
                is_last = self._number == self._count
                self._is_over = is_last or (self._is_empty and self._stops_at_empty)
            else:
                self._is_empty = False
                return element
        raise StopIteration

    def get_state(self) -> State:
        inner = None if self._current is None else self._current.get_state()
        own = {"number": self._number, "is_empty": self._is_empty, "is_over": self._is_over}
        return {**own, "current": inner}

    def set_state(self, state: State) -> None:
        self._drop()
        self._number, self._is_empty = state["number"], state["is_empty"]
        self._is_over = state["is_over"]
        if state["current"] is not None:
            self._current = self._make(self._number)
            self._current.set_state(state["current"])

    def _drop(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None

    def close(self) -> None:
        super().close()
        self._drop()


class Interleaved(grain.DatasetIterator[Any]):
    """Takes turns between the streams that elements of another stream stand for.

    A cycle has places. A place is filled when its turn comes and it is empty; it gives a
    block of elements, then the next place has its turn.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator[Any],
        make: Callable[[Any], grain.DatasetIterator[Any]],
        cycle_length: int,
        block_length: int,
    ) -> None:
        super().__init__(parent)
        self._make, self._block_length = make, block_length
        # Per place: the position of the parent before its element, and the stream.
        self._places: list[tuple[State, grain.DatasetIterator[Any]] | None]
        self._places = [None] * cycle_length
        self._turn = self._given = 0
        self._has_more = True

    def __next__(self) -> Any:
        while self._has_more or any(self._places):
            place = self._places[self._turn]
            if place is None:
                if not self._has_more or not self._fill():
                    self._advance()
                continue
            try:
                element = next(place[1])
            except StopIteration:
                place[1].close()
                self._places[self._turn] = None
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
        self._places[self._turn] = before, self._make(element)
        return True

    def _advance(self) -> None:
        self._given = 0
        self._turn = (self._turn + 1) % len(self._places)

    def get_state(self) -> State:
        places = [p and {"before": p[0], "stream": p[1].get_state()} for p in self._places]
        own = {"turn": self._turn, "given": self._given, "has_more": self._has_more}
        return {**own, "places": places, "parent": self._parent.get_state()}

    def set_state(self, state: State) -> None:
        self._drop()
        for i, place in enumerate(state["places"]):
            if place is not None:
                self._parent.set_state(place["before"])
                stream = self._make(next(self._parent))
                stream.set_state(place["stream"])
                self._places[i] = place["before"], stream
        self._turn, self._given = state["turn"], state["given"]
        self._has_more = state["has_more"]
        self._parent.set_state(state["parent"])

    def _drop(self) -> None:
        for i, place in enumerate(self._places):
            if place is not None:
                place[1].close()
                self._places[i] = None

    def close(self) -> None:
        super().close()
        self._drop()


class Directed(grain.DatasetIterator[Any]):
    """Takes each element from the stream whose number another stream gives.

    Args:
      selector: Gives the numbers.
      streams: The streams to choose from.
      stops_at_empty: Whether it all ends when a chosen stream has no more elements; otherwise
        such a choice is passed over.
    """

    def __init__(
        self,
        selector: grain.DatasetIterator[Any],
        streams: Sequence[grain.DatasetIterator[Any]],
        stops_at_empty: bool,
    ) -> None:
        super().__init__([selector, *streams])
        self._selector, self._streams = selector, list(streams)
        self._stops_at_empty = stops_at_empty
        self._has_more = [True] * len(self._streams)
        # The structure and types of elements, by the first one, and which streams are checked.
        self._like: Any = None
        self._is_checked = [False] * len(self._streams)

    def __next__(self) -> Any:
        while any(self._has_more):
            chosen = builder_checks.choice(next(self._selector), len(self._streams))
            if not self._has_more[chosen]:
                continue
            try:
                element = next(self._streams[chosen])
            except StopIteration:
                self._has_more[chosen] = False
                if self._stops_at_empty:
                    self._has_more = [False] * len(self._streams)
                continue
            if not self._is_checked[chosen]:
                self._check(chosen, element)
            return element
        raise StopIteration

    def _check(self, chosen: int, element: Any) -> None:
        like = builder_elements.kind_of(element)
        self._like = self._like or like
        if like != self._like:
            raise errors.ArgumentTypeError(
                "Datasets that elements are chosen from must have elements of one structure, "
                "with arrays of one type and number of dimensions",
                f"there are {self._like} and, in dataset {chosen}, {like}",
                "Bring them to one form with `map`.",
            )
        self._is_checked[chosen] = True

    def get_state(self) -> State:
        streams = [s.get_state() for s in self._streams]
        own = {"has_more": list(self._has_more), "streams": streams}
        return {**own, "selector": self._selector.get_state()}

    def set_state(self, state: State) -> None:
        self._has_more = list(state["has_more"])
        self._selector.set_state(state["selector"])
        for stream, own in zip(self._streams, state["streams"], strict=True):
            stream.set_state(own)


class Kept:
    """The elements of a cached dataset, once a pass over it has reached the end."""

    def __init__(self) -> None:
        self.elements: list[Any] | None = None


class Cached(grain.DatasetIterator[Any]):
    """Reads a stream once, and later what was kept of it; positions are counts."""

    def __init__(self, make: MakeIterator, kept: Kept) -> None:
        super().__init__()
        self._make, self._kept = make, kept
        self._count = 0
        # What this pass has read so far, if it reads the stream itself.
        self._read: list[Any] = []
        self._stream: grain.DatasetIterator[Any] | None = None

    def __next__(self) -> Any:
        if self._kept.elements is None and self._count == len(self._read):
            self._read_one()
        kept = self._read if self._kept.elements is None else self._kept.elements
        if self._count >= len(kept):
            raise StopIteration
        self._count += 1
        return builder_elements.copied(kept[self._count - 1])

    def _read_one(self) -> None:
        if self._stream is None:
            self._stream = self._make()
        try:
            self._read.append(next(self._stream))
        except StopIteration:
            self._stream.close()
            self._kept.elements = self._read

    def get_state(self) -> State:
        return {"count": self._count}

    def set_state(self, state: State) -> None:
        self._count = 0
        read(self, state["count"])

    def close(self) -> None:
        super().close()
        if self._stream is not None:
            self._stream.close()
