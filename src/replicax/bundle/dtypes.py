"""Array types that a bundle stores, and their names in safetensors files."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np

# Types that the safetensors format has. Arrays of other types are stored as bytes (U8).
_SAFETENSORS = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_ML_DTYPES = frozenset(
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn int2 int4 uint2 uint4".split()
)
_NUMPY_DTYPES = frozenset(_SAFETENSORS) - _ML_DTYPES | {"complex128"}
_TEXT_DTYPE = re.compile(r"<U[0-9]{1,6}|\|S[0-9]{1,6}")


def dtype_named(name: str) -> np.dtype:
    """Returns the type that a manifest names; ValueError for any other name.

    >>> dtype_named("bfloat16").itemsize
    2
    """
    if name in _ML_DTYPES and hasattr(jnp, name):
        return np.dtype(getattr(jnp, name))
    if name in _NUMPY_DTYPES or _TEXT_DTYPE.fullmatch(name):
        return np.dtype(name)
    # Never np.dtype of unknown text: an array of objects would turn bytes into pointers.
    raise ValueError(f"unknown type {name[:40]!r}")


def name_of_dtype(dtype: np.dtype) -> str | None:
    """Returns the name under which a type is stored, or None if it cannot be stored."""
    native = dtype.newbyteorder("=")
    name = native.str if native.kind in "US" else native.name
    try:
        return name if dtype_named(name) == native else None
    except ValueError:
        return None


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns type and shape of an array in a safetensors file.

    A type that the format lacks is stored as its bytes, which are the last axis.

    >>> stored_form("float32", (2, 3)), stored_form("complex128", (2, 3))
    (('F32', (2, 3)), ('U8', (2, 3, 16)))
    """
    code = _SAFETENSORS.get(dtype)
    return ("U8", (*shape, dtype_named(dtype).itemsize)) if code is None else (code, shape)
