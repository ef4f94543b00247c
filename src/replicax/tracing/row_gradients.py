"""Gradients of table lookups as rows, without a dense gradient of the table.

A looked-up block of rows passes through a tap: the identity, whose backward pass hands
the cotangent of the rows out to Python. The table itself is not differentiated there, so
no array of the table's size is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicax.values.indexed_slices import IndexedSlices
from replicax.variables import row_numbers


class RowTaps:
    """The lookups made while one function is being differentiated."""

    def __init__(self) -> None:
        # Per lookup: the variable, its ids, and a cell for the cotangent of its rows.
        self._lookups: list[tuple[Any, Any, list[Any]]] = []
        # Variables that were read as a whole, each with a cell for its cotangent.
        self._whole: dict[Any, list[Any]] = {}
        # A differentiated zero: without one JAX would not ask for the cotangent of rows
        # that depend on no differentiated input.
        self.anchor: Any = None

    def lookup(self, variable: Any, table: Any, ids: Any) -> Any:
        """Returns rows of a table; their gradient will be found by `rows_of`."""
        ids = jnp.asarray(ids)
        return self.looked_up(variable, ids, row_numbers.take(jax.lax.stop_gradient(table), ids))

    def looked_up(self, variable: Any, ids: Any, rows: Any) -> Any:
        """Returns rows that were looked up; their gradient will be found by `rows_of`."""
        cell: list[Any] = []
        self._lookups.append((variable, ids, cell))
        return _tap(cell.append)(rows, self.anchor)

    def whole(self, variable: Any, value: Any) -> Any:
        """Returns the value of a variable; its gradient will be found by `whole_of`."""
        cell = self._whole[variable] = []
        return _tap(cell.append)(jax.lax.stop_gradient(value), self.anchor)

    def whole_of(self, variable: Any) -> Any:
        """Returns the gradient of a value that was read as a whole, or None."""
        cell = self._whole.get(variable)
        return cell[0] if cell else None

    def rows_of(self, variable: Any) -> IndexedSlices | None:
        """Returns the gradient rows of all lookups in a variable, or None if there were none."""
        values, indices = [], []
        row_shape = variable.shape[1:]
        for looked_up, ids, cell in self._lookups:
            if looked_up is not variable:
                continue
            rows = cell[0] if cell else jnp.zeros((*ids.shape, *row_shape), variable.dtype)
            values.append(rows.reshape((-1, *row_shape)))
            indices.append(ids.reshape(-1))
        if not values:
            return None
        if len(values) == 1:
            return IndexedSlices(values[0], indices[0], variable.shape)
        return IndexedSlices(jnp.concatenate(values), jnp.concatenate(indices), variable.shape)


def _tap(hand_out: Callable[[Any], None]) -> Callable[[Any, Any], Any]:
    @jax.custom_vjp
    def tap(rows: Any, anchor: Any) -> Any:
        del anchor
        return rows

    def forward(rows: Any, anchor: Any) -> Any:
        del anchor
        return rows, None

    def backward(_: None, cotangent: Any) -> Any:
        hand_out(cotangent)
        return jnp.zeros_like(cotangent), jnp.zeros(())

    tap.defvjp(forward, backward)
    return tap
