"""Reductions inside eager replica code: replicas meet, and differentiate through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives.arguments import Component, checked_axis, require_array, require_dense
from replicax.contexts import frames
from replicax.contexts.frames import Frame
from replicax.contexts.rendezvous import acting_for_all, different_calls, require_meeting
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.foundation.types import Tree
from replicax.values.distributed_values import Mirrored, PerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import leaves_of, map_structure, select

_Leaves = list[Tree]
_Call = TypeVar("_Call", bound=tuple)
_Result = TypeVar("_Result")


class Run(Protocol):
    """A run whose replicas are traced one by one; see execution/unrolled.py."""

    num_replicas: int

    def merge_call(
        self, merge_fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree: ...


class _Reduction(NamedTuple):
    """The arguments of `all_reduce` on one replica."""

    op: ReduceOp
    leaves: Sequence[Tree]
    options: CommunicationOptions | None


class _Gathering(NamedTuple):
    """The arguments of `all_gather` on one replica."""

    array: jax.Array
    axis: int


class _Size(NamedTuple):
    """The number of rows that one replica put into a collective."""

    rows: int


def all_reduce(run: Run, op: ReduceOp, value: Tree, options: CommunicationOptions | None) -> Tree:
    """Combines a nest of values over the replicas of an eager run."""
    leaves: _Leaves = [require_array("all_reduce", leaf) for leaf in leaves_of(value)]

    def exchange(leaves: _Leaves) -> _Leaves:
        return _reduced(_Reduction(op, leaves, options))

    def pull_back(leaves: _Leaves, cts: _Leaves) -> _Leaves:
        return [_pull_back_leaf(run, op, leaf, ct) for leaf, ct in zip(leaves, cts, strict=True)]

    if any(map(jax_compat.is_traced, jax.tree.leaves(leaves))):
        reduced = _through_gradients(exchange, pull_back, leaves)
    else:
        reduced = _concrete(exchange, leaves)
    found = iter(reduced)
    return map_structure(lambda _: next(found), value)


def all_gather(run: Run, value: object, axis: int) -> jax.Array:
    """Concatenates a value over the replicas of an eager run."""
    array = require_dense("all_gather", value)
    axis = checked_axis(axis, array.ndim)

    def exchange(leaves: _Leaves) -> _Leaves:
        return [_meet(_Gathering(leaves[0], axis), _gather_all)]

    def pull_back(leaves: _Leaves, cts: _Leaves) -> _Leaves:
        if not jnp.issubdtype(leaves[0].dtype, jnp.inexact):
            return [_no_gradient(leaves[0])]
        return [_own_part(run, leaves[0].shape[axis], cts[0], axis)]

    if jax_compat.is_traced(array):
        return _through_gradients(exchange, pull_back, [array])[0]
    return _concrete(exchange, [array])[0]


# Meetings of replicas.


def _meet(call: _Call, act: Callable[[Frame, list[_Call]], Sequence[_Result]]) -> _Result:
    """Waits for the other replicas; the last one calls `act`, which returns all results."""
    frame = frames.current()
    replica_id = require_meeting(frame)
    rendezvous, reads = frame.rendezvous, frame.eager_reads
    assert rendezvous is not None
    if reads is not None:
        # What this replica traced for itself is not for the replicas that run meanwhile.
        reads.renew()
    meeting = rendezvous.arrive(replica_id, call)
    if meeting is None:
        result = rendezvous.result_of(replica_id)
    else:
        with acting_for_all(frame, rendezvous, meeting):
            for i, other in enumerate(meeting.calls):
                if type(other) is not type(call):
                    raise different_calls(i, meeting.calls[0], other)
            meeting.results = act(frame, meeting.calls)
        result = meeting.results[replica_id]
    if reads is not None:
        reads.renew()
    return result  # type: ignore[return-value]


def _reduced(call: _Reduction) -> _Leaves:
    return list(_meet(call, _reduce_all))


def _reduce_all(frame: Frame, calls: list[_Reduction]) -> list[_Leaves]:
    layout, first = frame.layout, calls[0]
    assert layout is not None
    for i, call in enumerate(calls):
        if call.op is not first.op:
            raise different_calls(i, first.op, call.op)
        if len(call.leaves) != len(first.leaves):
            raise errors.StructureError(
                "All replicas must pass the same structure to `all_reduce`",
                f"replica 0 passed {len(first.leaves)} values and replica {i} passed "
                f"{len(call.leaves)}",
                "Make every replica pass the same containers, lengths and keys.",
            )
    values: list[object] = []
    for column in zip(*(call.leaves for call in calls), strict=True):
        # Other processes may have other arrays where the local replicas have one.
        is_one = not layout.spans_processes and all(leaf is column[0] for leaf in column)
        values.append(column[0] if is_one else PerReplica(column, layout))
    targets = [layout.local_devices] * len(values)
    reduced = frame.reducer.reduce_values(
        first.op, values, targets, layout.num_replicas, first.options
    )
    return [
        [r.values[i] if isinstance(r, Mirrored) else select(i, r) for r in reduced]
        for i in range(layout.num_local)
    ]


def _gather_all(frame: Frame, calls: list[_Gathering]) -> list[jax.Array]:
    layout = frame.layout
    assert layout is not None
    value = PerReplica([call.array for call in calls], layout)
    devices = layout.local_devices
    gathered = frame.reducer.gather_values(value, calls[0].axis, devices[0], layout.num_replicas)
    copies = frame.reducer.broadcast_value(gathered, devices)
    return [select(i, copies) for i in range(layout.num_local)]


def _rows_before(frame: Frame, calls: list[_Size]) -> list[int]:
    """Returns, for each local replica, the number of rows of all replicas before it."""
    layout = frame.layout
    assert layout is not None
    rows, first = [call.rows for call in calls], 0
    if layout.peers is not None:
        found = layout.peers.exchange("rows of a gathered value", str(sum(rows)).encode())
        first = sum(int(total) for total in found[: layout.peers.index])
    return [first + sum(rows[:i]) for i in range(len(rows))]


# Gradients.


def _pull_back_leaf(run: Run, op: ReduceOp, leaf: Component, cotangent: Tree) -> Tree:
    """Returns the gradient of one all-reduced value.

    For an array it is the same all-reduce of the gradients. All-reduced rows are concatenated,
    so the gradient of a replica's rows is its part of the summed gradients.
    """
    if isinstance(leaf, IndexedSlices):
        rows = _own_part(run, leaf.values.shape[0], cotangent.values, 0)
        if op is ReduceOp.MEAN:
            rows = rows / run.num_replicas
        return IndexedSlices(rows, _no_gradient(leaf.indices), leaf.dense_shape)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return _no_gradient(leaf)
    return _reduced(_Reduction(op, [cotangent], None))[0]


def _own_part(run: Run, size: int, cotangent: jax.Array, axis: int) -> jax.Array:
    """Sums the gradients of all replicas and returns the part of this replica's input."""
    start = _meet(_Size(size), _rows_before)
    total = _reduced(_Reduction(ReduceOp.SUM, [cotangent], None))[0]
    return jax.lax.dynamic_slice_in_dim(total, start, size, axis)


