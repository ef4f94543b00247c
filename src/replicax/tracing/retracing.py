"""Frequent retracing: the warning, and Python numbers that become arrays."""

from __future__ import annotations

import collections
import logging
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

_log = logging.getLogger(__name__)

# As tf.function: this many traces within this many calls cause a warning, twice at most.
_MANY_TRACES = 5
_WITHIN_CALLS = 10
_MOST_WARNINGS = 2

_ADVICE = (
    "Tracing is expensive. Make an rx.function once, outside of loops; pass values that change "
    "as arrays instead of Python numbers, or set reduce_retracing=True; give arrays one shape "
    "(pad them, or drop the last partial batch)."
)


class TraceHistory:
    """The traces of one Python function, over all `rx.function` objects made of it.

    Attributes:
      num_calls: The number of calls; counted by the functions themselves.
    """

    __slots__ = ("_num_warnings", "_traced_at", "num_calls")

    def __init__(self) -> None:
        self.num_calls = 0
        self._traced_at: collections.deque[int] = collections.deque(maxlen=_MANY_TRACES)
        self._num_warnings = 0

    def note_trace(self, name: str, reason: str) -> None:
        """Records that the current call traced the function; warns if such calls are frequent."""
        self._traced_at.append(self.num_calls)
        within = self.num_calls - self._traced_at[0] + 1
        is_frequent = len(self._traced_at) == _MANY_TRACES and within <= _WITHIN_CALLS
        if not is_frequent or self._num_warnings == _MOST_WARNINGS:
            return
        self._num_warnings += 1
        # The next warning needs the same number of traces again.
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
    """The Python numbers among the arguments that change, and so are passed as arrays.

    A number is a constant while it keeps one value; with the second value it becomes an array,
    unless the function needs it as a Python number (for a shape, a range or a branch).
    """

    def __init__(self) -> None:
        # By structure of the arguments: the first value of each number, by its index in the key.
        self._seen: dict[Hashable, dict[int, Hashable]] = {}
        self._changing: dict[Hashable, frozenset[int]] = {}
        self._disabled: set[Hashable] = set()

    def changing(self, structure: Hashable, numbers: Mapping[int, Hashable]) -> frozenset[int]:
        """Records the numbers of a call, and returns the indices of those that change."""
        if structure in self._disabled:
            return frozenset()
        changing = self._changing.get(structure, frozenset())
        seen = self._seen.setdefault(structure, {})
        changing |= {index for index, n in numbers.items() if seen.setdefault(index, n) != n}
        self._changing[structure] = changing
        return changing

    def disable(self, structure: Hashable) -> bool:
        """Makes numbers constants from now on; returns False if they always were."""
        if not self._changing.get(structure):
            return False
        self._disabled.add(structure)
        del self._changing[structure], self._seen[structure]
        return True
