"""Reductions inside compiled replica code, as XLA collectives over the replica axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation.options import ReduceOp
from replicax.values.distributed_values import PerReplica
from replicax.values.indexed_slices import IndexedSlices, concatenate
from replicax.values.layout import AXIS, ReplicaLayout


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which arrays travel together.

    Attributes:
      largest: An array of more bytes travels alone.
      room: The most bytes of a pack.
      length: The most arrays of a pack; None for any number.
      is_last_first: Whether packs are filled from the last array on. A backward pass computes
        the gradients of the last layers first, so the first pack can leave before its end.
      has_equal_kernels: Whether the slices of a pack start at values that XLA does not know when
        it compiles; see Note [Slices of a pack].
    """

    largest: int
    room: int
    length: int | None = None
    is_last_first: bool = False
    has_equal_kernels: bool = False

    def with_room(self, bytes_per_pack: int) -> Packing:
        """Returns this packing with packs of the given size; 0 changes nothing."""
        if not bytes_per_pack:
            return self
        room = {"largest": bytes_per_pack, "room": bytes_per_pack, "length": None}
        return dataclasses.replace(self, **room)


# Measured on 100 small gradients, 2 CPU devices: one pack instead of 100 all-reduces makes a
# step 4 times as fast. Larger tensors lose by the copy, larger packs by their compilation.
WITHIN_A_PROCESS = Packing(largest=32 << 10, room=128 * (32 << 10), length=128)

# Across processes each collective costs a round trip, so nearly everything travels in packs; an
# array of 2 MB is worth a message of its own, and is not copied. docs/design/0031 has the figures.
ACROSS_PROCESSES = Packing(
    largest=(2 << 20) - 1, room=8 << 20, is_last_first=True, has_equal_kernels=True
)

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


# Up to this size the number of messages in a row decides, beyond it the number of bytes.
_FEW_STEPS_BYTES = 1 << 20


def across_processes(num_replicas: int) -> ArraySum:
    """Returns the sum that is fastest between processes on CPU devices (Gloo).

    Every replica ends with the same bits: a sum of two is commutative, doubling adds the same
    pairs everywhere, gathered values are added in replica order, and a ring computes each
    part of the sum in one place.
    """

    def reduce(array: jax.Array) -> jax.Array:
        if num_replicas == 2:
            return doubling(num_replicas)(array)
        if num_replicas & (num_replicas - 1) == 0:
            is_small = array.nbytes <= _FEW_STEPS_BYTES
            return doubling(num_replicas)(array) if is_small else psum(array)
        is_small = array.nbytes * (num_replicas - 1) <= _FEW_STEPS_BYTES
        return gather_and_add(_in_order, num_replicas)(array) if is_small else psum(array)

    return reduce


def doubling(num_replicas: int) -> ArraySum:
    """Returns a sum for 2, 4, 8, … replicas: pairs swap and add, then pairs of pairs, and so on.

    XLA's all-reduce over Gloo is a ring of twice as many messages; with two replicas this is a
    single swap.
    """

    def reduce(array: jax.Array) -> jax.Array:
        if array.size == 0:
            return array
        distance = 1
        while distance < num_replicas:
            swaps = [(i, i ^ distance) for i in range(num_replicas)]
            array = _computed_once(array, num_replicas)
            array = array + jax.lax.ppermute(array, AXIS, swaps)
            distance *= 2
        return array

    return reduce


def _computed_once(array: jax.Array, num_replicas: int) -> jax.Array:
    """Makes a replica add what it sends, bit for bit.

    XLA computes the own summand again where it is added, and may keep digits that the sent one
    has lost: a product becomes one multiply-add, also across `reduce_precision`. Then the sums of
    two replicas would differ. It does not compute the output of a conditional again, nor copy it.
    The barrier makes the branches differ while XLA looks for equal ones, and costs no kernel.
    """
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    barrier = jax.lax.optimization_barrier
    return jax.lax.cond(_never(num_replicas), barrier, lambda same: same, array)


def _never(num_replicas: int) -> jax.Array:
    """Returns a condition that is false, which XLA does not know."""
    return jax.lax.axis_index(AXIS) == num_replicas


