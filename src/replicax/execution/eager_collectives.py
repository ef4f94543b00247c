"""Reductions inside eager replica code: replicas meet, and differentiate through it."""

from __future__ import annotations

from typing import Any

import jax

from replicax.collectives.arguments import checked_axis, gather_of_slices, require_array
from replicax.contexts import frames
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import ReduceOp
from replicax.values.distributed_values import PerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import leaves_of, map_structure


def all_reduce(run: Any, op: ReduceOp, value: Any, options: Any) -> Any:
    """Combines a nest of values over the replicas of an eager run."""
    leaves = [require_array("all_reduce", leaf) for leaf in leaves_of(value)]

    def exchange(leaves: list[Any]) -> list[Any]:
        return run.merge_call(_reduce_merged, (op, list(leaves), options), {})

    if any(map(jax_compat.is_traced, jax.tree.leaves(leaves))):
        # The gradient of an all-reduce is the same all-reduce of the gradients.
        reduced = _through_gradients(exchange, lambda _, cts: exchange(cts), leaves)
    else:
        reduced = exchange(leaves)
    found = iter(reduced)
    return map_structure(lambda _: next(found), value)


def all_gather(run: Any, value: Any, axis: int) -> Any:
    """Concatenates a value over the replicas of an eager run."""
    if isinstance(value, IndexedSlices):
        raise gather_of_slices()
    array = require_array("all_gather", value)
    axis = checked_axis(axis, array.ndim)

    def exchange(leaves: list[Any]) -> list[Any]:
        return run.merge_call(_gather_merged, (leaves[0], axis), {})

    def own_part(leaves: list[Any], cts: list[Any]) -> list[Any]:
        """Sums the gradients of all replicas and cuts out what this replica put in."""
        sizes = run.merge_call(_sizes_merged, (leaves[0].shape[axis],), {})
        total = run.merge_call(_reduce_merged, (ReduceOp.SUM, cts, None), {})[0]
        start = sum(sizes[: _own_id()])
        return [jax.lax.dynamic_slice_in_dim(total, start, leaves[0].shape[axis], axis)]

    if jax_compat.is_traced(array):
        return _through_gradients(exchange, own_part, [array])[0]
    return exchange([array])[0]


def _through_gradients(exchange: Any, pull_back: Any, leaves: list[Any]) -> list[Any]:
    """Calls `exchange` on the concrete values behind values that are being differentiated."""

    @jax.custom_vjp
    def meet(leaves: list[Any]) -> list[Any]:
        return _concrete(exchange, leaves)

    def forward(leaves: list[Any]) -> Any:
        return _concrete(exchange, leaves), leaves

    def backward(leaves: list[Any], cotangents: list[Any]) -> Any:
        return (_concrete(lambda cts: pull_back(leaves, cts), list(cotangents)),)

    meet.defvjp(forward, backward)
    return meet(leaves)


def _concrete(exchange: Any, leaves: list[Any]) -> list[Any]:
    if any(map(jax_compat.is_traced, jax.tree.leaves(leaves))):
        raise errors.TracingError(
            errors.message(
                "A collective in eager replica code needs concrete values",
                "it is inside a jax.jit, scan, vmap or nested gradient",
                "Compile the whole step with `rx.function`.",
            )
        )
    with _without_overlay():
        return exchange(leaves)


def _without_overlay() -> Any:
    return frames.pushed(frames.current().with_overlay(None))


def _own_id() -> int:
    replica_id = frames.current().replica_id
    assert replica_id is not None
    return replica_id


def _reduce_merged(strategy: Any, op: ReduceOp, values: list[Any], options: Any) -> list[Any]:
    extended = strategy.extended
    count = strategy.num_replicas_in_sync
    pairs = [(v, extended.worker_devices) for v in values if isinstance(v, PerReplica)]
    reduced = iter(extended.batch_reduce(op, pairs, options))
    results = []
    for value in values:
        if isinstance(value, PerReplica):
            results.append(next(reduced))
        elif op is ReduceOp.MEAN:
            results.append(value)
        elif isinstance(value, IndexedSlices):
            results.append(value.map_values(lambda v: v * count))
        else:
            results.append(value * count)
    return results


def _gather_merged(strategy: Any, value: Any, axis: int) -> list[Any]:
    extended = strategy.extended
    if not isinstance(value, PerReplica):
        value = PerReplica((value,) * strategy.num_replicas_in_sync)
    gathered = extended.gather_components(value, axis)
    return [extended.broadcast_to(gathered, extended.worker_devices)]


def _sizes_merged(strategy: Any, size: Any) -> Any:
    if isinstance(size, PerReplica):
        return _Sizes(size.values)
    return _Sizes((size,) * strategy.num_replicas_in_sync)


class _Sizes(tuple[int, ...]):
    """Sizes of all replicas, handed to each replica whole."""
