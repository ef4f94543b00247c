"""Data iterators inside compiled functions: their elements are inputs of the program.

While a function is traced, each `next` of an iterator really takes an element; its arrays
enter the trace as inputs. The program remembers which iterators it asked, in what order,
and what kind of element (or the end of the data) it met. A later call asks the same
iterators first and picks the program that fits what they gave; if none does, it traces
again, with the elements that it already holds. Nothing is lost: elements of a call that
fails go back to where they came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax.contexts import frames
from replicax.foundation import errors, jax_compat
from replicax.tracing import signature
from replicax.tracing.iterators import EndOfData, Feed, FeedSource

# How many elements a trace may take one by one: each is a set of inputs of the compiled program.
# The rounds of rx.scan and rx.fori_loop do not count: their elements are stacked.
MOST_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a function gets an iterator from, the same in each of its calls."""

    kind: str  # "argument", "captured", or "loop" over a dataset
    place: int = 0
    owner: Any = None


@dataclasses.dataclass(frozen=True)
class Event:
    """One `next` of a trace: which iterator, and the kind of element; None for the end."""

    origin: Origin
    kind: Any


@dataclasses.dataclass(frozen=True)
class FedArray:
    """An input of a program: an array of an element, or of several that are stacked.

    Attributes:
      events: The elements.
      place: Which of their arrays.
      is_stacked: Whether the input has a dimension for the elements.
    """

    events: range
    place: int
    is_stacked: bool


class Supply:
    """The elements of one call of a function."""

    def __init__(self, arguments: list[Feed]) -> None:
        self._feeds = {Origin("argument", i): feed for i, feed in enumerate(arguments)}
        self._origins = {id(feed): origin for origin, feed in self._feeds.items()}
        self._loops = 0
        # What was taken, from which iterator, and where that was before.
        self._taken: list[tuple[Feed, Any, Any]] = []
        # What was met so far; a trace replays it from the start.
        self.events: list[tuple[Event, signature.Arguments | None]] = []
        self._replayed = 0
        self._stacks: dict[FedArray, Any] = {}

    def input_of(self, fed: FedArray) -> Any:
        """Returns an input of a program that takes the elements."""
        if not fed.is_stacked:
            return self._array(fed.events[0], fed.place)
        if fed not in self._stacks:
            self._stacks[fed] = _stacked([self._array(i, fed.place) for i in fed.events])
        return self._stacks[fed]

    def _array(self, event: int, place: int) -> Any:
        element = self.events[event][1]
        assert element is not None
        return element.arrays[place]

    @property
    def position(self) -> int:
        """How many elements the trace has taken."""
        return self._replayed

    def rewind(self, position: int) -> None:
        """Lets a trace take elements once more."""
        self._replayed = position

    def continues(self, kinds: Sequence[Event]) -> bool:
        """Takes the elements of one more round of a loop, if they are of the same kinds."""
        for place, event in enumerate(kinds, self._replayed):
            if place == len(self.events):
                self._take_eagerly(event.origin)
            if self.events[place][0] != event:
                return False
        self._replayed += len(kinds)
        return True

    def start_replay(self) -> None:
        """Lets a trace begin with the elements that were already taken."""
        self._replayed = 0
        self._loops = 0

    def loop_over(self, source: FeedSource) -> Feed:
        """Returns the iterator of the next loop over a dataset inside the function."""
        origin = Origin("loop", self._loops, source)
        self._loops += 1
        return self._feed_of(origin)

    def next_of(self, feed: Feed) -> signature.Arguments | None:
        """Returns the next element of an iterator for a trace; None at its end."""
        origin = self._origins.get(id(feed))
        if origin is None:
            origin = Origin("captured", owner=feed)
            self._feeds[origin] = feed
            self._origins[id(feed)] = origin
        if self._replayed == len(self.events):
            self._take_eagerly(origin)
        _, element = self.events[self._replayed]
        self._replayed += 1
        return element

    def _take_eagerly(self, origin: Origin) -> None:
        # An iterator without read-ahead computes here, and not for the trace.
        frame = frames.current()
        assert frame.overlay is not None
        eager = frame.with_overlay(None)
        with frame.overlay.outside_program(), jax_compat.eagerly(), frames.pushed(eager):
            self.take(origin)

    def take(self, origin: Origin) -> Event:
        """Takes one more element, or meets the end of the data."""
        feed = self._feed_of(origin)
        position = feed.get_state()
        try:
            taken = feed.pull()
        except EndOfData:
            self.events.append((Event(origin, None), None))
            return self.events[-1][0]
        self._taken.append((feed, taken, position))
        element = signature.Arguments((taken,), {}, None)
        _require_numbers(element)
        self.events.append((Event(origin, element.key), element))
        return self.events[-1][0]

    def return_all(self) -> None:
        """Gives all elements back, after a call that had no effect."""
        for feed in {id(feed): feed for feed, _, _ in self._taken}.values():
            feed.put_back([(taken, at) for owner, taken, at in self._taken if owner is feed])
        self.close()

    def close(self) -> None:
        """Ends the loops over datasets that this call started."""
        self._taken = []
        self._stacks = {}
        for origin, feed in self._feeds.items():
            if origin.kind == "loop":
                feed.close()

    def _feed_of(self, origin: Origin) -> Feed:
        feed = self._feeds.get(origin)
        if feed is None:
            feed = origin.owner if origin.kind == "captured" else origin.owner.open_feed()
            self._feeds[origin] = feed
            self._origins[id(feed)] = origin
        return feed


