"""Grain iterators without random access, whose positions can be saved and restored.

Grain has nodes for map, filter, batch, enumerate and zip too. They record statistics, which takes
up to 12 µs per element (Grain 0.2.18), more than these nodes take altogether.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import grain
import numpy as np

from replicax.foundation import ordered_trees
from replicax.foundation.ordered_trees import Structure
from replicax.foundation.types import Tree
from replicax.input.dataset import stored_format
from replicax.input.nodes.indexed import Indexed

State: TypeAlias = dict[str, Any]
Iterator: TypeAlias = grain.DatasetIterator[Any]
OpenIterator: TypeAlias = Callable[[], Iterator]


class Stream(grain.IterDataset[Any]):
    """A dataset defined by the function that opens its iterator."""

    def __init__(self, open_iterator: OpenIterator) -> None:
        super().__init__()
        self._open = open_iterator

    def __iter__(self) -> Iterator:
        return self._open()


class Step(grain.DatasetIterator[Any]):
    """An iterator whose state is the attributes named in `saved`, and the parents' states."""

    saved: tuple[str, ...] = ()

    def get_state(self) -> State:
        own = {name: getattr(self, f"_{name}") for name in self.saved}
        return {**own, "parents": [parent.get_state() for parent in self._parents]}

    def set_state(self, state: State) -> None:
        for name in self.saved:
            setattr(self, f"_{name}", state[name])
        for parent, own in zip(self._parents, state["parents"], strict=True):
            parent.set_state(own)


class Replayed(grain.DatasetIterator[Any]):
    """An iterator that restores a position by reading again from the start of its pass.

    For steps that buffer more than a saved position should hold. Subclasses define `_restart`
    and `_following`, and set their attributes before they call this `__init__`.
    """

    def __init__(self, *parents: Iterator) -> None:
        super().__init__(parents)
        self._start_states = [parent.get_state() for parent in parents]
        self._count = 0
        self._restart()

    def _restart(self) -> None:
        """Resets everything but the parents to the start of the pass."""

    def _following(self) -> Tree:
        """Returns the next element."""
        raise NotImplementedError

    def __next__(self) -> Tree:
        element = self._following()
        self._count += 1
        return element

    def get_state(self) -> State:
        return {"count": self._count}

    def set_state(self, state: State) -> None:
        for parent, start in zip(self._parents, self._start_states, strict=True):
            parent.set_state(start)
        self._count = 0
        self._restart()
        read(self, state["count"])


def read(iterator: Iterator, count: int) -> None:
    """Advances an iterator by `count` elements."""
    for _ in range(count):
        next(iterator)


class FromIndex(Step):
    """Reads a dataset with random access in order, in the calling thread."""

    saved = ("next",)

    def __init__(self, node: grain.MapDataset[Any]) -> None:
        super().__init__()
        self._element = node.element if isinstance(node, Indexed) else node.__getitem__
        self._length = len(node)
        self._next = 0

    def __next__(self) -> Tree:
        if self._next >= self._length:
            raise StopIteration
        element = self._element(self._next)
        self._next += 1
        return element


class Generated(Replayed):
    """The elements of a Python generator."""

    def __init__(self, make: Callable[[], Iterable[Tree]]) -> None:
        self._make = make
        super().__init__()

    def _restart(self) -> None:
        self._iterator = iter(self._make())

    def __next__(self) -> Tree:
        element = next(self._iterator)
        self._count += 1
        return element

    def close(self) -> None:
        super().close()
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class RandomNumbers(grain.DatasetIterator[Any]):
    """Endless random numbers of 32 bits, as int64."""

    def __init__(self, seed: Sequence[int]) -> None:
        super().__init__()
        self._seed = list(seed)
        self.set_state({"count": 0})

    def __next__(self) -> np.ndarray:
        self._count += 1
        return np.array(self._bits.random_raw() >> 32, np.int64)

    def get_state(self) -> State:
        return {"count": self._count}

    def set_state(self, state: State) -> None:
        self._count = state["count"]
        self._bits = np.random.PCG64(np.random.SeedSequence(self._seed)).advance(self._count)


class Mapped(Step):
    """Applies a function to each element."""

    def __init__(self, parent: Iterator, fn: Callable[[Tree], Tree]) -> None:
        super().__init__(parent)
        self._fn = fn

    def __next__(self) -> Tree:
        return self._fn(next(self._parent))


class Filtered(Step):
    """The elements that satisfy a predicate."""

    def __init__(self, parent: Iterator, predicate: Callable[[Tree], bool]) -> None:
        super().__init__(parent)
        self._predicate = predicate

    def __next__(self) -> Tree:
        while True:
            element = next(self._parent)
            if self._predicate(element):
                return element


