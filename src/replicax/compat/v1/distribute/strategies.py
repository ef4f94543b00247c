"""The v1 strategies of one machine: those of v2 with the API of v1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from replicax.collectives.cross_device_ops import CrossDeviceOps
from replicax.compat.v1.distribute.strategy import Strategy
from replicax.foundation.jax_compat import Device
from replicax.strategies import mirrored, one_device


class MirroredStrategy(Strategy):
    """`rx.MirroredStrategy` with the API of v1.

    Args:
      devices: Device names; all GPUs (or TPUs, or else CPUs) if None.
      cross_device_ops: How values of several devices are combined.

    >>> import replicax.compat.v1.distribute as distribute
    >>> distribute.MirroredStrategy(["CPU:0"]).num_replicas_in_sync
    1
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        super().__init__(mirrored.MirroredStrategy(devices, cross_device_ops).extended)


@final
class OneDeviceStrategy(Strategy):
    """`rx.OneDeviceStrategy` with the API of v1.

    Args:
      device: Its name, such as "CPU:0".
    """

    def __init__(self, device: str | Device) -> None:
        super().__init__(one_device.OneDeviceStrategy(device).extended)
