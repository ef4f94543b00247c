"""The base of iterators over datasets: TensorFlow's methods, and returned elements."""

from __future__ import annotations

import abc
import threading
from typing import Any

from typing_extensions import override

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.tracing.iterators import EndOfData, Feed


class DataIterator(Feed):
    """An iterator over a dataset, also inside `rx.function`."""

    def __init__(self) -> None:
        # Elements that were put back, the next one last, each with the position before it.
        self._returned: list[tuple[Tree, Any]] = []
        self._lock = threading.RLock()

    @abc.abstractmethod
    def _read(self) -> Tree:
        """Returns the next element of the dataset, or raises StopIteration."""

    @abc.abstractmethod
    def _position(self) -> Any:
        """Returns the position of the next element that `_read` returns."""

    def get_next(self) -> Tree:
        """Returns the next element; raises `rx.errors.OutOfRangeError` after the last one."""
        try:
            return next(self)
        except StopIteration:
            raise errors.OutOfRangeError(
                "`get_next` needs another element",
                "the dataset has ended",
                "Catch this error to end the epoch, or repeat the dataset.",
            ) from None

    def get_next_as_optional(self) -> Optional:
        """Returns the next element, or an `Optional` without a value after the last one."""
        try:
            return Optional(next(self), has_value=True)
        except StopIteration:
            return Optional(None, has_value=False)

    @override
    def pull(self) -> Tree:
        with self._lock:
            if self._returned:
                return self._returned.pop()[0]
            try:
                return self._read()
            except StopIteration:
                raise EndOfData from None

    @override
    def put_back(self, elements: list[tuple[Tree, Any]]) -> None:
        with self._lock:
            self._returned += reversed(elements)

    @override
    def get_state(self) -> Any:
        """Returns the position of the consumer, without elements that were read ahead."""
        with self._lock:
            return self._returned[-1][1] if self._returned else self._position()


class Optional:
    """An element, or none after the end of a dataset.

    >>> Optional(3, has_value=True).get_value()
    3
    """

    def __init__(self, value: Tree, has_value: bool) -> None:
        self._value = value
        self._has_value = has_value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self._has_value else "Optional without a value"

    def has_value(self) -> bool:
        """Returns whether there is an element."""
        return self._has_value

    def get_value(self) -> Tree:
        """Returns the element, or raises if there is none."""
        if not self._has_value:
            raise errors.InvalidArgumentError(
                "`get_value` needs an element",
                "the dataset has ended",
                "Call has_value() first.",
            )
        return self._value
