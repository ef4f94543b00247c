"""Reductions from cross-replica code: the reducer part of a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives import in_replica
from replicax.collectives.cross_device_ops import CrossDeviceOps
from replicax.contexts import frames
from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.foundation.types import Tree
from replicax.tracing.program import note_layout
from replicax.values.distributed_values import (
    Mirrored,
    PerReplica,
    TracedPerReplica,
    require_number,
)
from replicax.values.layout import ReplicaLayout
from replicax.variables.variable import Variable


class Reductions:
    """Combines values, and copies of variables, of all replicas.

    Args:
      layout: The replicas; None for the only replica of the default strategy.
      ops: Combines values of several devices.
    """

    def __init__(self, layout: ReplicaLayout | None, ops: CrossDeviceOps) -> None:
        self.ops = ops
        self._layout = layout
        self._count = 1 if layout is None else layout.num_replicas

    def reduce(
        self,
        op: ReduceOp,
        values: Sequence[object],
        targets: Sequence[Sequence[Device]],
        options: CommunicationOptions | None = None,
    ) -> list[Tree]:
        """Combines several values; returns one result per value, on its targets."""
        self._note_layout()
        found = [self._with_layout(_as_distributed(value)) for value in values]
        return self.ops.reduce_values(op, found, targets, self._count, options)

    def reduce_along(
        self, op: ReduceOp, value: object, axis: int | Sequence[int] | None, device: Device
    ) -> jax.Array:
        """Combines one value, also along dimensions inside each replica."""
        if axis is None:
            return self.reduce(op, [value], [(device,)])[0]
        self._note_layout()
        found = self._with_layout(_as_distributed(value))
        axes = _resolve_axes(axis)
        if not isinstance(found, PerReplica):
            combined = _combine_along(op, found, axes)
            return self.ops.reduce_values(op, [combined], [(device,)], self._count)[0]
        sums, sizes = _sum_along(op, found, axes, self._count)
        if op is ReduceOp.SUM:
            return self.ops.reduce_values(ReduceOp.SUM, [sums], [(device,)], self._count)[0]
        if len(sizes) == self._count:
            total = self.ops.reduce_values(ReduceOp.SUM, [sums], [(device,)], self._count)[0]
            return total / sum(sizes)
        # Only the other processes know the sizes of their components.
        counts = PerReplica([jnp.asarray(size) for size in sizes], sums.layout)
        total, number = self.ops.reduce_values(
            ReduceOp.SUM, [sums, counts], [(device,)] * 2, self._count
        )
        return total / number

    def gather(self, value: object, axis: int, device: Device) -> Tree:
        """Concatenates the components of a value along an axis, on one device."""
        self._note_layout()
        found = self._with_layout(_as_distributed(value))
        return self.ops.gather_values(found, axis, device, self._count)

    def broadcast(self, value: object, targets: Sequence[Device]) -> Tree:
        """Copies a value to devices."""
        return self.ops.broadcast_value(value, targets)

    def _with_layout(self, value: object) -> object:
        """Returns a value of no replicas as one of these, if other processes run some."""
        layout = self._layout
        if layout is None or not layout.spans_processes:
            return value
        if isinstance(value, PerReplica) and value.layout is None:
            value = PerReplica(value.values, layout)
        if isinstance(value, PerReplica) and frames.current().overlay is not None:
            # The function that is being compiled has captured the values of the local replicas.
            return value.of_all_replicas(layout)
        if isinstance(value, bool | int | float | complex) and frames.current().overlay is None:
            # Equal on the local replicas; other processes may have another number.
            return PerReplica((value,) * layout.num_local, layout)
        return value

    def _note_layout(self) -> None:
        """Adds the replicas to the layout of the function that is being compiled, if any."""
        overlay = frames.current().overlay
        if overlay is not None and self._layout is not None:
            note_layout(overlay, self._layout)


def _as_distributed(value: object) -> object:
    """Returns a variable as a value: per replica, if its copies differ."""
    if not isinstance(value, Variable):
        return value
    layout = value.layout
    if value.is_per_replica and layout is not None and layout.num_replicas > 1:
        return PerReplica([copy.read_value() for copy in value.components], layout)
    return value.read_value()


def _combine_along(op: ReduceOp, value: object, axes: tuple[int, ...]) -> jax.Array:
    """Sums or averages a value along dimensions that is equal on all replicas."""
    first = value.values[0] if isinstance(value, Mirrored) else value
    array = in_replica.summable(op, jnp.asarray(require_number(first)))
    kept = _checked_axes(axes, array.ndim)
    total = jnp.sum(array, axis=kept)
    if op is ReduceOp.SUM:
        return total
    return total / math.prod(array.shape[a] for a in kept)


def _sum_along(
    op: ReduceOp, value: PerReplica, axes: tuple[int, ...], count: int
) -> tuple[PerReplica, list[int]]:
    """Sums inside each replica along dimensions.

    Returns:
      The sum of each replica, and how many elements it was made of; for eager code of several
      processes, of local replicas only.
    """
    value.require_numbers(count)
    shapes = _component_shapes(value)
    normal = [_checked_axes(axes, len(shape)) for shape in shapes]
    sums = _map_components(
        lambda x: jnp.sum(in_replica.summable(op, x), axis=_checked_axes(axes, jnp.ndim(x))), value
    )
    return sums, [
        math.prod(shape[a] for a in kept) for shape, kept in zip(shapes, normal, strict=True)
    ]


def _map_components(fn: Callable[[jax.Array], jax.Array], value: PerReplica) -> PerReplica:
    """Applies `fn` to the component of each replica, on its device."""
    if isinstance(value, TracedPerReplica):
        assert value.layout is not None
        return TracedPerReplica(fn(value.local), value.layout)
    if jax_compat.is_eager() or value.layout is None:
        return PerReplica([_on_own_device(fn, v) for v in value.values], value.layout)
    layout = value.layout
    stored = value.stored(layout)
    if stored is None:
        return PerReplica([fn(v) for v in value.values], layout)
    outs = layout.map_replicas(lambda *local: [fn(x) for x in local], stored, (), value.scalars)
    local = [
        jax.ShapeDtypeStruct(layout.local_shape(a.shape, s), a.dtype)
        for a, s in zip(stored, value.scalars, strict=True)
    ]
    scalars = [jax.eval_shape(fn, x).shape == () for x in local]
    return PerReplica.from_stored(outs, scalars, value.treedef, layout)


def _on_own_device(fn: Callable[[jax.Array], jax.Array], component: object) -> jax.Array:
    array = require_number(component)
    if not isinstance(array, jax.Array) or jax_compat.is_traced(array):
        return fn(array)
    with devices.device(next(iter(array.devices()))):
        return fn(array)


def _component_shapes(value: PerReplica) -> list[tuple[int, ...]]:
    """Returns the shape of each replica's component, without moving any."""
    if isinstance(value, TracedPerReplica):
        assert value.layout is not None
        return [np.shape(value.local)] * value.layout.num_replicas
    return [np.shape(v) for v in value.values]


def _resolve_axes(axis: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the axes of an int or a sequence of ints."""
    axes: list[Any] = list(axis) if isinstance(axis, list | tuple) else [axis]
    for one in axes:
        if isinstance(one, bool) or not isinstance(one, int | np.integer):
            raise errors.ArgumentTypeError(
                "`axis` must be None, an int, or a list or tuple of ints",
                f"it is {axis!r}",
                "Pass the batch dimension, usually 0.",
            )
    return tuple(int(one) for one in axes)


def _checked_axes(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Returns axes counted from 0, or raises if the value has no such axis."""
    for one in axes:
        if not -rank <= one < rank:
            raise errors.InvalidArgumentError(
                f"`axis` must name a dimension of the value, which has {rank}",
                f"it is {one}",
                "Pass axis=None to combine across replicas only.",
            )
    return tuple(one % rank for one in axes)
