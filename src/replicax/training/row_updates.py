"""Updates of some rows of a table: the rows taken out, and put back, at the cost of the rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

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
        order = jnp.argsort(ids)
        ordered = ids[order]
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


def densify(slices: IndexedSlices, shape: tuple[int, ...]) -> jax.Array:
    """Adds rows into zeros; ids outside of the table are dropped."""
    zeros = jnp.zeros(shape, slices.values.dtype)
    return zeros.at[_in_range(slices.indices, shape[0])].add(slices.values, mode="drop")


def _in_range(ids: Any, num_rows: int) -> Any:
    """Moves all ids outside of the table to just behind its end."""
    ids = jnp.asarray(ids)
    if jnp.iinfo(ids.dtype).bits < 32:
        # Ids beyond the table must have room.
        ids = ids.astype(jnp.int32)
    return jnp.where((ids < 0) | (ids >= num_rows), num_rows, ids)
