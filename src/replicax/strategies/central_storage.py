"""CentralStorageStrategy: variables once, on one device; replicas on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from replicax.collectives.cross_device_ops import select_cross_device_ops
from replicax.foundation import devices
from replicax.foundation.jax_compat import Device
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.mirrored import resolve_worker_devices
from replicax.strategies.placement import SingleCopy
from replicax.values.layout import ReplicaLayout


@final
class CentralStorageStrategy(Strategy):
    """Keeps variables on one device and computes on several, in sync.

    Args:
      compute_devices: Names of the replicas' devices; all GPUs, or else CPUs, if None.
      parameter_device: The device of variables; the CPU if there are several replicas.

    >>> import replicax as rx
    >>> strategy = rx.CentralStorageStrategy(["CPU:0"])
    >>> strategy.extended.parameter_devices
    ('/job:localhost/replica:0/task:0/device:CPU:0',)
    """

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | None = None,
        parameter_device: str | Device | None = None,
    ) -> None:
        found = resolve_worker_devices(compute_devices)
        if parameter_device is not None:
            home = devices.resolve(parameter_device)
        else:
            home = found[0] if len(found) == 1 else devices.resolve("CPU:0")
        placement = SingleCopy(home, is_aggregating=True)
        ops = select_cross_device_ops(found)
        layout = ReplicaLayout(found)
        super().__init__(StrategyExtended(self, layout, None, ops, placement=placement))