class TakenWhile(Step):
    """The elements before the first one that does not satisfy a predicate."""

    saved = ("is_over",)

    def __init__(self, parent: Iterator, predicate: Callable[[Tree], bool]) -> None:
        super().__init__(parent)
        self._predicate = predicate
        self._is_over = False

    def __next__(self) -> Tree:
        if not self._is_over:
            element = next(self._parent)
            if self._predicate(element):
                return element
            self._is_over = True
        raise StopIteration


class Batched(Step):
    """Batches of consecutive elements, combined by `join`."""

    def __init__(
        self,
        parent: Iterator,
        size: int,
        drops_remainder: bool,
        join: Callable[[Sequence[Tree]], Tree],
    ) -> None:
        super().__init__(parent)
        self._size, self._drops_remainder, self._join = size, drops_remainder, join

    def __next__(self) -> Tree:
        batch = []
        for element in self._parent:
            batch.append(element)
            if len(batch) == self._size:
                return self._join(batch)
        if not batch or self._drops_remainder:
            raise StopIteration
        return self._join(batch)


class Sliced(Step):
    """Every `step`-th element from `start` to `stop`: take, skip and shard."""

    saved = ("seen",)

    def __init__(self, parent: Iterator, start: int, stop: int, step: int) -> None:
        super().__init__(parent)
        self._range = range(start, stop, step)
        self._seen = 0

    def __next__(self) -> Tree:
        while self._seen < self._range.stop:
            element = next(self._parent)
            self._seen += 1
            if self._seen - 1 in self._range:
                return element
        raise StopIteration


class Numbered(Step):
    """Pairs of the number of an element and the element."""

    saved = ("next",)

    def __init__(self, parent: Iterator, start: int) -> None:
        super().__init__(parent)
        self._next = start

    def __next__(self) -> Tree:
        element = next(self._parent)
        self._next += 1
        return np.array(self._next - 1, np.int64), element


class Zipped(Step):
    """Tuples of elements of several streams, up to the end of the shortest."""

    def __init__(self, parents: Sequence[Iterator], structure: Structure) -> None:
        super().__init__(parents)
        self._structure = structure

    def __next__(self) -> Tree:
        return ordered_trees.unflatten(self._structure, [next(p) for p in self._parents])


class Scanned(Step):
    """Applies a function that carries a state from element to element."""

    def __init__(
        self, parent: Iterator, initial: Tree, fn: Callable[[Tree, Tree], tuple[Tree, Tree]]
    ) -> None:
        super().__init__(parent)
        self._carried, self._fn = initial, fn

    def __next__(self) -> Tree:
        self._carried, element = self._fn(self._carried, next(self._parent))
        return element

    def get_state(self) -> State:
        leaves = ordered_trees.leaves(self._carried)
        return {"carried": stored_format.as_text(leaves), **super().get_state()}

    def set_state(self, state: State) -> None:
        super().set_state(state)
        leaves = stored_format.from_text(state["carried"])
        self._carried = ordered_trees.unflatten(ordered_trees.structure(self._carried), leaves)


class Shuffled(Replayed):
    """Draws elements from a buffer, as tf.data does; Grain's node shuffles disjoint windows."""

    def __init__(self, parent: Iterator, size: int, seed: Sequence[int]) -> None:
        self._size, self._seed = size, list(seed)
        super().__init__(parent)

    def _restart(self) -> None:
        self._random = np.random.default_rng(self._seed)
        self._buffer: list[Tree] = []
        self._has_more = True

    def _following(self) -> Tree:
        while self._has_more and len(self._buffer) < self._size:
            try:
                self._buffer.append(next(self._parent))
            except StopIteration:
                self._has_more = False
        if not self._buffer:
            raise StopIteration
        chosen = int(self._random.integers(len(self._buffer)))
        # The last element moves to where the chosen one was.
        self._buffer[chosen], self._buffer[-1] = self._buffer[-1], self._buffer[chosen]
        return self._buffer.pop()


class Unique(Replayed):
    """Elements without duplicates; keeps the keys of all elements so far."""

    def __init__(self, parent: Iterator, key: Callable[[Tree], Hashable]) -> None:
        self._key = key
        super().__init__(parent)

    def _restart(self) -> None:
        self._seen: set[Hashable] = set()

    def _following(self) -> Tree:
        for element in self._parent:
            key = self._key(element)
            if key not in self._seen:
                self._seen.add(key)
                return element
        raise StopIteration
