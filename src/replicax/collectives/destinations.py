"""Where results of reductions belong, and how they get there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from replicax.foundation import devices, errors, jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.values.containers import register_components
from replicax.values.distributed_values import Mirrored, PerReplica


def resolve_pairs(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, tuple[Device, ...]]]:
    """Resolves the destinations of a batch of values."""
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise errors.InvalidArgumentError(
                "`value_destination_pairs` must hold tuples (value, destinations)",
                f"it holds {pair!r}",
                "Pass a list of 2-tuples.",
            )
    return [(value, resolve_destinations(destinations)) for value, destinations in pairs]


def resolve_destinations(destinations: Any) -> tuple[Device, ...]:
    """Returns the devices meant by a name, a list of names, a variable or a value."""
    found = getattr(destinations, "placement", None)
    if found is not None:
        return found
    if isinstance(destinations, str | Device):
        return (devices.resolve(destinations),)
    if isinstance(destinations, PerReplica) and destinations.layout is not None:
        return destinations.layout.devices
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


def place(value: Any, targets: Sequence[Device]) -> Any:
    """Puts a value on one device, or a copy on each of several as `Mirrored`."""
    return place_all([value], [targets])[0]


def place_all(values: Sequence[Any], targets: Sequence[Sequence[Device]]) -> list[Any]:
    """Puts each value on its devices; all copies are made by one call."""
    if not jax_compat.is_eager() or any(map(jax_compat.is_traced, jax.tree.leaves(values))):
        copies = [(v,) * len(t) for v, t in zip(values, targets, strict=True)]
    else:
        sources = [v for v, t in zip(values, targets, strict=True) for _ in t]
        moved = jax.device_put(sources, [device for t in targets for device in t])
        moved = iter(jax.tree.map(placement.uncommitted, moved))
        copies = [tuple(next(moved) for _ in t) for t in targets]
    return [parts[0] if len(parts) == 1 else mirrored(parts) for parts in copies]


def mirrored(copies: tuple[Any, ...]) -> Mirrored:
    """Wraps copies, and remembers what they are copies of."""
    result = Mirrored(copies)
    register_components(result, copies)
    return result


def device_of(value: Any) -> Device:
    """Returns the device of an array; the current one for anything else."""
    if isinstance(value, jax.Array) and not jax_compat.is_traced(value):
        return next(iter(value.devices()))
    return devices.current()
