"""Optimizers: any optax transformation, applied to variables."""

from replicax.foundation.public_names import show_as_public
from replicax.training.optimizer.optimizer import Optimizer as Optimizer
from replicax.training.optimizer.step_guard import DynamicLossScale as DynamicLossScale

__all__ = ["DynamicLossScale", "Optimizer"]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
