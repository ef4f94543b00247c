"""Reductions of concrete values that lie on several devices, one operation at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.collectives import in_replica
from replicax.collectives.arguments import require_array
from replicax.foundation import errors
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import ReduceOp
from replicax.values.indexed_slices import IndexedSlices, concatenate

Accumulate = Callable[[Sequence[jax.Array]], jax.Array]


def add_n(values: Sequence[jax.Array]) -> jax.Array:
    """Adds arrays in order."""
    return functools.reduce(jnp.add, values)


def reduce_to_device(
    op: ReduceOp,
    columns: Sequence[Sequence[Any]],
    device: Device,
    accumulate: Accumulate = add_n,
) -> list[Any]:
    """Copies the components of several values to one device and combines them there."""
    for column in columns:
        require_same_shape(column)
    moved = jax.device_put([list(column) for column in columns], device)
    if accumulate is add_n:
        return _combine(op.value, moved)
    return [_combine_column(op, column, accumulate) for column in moved]


def require_same_shape(column: Sequence[Any]) -> None:
    """Raises unless the components of one value can be combined element by element."""
    if not column:
        raise errors.InvalidArgumentError(
            errors.message(
                "A reduction needs at least one component", "there is none", "Pass a value."
            )
        )
    kinds = {isinstance(c, IndexedSlices) for c in column}
    if kinds == {True}:
        return
    if len(kinds) > 1:
        raise errors.InvalidArgumentError(
            errors.message(
                "A reduction needs components of one kind",
                "some are IndexedSlices and some are arrays",
                "Call `to_dense()` on the IndexedSlices first.",
            )
        )
    shapes = [require_array("reduce", c).shape for c in column]
    if any(shape != shapes[0] for shape in shapes):
        raise errors.InvalidArgumentError(
            errors.message(
                "A reduction across replicas needs components of one shape",
                f"the shapes are {', '.join(map(str, shapes))}",
                "For a partial batch pass the batch dimension, as in `axis=0`.",
            )
        )


@functools.partial(jax.jit, static_argnums=0)
def _combine(op: str, columns: list[list[Any]]) -> list[Any]:
    return [_combine_column(ReduceOp(op), column, add_n) for column in columns]


def _combine_column(op: ReduceOp, column: Sequence[Any], accumulate: Accumulate) -> Any:
    if isinstance(column[0], IndexedSlices):
        joined = concatenate(column)
        if op is ReduceOp.SUM:
            return joined
        return joined.map_values(lambda v: in_replica.summable(op, v) / len(column))
    total = accumulate([in_replica.summable(op, c) for c in column])
    return total / len(column) if op is ReduceOp.MEAN else total
