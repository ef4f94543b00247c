"""Indices into variables that users pass: integers, in range, never counted from the end."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree


class Table(Protocol):
    """A variable or an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def checked(api: str, table: Table, indices: Tree, depth: int = 1) -> Any:
    """Returns indices as an array, or raises if they are not valid.

    Args:
      api: What the indices are an argument of, for messages.
      table: A variable or an array.
      indices: Row numbers; if `depth` is not 1, vectors of indices along the last dimension.
      depth: How many dimensions of the table one index names.
    """
    ids = indices if isinstance(indices, np.ndarray) else jnp.asarray(indices)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        # An empty list is of floating type to JAX.
        if jax_compat.is_traced(ids) or ids.size:
            raise errors.InvalidArgumentError(
                f"`{api}` needs indices that are integers",
                f"they have type {ids.dtype}",
                "Convert them with `.astype(int)`.",
            )
        ids = ids.astype(np.int32)
    if depth > len(table.shape):
        raise errors.InvalidArgumentError(
            f"`{api}` on {_named(table)} needs indices of at most {len(table.shape)} numbers each",
            f"they have {depth}",
            "Give one number per dimension, or fewer.",
        )
    require_in_range(api, table, ids, depth)
    return ids


def require_in_range(api: str, table: Table, indices: Tree, depth: int) -> None:
    """Raises for concrete indices out of range; compiled code skips them."""
    if jax_compat.is_traced(indices) or indices.size == 0:
        return
    limits = np.asarray(table.shape[:depth])
    found = np.asarray(indices)
    if (found < 0).any() or (found >= limits).any():
        raise errors.InvalidArgumentError(
            f"`{api}` on {_named(table)} needs indices in [0, {', '.join(map(str, limits))})",
            f"they reach from {found.min()} to {found.max()}",
            "Correct the indices.",
        )


def without_negative(indices: jax.Array) -> jax.Array:
    """Puts negative indices out of range: JAX would count them from the end."""
    if jnp.iinfo(indices.dtype).bits < 32:
        # The largest number of a narrow type may be the number of a row.
        indices = indices.astype(jnp.int32)
    return jnp.where(indices < 0, jnp.iinfo(indices.dtype).max, indices)


def take(table: ArrayLike, ids: ArrayLike) -> jax.Array:
    """Returns rows by number; in compiled code NaN (of integers, the least) out of range."""
    return jnp.take(table, without_negative(jnp.asarray(ids)), axis=0, mode="fill")


def take_at(table: jax.Array, vectors: ArrayLike) -> jax.Array:
    """Returns elements or rows at vectors of indices; out of range as `take` does."""
    parts = tuple(jnp.moveaxis(without_negative(jnp.asarray(vectors)), -1, 0))
    return table.at[parts].get(mode="fill")


def _named(table: Table) -> str:
    name = getattr(table, "name", None)
    return f"an array of shape {table.shape}" if name is None else f"variable {name!r}"
