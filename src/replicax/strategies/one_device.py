"""OneDeviceStrategy: everything on one device."""

from __future__ import annotations

from typing import final

from replicax.foundation import devices
from replicax.foundation.jax_compat import Device
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.placement import SingleCopy
from replicax.values.layout import ReplicaLayout


@final
class OneDeviceStrategy(Strategy):
    """Runs everything on one device; a way to write code that more devices can run later.

    Args:
      device: Its name, such as "CPU:0".

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("CPU:0")
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(self, device: str | Device) -> None:
        found = devices.resolve(device)
        layout = ReplicaLayout([found])
        super().__init__(StrategyExtended(self, layout, placement=SingleCopy(found)))
