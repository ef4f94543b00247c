"""Checks of what is passed to collectives, shared by all executors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.values.array_surface import as_operand
from replicax.values.distributed_values import is_array_like
from replicax.values.indexed_slices import IndexedSlices


def require_array(api: str, leaf: Any) -> Any:
    """Returns a leaf as an array (or IndexedSlices), or raises."""
    leaf = as_operand(leaf)
    if isinstance(leaf, IndexedSlices | jax.Array):
        return leaf
    if not is_array_like(leaf):
        raise errors.ArgumentTypeError(
            f"`{api}` needs arrays", f"{type(leaf).__name__} was given", "Pass arrays only."
        )
    return jnp.asarray(leaf)


def checked_axis(axis: Any, rank: int) -> int:
    """Returns an axis counted from 0, or raises if there is no such axis."""
    if isinstance(axis, jax.Array | np.integer) and not jax_compat.is_traced(axis):
        axis = int(axis)
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise errors.ArgumentTypeError(
            "`axis` must be an int", f"it is {axis!r}", "Pass a Python int."
        )
    if rank == 0:
        raise errors.InvalidArgumentError(
            "Gathering needs values with at least one dimension",
            "the value is a scalar",
            "Use jnp.expand_dims first.",
        )
    if not -rank <= axis < rank:
        raise errors.InvalidArgumentError(
            f"`axis` must be in [0, {rank})", f"it is {axis}", "Name an axis of the value."
        )
    return axis % rank


def gather_of_slices() -> errors.UnsupportedError:
    """Returns the error of gathering IndexedSlices."""
    return errors.UnsupportedError(
        "Gathering needs dense arrays",
        "IndexedSlices were given",
        "Call `to_dense()` first, or reduce them, which joins their rows.",
    )
