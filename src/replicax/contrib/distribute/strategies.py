"""The strategies of r1.x: constructors of the time, over strategies of today."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from replicax.collectives.cross_device_ops import CrossDeviceOps
from replicax.contrib.distribute.distribution_strategy import DistributionStrategy
from replicax.foundation import devices as available
from replicax.foundation import errors
from replicax.foundation.jax_compat import Device
from replicax.strategies import central_storage, mirrored, multi_worker, one_device


class MirroredStrategy(DistributionStrategy):
    """Mirrors variables to several devices of one machine, with a tower on each.

    Args:
      devices: Device names.
      num_gpus: The number of GPUs to use, instead of `devices`; if neither is given, all GPUs
        (or TPUs, or else CPUs).
      cross_tower_ops: How values of several devices are combined.
      prefetch_on_device: Accepted for portability; elements are always copied ahead.

    >>> from replicax.contrib import distribute
    >>> distribute.MirroredStrategy(["CPU:0"]).num_towers
    1
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        num_gpus: int | None = None,
        cross_tower_ops: CrossDeviceOps | None = None,
        prefetch_on_device: bool | None = None,
    ) -> None:
        del prefetch_on_device
        if num_gpus is not None and devices is not None:
            raise errors.InvalidArgumentError(
                "MirroredStrategy takes `devices` or `num_gpus`",
                f"both were given: {list(devices)} and {num_gpus}",
                "Leave one of them out.",
            )
        if num_gpus is not None:
            devices = _gpus("num_gpus", num_gpus)
        self._bind(mirrored.MirroredStrategy(devices, cross_tower_ops))


@final
class OneDeviceStrategy(DistributionStrategy):
    """Runs a single tower on one device.

    Args:
      device: Its name, such as "CPU:0".
      prefetch_on_device: Accepted for portability; elements are always copied ahead.

    >>> from replicax.contrib import distribute
    >>> distribute.OneDeviceStrategy("CPU:0").is_single_tower
    True
    """

    def __init__(self, device: str | Device, prefetch_on_device: bool | None = None) -> None:
        del prefetch_on_device
        self._bind(one_device.OneDeviceStrategy(device))


@final
class CollectiveAllReduceStrategy(DistributionStrategy):
    """Mirrors variables to the devices of several workers, as TF_CONFIG describes them.

    Args:
      num_gpus_per_worker: The number of GPUs of each worker, all of which are used; 0 for those
        that there are, or else CPUs.
    """

    def __init__(self, num_gpus_per_worker: int = 0) -> None:
        if num_gpus_per_worker:
            found = len(available.devices_of_kind("GPU"))
            if found != num_gpus_per_worker:
                raise errors.InvalidArgumentError(
                    "`num_gpus_per_worker` must be the number of GPUs of this worker",
                    f"it is {num_gpus_per_worker}, and there are {found}",
                    "Leave it out, or choose GPUs with CUDA_VISIBLE_DEVICES.",
                )
        self._bind(multi_worker.MultiWorkerMirroredStrategy())


@final
class ParameterServerStrategy(DistributionStrategy):
    """Keeps variables once, on the CPU or the only GPU, with towers on all GPUs of one machine.

    That is what the strategy of r1.x did on one machine. For workers and parameter servers, use
    `rx.ParameterServerStrategy`.

    Args:
      num_gpus_per_worker: The number of GPUs to use; 0 for one tower on the CPU.

    >>> from replicax.contrib import distribute
    >>> distribute.ParameterServerStrategy().num_towers
    1
    """

    def __init__(self, num_gpus_per_worker: int = 0) -> None:
        names = _gpus("num_gpus_per_worker", num_gpus_per_worker) or ["CPU:0"]
        self._bind(central_storage.CentralStorageStrategy(names))


def _gpus(argument: str, count: int) -> list[str]:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise errors.InvalidArgumentError(
            f"`{argument}` must be an int of 0 or more", f"it is {count!r}", "Pass 2, say."
        )
    found = len(available.devices_of_kind("GPU"))
    if count > found:
        raise errors.InvalidArgumentError(
            f"`{argument}` must be at most the number of GPUs",
            f"it is {count}, and there are {found}",
            'Name other devices, such as MirroredStrategy(devices=["CPU:0", "CPU:1"]).',
        )
    return [f"GPU:{i}" for i in range(count)]
