"""Variables with a single copy."""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp

from replicax.contexts import frames
from replicax.contexts.frames import StrategyHooks
from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.variables import creators
from replicax.variables.replicated import AggregatingVariable
from replicax.variables.variable import LocalVariable, Variable


@final
class PlainVariable(LocalVariable):
    """A variable with one copy, updated by one replica or by cross-replica code."""

    __slots__ = ()


def create_plain(
    owner: StrategyHooks | None = None,
    device: Device | None = None,
    is_aggregating: bool = False,
    **kwargs: Any,
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


def adopt(variable: Variable, initial: jax.Array) -> None:
    """Adds a variable whose first value is traced to the function that is being traced."""
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
