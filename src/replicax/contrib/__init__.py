"""The `tf.contrib` names of TensorFlow 1.9; imported when first used."""

from replicax.contrib import distribute as distribute

__all__ = ["distribute"]


def __dir__() -> list[str]:
    return __all__
