"""Random numbers in replica code and compiled functions: keys of `jax.random`, per replica."""

from replicax.foundation.public_names import show_as_public
from replicax.training.random_keys import Generator as Generator
from replicax.training.random_keys import replica_key as replica_key

__all__ = ["Generator", "replica_key"]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