class FeedInputs:
    """The inputs that the elements of a supply become while one function is traced."""

    def __init__(self, supply: Supply) -> None:
        self.supply = supply
        # Position among the fed arrays, by the identity of the array that stands for it.
        self.positions: dict[int, int] = {}
        # What each of the fed arrays is made of.
        self.fed: list[FedArray] = []
        self.layouts: list[Any] = []
        self._keep: list[Any] = []
        self._num_single = 0
        supply.start_replay()

    def next_of(self, feed: Feed) -> Any:
        """Returns the next element as traced arrays, or raises EndOfData."""
        event = self.supply.position
        element = self.supply.next_of(feed)
        if element is None:
            raise EndOfData
        if self._num_single == MOST_ELEMENTS:
            raise errors.TracingError(
                f"A compiled function can take {MOST_ELEMENTS} elements one by one",
                "it asks for more: is there a loop over a long or endless dataset inside?",
                "Call next(iterator) in the body of rx.fori_loop or rx.scan, which is "
                "compiled once, or loop outside of `rx.function`.",
            )
        self._num_single += 1
        events = range(event, event + 1)
        traced = [self.enter(FedArray(events, i, False)) for i in range(len(element.arrays))]
        self.layouts += signature.layouts_of(element.skeleton)
        return signature.fill(element.skeleton, traced)[0][0]

    def enter(self, fed: FedArray) -> Any:
        """Returns an input of the program as a traced array."""
        with jax_compat.eagerly():
            array = jnp.asarray(self.supply.input_of(fed))
            # A new array object over the same buffers: its identity is ours alone.
            parts = [shard.data for shard in array.addressable_shards]
            own = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
        self.positions[id(own)] = len(self._keep)
        self._keep.append(own)
        self.fed.append(fed)
        return jnp.copy(own)


class RoundElements:
    """The elements that the body of a loop takes in one round, traced for all rounds.

    The body is traced with the elements of the first round; arrays that stand for them are
    constants of its program, which the loop replaces by those of each round.
    """

    def __init__(self, inputs: FeedInputs) -> None:
        self._inputs = inputs
        self._start = inputs.supply.position
        # Position among the arrays of one round, by the identity of what stands for each.
        self.places: dict[int, int] = {}
        self._keep: list[Any] = []
        # Per array of a round: which element of the round, and which of its arrays.
        self._arrays: list[tuple[int, int]] = []
        self._kinds: list[Event] = []

    @property
    def supply(self) -> Supply:
        """Where elements come from, for loops over datasets inside the body."""
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
        """Tells whether an iterator has no element for a further round."""
        supply = self._inputs.supply
        if supply.next_of(feed) is None:
            return True
        supply.rewind(self._start)
        return False

    def restart(self) -> None:
        """Takes the elements of the first round once more, for another trace of the body."""
        self._inputs.supply.rewind(self._start)
        self.places.clear()
        self._keep, self._arrays, self._kinds = [], [], []

    def next_of(self, feed: Feed) -> Any:
        """Returns the next element of the round as traced arrays, or raises EndOfData."""
        supply = self._inputs.supply
        element = supply.next_of(feed)
        number = len(self._kinds)
        self._kinds.append(supply.events[supply.position - 1][0])
        if element is None:
            raise EndOfData
        self._inputs.layouts += signature.layouts_of(element.skeleton)
        traced = []
        for place, array in enumerate(element.arrays):
            with jax_compat.eagerly():
                stand_in = jnp.zeros(array.shape, jnp.asarray(array).dtype)
            self.places[id(stand_in)] = len(self._keep)
            self._keep.append(stand_in)
            self._arrays.append((number, place))
            traced.append(jnp.copy(stand_in))
        return signature.fill(element.skeleton, traced)[0][0]

    def count_rounds(self, most: int) -> int:
        """Takes elements for further rounds, as long as they are of the same kinds."""
        rounds = 1
        while rounds < most and self._inputs.supply.continues(self._kinds):
            rounds += 1
        return rounds

    def stacks(self, rounds: int) -> list[Any]:
        """Returns the arrays of all rounds, stacked, as inputs of the program."""
        stride = len(self._kinds)
        return [
            self._inputs.enter(
                FedArray(
                    range(self._start + number, self._start + number + rounds * stride, stride),
                    place,
                    is_stacked=True,
                )
            )
            for number, place in self._arrays
        ]


def _stacked(arrays: list[Any]) -> Any:
    """Stacks arrays of one kind where they are."""
    if not any(isinstance(array, jax.Array) for array in arrays):
        return np.stack(arrays)
    arrays = [jnp.asarray(array) for array in arrays]
    sharding, shape = arrays[0].sharding, (len(arrays), *arrays[0].shape)
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        sharding = NamedSharding(sharding.mesh, spec)
    columns = zip(*([s.data for s in a.addressable_shards] for a in arrays), strict=True)
    parts = [_stacked_on_one_device(list(column)) for column in columns]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _stacked_on_one_device(arrays: list[Any]) -> Any:
    (device,) = arrays[0].devices()
    if device.platform == "cpu":
        # Its memory is that of NumPy: one copy, and no program to compile per length.
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
