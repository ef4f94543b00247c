"""CentralStorageStrategy: variables once, on one device; replicas on several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

from typing_extensions import override

from replicax.collectives.cross_device_ops import select_cross_device_ops
from replicax.foundation import devices
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import VariableSynchronization
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.mirrored import attributes_of, replicated_by, resolve_worker_devices
from replicax.values.layout import ReplicaLayout
from replicax.variables import creators
from replicax.variables.plain import create_plain
from replicax.variables.variable import Variable


@final
class CentralStorageExtended(StrategyExtended):
    """Single-copy variables on the parameter device, whose writes are aggregated."""

    @override
    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Variable:
        assert self.layout is not None and self._parameter_devices is not None
        kwargs.pop("colocate_with", None)
        on_read = kwargs.get("synchronization") is VariableSynchronization.ON_READ
        if on_read:
            return replicated_by(next_creator, self, self.layout, kwargs)
        if creators.is_last_resort(next_creator):
            return create_plain(self, self._parameter_devices[0], is_aggregating=True, **kwargs)
        make = functools.partial(create_plain, self, is_aggregating=True)
        with devices.device(self._parameter_devices[0]), creators.made_by(make):
            made = next_creator(**kwargs)
        if not isinstance(made, Variable) or made.owner is self:
            return made
        kwargs = dict(kwargs, **attributes_of(made), initial_value=made.read_copy(0))
        return create_plain(self, made.placement[0], is_aggregating=True, **kwargs)


@final
class CentralStorageStrategy(Strategy):
    """Keeps variables on one device and computes on several, in sync.

    Args:
      compute_devices: Names of the replicas' devices; all GPUs, or else CPUs, if None.
      parameter_device: Where variables live; the CPU if there are several replicas.

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
        ops = select_cross_device_ops(found)
        super().__init__(CentralStorageExtended(self, ReplicaLayout(found), (home,), ops))
