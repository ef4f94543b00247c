"""Arrays of other libraries, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.values.regroup import sequence_like


def to_numpy(batch: Any) -> Any:
    """Replaces tensors of other libraries, and lists of numbers, by NumPy arrays.

    >>> to_numpy({"x": [1, 2, 3]})
    {'x': array([1, 2, 3])}
    """
    if isinstance(batch, list) and batch and all(isinstance(v, int | float) for v in batch):
        return np.asarray(batch)
    if type(batch).__name__ == "SparseTensorValue":
        return _sparse(batch)
    if isinstance(batch, list | tuple):
        return sequence_like(batch, [to_numpy(item) for item in batch])
    if isinstance(batch, Mapping):
        return {key: to_numpy(value) for key, value in batch.items()}
    return _leaf(batch)


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | jax.Array) or np.isscalar(leaf) or leaf is None:
        return leaf
    if hasattr(leaf, "detach"):
        # A torch tensor, wherever it is.
        return leaf.detach().cpu().numpy()
    if type(leaf).__name__ == "RaggedTensorValue":
        return _ragged(leaf)
    if hasattr(leaf, "numpy") and hasattr(leaf, "shape"):
        return leaf.numpy()
    return leaf


def _ragged(value: Any) -> np.ndarray:
    """Returns rows of different lengths as an array of arrays."""
    rows = value.to_list()
    ragged = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        ragged[i] = np.asarray(row)
    return ragged


def _sparse(value: Any) -> Any:
    from jax.experimental import sparse  # noqa: PLC0415 - slow to import, and rarely needed

    shape = tuple(int(n) for n in value.dense_shape)
    return sparse.BCOO((jnp.asarray(value.values), jnp.asarray(value.indices)), shape=shape)
