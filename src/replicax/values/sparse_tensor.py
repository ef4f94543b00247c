"""`SparseTensor`: the entries of a mostly empty array, by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from replicax.foundation import errors
from replicax.foundation.types import Tree


@jax.tree_util.register_pytree_node_class
class SparseTensor:
    """The entries of an array that is mostly empty, as of `tf.SparseTensor`.

    A pytree: its indices and values can be arguments of compiled and of replica code. Their
    number is part of the compiled program. To fill it up, add entries whose index lies outside
    `dense_shape`: they count as absent.

    Args:
      indices: Shape (entries, dimensions): where each entry is.
      values: Shape (entries,).
      dense_shape: The shape of the array.

    Raises:
      ArgumentTypeError: `dense_shape` is not of whole numbers.

    >>> ids = SparseTensor([[0, 0], [0, 1], [2, 0]], [7, 3, 5], dense_shape=(3, 2))
    >>> ids.shape
    (3, 2)
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, indices: Tree, values: Tree, dense_shape: Sequence[int]) -> None:
        self.indices = indices
        self.values = values
        self.dense_shape = tuple(_whole(size) for size in dense_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.dense_shape

    def __repr__(self) -> str:
        return (
            f"SparseTensor(indices={self.indices!r}, values={self.values!r}, "
            f"dense_shape={self.dense_shape})"
        )

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        return (self.indices, self.values), self.dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...], children: tuple[Tree, Tree]
    ) -> SparseTensor:
        made = object.__new__(cls)
        made.indices, made.values = children
        made.dense_shape = dense_shape
        return made


def _whole(size: Tree) -> int:
    try:
        return int(size)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise errors.ArgumentTypeError(
            "`dense_shape` of a SparseTensor must be whole numbers",
            f"it contains {size!r}",
            "Pass numbers, not values of compiled code: shapes are part of the program.",
        ) from None
