"""Iterators that compiled functions can take elements from, again in each call.

See `tracing/feeds.py` for how their elements become inputs of programs.
"""

from __future__ import annotations

import abc
import io
from collections.abc import Iterator
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import TypeIs, override

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.contexts.overlay import Overlay
from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.values.array_surface import ArraySurface
from replicax.values.regroup import map_structure


class EndOfData(StopIteration):
    """Raised by `next` of a data iterator that has no element left."""


class Feed(abc.ABC):
    """An iterator whose elements compiled functions can take."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tree:
        frame = frames.current()
        inputs = inputs_of(frame.overlay)
        if inputs is None:
            return self.placed(self.pull())
        _require_one_taker(frame)
        return inputs.next_of(self)

    @abc.abstractmethod
    def pull(self) -> Tree:
        """Returns the next element, or raises EndOfData."""

    def placed(self, element: Tree) -> Tree:
        """Returns an element of `pull` on the devices where eager code expects it."""
        return element

    @abc.abstractmethod
    def get_state(self) -> Any:
        """Returns the position, from which an iterator returns the same elements."""

    @abc.abstractmethod
    def put_back(self, elements: list[tuple[Tree, Any]]) -> None:
        """Puts back the last elements of `pull`, oldest first, each with the position before it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stops background work."""


class FeedSource(Protocol):
    """A dataset: each loop over it starts a new iterator."""

    def open_feed(self) -> Feed: ...


class ElementInputs(Protocol):
    """The elements of data iterators in a trace."""

    @property
    def supply(self) -> Supply: ...

    def next_of(self, feed: Feed) -> Tree:
        """Returns the next element as traced arrays, or raises EndOfData."""
        ...


class Supply(Protocol):
    """Opens the iterators of loops over datasets."""

    def loop_over(self, source: FeedSource) -> Feed: ...


class PythonIterator(Feed):
    """Any other iterator, for the duration of one call that takes it as an argument.

    It replaces the argument while the function is traced. Elements cannot be put back into Python
    iterators: those of a failing call are lost, as in eager code.
    """

    def __init__(self, iterator: Iterator[Tree]) -> None:
        self._iterator = iterator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._iterator, name):
            kind = type(self.__dict__.get("_iterator")).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        raise errors.TracingError(
            "An iterator that is an argument of a compiled function provides elements only: one "
            "trace serves all iterators",
            f"its attribute {name!r} is read",
            "Pass the value as another argument, or take it from the dataset.",
        )

    @override
    def pull(self) -> Tree:
        try:
            element = next(self._iterator)
        except StopIteration:
            raise EndOfData from None
        return map_structure(_as_array, element)

    @override
    def get_state(self) -> None:
        return None

    @override
    def put_back(self, elements: list[tuple[Tree, Any]]) -> None:
        del elements

    @override
    def close(self) -> None:
        """Leaves the iterator to its owner."""


def is_iterator(value: object) -> TypeIs[Iterator[Any]]:
    """Returns whether a value is an iterator; files do not count.

    >>> is_iterator(iter([1])), is_iterator([1])
    (True, False)
    """
    cls = type(value)
    has_next = hasattr(cls, "__next__") and hasattr(cls, "__iter__")
    return has_next and not isinstance(value, io.IOBase)


def open_loop(source: FeedSource) -> Feed:
    """Starts a loop over a dataset in the current frame."""
    inputs = inputs_of(frames.current().overlay)
    return source.open_feed() if inputs is None else inputs.supply.loop_over(source)


def inputs_of(overlay: Overlay | None) -> ElementInputs | None:
    """Returns the data elements of the function being compiled; None in eager code."""
    while overlay is not None:
        inputs = getattr(overlay, "feed_inputs", None)
        if inputs is not None:
            return inputs
        overlay = overlay.parent
    return None


def _require_one_taker(frame: frames.Frame) -> None:
    """Raises where one `next` of a trace would be several at run time."""
    if frame.overlay is not None and not frame.overlay.is_current_trace():
        raise errors.TracingError(
            "`next(iterator)` in compiled code must be called once per element",
            "it is called inside a jax.lax loop, branch or a nested transformation",
            "Take the element before, and pass it in; or use rx.fori_loop or rx.scan, whose "
            "bodies can take elements.",
        )
    if frame.mode is Mode.REPLICA and frame.strategy.num_replicas_in_sync > 1:
        raise errors.TracingError(
            "Compiled replica code is traced once for all replicas, and cannot take an element "
            "for each of them",
            f"`next(iterator)` is called in {frame.describe()}",
            "Call next(iterator) outside of `strategy.run` and pass the element in `args`.",
        )


def _as_array(leaf: object) -> object:
    """Converts numbers and arrays of other libraries: inputs instead of constants."""
    if isinstance(leaf, jax.Array | np.ndarray | ArraySurface):
        return leaf
    if isinstance(leaf, bool | int | float | complex | np.generic):
        with jax_compat.eagerly():
            return jnp.asarray(leaf)
    return np.asarray(leaf) if hasattr(leaf, "__array__") else leaf
