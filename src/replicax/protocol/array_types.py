"""The types of arrays that may travel, by name: NumPy's numbers and those of ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_NATIVE = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
_NATIVE += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_EXTRA = {
    name: kind
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}

DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NATIVE}
DTYPES |= {name: np.dtype(kind) for name, kind in _EXTRA.items()}
