"""Reductions inside eager replica code: replicas meet, and differentiate through it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives.arguments import checked_axis, gather_of_slices, require_array
from replicax.contexts import frames
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import ReduceOp
from replicax.values.distributed_values import PerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import leaves_of, map_structure


def exchange_reduced(run: Any, op: ReduceOp, value: Any, options: Any) -> Any:
    """Combines a nest of values that nobody differentiates."""
    leaves = [require_array("all_reduce", leaf) for leaf in leaves_of(value)]
    found = iter(run.merge_call(_reduce_merged, (op, leaves, options), {}))
    return map_structure(lambda _: next(found), value)


def exchange_gathered(run: Any, value: Any, axis: int) -> Any:
    """Concatenates a value that nobody differentiates."""
    array, axis = _checked_gather(value, axis)
    return run.merge_call(_gather_merged, (array, axis), {})[0]


def all_reduce(run: Any, op: ReduceOp, value: Any, options: Any) -> Any:
    """Combines a nest of values over the replicas of an eager run."""
    leaves = [require_array("all_reduce", leaf) for leaf in leaves_of(value)]

    def exchange(leaves: list[Any]) -> list[Any]:
        return run.merge_call(_reduce_merged, (op, list(leaves), options), {})

    def pull_back(leaves: list[Any], cts: list[Any]) -> list[Any]:
        return [_pull_back_leaf(run, op, leaf, ct) for leaf, ct in zip(leaves, cts, strict=True)]

    if any(map(jax_compat.is_traced, jax.tree.leaves(leaves))):
        reduced = _through_gradients(exchange, pull_back, leaves)
    else:
        reduced = _concrete(exchange, leaves)
    found = iter(reduced)
    return map_structure(lambda _: next(found), value)


def _pull_back_leaf(run: Any, op: ReduceOp, leaf: Any, cotangent: Any) -> Any:
    """Returns the gradient of one all-reduced value.

    For an array it is the same all-reduce of the gradients. All-reduced rows lie side by
    side, so the gradient of a replica's rows is its part of the summed gradients.
    """
    if isinstance(leaf, IndexedSlices):
        rows = _own_part(run, leaf.values.shape[0], cotangent.values, 0)
        if op is ReduceOp.MEAN:
            rows = rows / run.num_replicas
        return IndexedSlices(rows, _no_gradient(leaf.indices), leaf.dense_shape)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return _no_gradient(leaf)
    return run.merge_call(_reduce_merged, (op, [cotangent], None), {})[0]


def _own_part(run: Any, size: int, cotangent: Any, axis: int) -> Any:
    """Sums the gradients of all replicas and cuts out what this replica put in."""
    sizes = run.merge_call(_sizes_merged, (size,), {})
    total = run.merge_call(_reduce_merged, (ReduceOp.SUM, [cotangent], None), {})[0]
    return jax.lax.dynamic_slice_in_dim(total, sum(sizes[: _own_id()]), size, axis)


def _no_gradient(leaf: Any) -> Any:
    return np.zeros(leaf.shape, jax.dtypes.float0)


def all_gather(run: Any, value: Any, axis: int) -> Any:
    """Concatenates a value over the replicas of an eager run."""
    array, axis = _checked_gather(value, axis)

    def exchange(leaves: list[Any]) -> list[Any]:
        return run.merge_call(_gather_merged, (leaves[0], axis), {})

    def pull_back(leaves: list[Any], cts: list[Any]) -> list[Any]:
        if not jnp.issubdtype(leaves[0].dtype, jnp.inexact):
            return [_no_gradient(leaves[0])]
        return [_own_part(run, leaves[0].shape[axis], cts[0], axis)]

    if jax_compat.is_traced(array):
        return _through_gradients(exchange, pull_back, [array])[0]
    return _concrete(exchange, [array])[0]


def _checked_gather(value: Any, axis: int) -> tuple[Any, int]:
    if isinstance(value, IndexedSlices):
        raise gather_of_slices()
    array = require_array("all_gather", value)
    return array, checked_axis(axis, array.ndim)


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
    if any(map(jax_compat.is_traced, jax.tree.leaves(leaves))) or jax_compat.is_staging():
        raise errors.TracingError(
            "A collective in eager replica code needs concrete values",
            "it is inside a jax.jit, scan, vmap or nested gradient",
            "Compile the whole step with `rx.function`.",
        )
    # The values are concrete, so the meeting is no part of the gradient around it.
    with jax_compat.eagerly(), frames.pushed(frames.current().with_overlay(None)):
        return exchange(leaves)


def _own_id() -> int:
    replica_id = frames.current().replica_id
    assert replica_id is not None
    return replica_id


def _reduce_merged(strategy: Any, op: ReduceOp, values: list[Any], options: Any) -> list[Any]:
    extended = strategy.extended
    if isinstance(options, PerReplica):
        options = options.values[0]
    return extended.batch_reduce(op, [(v, extended.layout.devices) for v in values], options)


def _gather_merged(strategy: Any, value: Any, axis: int) -> list[Any]:
    extended = strategy.extended
    if not isinstance(value, PerReplica):
        value = PerReplica((value,) * strategy.num_replicas_in_sync)
    gathered = extended.gather_components(value, axis)
    return [extended.broadcast_to(gathered, extended.layout.devices)]


def _sizes_merged(strategy: Any, size: Any) -> Any:
    if isinstance(size, PerReplica):
        return _Sizes(size.values)
    return _Sizes((size,) * strategy.num_replicas_in_sync)


class _Sizes(tuple[int, ...]):
    """Sizes of all replicas, handed to each replica whole."""
