"""Older versions of the tf.distribute API; imported when first used."""

from replicax.compat import v1 as v1

__all__ = ["v1"]


def __dir__() -> list[str]:
    return __all__
