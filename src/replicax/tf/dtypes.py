"""Element types under TensorFlow's names."""

from __future__ import annotations

import builtins
import functools
import typing
from typing import Any

import jax.dtypes
import ml_dtypes
import numpy as np

from replicax.foundation import errors
from replicax.tf import namespaces

_INTEGERS = ("int4", "int8", "int16", "int32", "int64")
_UNSIGNED = ("uint4", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_COMPLEX = ("complex64", "complex128")
_QUANTIZED = ("qint8", "qint16", "qint32", "quint8", "quint16")


class DType:
    """The type of the elements of a tensor.

    Equal to NumPy's dtype of the same elements, and to its name.

    >>> float32.name, float32.is_floating, float32 == "float32", float32 == np.float32
    ('float32', True, True, True)
    """

    __slots__ = ("_name", "_numpy")

    def __init__(self, name: str, numpy_dtype: np.dtype) -> None:
        self._name = name
        self._numpy = numpy_dtype

    @property
    def name(self) -> str:
        """The name, such as `"float32"`."""
        return self._name

    @property
    def dtype(self) -> np.dtype:
        """NumPy's dtype; `np.dtype(tf.float32)` and JAX read it."""
        return self._numpy

    @property
    def as_numpy_dtype(self) -> Any:
        """NumPy's scalar type, such as `np.float32`; `object` for strings."""
        return self._numpy.type if self._name != "string" else object

    @property
    def base_dtype(self) -> DType:
        """The type itself: there are no reference types."""
        return self

    @property
    def real_dtype(self) -> DType:
        """The type of the real part."""
        real = {"complex64": "float32", "complex128": "float64"}
        return as_dtype(real.get(self._name, self._name))

    @property
    def size(self) -> int:
        """The number of bytes of an element."""
        return self._numpy.itemsize if self._name != "string" else 0

    @property
    def is_floating(self) -> bool:
        """Whether it is a real floating type."""
        return self._name in _FLOATS

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer type, signed or not."""
        return self._name in _INTEGERS or self._name in _UNSIGNED

    @property
    def is_unsigned(self) -> bool:
        """Whether it is an unsigned integer type."""
        return self._name in _UNSIGNED

    @property
    def is_complex(self) -> bool:
        """Whether it is a complex type."""
        return self._name in _COMPLEX

    @property
    def is_bool(self) -> bool:
        """Whether it is the type of truth values."""
        return self._name == "bool"

    @property
    def is_quantized(self) -> bool:
        """Always False: quantized types are not offered."""
        return False

    @property
    def is_numpy_compatible(self) -> bool:
        """Always True: each type has a NumPy dtype."""
        return True

    @property
    def min(self) -> Any:
        """The smallest finite value."""
        return self._limits().min

    @property
    def max(self) -> Any:
        """The largest finite value."""
        return self._limits().max

    @property
    def limits(self) -> tuple[Any, Any]:
        """The smallest and the largest value."""
        return self.min, self.max

    def _limits(self) -> Any:
        if self.is_bool:
            return _BoolLimits
        if self.is_integer:
            return ml_dtypes.iinfo(self._numpy)
        if self.is_floating:
            return ml_dtypes.finfo(self._numpy)
        raise errors.ArgumentTypeError(
            "`min` and `max` need a type of real numbers",
            f"this is tf.{self._name}",
            "Use `real_dtype` of a complex type.",
        )

    def is_compatible_with(self, other: Any) -> bool:
        """Tells whether values of another type can be used for this one: only the same."""
        return self == as_dtype(other)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self._name == other._name
        if other is None:
            return False
        try:
            return self._name == as_dtype(other).name
        except (TypeError, ValueError):
            return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._name)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return as_dtype, (self._name,)

    def __int__(self) -> int:
        return _ENUM.get(self._name, 0)

    @property
    def as_datatype_enum(self) -> int:
        """The number of the type in the files of TensorFlow."""
        return int(self)

    def __getattr__(self, name: str) -> Any:
        # `itemsize`, `kind` and what else code reads of NumPy's dtypes.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._numpy, name)

    def __format__(self, spec: str) -> str:
        return format(self._name, spec)

    def __str__(self) -> str:
        return f"<dtype: {self._name!r}>"

    def __repr__(self) -> str:
        return f"tf.{self._name}"


class _BoolLimits:
    min = False
    max = True


# The numbers of the types in TensorFlow's files.
_ENUM = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "string": 7,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
    "float8_e5m2": 24,
    "float8_e4m3fn": 25,
    "int4": 29,
    "uint4": 30,
}

_TABLE: dict[str, DType] = {}


def _add(name: str, numpy_dtype: Any = None) -> DType:
    found = DType(name, np.dtype(numpy_dtype if numpy_dtype is not None else name))
    _TABLE[name] = found
    return found


float16 = half = _add("float16")
float32 = _add("float32")
float64 = double = _add("float64")
bfloat16 = _add("bfloat16", ml_dtypes.bfloat16)
float8_e4m3fn = _add("float8_e4m3fn", ml_dtypes.float8_e4m3fn)
float8_e5m2 = _add("float8_e5m2", ml_dtypes.float8_e5m2)
int4 = _add("int4", ml_dtypes.int4)
int8 = _add("int8")
int16 = _add("int16")
int32 = _add("int32")
int64 = _add("int64")
uint4 = _add("uint4", ml_dtypes.uint4)
uint8 = _add("uint8")
uint16 = _add("uint16")
uint32 = _add("uint32")
uint64 = _add("uint64")
complex64 = _add("complex64")
complex128 = _add("complex128")
string = _add("string", object)
_bool = _add("bool")
# Under its public name only, so that this module can use Python's type.
globals()["bool"] = _bool

_ALIASES = {"half": "float16", "double": "float64", "str": "string", "object": "string"}

__all__ = [
    "DType",
    "as_dtype",
    "bfloat16",
    "bool",
    "complex64",
    "complex128",
    "double",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "half",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "string",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]


def as_dtype(type_value: Any) -> DType:
    """Returns the type that a name, a NumPy or JAX dtype, or a Python type stands for.

    >>> as_dtype("float32"), as_dtype(np.int64), as_dtype(float), as_dtype(np.dtype("bool"))
    (tf.float32, tf.int64, tf.float32, tf.bool)
    """
    if isinstance(type_value, DType):
        return type_value
    try:
        return _resolved(type_value)
    except TypeError:
        # Unhashable.
        raise _unknown(type_value) from None


@functools.lru_cache(maxsize=1024)
def _resolved(given: Any) -> DType:
    # Python's float is TensorFlow's float32, and its int int32.
    python = {float: float32, int: int32, bool_type: _bool, str: string, bytes: string}
    python |= {object: string, complex: complex128}
    if isinstance(given, type) and given in python:
        return python[given]
    if isinstance(given, int) and not isinstance(given, bool_type):
        return _by_enum(given)
    name = given if isinstance(given, str) else None
    if given is None:
        # NumPy's default.
        raise _unknown(given)
    if name is None:
        try:
            name = np.dtype(typing.cast(Any, given)).name
        except TypeError:
            raise _unknown(given) from None
    name = _ALIASES.get(name, name)
    if name.startswith(("bytes", "str")):
        return string
    found = _TABLE.get(name)
    if found is None:
        raise _unknown(given)
    return found


def _by_enum(number: int) -> DType:
    for name, value in _ENUM.items():
        if value == number:
            return _TABLE[name]
    raise _unknown(number)


def _unknown(given: object) -> errors.ArgumentTypeError:
    if isinstance(given, str) and given in _QUANTIZED:
        return errors.ArgumentTypeError(
            "An element type must be one that JAX computes with",
            f"{given!r} is a quantized type of TensorFlow",
            "Use tf.int8 or tf.uint8, and keep scale and zero point beside it.",
        )
    return errors.ArgumentTypeError(
        "A dtype must be a tf dtype, its name, or a dtype of NumPy or JAX",
        f"{given!r} was given",
        "Pass for example tf.float32.",
    )


bool_type = builtins.bool


def device_dtype(dtype: Any) -> np.dtype:
    """Returns the NumPy dtype that JAX computes with where a type is asked for.

    Without `jax_enable_x64`, the 64-bit types become their 32-bit ones, without a warning.

    >>> device_dtype(int64)
    dtype('int32')
    """
    return jax.dtypes.canonicalize_dtype(as_dtype(dtype).dtype)


# `tf.dtypes` also has ops, whose modules import this one.
__getattr__, __dir__ = namespaces.lookup(
    "dtypes",
    namespaces.Table(
        {
            "cast": ".ops.creation:cast",
            "complex": ".ops.complex_numbers:complex",
            "saturate_cast": ".ops.creation:saturate_cast",
        }
    ),
    globals(),
)