def _in_order(values: Sequence[jax.Array]) -> jax.Array:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def all_reduce(
    op: ReduceOp,
    leaves: Sequence[jax.Array | IndexedSlices],
    num_replicas: int,
    *,
    array_sum: ArraySum = psum,
    packing: Packing = WITHIN_A_PROCESS,
    bytes_per_pack: int = 0,
    num_packs: int | None = None,
) -> list[jax.Array | IndexedSlices]:
    """Combines arrays and IndexedSlices over replicas; small arrays travel together.

    Args:
      op: The reduction.
      leaves: This replica's values.
      num_replicas: How many replicas take part.
      array_sum: Sums one array.
      packing: Which arrays travel together.
      bytes_per_pack: Upper size of a pack; 0 leaves it to `packing`.
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
    packing = packing.with_room(bytes_per_pack)
    for pack in _packs(arrays, packing, num_packs):
        if len(pack) == 1:
            reduced[pack[0]] = array_sum(arrays[pack[0]])
            continue
        joined = array_sum(jnp.concatenate([arrays[i].reshape(-1) for i in pack]))
        like = [arrays[i] for i in pack]
        parts = _parts(joined, like, num_replicas if packing.has_equal_kernels else None)
        reduced.update(zip(pack, parts, strict=True))
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


def joined_slices(op: ReduceOp, slices: Sequence[IndexedSlices]) -> IndexedSlices:
    """Joins the rows of all replicas; their mean is the sum of rows that are divided."""
    joined = concatenate(slices)
    if op is ReduceOp.SUM:
        return joined
    return joined.map_values(lambda v: summable(op, v) / len(slices))


def uneven_rows(
    op: ReduceOp, values: Sequence[PerReplica], layout: ReplicaLayout
) -> list[IndexedSlices | None]:
    """Combines rows whose number differs between replicas; None stands for any other value.

    The trace computes the rows of all replicas one after the other, so that nothing has to move.
    """
    found: list[IndexedSlices | None] = []
    for value in values:
        components = value.values if value.is_split else ()
        slices = [own for own in components if isinstance(own, IndexedSlices)]
        is_uneven = slices and len(slices) == len(components) and value.stored(layout) is None
        found.append(joined_slices(op, slices) if is_uneven else None)
    return found


# The number of kernels, each about 10 ms of compilation.
_WORTH_SAVING = 4


def _parts(
    joined: jax.Array, like: Sequence[jax.Array], num_replicas: int | None
) -> list[jax.Array]:
    """Takes a pack apart; with a number of replicas, by kernels that XLA compiles once per shape.

    Note [Slices of a pack]
        XLA's CPU compiler fuses each slice into the code that uses it, the update of a variable,
        and compiles one kernel for each offset: 100 gradients take 1.1 s instead of 0.25 s.
        Kernels that read their offset are equal, and are compiled once. Constants, also those
        behind `optimization_barrier`, are compiled into the kernel; the outputs of a conditional
        are not. A pack of few arrays is not
        worth a conditional.
    """
    starts: list[Any] = [0]
    for array in like:
        starts.append(starts[-1] + array.size)
    num_saved = len(like) - len({array.shape for array in like})
    if num_replicas is None or num_saved < _WORTH_SAVING:
        return [
            joined[start : start + array.size].reshape(array.shape)
            for start, array in zip(starts, like, strict=False)
        ]
    starts = jax.lax.cond(
        _never(num_replicas),
        lambda: [jnp.zeros((), jnp.int32) for _ in like],
        lambda: [jnp.asarray(start, jnp.int32) for start in starts[:-1]],
    )
    return [
        jax.lax.dynamic_slice(
            joined, (start,), (array.size,), allow_negative_indices=False
        ).reshape(array.shape)
        for start, array in zip(starts, like, strict=True)
    ]


def _packs(
    arrays: dict[int, jax.Array], packing: Packing, num_packs: int | None
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
        pack: list[int] = []
        for i in reversed(indices) if packing.is_last_first else indices:
            if arrays[i].nbytes > packing.largest:
                packs.append([i])
                continue
            is_full = sum(arrays[j].nbytes for j in pack) + arrays[i].nbytes > packing.room
            if pack and (is_full or len(pack) == packing.length):
                packs.append(pack)
                pack = []
            pack.append(i)
        if pack:
            packs.append(pack)
    return packs
