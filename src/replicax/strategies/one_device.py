"""OneDeviceStrategy: everything on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

from typing_extensions import override

from replicax.foundation import devices
from replicax.foundation.jax_compat import Device
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.values.layout import ReplicaLayout
from replicax.variables import creators
from replicax.variables.plain import create_plain
from replicax.variables.variable import Variable


@final
class OneDeviceExtended(StrategyExtended):
    """One replica on a named device; variables are plain ones there."""

    @override
    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Variable:
        assert self.layout is not None
        kwargs.pop("colocate_with", None)
        if creators.is_last_resort(next_creator):
            return create_plain(self, self.layout.devices[0], **kwargs)
        make = functools.partial(create_plain, self)
        with devices.device(self.layout.devices[0]), creators.made_by(make):
            variable = next_creator(**kwargs)
        if isinstance(variable, Variable) and variable.owner is None:
            variable.owner = self
        return variable


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
        layout = ReplicaLayout([devices.resolve(device)])
        super().__init__(OneDeviceExtended(self, layout))
