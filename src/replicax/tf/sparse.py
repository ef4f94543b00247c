"""`tf.sparse`: what `VarLenFeature` needs. Other operations on sparse tensors are not offered."""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax.tf import namespaces
from replicax.tf.arguments import Value
from replicax.tf.tensor import raw, wrap
from replicax.values.sparse_tensor import SparseTensor as SparseTensor

__all__ = ["SparseTensor", "from_dense", "to_dense"]


def to_dense(
    sp_input: SparseTensor,
    default_value: Value = None,
    validate_indices: bool = True,
    name: str | None = None,
) -> Any:
    """Returns the array with a default value where there is no entry.

    >>> to_dense(SparseTensor([[0], [2]], [7, 3], (3,))).numpy().tolist()
    [7, 0, 3]
    """
    del validate_indices, name
    values = np.asarray(raw(sp_input.values))
    indices = np.asarray(raw(sp_input.indices)).reshape(-1, len(sp_input.dense_shape))
    is_text = values.dtype.kind in "OSU"
    blank = (b"" if is_text else 0) if default_value is None else default_value
    blank = raw(blank)
    if isinstance(blank, str):
        blank = blank.encode("utf-8")
    array = np.full(sp_input.dense_shape, blank, dtype=object if is_text else values.dtype)
    array[tuple(indices.T)] = values
    return wrap(array)


def from_dense(tensor: Value, name: str | None = None) -> SparseTensor:
    """Returns the entries of an array that are not zero.

    >>> from_dense(np.array([0, 5])).dense_shape
    (2,)
    """
    del name
    array = np.asarray(raw(tensor))
    indices = np.argwhere(array)
    return SparseTensor(wrap(indices), wrap(array[tuple(indices.T)]), array.shape)


__getattr__ = namespaces.refusing(__name__)
