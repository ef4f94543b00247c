"""Combining values of all replicas from cross-replica code, wherever the values are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives import in_replica
from replicax.collectives.arguments import checked_axis, gather_of_slices
from replicax.collectives.cross_device_ops import CrossDeviceOps
from replicax.collectives.destinations import place
from replicax.foundation import devices, errors, jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import ReduceOp
from replicax.values.array_surface import ArraySurface
from replicax.values.distributed_values import (
    Mirrored,
    PerReplica,
    TracedPerReplica,
    is_array_like,
)
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables.variable import Variable


def as_distributed(value: Any) -> Any:
    """Returns a variable with copies as the distributed value of these copies."""
    if isinstance(value, Variable):
        copies = value.components
        if len(copies) > 1 and value.is_per_replica:
            return PerReplica([c.read_value() for c in copies], value.layout)
        return value.read_value()
    return value


def reduce_values(
    ops: CrossDeviceOps,
    op: ReduceOp,
    values: list[Any],
    targets: list[Any],
    count: int,
    options: Any,
) -> list[Any]:
    """Combines several values over replicas; plain and mirrored ones are equal everywhere."""
    values = [as_distributed(v) for v in values]
    for value in values:
        _require_numbers(value, count)
    pairs = [(v, t) for v, t in zip(values, targets, strict=True) if isinstance(v, PerReplica)]
    if count == 1:
        reduced = iter([place(_alone(op, v.values[0]), t) for v, t in pairs])
    else:
        reduced = iter(ops.batch_reduce(op, pairs, options))
    results = []
    for value, target in zip(values, targets, strict=True):
        if isinstance(value, PerReplica):
            results.append(next(reduced))
        else:
            results.append(place(_equal_everywhere(op, value, count), target))
    return results


def _alone(op: ReduceOp, value: Any) -> Any:
    if isinstance(value, IndexedSlices):
        return value
    return in_replica.summable(op, require_number(value))


def _equal_everywhere(op: ReduceOp, value: Any, count: int) -> Any:
    """Combines `count` equal values: plain arithmetic, n·t."""
    if isinstance(value, Mirrored):
        value = value.values[0]
    if isinstance(value, IndexedSlices):
        return value if op is ReduceOp.MEAN else value.map_values(lambda v: v * count)
    array = in_replica.summable(op, require_number(value))
    return array if op is ReduceOp.MEAN or count == 1 else array * count


def _require_numbers(value: Any, count: int) -> None:
    """Raises unless a distributed value has `count` components that are numbers."""
    if isinstance(value, PerReplica) and not isinstance(value, TracedPerReplica):
        value.require_components(count)
        for component in value.values:
            if not isinstance(component, IndexedSlices):
                require_number(component)


def require_number(value: Any) -> Any:
    """Raises for values that cannot be combined by arithmetic."""
    if isinstance(value, ArraySurface):
        return value.__jax_array__()
    if not is_array_like(value):
        raise errors.ArgumentTypeError(
            "A reduction needs arrays or numbers",
            f"{type(value).__name__} was given",
            "Pass results of `strategy.run` that are arrays.",
        )
    return value


def map_components(fn: Callable[[Any], Any], value: PerReplica) -> PerReplica:
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


def _on_own_device(fn: Callable[[Any], Any], component: Any) -> Any:
    component = require_number(component)
    if not isinstance(component, jax.Array) or jax_compat.is_traced(component):
        return fn(component)
    with devices.device(next(iter(component.devices()))):
        return fn(component)


def component_shapes(value: Any) -> list[tuple[int, ...]]:
    """Returns the shape of each replica's component, without moving any."""
    if isinstance(value, TracedPerReplica):
        assert value.layout is not None
        return [np.shape(value.local)] * value.layout.num_replicas
    return [np.shape(v) for v in value.values]


