"""Creation of variables, their kind and devices: the placement part of a strategy."""

from __future__ import annotations

import functools
from typing import Any

import jax
from typing_extensions import override

from replicax.contexts.frames import StrategyHooks
from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import VariableSynchronization
from replicax.values.layout import ReplicaLayout
from replicax.variables import common_values, creators
from replicax.variables.plain import adopt, create_plain
from replicax.variables.replicated import MirroredVariable, SyncOnReadVariable
from replicax.variables.variable import Variable


class Placement:
    """Creates the variables of a strategy; a subclass decides on kind and devices.

    Attributes:
      devices: The devices that hold variables; None for those of the replicas.
    """

    devices: tuple[Device, ...] | None = None

    def create(
        self, owner: StrategyHooks, next_creator: creators.Creator, kwargs: dict[str, Any]
    ) -> Variable:
        """Creates a variable.

        Args:
          owner: The `StrategyExtended` that the variable belongs to.
          next_creator: Creates a plain variable, or what creators outside the scope make of it.
          kwargs: The arguments of `rx.Variable`, and perhaps `colocate_with`.
        """
        raise errors.UnsupportedError(
            "A StrategyExtended subclass must define `_create_variable`",
            f"{type(owner).__name__} does not",
            "Override it; `next_creator(**kwargs)` makes a plain variable.",
        )


class SingleCopy(Placement):
    """One copy on one device.

    Args:
      device: The device.
      is_aggregating: Whether several replicas update it, by their aggregate.
    """

    def __init__(self, device: Device, is_aggregating: bool = False) -> None:
        self.devices = (device,)
        self._is_aggregating = is_aggregating

    @override
    def create(
        self, owner: StrategyHooks, next_creator: creators.Creator, kwargs: dict[str, Any]
    ) -> Variable:
        assert self.devices is not None
        kwargs.pop("colocate_with", None)
        device, is_aggregating = self.devices[0], self._is_aggregating
        on_read = kwargs.get("synchronization") is VariableSynchronization.ON_READ
        if on_read and is_aggregating:
            assert owner.layout is not None
            return replicated_by(next_creator, owner, owner.layout, kwargs)
        if creators.is_last_resort(next_creator):
            return create_plain(owner, device, is_aggregating, **kwargs)
        make = functools.partial(create_plain, owner, is_aggregating=is_aggregating)
        with devices.device(device), creators.made_by(make):
            made = next_creator(**kwargs)
        if not isinstance(made, Variable) or made.owner is owner:
            return made
        if not is_aggregating:
            made.owner = owner
            return made
        kwargs = dict(kwargs, **_attributes_of(made), initial_value=made.read_copy(0))
        return create_plain(owner, made.placement[0], is_aggregating=True, **kwargs)


class CopyPerReplica(Placement):
    """A copy on each replica: equal ones, or ON_READ ones that are combined when read."""

    @override
    def create(
        self, owner: StrategyHooks, next_creator: creators.Creator, kwargs: dict[str, Any]
    ) -> Variable:
        layout = owner.layout
        assert layout is not None
        targets = kwargs.pop("colocate_with", None)
        if targets is not None and tuple(targets) != layout.local_devices:
            return create_plain(owner, targets[0], is_aggregating=True, **kwargs)
        return replicated_by(next_creator, owner, layout, kwargs)


def replicated_by(
    next_creator: creators.Creator,
    owner: StrategyHooks,
    layout: ReplicaLayout,
    kwargs: dict[str, Any],
) -> Variable:
    """Makes a variable with a copy on each replica; creators outside the scope make each copy."""
    if creators.is_last_resort(next_creator):
        return create_replicated(owner, layout, **kwargs)

    def first_copy(**own: Any) -> Variable:
        initial = creators.initial_array(own)
        if jax_compat.is_traced(initial):
            # There is one trace for all copies.
            return create_replicated(owner, layout, **{**own, "initial_value": initial})
        return create_plain(**{**own, "initial_value": initial})

    def further_copy(**own: Any) -> Variable:
        # A creator that changes initial values has changed this one already.
        return create_plain(**{**own, "initial_value": first})

    name = kwargs.get("name") or "Variable"
    first: jax.Array | None = None
    parts: list[Variable] = []
    for i, device in enumerate(layout.local_devices):
        own = dict(kwargs, name=name if i == 0 else f"{name}/replica_{i}")
        if i > 0:
            own["initial_value"] = first
        maker = first_copy if i == 0 else further_copy
        with devices.device(device), creators.made_by(maker):
            part = next_creator(**own)
        if not isinstance(part, Variable) or part.owner is owner:
            return part
        first = part.read_copy(0) if i == 0 else first
        parts.append(part)
    kwargs = dict(kwargs, **_attributes_of(parts[0]), initial_value=first)
    variable = create_replicated(owner, layout, **kwargs)
    with jax_compat.eagerly():
        copies = [part.read_copy(0) for part in parts]
        join = layout.assemble if variable.is_per_replica else layout.from_copies
        variable.stored = join(copies)
    return variable


def _attributes_of(variable: Variable) -> dict[str, Any]:
    """Returns the attributes of a copy that a creator outside the scope may have changed."""
    return {
        "name": variable.name,
        "dtype": variable.dtype,
        "shape": None,
        "trainable": variable.trainable,
        "constraint": variable.constraint,
    }


def create_replicated(owner: StrategyHooks, layout: ReplicaLayout, **kwargs: Any) -> Variable:
    """Makes a variable with a copy on each replica."""
    initial = creators.initial_array(kwargs)
    attributes = creators.resolve_attributes(kwargs, initial)
    on_read = attributes.synchronization is VariableSynchronization.ON_READ
    cls = SyncOnReadVariable if on_read else MirroredVariable
    variable = cls(attributes, None, owner=owner, layout=layout)
    if jax_compat.is_traced(initial):
        adopt(variable, initial)
    else:
        with jax_compat.eagerly():
            variable.initialize(initial)
        if layout.spans_processes:
            common_values.make_common(variable)
    return variable
