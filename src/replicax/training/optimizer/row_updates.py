"""Updates of some rows of a table: the rows taken out, and put back, at the cost of the rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.values.indexed_slices import IndexedSlices


class RowBlock:
    """The rows that a sparse gradient names, each once, in order.

    There are as many as ids in the gradient, since compiled code must know how many. Where
    ids repeat, or lie outside of the table, rows are left over at the end: they hold zeros,
    and ids beyond the table, so that what is put back there is dropped.

    Attributes:
      gradient: The gradient of each row.

    >>> slices = IndexedSlices(jnp.ones((3, 1)), jnp.array([4, 0, 4]), (5, 1))
    >>> RowBlock(slices, 5).gradient.tolist()
    [[1.0], [2.0], [0.0]]
    """

    def __init__(self, slices: IndexedSlices, num_rows: int) -> None:
        ids = _in_range(slices.indices, num_rows)
        count = ids.shape[0]
        ordered, order = _sorted(ids)
        is_new = jnp.concatenate([jnp.ones(min(count, 1), bool), ordered[1:] != ordered[:-1]])
        group = jnp.cumsum(is_new) - 1
        beyond = num_rows + jnp.arange(count, dtype=ids.dtype)
        first = jnp.full(count, num_rows, ids.dtype)
        first = first.at[group].set(ordered, indices_are_sorted=True)
        is_row = first < num_rows
        self._ids = jnp.where(is_row, first, beyond)
        summed = jax.ops.segment_sum(
            slices.values[order], group, num_segments=count, indices_are_sorted=True
        )
        fits = is_row.reshape((-1,) + (1,) * (summed.ndim - 1))
        self.gradient: Any = jnp.where(fits, summed, jnp.zeros_like(summed))

    def take(self, table: Any) -> Any:
        """Returns the rows of a table."""
        return table.at[self._ids].get(
            mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=True
        )

    def put(self, table: Any, rows: Any) -> Any:
        """Returns the table with its rows replaced."""
        return table.at[self._ids].set(
            rows.astype(table.dtype), mode="drop", indices_are_sorted=True, unique_indices=True
        )

    def put_sums(self, table: Any, updates: Any, sums: Any) -> Any:
        """Returns the table with its rows replaced by `sums`, which are rows plus updates.

        Where the types allow it the updates are added in place, without a copy of the rows.
        """
        if updates.dtype != table.dtype:
            return self.put(table, sums)
        return table.at[self._ids].add(
            updates, mode="drop", indices_are_sorted=True, unique_indices=True
        )


def densify(slices: IndexedSlices, shape: tuple[int, ...]) -> jax.Array:
    """Adds rows into zeros; ids outside of the table are dropped."""
    zeros = jnp.zeros(shape, slices.values.dtype)
    return zeros.at[_in_range(slices.indices, shape[0])].add(slices.values, mode="drop")


def _sorted(ids: Any) -> tuple[Any, Any]:
    """Returns ids in order, and the place that each of them had.

    As one number each, with the place in the lower half: XLA's CPU backend sorts one array
    of 4,096 numbers in a tenth of the time of two arrays.
    """
    half = np.uint64(32)
    with jax.enable_x64(True):
        places = jnp.arange(ids.shape[0], dtype=jnp.uint64)
        joined = jax.lax.sort((ids.astype(jnp.uint64) << half) | places, is_stable=False)
        order = (joined & np.uint64(2**32 - 1)).astype(jnp.int32)
        return (joined >> half).astype(ids.dtype), order


def _in_range(ids: Any, num_rows: int) -> Any:
    """Moves all ids outside of the table to just behind its end."""
    ids = jnp.asarray(ids)
    if jnp.iinfo(ids.dtype).bits < 32:
        # Ids beyond the table must have room.
        ids = ids.astype(jnp.int32)
    return jnp.where((ids < 0) | (ids >= num_rows), num_rows, ids)
