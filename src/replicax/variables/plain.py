"""Variables with a single copy: outside of every strategy, on one device, or in the centre."""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.variables import aggregation, creators
from replicax.variables.variable import LocalVariable, Variable


@final
class PlainVariable(LocalVariable):
    """A variable with one copy and one writer."""

    __slots__ = ()


@final
class AggregatingVariable(LocalVariable):
    """One copy on a parameter device; what replicas write is aggregated first."""

    __slots__ = ()

    def apply_update(self, frame: Frame, kind: str, payload: Any) -> None:
        if frame.mode is Mode.REPLICA and frame.layout is not None:
            aggregation.change_from_replicas(self, frame, kind, payload)
        else:
            aggregation.apply_to_copies(self, frame, kind, payload)


def create_plain(
    owner: Any = None, device: Device | None = None, is_aggregating: bool = False, **kwargs: Any
) -> Variable:
    """Makes a variable with a single copy."""
    initial = creators.initial_array(kwargs)
    attributes = creators.resolve_attributes(kwargs, initial)
    cls = AggregatingVariable if is_aggregating else PlainVariable
    device = device or devices.explicit()
    if jax_compat.is_traced(initial):
        variable = cls(attributes, None, owner=owner)
        variable.intended_device = device
        adopt(variable, initial)
        return variable
    with jax_compat.eagerly():
        if device is not None:
            initial = jnp.copy(jax.device_put(initial, device))
        elif not initial.committed:
            initial = jax.device_put(initial, initial.sharding)
    return cls(attributes, initial, owner=owner)


def adopt(variable: Variable, initial: Any) -> None:
    """Hands a variable whose first value is being traced to the function that traces it."""
    overlay = frames.current().overlay
    if overlay is None:
        raise errors.TracingError(
            f"A variable such as {variable.name!r} whose initial value is traced must be "
            "created inside `rx.function`",
            "it is created under a bare jax.jit or another JAX transformation",
            "Create it outside, or pass a function as initial value.",
        )
    overlay.adopt(variable, initial)


creators.set_last_resort(create_plain)
