"""Functions that are traced too often: the warning, and constants that become arrays."""

from __future__ import annotations

import collections
import logging
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

_log = logging.getLogger(__name__)

# As tf.function: so many traces within so many calls are too many, which is said twice at most.
_MANY_TRACES = 5
_WITHIN_CALLS = 10
_MOST_WARNINGS = 2

_ADVICE = (
    "Tracing is expensive. Make an rx.function once, outside of loops; pass values that change "
    "as arrays instead of Python numbers, or set reduce_retracing=True; give arrays one shape "
    "(pad them, or drop the last partial batch)."
)


class TraceHistory:
    """When one Python function was traced, over all `rx.function` objects made of it.

    Attributes:
      num_calls: How many calls there were; counted by the functions themselves.
    """

    __slots__ = ("_num_warnings", "_traced_at", "num_calls")

    def __init__(self) -> None:
        self.num_calls = 0
        self._traced_at: collections.deque[int] = collections.deque(maxlen=_MANY_TRACES)
        self._num_warnings = 0

    def note_trace(self, name: str, reason: str) -> None:
        """Notes that the current call traced the function; warns if such calls are frequent."""
        self._traced_at.append(self.num_calls)
        within = self.num_calls - self._traced_at[0] + 1
        is_frequent = len(self._traced_at) == _MANY_TRACES and within <= _WITHIN_CALLS
        if not is_frequent or self._num_warnings == _MOST_WARNINGS:
            return
        self._num_warnings += 1
        # The next warning needs as many traces again.
        self._traced_at.clear()
        _log.warning(
            "%s was traced %d times in its last %d calls, the last time because %s. %s",
            name,
            _MANY_TRACES,
            within,
            reason,
            _ADVICE,
        )


_histories: weakref.WeakKeyDictionary[Any, TraceHistory] = weakref.WeakKeyDictionary()


def history_of(python_function: Callable[..., Any]) -> TraceHistory:
    """Returns the history of a function, shared by all `rx.function` objects made of it."""
    if not isinstance(python_function, types.FunctionType):
        return TraceHistory()
    found = _histories.get(python_function)
    if found is None:
        found = _histories[python_function] = TraceHistory()
    return found


class Generalization:
    """Python numbers of the arguments that turned out to change, and so are passed as arrays.

    A number is a constant while it keeps one value; with the second value it becomes an array,
    unless the function needs it as a Python number (for a shape, a range or a branch).
    """

    def __init__(self) -> None:
        # By structure of the arguments: the value of each number seen first, by its place.
        self._seen: dict[Any, dict[int, Any]] = {}
        self._changing: dict[Any, frozenset[int]] = {}
        self._refused: set[Any] = set()

    def changing(self, structure: Any, numbers: Mapping[int, Any]) -> frozenset[int]:
        """Notes the numbers of a call, by place, and returns the places of those that change."""
        if structure in self._refused:
            return frozenset()
        changing = self._changing.get(structure, frozenset())
        seen = self._seen.setdefault(structure, {})
        changing |= {place for place, n in numbers.items() if seen.setdefault(place, n) != n}
        self._changing[structure] = changing
        return changing

    def refuse(self, structure: Any) -> bool:
        """Makes numbers constants for good; False if they were all along."""
        if not self._changing.get(structure):
            return False
        self._refused.add(structure)
        del self._changing[structure], self._seen[structure]
        return True
