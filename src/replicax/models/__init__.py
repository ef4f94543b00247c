"""Models of Flax and Equinox under a strategy: their state becomes variables, in one call.

    with strategy.scope():
        model = rx.models.from_nnx(CNN(rngs=nnx.Rngs(0)))
        optimizer = rx.optimizers.Optimizer(optax.adam(1e-3), model.trainable_variables)

In the step, `model(images)` computes with the values of the variables, and stores what the call
changed: statistics of BatchNorm, positions of random streams. Keras models need none of this; see
`replicax.keras`.
"""

from replicax.foundation.public_names import show_as_public
from replicax.models.equinox import EquinoxModel as EquinoxModel
from replicax.models.equinox import from_equinox as from_equinox
from replicax.models.linen import LinenModel as LinenModel
from replicax.models.linen import from_linen as from_linen
from replicax.models.nnx import NnxModel as NnxModel
from replicax.models.nnx import from_nnx as from_nnx

__all__ = [
    "EquinoxModel",
    "LinenModel",
    "NnxModel",
    "from_equinox",
    "from_linen",
    "from_nnx",
]


def __dir__() -> list[str]:
    return __all__


show_as_public(__name__)
