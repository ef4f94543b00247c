"""`tensorflow.python.client.device_lib`: the devices of this process."""

from __future__ import annotations

import dataclasses

import jax

from replicax.foundation import devices
from replicax.tf.arguments import Ignored

__all__ = ["list_local_devices"]


@dataclasses.dataclass(frozen=True)
class DeviceAttributes:
    """What is known about a device.

    >>> DeviceAttributes("/device:CPU:0", "CPU", 0, "").device_type
    'CPU'
    """

    name: str
    device_type: str
    memory_limit: int
    physical_device_desc: str
    incarnation: int = 0


def list_local_devices(session_config: Ignored = None) -> list[DeviceAttributes]:
    """Returns the devices of this process.

    >>> list_local_devices()[0].device_type
    'CPU'
    """
    del session_config
    found = []
    for device in jax.local_devices():
        name = devices.name_of(device).rpartition("/")[2]
        memory = device.memory_stats() or {}
        kind = name.split(":")[1]
        limit = int(memory.get("bytes_limit", 0))
        found.append(DeviceAttributes(f"/{name}", kind, limit, device.device_kind))
    return found
