"""Keras 3 under strategies; `import replicax` is enough, this module adds what Keras does not have.

A model that is made in `strategy.scope()` is distributed: `fit`, `evaluate` and `predict` use all
replicas, and its variables are those of the strategy in replica code. Keras needs the JAX
backend, which is chosen if `KERAS_BACKEND` is not set when Keras is imported.
"""

from replicax.foundation import errors

# Keras first: importing it installs the hooks, which are modules of this package.
try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as error:
    raise errors.MissingDependencyError(
        "`rx.keras` needs the package 'keras'",
        "it is not installed",
        "Run `pip install replicax[keras]`.",
    ) from error

from replicax.keras import layers as layers
from replicax.keras.hooks import install as install
from replicax.keras.hooks import is_installed as is_installed
from replicax.keras.hooks import uninstall as uninstall
from replicax.keras.parameter_servers.data import DatasetCreator as DatasetCreator

__all__ = ["DatasetCreator", "install", "is_installed", "layers", "uninstall"]
