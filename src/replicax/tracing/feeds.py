"""Data iterators inside compiled functions: their elements are inputs of the program.

While a function is traced, each `next` of an iterator takes a real element; its arrays become
inputs of the trace. The program records which iterators it read, in what order, and the kind of
each element (or the end of the data). A later call reads the same iterators first and picks the
program that fits the elements; if none does, the function is traced again with them. The elements
of a call that fails go back to their iterators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from replicax.contexts import frames
from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.tracing import signature
from replicax.tracing.iterators import EndOfData, Feed, FeedSource
from replicax.values.layout import ReplicaLayout

# The number of elements that a trace may take one by one: each is a set of inputs of the compiled
# program. The rounds of rx.scan and rx.fori_loop do not count: their elements are stacked.
MOST_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class IteratorSource:
    """The source of an iterator of a function, the same in each of its calls."""

    kind: str  # "argument", "captured", or "loop" over a dataset
    index: int = 0
    # The captured iterator, or the dataset of a loop.
    owner: Feed | FeedSource | None = None

    def open(self) -> Feed:
        """Returns the iterator; a new one of a loop over a dataset."""
        assert self.owner is not None
        return self.owner if isinstance(self.owner, Feed) else self.owner.open_feed()


@dataclasses.dataclass(frozen=True)
class Event:
    """One `next` of a trace: the iterator, and the kind of element; None for the end."""

    source: IteratorSource
    kind: Hashable


@dataclasses.dataclass(frozen=True)
class FedArray:
    """An input of a program: an array of an element, or of several that are stacked.

    Attributes:
      events: The elements.
      index: The index of the array in each element.
      is_stacked: Whether the input has a dimension for the elements.
    """

    events: range
    index: int
    is_stacked: bool


class Supply:
    """The elements of one call of a function."""

    def __init__(self, arguments: list[Feed]) -> None:
        self._feeds = {IteratorSource("argument", i): feed for i, feed in enumerate(arguments)}
        self._sources = {id(feed): source for source, feed in self._feeds.items()}
        self._loops = 0
        # The elements taken: the iterator, the element, and the iterator's position before it.
        self._taken: list[tuple[Feed, Tree, object]] = []
        # The events so far; a trace replays them from the start.
        self.events: list[tuple[Event, signature.Arguments | None]] = []
        self._replayed = 0
        self._stacks: dict[FedArray, ArrayLike] = {}

    def input_of(self, fed: FedArray) -> ArrayLike:
        """Returns an input of a program that takes the elements."""
        if not fed.is_stacked:
            return self._array(fed.events[0], fed.index)
        if fed not in self._stacks:
            self._stacks[fed] = _stacked([self._array(i, fed.index) for i in fed.events])
        return self._stacks[fed]

    def _array(self, event: int, index: int) -> ArrayLike:
        element = self.events[event][1]
        assert element is not None
        return element.arrays[index]

    @property
    def position(self) -> int:
        """The number of elements that the trace has taken."""
        return self._replayed

    def rewind(self, position: int) -> None:
        """Moves the trace back to an earlier element."""
        self._replayed = position

    def continues(self, kinds: Sequence[Event]) -> bool:
        """Takes the elements of one more round of a loop, if they are of the same kinds."""
        for number, event in enumerate(kinds, self._replayed):
            if number == len(self.events):
                self._take_eagerly(event.source)
            if self.events[number][0] != event:
                return False
        self._replayed += len(kinds)
        return True

    def start_replay(self) -> None:
        """Moves the trace back to the first element that was taken."""
        self._replayed = 0
        self._loops = 0

    def loop_over(self, source: FeedSource) -> Feed:
        """Returns the iterator of the next loop over a dataset inside the function."""
        loop = IteratorSource("loop", self._loops, source)
        self._loops += 1
        return self._feed_of(loop)

    def next_of(self, feed: Feed) -> signature.Arguments | None:
        """Returns the next element of an iterator for a trace; None at its end."""
        source = self._sources.get(id(feed))
        if source is None:
            source = IteratorSource("captured", owner=feed)
            self._feeds[source] = feed
            self._sources[id(feed)] = source
        if self._replayed == len(self.events):
            self._take_eagerly(source)
        _, element = self.events[self._replayed]
        self._replayed += 1
        return element

    def _take_eagerly(self, source: IteratorSource) -> None:
        # An iterator without read-ahead computes here, outside of the trace.
        frame = frames.current()
        assert frame.overlay is not None
        eager = frame.with_overlay(None)
        with frame.overlay.outside_program(), jax_compat.eagerly(), frames.pushed(eager):
            self.take(source)

    def take(self, source: IteratorSource) -> Event:
        """Takes one more element, or records the end of the data."""
        feed = self._feed_of(source)
        position = feed.get_state()
        try:
            taken = feed.pull()
        except EndOfData:
            self.events.append((Event(source, None), None))
            return self.events[-1][0]
        self._taken.append((feed, taken, position))
        element = signature.Arguments((taken,), {}, None)
        _require_numbers(element)
        self.events.append((Event(source, element.key), element))
        return self.events[-1][0]

    def return_all(self) -> None:
        """Puts all elements back into their iterators, after a call that failed."""
        for feed in {id(feed): feed for feed, _, _ in self._taken}.values():
            feed.put_back([(taken, at) for owner, taken, at in self._taken if owner is feed])
        self.close()

    def close(self) -> None:
        """Closes the iterators of loops over datasets that this call started."""
        self._taken = []
        self._stacks = {}
        for source, feed in self._feeds.items():
            if source.kind == "loop":
                feed.close()

    def _feed_of(self, source: IteratorSource) -> Feed:
        feed = self._feeds.get(source)
        if feed is None:
            feed = self._feeds[source] = source.open()
            self._sources[id(feed)] = source
        return feed


class FeedInputs:
    """The inputs that the elements of a supply become while one function is traced."""

    def __init__(self, supply: Supply) -> None:
        self.supply = supply
        # Index among the fed arrays, by the id of the stand-in.
        self.indices: dict[int, int] = {}
        self.fed: list[FedArray] = []
        self.layouts: list[ReplicaLayout] = []
        self._keep: list[jax.Array] = []
        self._num_single = 0
        supply.start_replay()

    def next_of(self, feed: Feed) -> Tree:
        """Returns the next element as traced arrays, or raises EndOfData."""
        event = self.supply.position
        element = self.supply.next_of(feed)
        if element is None:
            raise EndOfData
        if self._num_single == MOST_ELEMENTS:
            raise errors.TracingError(
                f"A compiled function can take {MOST_ELEMENTS} elements one by one",
                "it takes more: does it loop over a long or endless dataset?",
                "Call next(iterator) in the body of rx.fori_loop or rx.scan, which is "
                "compiled once, or loop outside of `rx.function`.",
            )
        self._num_single += 1
        events = range(event, event + 1)
        traced = [self.enter(FedArray(events, i, False)) for i in range(len(element.arrays))]
        self.layouts += signature.layouts_of(element.skeleton)
        return signature.fill(element.skeleton, traced)[0][0]

    def enter(self, fed: FedArray) -> jax.Array:
        """Returns an input of the program as a traced array."""
        with jax_compat.eagerly():
            # Another object over the same buffers, with an identity of its own.
            own = jax_compat.alias(jnp.asarray(self.supply.input_of(fed)))
        self.indices[id(own)] = len(self._keep)
        self._keep.append(own)
        self.fed.append(fed)
        return jnp.copy(own)


class RoundElements:
    """The elements that the body of a loop takes in one round, traced for all rounds.

    The body is traced with stand-ins of the elements of the first round; they are constants of
    its program, which the loop replaces by the elements of each round.
    """

    def __init__(self, inputs: FeedInputs) -> None:
        self._inputs = inputs
        self._start = inputs.supply.position
        # Index among the arrays of one round, by the id of the stand-in.
        self.indices: dict[int, int] = {}
        self._keep: list[jax.Array] = []
        # Per array of a round: the number of the element, and the index of the array in it.
        self._arrays: list[tuple[int, int]] = []
        self._kinds: list[Event] = []

    @property
    def supply(self) -> Supply:
        """The elements of loops over datasets inside the body, which are not supported."""
        raise errors.TracingError(
            "A loop over a dataset must be outside of other compiled loops",
            "it is inside the body of a loop",
            "Make the iterator before, and call next(iterator) in the body.",
        )

    @property
    def is_empty(self) -> bool:
        """Whether the body takes no elements."""
        return not self._kinds

    def is_at_end(self, feed: Feed) -> bool:
        """Returns whether an iterator has no element for a further round."""
        supply = self._inputs.supply
        if supply.next_of(feed) is None:
            return True
        supply.rewind(self._start)
        return False

    def restart(self) -> None:
        """Moves back to the elements of the first round, for another trace of the body."""
        self._inputs.supply.rewind(self._start)
        self.indices.clear()
        self._keep, self._arrays, self._kinds = [], [], []

    def next_of(self, feed: Feed) -> Tree:
        """Returns the next element of the round as traced arrays, or raises EndOfData."""
        supply = self._inputs.supply
        element = supply.next_of(feed)
        number = len(self._kinds)
        self._kinds.append(supply.events[supply.position - 1][0])
        if element is None:
            raise EndOfData
        self._inputs.layouts += signature.layouts_of(element.skeleton)
        traced = []
        for index, array in enumerate(element.arrays):
            with jax_compat.eagerly():
                stand_in = jnp.zeros(jnp.shape(array), jnp.asarray(array).dtype)
            self.indices[id(stand_in)] = len(self._keep)
            self._keep.append(stand_in)
            self._arrays.append((number, index))
            traced.append(jnp.copy(stand_in))
        return signature.fill(element.skeleton, traced)[0][0]

    def count_rounds(self, most: int) -> int:
        """Takes elements for further rounds, as long as they are of the same kinds."""
        rounds = 1
        while rounds < most and self._inputs.supply.continues(self._kinds):
            rounds += 1
        return rounds

    def stacks(self, rounds: int) -> list[jax.Array]:
        """Returns the arrays of all rounds, stacked, as inputs of the program."""
        stride = len(self._kinds)
        return [
            self._inputs.enter(
                FedArray(
                    range(self._start + number, self._start + number + rounds * stride, stride),
                    index,
                    is_stacked=True,
                )
            )
            for number, index in self._arrays
        ]


def _stacked(elements: list[ArrayLike]) -> ArrayLike:
    """Stacks arrays of one kind on their devices."""
    if not any(isinstance(array, jax.Array) for array in elements):
        return np.stack([np.asarray(array) for array in elements])
    arrays = [jnp.asarray(array) for array in elements]
    sharding, shape = arrays[0].sharding, (len(arrays), *arrays[0].shape)
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        sharding = NamedSharding(sharding.mesh, spec)
    columns = zip(*([s.data for s in a.addressable_shards] for a in arrays), strict=True)
    parts = [_stacked_on_one_device(list(column)) for column in columns]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _stacked_on_one_device(arrays: list[jax.Array]) -> jax.Array:
    (device,) = arrays[0].devices()
    if device.platform == "cpu":
        # NumPy shares its memory: one copy, and no program to compile per length.
        return jax.device_put(np.stack([np.asarray(array) for array in arrays]), device)
    return jnp.stack(arrays)


def _require_numbers(element: signature.Arguments) -> None:
    for array in element.arrays:
        if array.dtype.kind in "OSUMm" or array.dtype.names is not None:
            raise errors.ArgumentTypeError(
                "A compiled function can take elements of numbers from an iterator",
                f"an element has an array of type {array.dtype}",
                "Remove or convert that part with `Dataset.map`, or call next(iterator) "
                "outside of `rx.function`.",
            )
