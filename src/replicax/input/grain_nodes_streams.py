"""Grain datasets without random access: iterators whose position can be saved and set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grain
import jax
import numpy as np

from replicax.input import stored_elements

State = dict[str, Any]
MakeIterator = Callable[[], grain.DatasetIterator[Any]]


class Stream(grain.IterDataset[Any]):
    """A dataset that is known by how its iterator is made."""

    def __init__(self, make: MakeIterator) -> None:
        super().__init__()
        self._make = make

    def __iter__(self) -> grain.DatasetIterator[Any]:
        return self._make()


class FromIndex(grain.DatasetIterator[Any]):
    """Goes through a dataset with random access, in this thread."""

    def __init__(self, node: grain.MapDataset[Any]) -> None:
        super().__init__()
        self._node = node
        self._length = len(node)
        self._next = 0

    def __next__(self) -> Any:
        if self._next >= self._length:
            raise StopIteration
        element = self._node[self._next]
        self._next += 1
        return element

    def get_state(self) -> State:
        return {"next": self._next}

    def set_state(self, state: State) -> None:
        self._next = state["next"]


class Generated(grain.DatasetIterator[Any]):
    """What a Python generator yields; goes to a position by counting."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        super().__init__()
        self._make = make
        self._iterator = iter(make())
        self._count = 0

    def __next__(self) -> Any:
        element = next(self._iterator)
        self._count += 1
        return element

    def get_state(self) -> State:
        return {"count": self._count}

    def set_state(self, state: State) -> None:
        self._iterator = iter(self._make())
        self._count = 0
        read(self, state["count"])

    def close(self) -> None:
        super().close()
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class _OfOne(grain.DatasetIterator[Any]):
    """An iterator over another one, whose position is all there is to know."""

    def get_state(self) -> State:
        return {"parent": self._parent.get_state()}

    def set_state(self, state: State) -> None:
        self._parent.set_state(state["parent"])


class Mapped(_OfOne):
    """Applies a function to each element."""

    def __init__(self, parent: grain.DatasetIterator[Any], fn: Callable[[Any], Any]) -> None:
        super().__init__(parent)
        self._fn = fn

    def __next__(self) -> Any:
        return self._fn(next(self._parent))


class Filtered(_OfOne):
    """Leaves out elements."""

    def __init__(self, parent: grain.DatasetIterator[Any], keeps: Callable[[Any], bool]) -> None:
        super().__init__(parent)
        self._keeps = keeps

    def __next__(self) -> Any:
        while True:
            element = next(self._parent)
            if self._keeps(element):
                return element


class Batched(_OfOne):
    """Groups consecutive elements."""

    def __init__(
        self,
        parent: grain.DatasetIterator[Any],
        size: int,
        drops_remainder: bool,
        join: Callable[[Sequence[Any]], Any],
    ) -> None:
        super().__init__(parent)
        self._size, self._drops_remainder, self._join = size, drops_remainder, join

    def __next__(self) -> Any:
        elements = []
        for element in self._parent:
            elements.append(element)
            if len(elements) == self._size:
                return self._join(elements)
        if not elements or self._drops_remainder:
            raise StopIteration
        return self._join(elements)


class Sliced(grain.DatasetIterator[Any]):
    """Every `step`-th element from `start` to `stop`: take, skip and shard."""

    def __init__(
        self, parent: grain.DatasetIterator[Any], start: int, stop: int, step: int
    ) -> None:
        super().__init__(parent)
        self._range = range(start, stop, step)
        self._seen = 0

    def __next__(self) -> Any:
        while self._seen < self._range.stop:
            element = next(self._parent)
            self._seen += 1
            if self._seen - 1 in self._range:
                return element
        raise StopIteration

    def get_state(self) -> State:
        return {"seen": self._seen, "parent": self._parent.get_state()}

    def set_state(self, state: State) -> None:
        self._seen = state["seen"]
        self._parent.set_state(state["parent"])


class Numbered(grain.DatasetIterator[Any]):
    """Each element with its number."""

    def __init__(self, parent: grain.DatasetIterator[Any], start: int) -> None:
        super().__init__(parent)
        self._next = start

    def __next__(self) -> Any:
        element = next(self._parent)
        self._next += 1
        return np.array(self._next - 1, np.int64), element

    def get_state(self) -> State:
        return {"next": self._next, "parent": self._parent.get_state()}

    def set_state(self, state: State) -> None:
        self._next = state["next"]
        self._parent.set_state(state["parent"])