def _no_gradient(leaf: jax.Array) -> np.ndarray:
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _through_gradients(
    exchange: Callable[[_Leaves], _Leaves],
    pull_back: Callable[[_Leaves, _Leaves], _Leaves],
    leaves: _Leaves,
) -> _Leaves:
    """Calls `exchange` on the concrete values behind values that are being differentiated."""

    @jax.custom_vjp
    def meet(leaves: _Leaves) -> _Leaves:
        return _concrete(exchange, leaves)

    def forward(leaves: _Leaves) -> tuple[_Leaves, _Leaves]:
        return _concrete(exchange, leaves), leaves

    def backward(leaves: _Leaves, cotangents: _Leaves) -> tuple[_Leaves]:
        return (_concrete(lambda cts: pull_back(leaves, cts), list(cotangents)),)

    meet.defvjp(forward, backward)
    return meet(leaves)


def _concrete(exchange: Callable[[_Leaves], _Leaves], leaves: _Leaves) -> _Leaves:
    if any(map(jax_compat.is_traced, jax.tree.leaves(leaves))) or jax_compat.is_staging():
        raise errors.TracingError(
            "A collective in eager replica code needs concrete values",
            "it is inside a jax.jit, scan, vmap or nested gradient",
            "Compile the whole step with `rx.function`.",
        )
    # The values are concrete, so the meeting is no part of the gradient around it.
    with jax_compat.eagerly(), frames.pushed(frames.current().with_overlay(None)):
        return exchange(leaves)


# The same in a trace of each replica: by `merge_call`.


def reduce_in_trace(
    run: Run, op: ReduceOp, value: Tree, options: CommunicationOptions | None
) -> Tree:
    """Combines a nest of values over replicas that are traced one by one."""
    leaves = [require_array("all_reduce", leaf) for leaf in leaves_of(value)]

    def merged(strategy: object, values: list[object]) -> list[Tree]:
        frame = frames.current()
        assert frame.layout is not None
        targets = [frame.layout.devices] * len(values)
        return frame.reducer.reduce_values(op, values, targets, run.num_replicas, options)

    found = iter(run.merge_call(merged, (leaves,), {}))
    return map_structure(lambda _: next(found), value)


def gather_in_trace(run: Run, value: object, axis: int) -> jax.Array:
    """Concatenates a value over replicas that are traced one by one."""
    array = require_dense("all_gather", value)
    axis = checked_axis(axis, array.ndim)

    def merged(strategy: object, value: object) -> Tree:
        frame = frames.current()
        assert frame.layout is not None
        if not isinstance(value, PerReplica):
            value = PerReplica((value,) * run.num_replicas)
        devices = frame.layout.devices
        gathered = frame.reducer.gather_values(value, axis, devices[0], run.num_replicas)
        return frame.reducer.broadcast_value(gathered, devices)

    return run.merge_call(merged, (array,), {})