def reduce_along(op: ReduceOp, value: Any, axis: Any, count: int) -> tuple[Any, ReduceOp, Any]:
    """Sums inside each replica along `axis`; returns what is left to do across replicas.

    Returns:
      The per-replica sums, SUM, and the number to divide the total by (None for SUM).
    """
    value = as_distributed(value)
    if not isinstance(value, PerReplica):
        first = value.values[0] if isinstance(value, Mirrored) else value
        value = PerReplica((jnp.asarray(require_number(first)),) * count)
    _require_numbers(value, count)
    axes = resolve_axes(axis)
    shapes = component_shapes(value)
    normal = [checked_axes(axes, len(shape)) for shape in shapes]
    sums = map_components(
        lambda x: jnp.sum(in_replica.summable(op, x), axis=checked_axes(axes, jnp.ndim(x))), value
    )
    if op is ReduceOp.SUM:
        return sums, ReduceOp.SUM, None
    total = sum(
        math.prod(shape[a] for a in kept) for shape, kept in zip(shapes, normal, strict=True)
    )
    return sums, ReduceOp.SUM, total


def resolve_axes(axis: Any) -> tuple[int, ...]:
    """Returns the axes meant by an int or a sequence of ints."""
    axes = axis if isinstance(axis, list | tuple) else (axis,)
    for one in axes:
        if isinstance(one, bool) or not isinstance(one, int | np.integer):
            raise errors.ArgumentTypeError(
                "`axis` must be None, an int, or a list or tuple of ints",
                f"it is {axis!r}",
                "Pass the batch dimension, usually 0.",
            )
    return tuple(int(one) for one in axes)


def checked_axes(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Returns axes counted from 0, or raises if the value has no such axis."""
    for one in axes:
        if not -rank <= one < rank:
            raise errors.InvalidArgumentError(
                f"`axis` must name a dimension of the value, which has {rank}",
                f"it is {one}",
                "Pass axis=None to combine across replicas only.",
            )
    return tuple(one % rank for one in axes)


def gather_values(value: Any, axis: Any, target: Device, count: int) -> Any:
    """Concatenates the components of a distributed value along an axis."""
    if isinstance(value, IndexedSlices):
        raise gather_of_slices()
    value = as_distributed(value)
    if isinstance(value, Mirrored):
        value = PerReplica(value.values)
    if not isinstance(value, PerReplica):
        return value
    if isinstance(value, TracedPerReplica):
        if isinstance(value.local, IndexedSlices):
            raise gather_of_slices()
        return in_replica.all_gather(value.local, checked_axis(axis, jnp.ndim(value.local)))
    parts = value.values
    if any(isinstance(p, IndexedSlices) for p in parts):
        raise gather_of_slices()
    _require_numbers(value, count)
    shapes = [np.shape(p) for p in parts]
    axis = checked_axis(axis, len(shapes[0]))
    if any(len(s) != len(shapes[0]) or _but(s, axis) != _but(shapes[0], axis) for s in shapes):
        raise errors.InvalidArgumentError(
            f"Gathering along axis {axis} needs components that agree in every other dimension",
            f"their shapes are {', '.join(map(str, shapes))}",
            "Gather along the dimension in which they differ.",
        )
    if jax_compat.is_eager():
        moved = jax.device_put([jnp.asarray(p) for p in parts], target)
        return placement.uncommitted(jnp.concatenate(moved, axis))
    return _gather_in_trace(value, axis)


def _gather_in_trace(value: PerReplica, axis: int) -> Any:
    layout = value.layout
    stored = None if layout is None else value.stored(layout)
    if stored is None or layout is None or layout.num_replicas == 1:
        return jnp.concatenate([jnp.asarray(p) for p in value.values], axis)
    return layout.map_replicas(
        lambda x: [in_replica.all_gather(x, axis)], stored, (), value.scalars, num_equal=1
    )[0]


def _but(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def current_target() -> tuple[Device, ...]:
    """Returns where results for cross-replica code belong."""
    return (devices.current(),)
