"""The rows that an index selects: only these are fetched of a variable on servers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree


class RowSelection(NamedTuple):
    """Rows to fetch, and the index into them.

    Attributes:
      ids: The numbers of the rows, a list; known (NumPy), or computed by a trace.
      within: `rows[within]` is what the variable at the index is.
    """

    ids: Any
    within: tuple[Any, ...]


def select_rows(key: object, num_rows: int, name: str) -> RowSelection | None:
    """Returns the rows that an index needs; None for all of them, or if that is unknown.

    >>> select_rows((slice(1, 3), 0), 5, "v")
    RowSelection(ids=array([1, 2]), within=(slice(None, None, None), 0))

    Args:
      key: What `variable[key]` was given.
      num_rows: The number of rows.
      name: The name of the variable, for messages.
    """
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    if isinstance(first, slice):
        bounds = (first.start, first.stop, first.step)
        if any(map(jax_compat.is_traced, bounds)):
            return None
        wanted = range(*first.indices(num_rows))
        if len(wanted) == num_rows and wanted.step == 1:
            return None
        numbers = np.arange(wanted.start, wanted.stop, wanted.step)
        return RowSelection(numbers, (slice(None), *rest))
    is_number = isinstance(first, int | np.integer) and not isinstance(first, bool)
    if not is_number and not isinstance(first, np.ndarray | jax.Array):
        return None
    if jax_compat.is_traced(first):
        return _computed(first, rest, num_rows)
    ids = np.asarray(first)
    if ids.dtype == bool:
        if ids.shape != (num_rows,):
            return None
        (ids,) = np.nonzero(ids)
    elif not np.issubdtype(ids.dtype, np.integer):
        return None
    if ids.size and not (-num_rows <= ids.min() and ids.max() < num_rows):
        raise errors.OutOfRangeError(
            f"Row numbers of {name!r} must be in [{-num_rows}, {num_rows})",
            f"{ids.max() if ids.max() >= num_rows else ids.min()} was given",
            "Correct the index.",
        )
    ids = np.where(ids < 0, ids + num_rows, ids)
    return RowSelection(ids.reshape(-1), (_positions(ids.shape), *rest))


def _computed(first: Tree, rest: tuple[Any, ...], num_rows: int) -> RowSelection | None:
    if not jnp.issubdtype(first.dtype, jnp.integer):
        return None
    ids = jnp.where(first < 0, first + num_rows, first)
    return RowSelection(ids.reshape(-1), (_positions(ids.shape), *rest))


def _positions(shape: tuple[int, ...]) -> Any:
    """Returns the index into the fetched rows."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape) if shape else 0
