"""Checks and conversions of the arguments of collectives."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.values.array_surface import as_operand
from replicax.values.distributed_values import (
    Mirrored,
    PerReplica,
    is_array_like,
)
from replicax.values.indexed_slices import IndexedSlices

# An array of one replica, or rows of one.
Component = jax.Array | IndexedSlices


def require_array(api: str, leaf: object) -> Component:
    """Returns a leaf as an array (or IndexedSlices), or raises."""
    leaf = as_operand(leaf)
    if isinstance(leaf, IndexedSlices | jax.Array):
        return leaf
    if not is_array_like(leaf):
        raise errors.ArgumentTypeError(
            f"`{api}` needs arrays", f"{type(leaf).__name__} was given", "Pass arrays only."
        )
    return jnp.asarray(leaf)


def require_dense(api: str, leaf: object) -> jax.Array:
    """Returns a leaf as an array, or raises; also for IndexedSlices."""
    array = require_array(api, leaf)
    if isinstance(array, IndexedSlices):
        raise gather_of_slices()
    return array


def checked_axis(axis: object, rank: int) -> int:
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


def resolve_pairs(
    pairs: Sequence[tuple[object, object]],
) -> list[tuple[object, tuple[Device, ...]]]:
    """Resolves the destinations of a batch of values."""
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise errors.InvalidArgumentError(
                "`value_destination_pairs` must hold tuples (value, destinations)",
                f"it holds {pair!r}",
                "Pass a list of 2-tuples.",
            )
    return [(value, resolve_destinations(destinations)) for value, destinations in pairs]


def resolve_destinations(destinations: object) -> tuple[Device, ...]:
    """Returns the devices of a name, a list of names, a variable or a value."""
    found = getattr(destinations, "placement", None)
    if found is not None:
        return found
    if isinstance(destinations, str | Device):
        return (devices.resolve(destinations),)
    if isinstance(destinations, PerReplica) and destinations.layout is not None:
        return destinations.layout.local_devices
    if isinstance(destinations, PerReplica | Mirrored):
        return tuple(device_of(v) for v in destinations.values)
    if isinstance(destinations, list | tuple) and destinations:
        return tuple(devices.resolve(d) for d in destinations)
    if isinstance(destinations, jax.Array):
        return (device_of(destinations),)
    raise errors.InvalidArgumentError(
        "`destinations` must be a variable, a distributed value, an array, a device name or "
        "a non-empty list of device names",
        f"it is {destinations!r}",
        "Name at least one device.",
    )


def common_axis(axis: int, shapes: list[tuple[int, ...]]) -> int:
    """Returns the axis to gather along, or raises if shapes differ in another one."""
    axis = checked_axis(axis, len(shapes[0]))
    rest = {(len(shape), shape[:axis] + shape[axis + 1 :]) for shape in shapes}
    if len(rest) > 1:
        raise errors.InvalidArgumentError(
            f"Gathering along axis {axis} needs components that agree in every other dimension",
            f"their shapes are {', '.join(map(str, shapes))}",
            "Gather along the dimension in which they differ.",
        )
    return axis


def device_of(value: object) -> Device:
    """Returns the device of an array; the current one for anything else."""
    if isinstance(value, jax.Array) and not jax_compat.is_traced(value):
        return next(iter(value.devices()))
    return devices.current()


def of_common_type(column: Sequence[Component]) -> list[jax.Array]:
    """Returns the components of one value as arrays of one type."""
    arrays = [c if isinstance(c, jax.Array) else jnp.asarray(c) for c in column]
    dtype = arrays[0].dtype
    if all(array.dtype == dtype for array in arrays):
        return arrays
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]
