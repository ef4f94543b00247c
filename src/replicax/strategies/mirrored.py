"""MirroredStrategy: a replica on each device of a machine, variables copied to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from typing_extensions import override

from replicax.collectives.cross_device_ops import CrossDeviceOps, select_cross_device_ops
from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import VariableSynchronization
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.values.distributed_values import PerReplica, TracedPerReplica
from replicax.values.layout import ReplicaLayout
from replicax.variables import creators
from replicax.variables.plain import adopt, create_plain
from replicax.variables.replicated import (
    MirroredVariable,
    SyncOnReadVariable,
)
from replicax.variables.variable import Variable


class MirroredExtended(StrategyExtended):
    """Mirrored and sync-on-read variables over one set of devices."""

    @override
    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Variable:
        assert self.layout is not None
        targets = kwargs.pop("colocate_with", None)
        if targets is not None and tuple(targets) != self.layout.devices:
            return create_plain(self, targets[0], is_aggregating=True, **kwargs)
        return replicated_by(next_creator, self, self.layout, kwargs)

    @override
    def _check_batch(self, values: list[Any]) -> None:
        if self.num_replicas_in_sync == 1:
            return
        kinds = {jnp.dtype(_dtype(v)) == jnp.int32 for v in values if isinstance(v, PerReplica)}
        if len(kinds) > 1:
            raise errors.InvalidArgumentError(
                "`batch_reduce_to` needs values that one algorithm can take together",
                "int32 values are mixed with others",
                "Reduce the int32 values in a batch of their own.",
            )


def replicated_by(
    next_creator: Callable[..., Any], owner: Any, layout: ReplicaLayout, kwargs: dict[str, Any]
) -> Any:
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
    first: Any = None
    parts: list[Any] = []
    for i, device in enumerate(layout.devices):
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
    kwargs = dict(kwargs, **attributes_of(parts[0]), initial_value=first)
    variable = create_replicated(owner, layout, **kwargs)
    with jax_compat.eagerly():
        copies = [part.read_copy(0) for part in parts]
        join = layout.assemble if variable.is_per_replica else layout.from_copies
        variable.stored = join(copies)
    return variable


def attributes_of(variable: Variable) -> dict[str, Any]:
    """Returns what a creator outside the scope may have decided about a copy."""
    return {
        "name": variable.name,
        "dtype": variable.dtype,
        "shape": None,
        "trainable": variable.trainable,
        "constraint": variable.constraint,
    }


def create_replicated(owner: Any, layout: ReplicaLayout, **kwargs: Any) -> Variable:
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
    return variable


class MirroredStrategy(Strategy):
    """Trains in sync on several devices of one machine.

    Each device runs one replica; variables have a copy on each, and every write reaches
    all copies.

    Args:
      devices: Device names; all GPUs (or TPUs, or else CPUs) if None.
      cross_device_ops: How values of several devices are combined.
      virtual_replicas: If more than 1, that many replicas share the single device.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    PerReplica:{
      0: <jax.Array: shape=(), dtype=int32, numpy=0>,
      1: <jax.Array: shape=(), dtype=int32, numpy=1>
    }
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        virtual_replicas: int = 1,
    ) -> None:
        found = resolve_worker_devices(devices)
        if not isinstance(virtual_replicas, int) or isinstance(virtual_replicas, bool):
            raise errors.ArgumentTypeError(
                "`virtual_replicas` must be an int",
                f"it is {virtual_replicas!r}",
                "Pass 2, say.",
            )
        if virtual_replicas < 1 or (virtual_replicas > 1 and len(found) > 1):
            raise errors.InvalidArgumentError(
                "`virtual_replicas` above 1 needs exactly one device",
                f"virtual_replicas={virtual_replicas} with {len(found)} devices was given",
                "Name one device, or leave `virtual_replicas` out.",
            )
        ops = cross_device_ops or select_cross_device_ops(found)
        if not isinstance(ops, CrossDeviceOps):
            raise errors.ArgumentTypeError(
                "`cross_device_ops` must be an rx.CrossDeviceOps",
                f"it is {ops!r}",
                "Pass e.g. rx.ReductionToOneDevice().",
            )
        layout = ReplicaLayout(found, virtual_replicas)
        super().__init__(MirroredExtended(self, layout, cross_device_ops=ops))


def resolve_worker_devices(names: Sequence[str | Device] | None) -> tuple[Device, ...]:
    """Returns the devices that a strategy over several devices was asked to use."""
    if isinstance(names, str):
        names = [names]
    if names is not None and not isinstance(names, list | tuple):
        raise errors.ArgumentTypeError(
            "The devices of a strategy must be a list of names",
            f"{names!r} was given",
            'Pass e.g. ["CPU:0", "CPU:1"].',
        )
    if not names:
        return tuple(devices.default_devices())
    tasks = {
        (spec.job, spec.task)
        for spec in (devices.parse(n) for n in names if isinstance(n, str))
        if spec.job not in (None, "localhost")
    }
    if tasks:
        raise errors.InvalidArgumentError(
            "MirroredStrategy needs devices of this machine",
            f"{list(names)} names devices of other tasks",
            "Name local devices; for several machines use rx.ParameterServerStrategy.",
        )
    return devices.resolve_all(names)


def _dtype(value: PerReplica) -> Any:
    leaf = value.local if isinstance(value, TracedPerReplica) else value.values[0]
    return getattr(leaf, "dtype", None) or jnp.asarray(leaf).dtype
