"""`tf.compat`: text as str or bytes, sizes of dimensions, and versions."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.tf.arguments import PathValue, Value

__all__ = [
    "as_bytes",
    "as_str",
    "as_str_any",
    "as_text",
    "bytes_or_text_types",
    "complex_types",
    "dimension_at_index",
    "dimension_value",
    "forward_compatibility_horizon",
    "forward_compatible",
    "integral_types",
    "path_to_str",
    "real_types",
]

bytes_or_text_types = (bytes, str)
complex_types = (complex, float, int, np.number)
integral_types = (int, np.integer)
real_types = (float, int, np.integer, np.floating)


def as_text(bytes_or_text: str | bytes, encoding: str = "utf-8") -> str:
    """Returns text as str.

    >>> as_text(b"ab")
    'ab'
    """
    if isinstance(bytes_or_text, str):
        return bytes_or_text
    if isinstance(bytes_or_text, bytes | bytearray):
        return bytes(bytes_or_text).decode(encoding)
    raise _not_text(bytes_or_text)


def as_bytes(bytes_or_text: str | bytes, encoding: str = "utf-8") -> bytes:
    """Returns text as bytes.

    >>> as_bytes("ab")
    b'ab'
    """
    if isinstance(bytes_or_text, str):
        return bytes_or_text.encode(encoding)
    if isinstance(bytes_or_text, bytes | bytearray):
        return bytes(bytes_or_text)
    raise _not_text(bytes_or_text)


as_str = as_text


def as_str_any(value: Value, encoding: str = "utf-8") -> str:
    """Returns any value as str; bytes are decoded.

    >>> as_str_any(3), as_str_any(b"a")
    ('3', 'a')
    """
    return as_text(value, encoding) if isinstance(value, bytes) else str(value)


def _not_text(value: object) -> errors.ArgumentTypeError:
    return errors.ArgumentTypeError(
        "Text must be str or bytes", f"{type(value).__name__} was given", "Convert it first."
    )


def path_to_str(path: PathValue) -> Any:
    """Returns a path object as str; other values stay as they are.

    >>> path_to_str("a/b")
    'a/b'
    """
    return as_str_any(os.fspath(path)) if hasattr(path, "__fspath__") else path


def dimension_value(dimension: Value) -> int | None:
    """Returns the size of a dimension: an int, or None if it is not known.

    >>> dimension_value(3)
    3
    """
    return dimension


def dimension_at_index(shape: Value, index: int) -> int | None:
    """Returns one size of a shape; None if the number of dimensions is not known.

    >>> dimension_at_index((2, 3), 1)
    3
    """
    rank = getattr(shape, "rank", len(shape))
    return None if rank is None else shape[index]


def forward_compatible(year: int, month: int, day: int) -> bool:
    """Tells whether a date has passed.

    >>> forward_compatible(2020, 1, 1)
    True
    """
    return datetime.date(year, month, day) < datetime.date.today()


@contextlib.contextmanager
def forward_compatibility_horizon(year: int, month: int, day: int) -> Iterator[None]:
    """Runs a block; there are no serialized graphs that a date could matter to.

    >>> with forward_compatibility_horizon(2020, 1, 1):
    ...     pass
    """
    del year, month, day
    yield
