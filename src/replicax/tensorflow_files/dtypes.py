"""The types of tensors, by their numbers in the messages of TensorFlow."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

# The number of tensors of text, which have no fixed size.
STRING = 7

_DTYPES: dict[int, np.dtype] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    3: np.dtype(np.int32),
    4: np.dtype(np.uint8),
    5: np.dtype(np.int16),
    6: np.dtype(np.int8),
    STRING: np.dtype(object),
    8: np.dtype(np.complex64),
    9: np.dtype(np.int64),
    10: np.dtype(np.bool_),
    14: np.dtype(jnp.bfloat16),
    17: np.dtype(np.uint16),
    18: np.dtype(np.complex128),
    19: np.dtype(np.float16),
    22: np.dtype(np.uint32),
    23: np.dtype(np.uint64),
    24: np.dtype(jnp.float8_e5m2),
    25: np.dtype(jnp.float8_e4m3fn),
}
_OTHERS = {
    11: "qint8",
    12: "quint8",
    13: "qint32",
    15: "qint16",
    16: "quint16",
    20: "resource",
    21: "variant",
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


def dtype_numbered(number: int) -> np.dtype | None:
    """Returns a type of NumPy (object for text), or None if there is none.

    >>> dtype_numbered(14)
    dtype(bfloat16)
    """
    return _DTYPES.get(number)


def number_of(dtype: np.dtype) -> int | None:
    """Returns the number of a type of NumPy, or None.

    >>> number_of(np.dtype("float64"))
    2
    """
    return STRING if dtype.kind in "OSU" else _NUMBERS.get(dtype)


def name_numbered(number: int) -> str:
    """Returns the name of a type in TensorFlow.

    >>> name_numbered(7), name_numbered(20)
    ('string', 'resource')
    """
    if number == STRING:
        return "string"
    dtype = _DTYPES.get(number)
    return _OTHERS.get(number, f"type number {number}") if dtype is None else dtype.name
