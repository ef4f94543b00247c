"""Tries out whether an optimizer updates the rows of a variable independently of each other."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import jax
import numpy as np

from replicax.foundation import jax_compat
from replicax.keras.parameter_servers.optimizer_programs import OptimizerPrograms
from replicax.keras.variables import DistributedVariable

_log = logging.getLogger(__name__)

_NUM_ROWS = 6
_ROWS = np.array([1, 4])
# Offsets of counters: schedules may do nothing at first, and something later.
_LATER = (0, 3, 1_000)
# The offset of the learning rate: one that is zero now may be set to another value.
_HYPERPARAM_STEP = 0.03
_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class RowTrial:
    """What a trial has shown.

    Attributes:
      is_by_rows: Whether a part of a variable changes as it does in the whole.
      keeps_others: Whether rows without a gradient stay as they are, with their slots.
    """

    is_by_rows: bool
    keeps_others: bool


def run(programs: OptimizerPrograms, number: int) -> RowTrial:
    """Updates a few rows of a variable as a whole, and in parts."""
    try:
        return _tried(programs, number)
    except Exception as error:  # It may work on the real shapes only.
        _log.info("%s is updated as a whole: %r", programs.trained[number].path, error)
        return RowTrial(is_by_rows=False, keeps_others=False)


def _tried(programs: OptimizerPrograms, number: int) -> RowTrial:
    random = np.random.default_rng(0)
    variable = programs.trained[number]
    slots = [programs.state[i] for i in programs.slots(number)]

    def draw(shape: Sequence[int], dtype: str) -> np.ndarray:
        return random.normal(size=(_NUM_ROWS, *shape[1:])).astype(dtype)

    with jax_compat.eagerly():
        update = jax.jit(programs.update(number))
        shared = [np.asarray(programs.state[i].value) for i in programs.shared]
        own = [draw(variable.shape, variable.dtype)]
        own += [_first(slot) for slot in slots]
        is_by_rows = keeps_others = True
        others = np.setdiff1d(np.arange(_NUM_ROWS), _ROWS)
        for later in _LATER:
            moved = [_moved(array, later) for array in shared]
            gradient = draw(variable.shape, variable.dtype)
            whole = _arrays(update(gradient, *own, *moved))[: len(own)]
            some = _arrays(update(gradient[_ROWS], *(a[_ROWS] for a in own), *moved))
            for a, b in zip([a[_ROWS] for a in whole], some, strict=False):
                is_by_rows &= bool(np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE))
            # From the first state, and from a later one.
            gradient[others] = 0
            for start in (own, whole):
                after = _arrays(update(gradient, *start, *moved))
                for a, b in zip(after, start, strict=False):
                    keeps_others &= bool(np.array_equal(a[others], b[others]))
    return RowTrial(is_by_rows, is_by_rows and keeps_others)


def _first(slot: DistributedVariable) -> np.ndarray:
    """Returns a slot of a few rows with the first element of the real one."""
    element = np.asarray(slot.value).reshape(-1)[:1]
    return np.full((_NUM_ROWS, *slot.shape[1:]), element if element.size else 0, slot.dtype)


def _arrays(found: Sequence[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(array) for array in found]


def _moved(array: np.ndarray, later: int) -> np.ndarray:
    if np.issubdtype(array.dtype, np.integer):
        return (array + later).astype(array.dtype)
    return (array + (_HYPERPARAM_STEP if later else 0)).astype(array.dtype)
