"""Operations on variables that have a distributed or sparse form of their own."""

from replicax.tracing.gradients import embedding_lookup as embedding_lookup

__all__ = ["embedding_lookup"]


def __dir__() -> list[str]:
    return __all__
