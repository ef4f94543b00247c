"""Sparse gradients: rows of a table, by index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.foundation import errors
from replicax.foundation.types import Tree


@jax.tree_util.register_pytree_node_class
class IndexedSlices:
    """Some rows of a dense array, named by index; repeated indices add up.

    >>> slices = IndexedSlices(jnp.ones((2, 3)), jnp.array([0, 2]), dense_shape=(4, 3))
    >>> slices.to_dense().sum()
    Array(6., dtype=float32)
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(
        self, values: Tree, indices: Tree, dense_shape: Sequence[int] | None = None
    ) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = None if dense_shape is None else tuple(dense_shape)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the dense array, if it is known."""
        return self.dense_shape

    @property
    def dtype(self) -> Any:
        """The type of the rows."""
        return self.values.dtype

    def to_dense(self) -> jax.Array:
        """Adds the rows into an array of zeros.

        Raises:
          InvalidArgumentError: The shape is unknown.
        """
        if self.dense_shape is None:
            raise errors.InvalidArgumentError(
                "`to_dense` needs to know the shape of the dense array",
                "these IndexedSlices were made without `dense_shape`",
                "Pass dense_shape= when making them.",
            )
        zeros = jnp.zeros(self.dense_shape, self.dtype)
        return zeros.at[self.indices].add(self.values)

    def map_values(self, fn: Callable[[Tree], Tree]) -> IndexedSlices:
        """Applies `fn` to the rows and keeps the indices, which `jax.tree.map` changes as well."""
        return IndexedSlices(fn(self.values), self.indices, self.dense_shape)

    def map_arrays(self, fn: Callable[[Tree], Tree]) -> IndexedSlices:
        """Applies `fn` to rows and indices alike."""
        return IndexedSlices(fn(self.values), fn(self.indices), self.dense_shape)

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape})"
        )

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...] | None, children: tuple[Tree, Tree]
    ) -> IndexedSlices:
        return cls(*children, dense_shape=dense_shape)


def concatenate(slices: Sequence[IndexedSlices]) -> IndexedSlices:
    """Joins the rows of several; together they stand for the sum."""
    return IndexedSlices(
        jnp.concatenate([s.values for s in slices]),
        jnp.concatenate([s.indices for s in slices]),
        slices[0].dense_shape,
    )
