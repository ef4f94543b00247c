"""The API of TensorFlow 1."""

from replicax.compat.v1 import distribute as distribute

__all__ = ["distribute"]


def __dir__() -> list[str]:
    return __all__
