"""Optimizers: any optax transformation, applied to variables."""

from replicax.training.optimizer import Optimizer as Optimizer

__all__ = ["Optimizer"]


def __dir__() -> list[str]:
    return __all__
