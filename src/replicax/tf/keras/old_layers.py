"""Layers of earlier versions of Keras."""

from __future__ import annotations

from typing import Any

import keras

from replicax.tf.keras.argument_types import ElementType, Value

__all__ = ["AbstractRNNCell", "CuDNNGRU", "CuDNNLSTM", "SyncBatchNormalization"]


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with the statistics of the batches of all replicas.

    >>> SyncBatchNormalization().synchronized
    True
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["synchronized"] = True
        super().__init__(*args, **kwargs)


class AbstractRNNCell(keras.layers.Layer):
    """A base class of cells of `tf.keras.layers.RNN`: define `call`, `state_size`, `output_size`.

    >>> import numpy as np
    >>> class Sum(AbstractRNNCell):
    ...     state_size = output_size = 2
    ...     def call(self, inputs, states):
    ...         return inputs + states[0], [inputs + states[0]]
    >>> keras.layers.RNN(Sum())(np.ones((1, 3, 2))).shape
    TensorShape([1, 2])
    """

    def get_initial_state(
        self, batch_size: int | None = None, inputs: Value = None, dtype: ElementType = None
    ) -> list[Any]:
        """Returns zeros of the sizes of the states."""
        rows = inputs.shape[0] if batch_size is None else batch_size
        kind = dtype or self.compute_dtype
        sizes = self.state_size
        return [keras.ops.zeros((rows, size), kind) for size in keras.tree.flatten(sizes)]


class CuDNNLSTM(keras.layers.LSTM):
    """An LSTM: XLA compiles it for all devices."""


class CuDNNGRU(keras.layers.GRU):
    """A GRU: XLA compiles it for all devices."""
