"""`tf.tpu.experimental`: starting TPUs, which JAX does itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from replicax.tf.arguments import Ignored

__all__ = ["TPUSystemMetadata", "Topology", "initialize_tpu_system", "shutdown_tpu_system"]


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices that programs run on.

    >>> Topology((2, 1, 1, 1), ("cpu",), 2, 1).num_tasks
    1
    """

    mesh_shape: tuple[int, ...]
    device_coordinates: tuple[Any, ...]
    num_tpus_per_task: int
    num_tasks: int


@dataclasses.dataclass(frozen=True)
class TPUSystemMetadata:
    """The number of cores and hosts, and their devices.

    >>> TPUSystemMetadata(8, 1, 8, None, ()).num_cores
    8
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Topology | None
    devices: tuple[Any, ...]


def initialize_tpu_system(cluster_resolver: Ignored = None) -> Topology:
    """Starts JAX, and returns its devices: TPUs where there are any, else what there is.

    >>> initialize_tpu_system().num_tasks
    1
    """
    del cluster_resolver
    found = jax.devices()
    coordinates = tuple(getattr(device, "coords", (device.id, 0, 0)) for device in found)
    each = len(jax.local_devices())
    return Topology((len(found), 1, 1, 1), coordinates, each, jax.process_count())


def shutdown_tpu_system(cluster_resolver: Ignored = None) -> None:
    """Accepts the call: JAX gives devices back when the process ends.

    >>> shutdown_tpu_system()
    """
    del cluster_resolver
