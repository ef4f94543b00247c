"""The devices that a compiled program runs on, and how arrays get there."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from replicax.foundation import devices, placement
from replicax.foundation.jax_compat import Device
from replicax.values.layout import ReplicaLayout


class Home:
    """The devices of one program: those of its replicas, or the one of its variables.

    Attributes:
      sharding: How arrays that are equal on all of the devices are placed.
      devices: The devices, in the order of the mesh.
    """

    def __init__(self, sharding: Sharding, devices: tuple[Device, ...]) -> None:
        self.sharding = sharding
        self.devices = devices
        self._device_set = sharding.device_set
        self._mesh = getattr(sharding, "mesh", None)

    def holds(self, variable: Any) -> bool:
        """Tells whether the array behind a variable is on these devices, in this order."""
        return _places_of(variable) == self.devices

    def take(self, arrays: list[Any]) -> list[Any]:
        """Copies arrays of other devices to these."""
        moving = [
            i for i, a in enumerate(arrays) if isinstance(a, jax.Array) and self._is_elsewhere(a)
        ]
        if not moving:
            return arrays
        arrays = list(arrays)
        moved = jax.device_put([arrays[i] for i in moving], self.sharding)
        for i, array in zip(moving, moved, strict=True):
            arrays[i] = array
        return arrays

    def _is_elsewhere(self, array: jax.Array) -> bool:
        sharding = array.sharding
        if sharding.device_set != self._device_set:
            return True
        mesh = getattr(sharding, "mesh", None)
        if mesh is None or mesh is self._mesh:
            return False
        return tuple(mesh.devices.flat) != self.devices


def home_of(layout: ReplicaLayout | None, captured: Any) -> Home | None:
    """Returns where a program runs; None if it has neither replicas nor variables."""
    if layout is not None:
        return Home(layout.replicated, _ordered(layout))
    variables = dict.fromkeys((*captured.variables, *captured.written, *captured.created))
    sizes: dict[Device, int] = {}
    for variable in variables:
        if variable.is_remote:
            continue
        places = _places_of(variable)
        if len(places) != 1:
            return None  # an array that the user spread over devices: JAX knows best
        sizes[places[0]] = sizes.get(places[0], 0) + math.prod(variable.shape)
    if not sizes:
        return None
    # Where most of the state is: the rest moves with each call.
    device = max(sizes, key=lambda device: sizes[device])
    return Home(SingleDeviceSharding(device), (device,))


def reconciled(arrays: list[Any]) -> list[Any]:
    """Copies arrays to the current device if they are committed to different ones."""
    first = None
    for array in arrays:
        if not isinstance(array, jax.Array) or not array.committed:
            continue
        if first is None:
            first = array.sharding
        elif array.sharding is not first and array.sharding.device_set != first.device_set:
            device = devices.current()
            return [placement.usable_on(a, device) for a in arrays]
    return arrays


def _places_of(variable: Any) -> tuple[Device, ...]:
    return variable.placement if variable.layout is None else _ordered(variable.layout)


def _ordered(layout: ReplicaLayout) -> tuple[Device, ...]:
    return layout.devices if layout.is_mesh else layout.devices[:1]
