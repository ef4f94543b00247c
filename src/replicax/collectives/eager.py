"""Reductions of concrete values that lie on several devices, one operation at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives import in_replica
from replicax.collectives.arguments import Component, require_array
from replicax.foundation import errors, jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import ReduceOp
from replicax.foundation.types import Tree
from replicax.values.distributed_values import Mirrored, register_components
from replicax.values.indexed_slices import IndexedSlices

Accumulate = Callable[[Sequence[jax.Array]], jax.Array]


def add_n(values: Sequence[jax.Array]) -> jax.Array:
    """Adds arrays in order."""
    return functools.reduce(jnp.add, values)


def reduce_to_device(
    op: ReduceOp,
    columns: Sequence[Sequence[Component]],
    device: Device,
    accumulate: Accumulate = add_n,
) -> list[Component]:
    """Copies the components of several values to one device and combines them there."""
    for column in columns:
        require_same_shape(column)
    moved = jax.device_put([list(column) for column in columns], device)
    if accumulate is add_n:
        return _combine(op.value, moved)
    return [_combine_column(op, column, accumulate) for column in moved]


def place(value: Tree, targets: Sequence[Device]) -> Tree:
    """Puts a value on one device, or a copy on each of several as `Mirrored`."""
    return place_all([value], [targets])[0]


def place_all(values: Sequence[Tree], targets: Sequence[Sequence[Device]]) -> list[Tree]:
    """Puts each value on its devices; all copies are made by one call."""
    if not jax_compat.is_eager() or any(map(jax_compat.is_traced, jax.tree.leaves(values))):
        copies = [(v,) * len(t) for v, t in zip(values, targets, strict=True)]
    else:
        sources = [v for v, t in zip(values, targets, strict=True) for _ in t]
        moved = jax.device_put(sources, [device for t in targets for device in t])
        moved = iter(jax.tree.map(placement.uncommitted, moved))
        copies = [tuple(next(moved) for _ in t) for t in targets]
    return [parts[0] if len(parts) == 1 else mirrored(parts) for parts in copies]


def mirrored(copies: tuple[Tree, ...]) -> Mirrored:
    """Wraps the copies of a value, and registers them as its components."""
    result = Mirrored(copies)
    register_components(result, copies)
    return result


# Below this size a copy between devices costs more than packing does.
_SMALL_BYTES = 64 << 10


def are_small(columns: Sequence[Sequence[Component]]) -> bool:
    """Tells whether values are worth being sent together."""
    return len(columns) > 1 and all(
        isinstance(c, jax.Array) and c.nbytes <= _SMALL_BYTES for column in columns for c in column
    )


def reduce_packed(
    op: ReduceOp, columns: Sequence[Sequence[Tree]], targets: Sequence[Device]
) -> list[tuple[jax.Array, ...]]:
    """Combines small arrays over replicas, one transfer for all; returns a copy per target.

    Each replica's arrays are joined on its device, the joined arrays are added on the first
    target, and every target takes the sum apart.
    """
    for column in columns:
        require_same_shape(column)
    kinds = tuple((column[0].shape, column[0].dtype) for column in columns)
    pack, combine, unpack = _packed_programs(op, kinds, len(columns[0]))
    rows = list(zip(*columns, strict=True))
    packs = [_on_own_device(pack, row) for row in rows]
    # Uncommitted arrays move to the default device as part of the call.
    with jax.default_device(targets[0]):
        total = combine(packs)
    parts = []
    for device in targets:
        with jax.default_device(device):
            parts.append(unpack(total))
    return list(zip(*parts, strict=True))


def _on_own_device(pack: Callable[..., Any], row: Sequence[jax.Array]) -> Any:
    """Joins one replica's arrays on the device of the first of them."""
    device = next(iter(row[0].devices()))
    if any(array.committed for array in row):
        row = [placement.put(array, device) for array in row]
    with jax.default_device(device):
        return pack(row)


@functools.lru_cache(maxsize=256)
def _packed_programs(
    op: ReduceOp, kinds: tuple[tuple[tuple[int, ...], np.dtype], ...], count: int
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Returns the programs that join arrays, add joined arrays, and take the sum apart."""

    def joined(row: Sequence[jax.Array]) -> dict[str, jax.Array]:
        by_type: dict[str, list[jax.Array]] = {}
        for array in row:
            array = in_replica.summable(op, array)
            by_type.setdefault(str(array.dtype), []).append(array.reshape(-1))
        return {dtype: jnp.concatenate(arrays) for dtype, arrays in by_type.items()}

    def combined(packs: Sequence[dict[str, jax.Array]]) -> dict[str, jax.Array]:
        total = jax.tree.map(lambda *parts: add_n(parts), *packs)
        return jax.tree.map(lambda t: t / count, total) if op is ReduceOp.MEAN else total

    def apart(total: dict[str, jax.Array]) -> list[jax.Array]:
        results, used = [], dict.fromkeys(total, 0)
        for shape, dtype in kinds:
            dtype = str(in_replica.summable(op, jnp.zeros((), dtype)).dtype)
            start, size = used[dtype], math.prod(shape)
            results.append(total[dtype][start : start + size].reshape(shape))
            used[dtype] = start + size
        return results

    return jax.jit(joined), jax.jit(combined), jax.jit(apart)


def require_same_shape(column: Sequence[Component]) -> None:
    """Raises unless the components of one value can be combined element by element."""
    if not column:
        raise errors.InvalidArgumentError(
            "A reduction needs at least one component", "there is none", "Pass a value."
        )
    kinds = {isinstance(c, IndexedSlices) for c in column}
    if kinds == {True}:
        return
    if len(kinds) > 1:
        raise errors.InvalidArgumentError(
            "A reduction needs components of one kind",
            "some are IndexedSlices and some are arrays",
            "Call `to_dense()` on the IndexedSlices first.",
        )
    shapes = [
        c.shape if isinstance(c, jax.Array) else require_array("reduce", c).shape for c in column
    ]
    if any(shape != shapes[0] for shape in shapes):
        raise errors.InvalidArgumentError(
            "A reduction across replicas needs components of one shape",
            f"the shapes are {', '.join(map(str, shapes))}",
            "For a partial batch pass the batch dimension, as in `axis=0`.",
        )


@functools.partial(jax.jit, static_argnums=0)
def _combine(op: str, columns: list[list[Component]]) -> list[Component]:
    return [_combine_column(ReduceOp(op), column, add_n) for column in columns]


def _combine_column(op: ReduceOp, column: Sequence[Component], accumulate: Accumulate) -> Component:
    slices = [c for c in column if isinstance(c, IndexedSlices)]
    if slices:
        return in_replica.joined_slices(op, slices)
    arrays = [c for c in column if isinstance(c, jax.Array)]
    total = accumulate([in_replica.summable(op, array) for array in arrays])
    return total / len(column) if op is ReduceOp.MEAN else total
