"""Layers under the names that they have in TensorFlow's add-ons for distribution."""

from __future__ import annotations

import keras


@keras.saving.register_keras_serializable("replicax")
class Embedding(keras.layers.Embedding):
    """Maps row numbers to rows of a table; with parameter servers, only these rows travel.

    It is `keras.layers.Embedding`, which does the same in the scope of a strategy.

    >>> import numpy as np
    >>> import replicax as rx
    >>> rx.keras.layers.Embedding(10, 4)(np.array([[1, 2, 1]])).ndim
    3
    """


__all__ = ["Embedding"]
