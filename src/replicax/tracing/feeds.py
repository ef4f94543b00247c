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
from typing import Any

import jax
import jax.numpy as jnp

from replicax.contexts import frames
from replicax.foundation import errors, jax_compat
from replicax.tracing import signature
from replicax.tracing.iterators import EndOfData, Feed, FeedSource

# How many elements one call may take: each is a set of inputs of the compiled program.
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

    @property
    def arrays(self) -> list[Any]:
        """The arrays of all elements, in order."""
        return [a for _, element in self.events if element is not None for a in element.arrays]

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
            # An iterator without read-ahead computes here, and not for the trace.
            eager = frames.current().with_overlay(None)
            with jax_compat.eagerly(), frames.pushed(eager):
                self.take(origin)
        _, element = self.events[self._replayed]
        self._replayed += 1
        return element

    def take(self, origin: Origin) -> Event:
        """Takes one more element, or meets the end of the data."""
        if len(self._taken) == MOST_ELEMENTS:
            raise errors.TracingError(
                errors.message(
                    f"One call of a compiled function can take {MOST_ELEMENTS} elements",
                    "it asks for more: is there a loop over a long or endless dataset inside?",
                    "Loop outside of `rx.function` and pass the elements, or take a fixed number "
                    "with `next(iterator)`.",
                )
            )
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
        self.layouts: list[Any] = []
        self._keep: list[Any] = []
        supply.start_replay()

    def next_of(self, feed: Feed) -> Any:
        """Returns the next element as traced arrays, or raises EndOfData."""
        element = self.supply.next_of(feed)
        if element is None:
            raise EndOfData
        traced = [self._enter(array) for array in element.arrays]
        self.layouts += signature.layouts_of(element.skeleton)
        return signature.fill(element.skeleton, traced)[0][0]

    def _enter(self, array: Any) -> Any:
        with jax_compat.eagerly():
            array = jnp.asarray(array)
            # A new array object over the same buffers: its identity is ours alone.
            parts = [shard.data for shard in array.addressable_shards]
            own = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
        self.positions[id(own)] = len(self._keep)
        self._keep.append(own)
        return jnp.copy(own)


def _require_numbers(element: signature.Arguments) -> None:
    for array in element.arrays:
        if array.dtype.kind in "OSUMm" or array.dtype.names is not None:
            raise errors.ArgumentTypeError(
                errors.message(
                    "A compiled function can take elements of numbers from an iterator",
                    f"an element has an array of type {array.dtype}",
                    "Remove or convert that part with `Dataset.map`, or call next(iterator) "
                    "outside of `rx.function`.",
                )
            )
