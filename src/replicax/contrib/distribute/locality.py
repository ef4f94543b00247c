"""Localities T, M, V(v) and N: which values an API of `DistributionStrategy` takes.

    T     a value per tower
    M     equal on all towers: a copy on each worker device
    V(v)  equal on all devices of the variable v: a copy on each
    N     equal on all non-slot devices: a copy on each

M, V(v) and N are told apart by their devices. If variables are on the worker devices, they are the
same. A number, or an array on one device, is not wrapped and has no locality: every API takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from replicax.collectives.arguments import device_of
from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.foundation.types import Tree
from replicax.values.distributed_values import Mirrored, PerReplica
from replicax.values.regroup import leaves_of
from replicax.variables.replicated import VariableComponent
from replicax.variables.variable import Variable


class Locality(NamedTuple):
    """Where a wrapped value has copies.

    Attributes:
      is_per_tower: Whether the value differs between towers (T).
      devices: The devices of its copies; None in compiled code, which does not know them.
      variable: The name of the variable that the value is.
    """

    is_per_tower: bool
    devices: tuple[Device, ...] | None
    variable: str = ""

    def describe(self) -> str:
        """Describes a value of this locality, for messages."""
        if self.is_per_tower:
            what = f"the tower-local variable {self.variable!r}" if self.variable else "a value"
            return f"{what} of locality T, which differs between towers"
        what = f"variable {self.variable!r}" if self.variable else "a mirrored value"
        return f"{what} on {names(self.devices or ())}"


def locality_of(value: object) -> Locality | None:
    """Returns the locality of a wrapped value or variable; None for anything else."""
    if isinstance(value, PerReplica):
        return Locality(True, None)
    if isinstance(value, VariableComponent):
        return None
    if isinstance(value, Variable):
        return Locality(value.is_per_replica, tuple(value.placement), value.name)
    if isinstance(value, Mirrored):
        known = all(_is_placed(component) for component in value.values)
        return Locality(False, tuple(map(device_of, value.values)) if known else None)
    return None


def require_for_towers(api: str, arguments: Tree, worker_devices: Sequence[Device]) -> None:
    """Raises unless all values of a structure are T, M or variables."""
    for leaf in leaves_of(arguments):
        found = locality_of(leaf)
        if found is None or found.is_per_tower or found.variable or found.devices is None:
            continue
        if found.devices != tuple(worker_devices):
            raise errors.InvalidArgumentError(
                f"`{api}` takes values of locality T or M, and variables; towers are on "
                f"{names(worker_devices)}",
                f"{found.describe()} was given",
                "Mirror it to the towers with `distribution.broadcast(distribution.fetch(value))`.",
            )


def require_per_tower(api: str, value: object) -> None:
    """Raises for a value that is equal on all towers, or a variable that is."""
    found = locality_of(value)
    if found is not None and not found.is_per_tower:
        raise errors.InvalidArgumentError(
            f"`{api}` takes values of locality T, one per tower",
            f"{found.describe()} was given, which is equal on all of them",
            "Use it as it is, or copy it with `distribution.broadcast(value, destinations)`.",
        )


def require_one_value(api: str, value: object) -> None:
    """Raises for a value that differs between towers."""
    found = locality_of(value)
    if found is not None and found.is_per_tower:
        raise errors.InvalidArgumentError(
            f"`{api}` takes one value",
            f"{found.describe()} was given",
            'Combine it with `distribution.reduce("sum", value, destinations)`.',
        )


def require_at(api: str, arguments: Tree, where: Sequence[Device], locality: str) -> None:
    """Raises unless all values of a structure have copies on given devices.

    Args:
      api: The name of the caller.
      arguments: The values.
      where: The devices.
      locality: Their locality, such as "N".
    """
    for leaf in leaves_of(arguments):
        found = locality_of(leaf)
        if found is None or (found.devices is None and not found.is_per_tower):
            continue
        if found.is_per_tower:
            advice = 'Combine it first: `distribution.reduce("sum", value, destinations)`.'
        elif found.devices == tuple(where):
            continue
        elif found.variable:
            advice = "Create the variable in `with distribution.colocate_vars_with(...)`."
        else:
            advice = "Reduce or broadcast it to these devices: pass `destinations`."
        raise errors.InvalidArgumentError(
            f"`{api}` takes values of locality {locality}, on {names(where)}",
            f"{found.describe()} was given",
            advice,
        )


def names(where: Sequence[Device]) -> str:
    """Returns the names of devices, short: "CPU:0, CPU:1"."""
    return ", ".join(devices.name_of(d).rpartition("device:")[2] for d in where)


def _is_placed(component: object) -> bool:
    return isinstance(component, jax.Array) and not jax_compat.is_traced(component)
