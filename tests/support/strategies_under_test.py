"""The strategies that every semantic test runs over, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import worker_groups

import replicax as rx


class MinimalExtended(rx.StrategyExtended):
    """A strategy written outside of the library: a layout, and how variables are made."""

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        from replicax.strategies.mirrored import create_replicated

        kwargs.pop("colocate_with", None)
        return create_replicated(self, self.layout, **kwargs)


class MinimalStrategy(rx.Strategy):
    """S138: the Strategy subclass only makes its StrategyExtended."""

    def __init__(self) -> None:
        import jax

        layout = rx.ReplicaLayout(jax.devices("cpu")[4:6])
        super().__init__(MinimalExtended(self, layout))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": rx.get_strategy,
    "one_device": lambda: rx.OneDeviceStrategy("CPU:1"),
    "mirrored_1": lambda: rx.MirroredStrategy(["CPU:0"]),
    "mirrored_2": lambda: rx.MirroredStrategy(["CPU:0", "CPU:1"]),
    "mirrored_4": lambda: rx.MirroredStrategy(["CPU:3", "CPU:2", "CPU:1", "CPU:0"]),
    "virtual_2": lambda: rx.MirroredStrategy(["CPU:2"], virtual_replicas=2),
    "central_2": lambda: rx.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    "tpu_2": lambda: rx.TPUStrategy(experimental_device_assignment=["CPU:6", "CPU:7"]),
    "minimal_2": MinimalStrategy,
}
if (_worker := worker_groups.current()) is not None:
    STRATEGIES[worker_groups.STRATEGY] = _worker.new_strategy
TWO_REPLICAS = ("mirrored_2", "virtual_2", "central_2", "tpu_2", "minimal_2")
DISTRIBUTED = ("mirrored_1", "mirrored_2", "mirrored_4", "virtual_2", "tpu_2", "minimal_2")
# Strategies of the default run: one with a device per replica, one with several replicas on a
# device, and the first of these with a single replica.
_SEVERAL_REPLICAS = ("mirrored_2", "virtual_2")
_ONE_REPLICA = ("one_device", "default", "mirrored_1")


def is_single(name: str) -> bool:
    """Tells whether a strategy has a single replica."""
    return name in _ONE_REPLICA


def default_strategies(names: list[str]) -> list[str]:
    """Returns the strategies among `names` that a test runs over by default.

    The slow suite runs it over the others, which share nearly all of their code with these. Tests
    of what differs between strategies are marked `every_strategy`.
    """
    single = [n for n in _ONE_REPLICA if n in names][:1]
    return [n for n in _SEVERAL_REPLICAS if n in names] + single or names
