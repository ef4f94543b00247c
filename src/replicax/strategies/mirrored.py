"""MirroredStrategy: a replica on each device of a machine, variables copied to all."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from replicax.collectives.cross_device_ops import CrossDeviceOps, select_cross_device_ops
from replicax.foundation import device_names, devices, errors
from replicax.foundation.jax_compat import Device
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.placement import CopyPerReplica
from replicax.strategies.placement import create_replicated as create_replicated
from replicax.values.distributed_values import PerReplica, TracedPerReplica
from replicax.values.layout import ReplicaLayout


class MirroredExtended(StrategyExtended):
    """Refuses batches that tf.distribute refuses; everything else is the default."""

    @override
    def _check_batch(self, values: Sequence[object]) -> None:
        if self.num_replicas_in_sync == 1:
            return
        kinds = {_dtype(v) == jnp.int32 for v in values if isinstance(v, PerReplica)}
        if len(kinds) > 1:
            raise errors.InvalidArgumentError(
                "`batch_reduce_to` needs values that one algorithm can take together",
                "int32 values are mixed with others",
                "Reduce the int32 values in a batch of their own.",
            )


def _dtype(value: PerReplica) -> np.dtype:
    leaf = value.local if isinstance(value, TracedPerReplica) else value.values[0]
    return jnp.dtype(getattr(leaf, "dtype", None) or jnp.asarray(leaf).dtype)


class MirroredStrategy(Strategy):
    """Trains in sync on several devices of one machine.

    Each device runs one replica; variables have a copy on each, and every write reaches
    all copies.

    Args:
      devices: Device names; all GPUs (or TPUs, or else CPUs) if None.
      cross_device_ops: How values of several devices are combined.
      virtual_replicas: If more than 1, that many replicas share the single device.

    Raises:
      ArgumentTypeError: An option has another type.
      InvalidArgumentError: A device is not there, or virtual replicas are asked for on several
        devices.

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
        super().__init__(MirroredExtended(self, layout, None, ops, placement=CopyPerReplica()))


def resolve_worker_devices(names: Sequence[str | Device] | None) -> tuple[Device, ...]:
    """Returns the devices of the argument `devices` of a strategy; the default ones if None."""
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
        for spec in (device_names.parse(n) for n in names if isinstance(n, str))
        if not spec.is_local
    }
    if tasks:
        raise errors.InvalidArgumentError(
            "MirroredStrategy needs devices of this machine",
            f"{list(names)} names devices of other tasks",
            "Name local devices; for several machines use "
            "rx.MultiWorkerMirroredStrategy or rx.ParameterServerStrategy.",
        )
    return devices.resolve_all(names)