class Replayed(grain.DatasetIterator[Any]):
    """An iterator that goes to a position by reading again from the start of its pass.

    For steps that hold many elements back: what they hold is too much for a saved position.
    Subclasses define `_restart`, which forgets everything, and `_following`.
    """

    def __init__(self, parent: grain.DatasetIterator[Any]) -> None:
        super().__init__(parent)
        self._at_start = parent.get_state()
        self._count = 0
        self._restart()

    def _restart(self) -> None:
        """Gets ready for the first element of the pass."""
        raise NotImplementedError

    def _following(self) -> Any:
        """Returns the next element."""
        raise NotImplementedError

    def __next__(self) -> Any:
        element = self._following()
        self._count += 1
        return element

    def get_state(self) -> State:
        return {"count": self._count}

    def set_state(self, state: State) -> None:
        self._parent.set_state(self._at_start)
        self._count = 0
        self._restart()
        read(self, state["count"])


class Shuffled(Replayed):
    """Draws from a buffer."""

    def __init__(self, parent: grain.DatasetIterator[Any], size: int, seed: Sequence[int]) -> None:
        self._size, self._seed = size, list(seed)
        super().__init__(parent)

    def _restart(self) -> None:
        self._random = np.random.default_rng(self._seed)
        self._buffer: list[Any] = []
        self._has_more = True

    def _following(self) -> Any:
        while self._has_more and len(self._buffer) < self._size:
            try:
                self._buffer.append(next(self._parent))
            except StopIteration:
                self._has_more = False
        if not self._buffer:
            raise StopIteration
        chosen = int(self._random.integers(len(self._buffer)))
        # The last element takes the place of the chosen one.
        self._buffer[chosen], self._buffer[-1] = self._buffer[-1], self._buffer[chosen]
        return self._buffer.pop()


class Unique(Replayed):
    """Leaves out elements that have come before."""

    def __init__(self, parent: grain.DatasetIterator[Any], key: Callable[[Any], Any]) -> None:
        self._key = key
        super().__init__(parent)

    def _restart(self) -> None:
        self._seen: set[Any] = set()

    def _following(self) -> Any:
        for element in self._parent:
            key = self._key(element)
            if key not in self._seen:
                self._seen.add(key)
                return element
        raise StopIteration


class Leading(grain.DatasetIterator[Any]):
    """The elements before the first one that a predicate refuses."""

    def __init__(self, parent: grain.DatasetIterator[Any], keeps: Callable[[Any], bool]) -> None:
        super().__init__(parent)
        self._keeps = keeps
        self._is_over = False

    def __next__(self) -> Any:
        if not self._is_over:
            element = next(self._parent)
            if self._keeps(element):
                return element
            self._is_over = True
        raise StopIteration

    def get_state(self) -> State:
        return {"is_over": self._is_over, "parent": self._parent.get_state()}

    def set_state(self, state: State) -> None:
        self._is_over = state["is_over"]
        self._parent.set_state(state["parent"])


class Scanned(grain.DatasetIterator[Any]):
    """Applies a function that carries a state from element to element."""

    def __init__(
        self,
        parent: grain.DatasetIterator[Any],
        initial: Any,
        fn: Callable[[Any, Any], tuple[Any, Any]],
    ) -> None:
        super().__init__(parent)
        self._carried, self._fn = initial, fn

    def __next__(self) -> Any:
        self._carried, element = self._fn(self._carried, next(self._parent))
        return element

    def get_state(self) -> State:
        leaves = jax.tree.leaves(self._carried)
        return {"carried": stored_elements.as_json(leaves), "parent": self._parent.get_state()}

    def set_state(self, state: State) -> None:
        structure = jax.tree.structure(self._carried)
        leaves = stored_elements.from_json(state["carried"])
        self._carried = jax.tree.unflatten(structure, leaves)
        self._parent.set_state(state["parent"])


class RandomNumbers(grain.DatasetIterator[Any]):
    """Endless random numbers of 32 bits, as int64."""

    def __init__(self, seed: Sequence[int]) -> None:
        super().__init__()
        self._seed = list(seed)
        self._go_to(0)

    def _go_to(self, count: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(self._seed)).advance(count)
        self._count = count

    def __next__(self) -> Any:
        self._count += 1
        return np.array(self._bits.random_raw() >> 32, np.int64)

    def get_state(self) -> State:
        return {"count": self._count}

    def set_state(self, state: State) -> None:
        self._go_to(state["count"])


class Zipped(grain.DatasetIterator[Any]):
    """Elements of several streams side by side."""

    def __init__(self, parents: Sequence[grain.DatasetIterator[Any]], structure: Any) -> None:
        super().__init__(parents)
        self._structure = structure

    def __next__(self) -> Any:
        return jax.tree.unflatten(self._structure, [next(p) for p in self._parents])

    def get_state(self) -> State:
        return {"parents": [p.get_state() for p in self._parents]}

    def set_state(self, state: State) -> None:
        for parent, own in zip(self._parents, state["parents"], strict=True):
            parent.set_state(own)


def read(iterator: grain.DatasetIterator[Any], count: int) -> None:
    """Moves an iterator on by some elements."""
    for _ in range(count):
        next(iterator)
