"""tf.contrib.distribute of r1.9, in which replicas are called towers.

The strategies call those of `rx`; a scope, a variable or a dataset of one is one of the other.
"""

from typing import TYPE_CHECKING, Any

from replicax.collectives.cross_device_ops import CrossDeviceOps, ReductionToOneDevice
from replicax.compat.v1.distribute.loss_reduction import get_loss_reduction as get_loss_reduction
from replicax.contrib.distribute.cross_tower_ops import (
    AllReduceCrossTowerOps as AllReduceCrossTowerOps,
)
from replicax.contrib.distribute.distribution_strategy import (
    DistributionStrategy as DistributionStrategy,
)
from replicax.contrib.distribute.strategies import (
    CollectiveAllReduceStrategy as CollectiveAllReduceStrategy,
)
from replicax.contrib.distribute.strategies import MirroredStrategy as MirroredStrategy
from replicax.contrib.distribute.strategies import OneDeviceStrategy as OneDeviceStrategy
from replicax.contrib.distribute.strategies import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from replicax.contrib.distribute.towers import TowerContext as TowerContext
from replicax.contrib.distribute.towers import get_cross_tower_context as get_cross_tower_context
from replicax.contrib.distribute.towers import (
    get_distribution_strategy as get_distribution_strategy,
)
from replicax.contrib.distribute.towers import get_tower_context as get_tower_context
from replicax.contrib.distribute.towers import (
    has_distribution_strategy as has_distribution_strategy,
)
from replicax.contrib.distribute.towers import require_tower_context as require_tower_context
from replicax.foundation.spelling import suggestion

# The name of r1.12.
AllReduceCrossDeviceOps = AllReduceCrossTowerOps
CrossTowerOps = CrossDeviceOps
ReductionToOneDeviceCrossTowerOps = ReductionToOneDevice

__all__ = [
    "AllReduceCrossDeviceOps",
    "AllReduceCrossTowerOps",
    "CollectiveAllReduceStrategy",
    "CrossTowerOps",
    "DistributionStrategy",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReductionToOneDeviceCrossTowerOps",
    "TowerContext",
    "get_cross_tower_context",
    "get_distribution_strategy",
    "get_loss_reduction",
    "get_tower_context",
    "has_distribution_strategy",
    "require_tower_context",
]

# Names of r1.9 that are not offered, and what to use.
_INSTEAD = {
    "Monitor": "a loop over steps",
    "Step": "a function that calls `call_for_each_tower`",
    "StandardInputStep": "a function that calls `call_for_each_tower` with the next element",
    "StandardSingleLossStep": "rx.value_and_grad and rx.optimizers.Optimizer in a tower",
    "TPUStrategy": "rx.TPUStrategy",
    "DistributeConfig": "rx.MultiWorkerMirroredStrategy with TF_CONFIG",
    "initialize_tpu_system": "rx.TPUStrategy, which needs no set-up",
}


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # which would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name in _INSTEAD:
            advice = f"It is not offered: use {_INSTEAD[name]}"
        else:
            advice = suggestion([name], __all__)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}. {advice}".rstrip(". ")
        )
