"""How far the program of this process is: its steps, and the values that it has logged.

Written by the thread that trains, so that a write costs next to nothing; read by the thread that
answers requests.
"""

from __future__ import annotations

import math
import time
from typing import SupportsFloat

# How many names are kept; a program that makes a name per step keeps the last ones.
_MOST_VALUES = 64
_MOST_PROGRAMS = 256


class RunCounter:
    """Counts the runs of a compiled program; its owner adds to `count`.

    Attributes:
      count: The number of runs.
      changes_state: Whether a run changes variables: the program may be a training step.
    """

    __slots__ = ("changes_state", "count")

    def __init__(self, changes_state: bool) -> None:
        self.count = 0
        self.changes_state = changes_state


# By the name of the program, in the order of their creation.
_runs: dict[str, RunCounter] = {}
_values: dict[str, tuple[object, int | None, float]] = {}
# The last number that could be read of each value.
_readable: dict[str, float] = {}


def counter_of(program: str, changes_state: bool) -> RunCounter:
    """Returns the counter of all programs of a name in this process.

    >>> counter = counter_of("train_step", changes_state=True)
    >>> counter.count += 1
    >>> snapshot()["steps"] >= 1
    True
    """
    found = _runs.get(program)
    if found is None:
        found = RunCounter(changes_state)
        # Of more programs than that, counts are not shown.
        if len(_runs) < _MOST_PROGRAMS:
            _runs[program] = found
    found.changes_state |= changes_state
    return found


def log(name: str, value: object, step: int | None = None) -> None:
    """Records the newest value of something, such as the loss.

    Args:
      name: What it is.
      value: A number, or an array with one element, which may still be computed.
      step: The step that it belongs to.

    >>> log("loss", 0.25, step=3)
    >>> snapshot()["values"]["loss"]["value"]
    0.25
    >>> forget("loss")
    """
    if name not in _values and len(_values) >= _MOST_VALUES:
        forget(next(iter(_values)))
    _values[name] = value, step, time.time()


def forget(name: str) -> None:
    """Removes a value. Idempotent."""
    _values.pop(name, None)
    _readable.pop(name, None)


def snapshot() -> dict[str, object]:
    """Returns the runs of programs, the steps, and the newest values that were ready.

    The steps are the runs of that program that has changed variables most often.
    """
    counters = list(_runs.items())
    values: dict[str, object] = {}
    for name, (value, step, logged_s) in list(_values.items()):
        number = _number(value)
        if number is not None:
            _readable[name] = number
        if name in _readable:
            values[name] = {"value": _readable[name], "step": step, "time_s": logged_s}
    return {
        "steps": max((c.count for _, c in counters if c.changes_state), default=0),
        "runs": {name: counter.count for name, counter in counters if counter.count},
        "values": values,
    }


def _number(value: object) -> float | None:
    """Returns a value as a number; None if it is not ready, not finite, or was donated."""
    is_ready = getattr(value, "is_ready", None)
    try:
        if callable(is_ready) and not is_ready():
            return None
        if not isinstance(value, SupportsFloat):
            return None
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
