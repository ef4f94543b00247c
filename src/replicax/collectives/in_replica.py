"""Reductions inside compiled replica code, as XLA collectives over the replica axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation.options import ReduceOp
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import AXIS

# Measured on 100 small gradients, 2 CPU devices: one pack instead of 100 all-reduces makes a
# step 4 times as fast. Larger tensors lose by the copy, larger packs by their compilation.
_PACKED_BYTES = 32 << 10
_PACK_LENGTH = 128

# Sums one array over replicas.
ArraySum = Callable[[jax.Array], jax.Array]


def summable(op: ReduceOp, value: ArrayLike) -> jax.Array:
    """Returns a value as an array of a type that the reduction can work in."""
    array = jnp.asarray(value)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.int32)
    if op is ReduceOp.MEAN and jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(jnp.zeros((), float).dtype)
    return array


def psum(array: jax.Array) -> jax.Array:
    """Sums over replicas with the collective that the devices have."""
    return jax.lax.psum(array, AXIS)


def scatter_and_gather(num_replicas: int) -> ArraySum:
    """Returns a sum in two stages: each replica sums one part, then all exchange parts."""

    def reduce(array: jax.Array) -> jax.Array:
        if array.size == 0:
            return array
        flat = array.reshape(-1)
        padded = jnp.pad(flat, (0, -flat.size % num_replicas))
        part = jax.lax.psum_scatter(padded, AXIS, tiled=True)
        whole = jax.lax.all_gather(part, AXIS, tiled=True)
        return whole[: flat.size].reshape(array.shape)

    return reduce


# From this size on, XLA's CPU all-reduce of a training step takes longer than its two stages:
# 157 against 116 ms a step for 8 gradients of 4 MB on 2 devices.
_TWO_STAGES_BYTES = 4 << 20


def by_size(num_replicas: int) -> ArraySum:
    """Returns the sum that is fastest on CPU devices, whichever it is for a size."""
    two_stages = scatter_and_gather(num_replicas)

    def reduce(array: jax.Array) -> jax.Array:
        return two_stages(array) if array.nbytes >= _TWO_STAGES_BYTES else psum(array)

    return reduce


def gather_and_add(accumulate: Callable[[Sequence[jax.Array]], jax.Array], count: int) -> ArraySum:
    """Returns a sum in replica order: every replica collects all values and adds them."""

    def reduce(array: jax.Array) -> jax.Array:
        gathered = jax.lax.all_gather(array, AXIS)
        return accumulate([gathered[i] for i in range(count)])

    return reduce


def all_reduce(
    op: ReduceOp,
    leaves: Sequence[jax.Array | IndexedSlices],
    num_replicas: int,
    *,
    array_sum: ArraySum = psum,
    bytes_per_pack: int = 0,
    num_packs: int | None = None,
) -> list[jax.Array | IndexedSlices]:
    """Combines arrays and IndexedSlices over replicas; small arrays travel together.

    Args:
      op: The reduction.
      leaves: This replica's values.
      num_replicas: How many replicas take part.
      array_sum: Sums one array.
      bytes_per_pack: Upper size of a pack; 0 packs only what measurably gains.
      num_packs: If given, all arrays of a type travel in this many packs; 0 never packs.
    """
    results: dict[int, jax.Array | IndexedSlices] = {}
    arrays: dict[int, jax.Array] = {}
    reduced: dict[int, jax.Array] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, IndexedSlices):
            results[i] = _all_reduce_slices(op, leaf, num_replicas)
        else:
            arrays[i] = summable(op, leaf)
    for pack in _packs(arrays, bytes_per_pack, num_packs):
        if len(pack) == 1:
            reduced[pack[0]] = array_sum(arrays[pack[0]])
            continue
        joined = array_sum(jnp.concatenate([arrays[i].reshape(-1) for i in pack]))
        start = 0
        for i in pack:
            size = arrays[i].size
            reduced[i] = joined[start : start + size].reshape(arrays[i].shape)
            start += size
    for i, array in reduced.items():
        results[i] = array / num_replicas if op is ReduceOp.MEAN else array
    return [results[i] for i in range(len(leaves))]


def first_replica(leaf: ArrayLike) -> Any:
    """Gives every replica the value of replica 0."""
    array = jnp.asarray(leaf)
    own = jax.lax.axis_index(AXIS) == 0
    if array.dtype == jnp.bool_:
        return jax.lax.psum(jnp.where(own, array, False).astype(jnp.int32), AXIS) > 0
    return jax.lax.psum(jnp.where(own, array, jnp.zeros_like(array)), AXIS)


def all_gather(value: jax.Array, axis: int) -> jax.Array:
    """Concatenates over replicas along `axis`."""
    if value.shape[axis] == 0:
        return value  # XLA gathers no empty dimension; many empty parts are an empty whole
    return jax.lax.all_gather(value, AXIS, axis=axis, tiled=True)


def _all_reduce_slices(op: ReduceOp, slices: IndexedSlices, num_replicas: int) -> IndexedSlices:
    values = summable(op, slices.values)
    if op is ReduceOp.MEAN:
        values = values / num_replicas
    gathered = all_gather(values, 0), all_gather(jnp.asarray(slices.indices), 0)
    return IndexedSlices(*gathered, dense_shape=slices.dense_shape)


def _packs(
    arrays: dict[int, jax.Array], bytes_per_pack: int, num_packs: int | None
) -> list[list[int]]:
    """Decides which arrays travel together; arrays of one pack have one type."""
    by_type: dict[np.dtype, list[int]] = {}
    for i, array in arrays.items():
        by_type.setdefault(array.dtype, []).append(i)
    packs: list[list[int]] = []
    for indices in by_type.values():
        if num_packs is not None:
            size = -(-len(indices) // num_packs) if num_packs else 1
            packs += [indices[i : i + size] for i in range(0, len(indices), size)]
            continue
        limit = bytes_per_pack or _PACKED_BYTES
        pack: list[int] = []
        room = limit * (1 if bytes_per_pack else _PACK_LENGTH)
        for i in indices:
            if arrays[i].nbytes > limit:
                packs.append([i])
                continue
            is_full = sum(arrays[j].nbytes for j in pack) + arrays[i].nbytes > room
            if pack and (is_full or (len(pack) == _PACK_LENGTH and not bytes_per_pack)):
                packs.append(pack)
                pack = []
            pack.append(i)
        if pack:
            packs.append(pack)
    return packs
