"""Everything an array can do, for objects that stand for one."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax.foundation import jax_compat
from replicax.foundation.peers import Peers
from replicax.values import printing

_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_COMPARE = ["lt", "le", "gt", "ge", "eq", "ne"]
_UNARY = {"neg": operator.neg, "pos": operator.pos, "abs": abs, "invert": operator.invert}
# Names that must not reach the array: JAX and NumPy would take the object for one.
_WITHHELD = frozenset({"block_until_ready", "delete", "is_deleted", "sharding"})
# What only concrete arrays offer.
_CONCRETE_ONLY = frozenset({"tolist"})
_UNGUARDED = contextlib.nullcontext()


if TYPE_CHECKING:
    # Type checkers see an array: functions of JAX, annotated with jax.Array, take these objects.
    _Array = jax.Array
else:
    _Array = object


class ArrayOperators(_Array):
    """Gives operators, slicing and conversions to a class with `_as_array()`."""

    __slots__ = ()
    __array_priority__ = 200

    def _as_array(self) -> Any:
        raise NotImplementedError

    def _reading(self) -> AbstractContextManager[None]:
        """Names the lost process, if that is why the value cannot be computed."""
        peers: Peers | None = getattr(getattr(self, "layout", None), "peers", None)
        return _UNGUARDED if peers is None else peers.guarded()

    def __jax_array__(self) -> Any:
        return self._as_array()

    def __array__(  # type: ignore[override]
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        # Always a copy: a view would see, or block, the reuse of its buffer by a later step.
        with self._reading():
            return np.array(self._as_array(), dtype=dtype, copy=True)

    def __getitem__(self, index: object) -> Any:
        return self._as_array()[as_operand(index)]

    def __iter__(self) -> Any:
        return iter(self._as_array())

    def __len__(self) -> int:
        return len(self._as_array())

    def __float__(self) -> float:
        with self._reading():
            return float(self._as_array())

    def __int__(self) -> int:
        with self._reading():
            return int(self._as_array())

    def __index__(self) -> int:
        return operator.index(self._as_array())

    def __complex__(self) -> complex:
        return complex(self._as_array())

    def __bool__(self) -> bool:
        with self._reading():
            return bool(self._as_array())

    def __round__(self, ndigits: int | None = None) -> Any:
        array = self._as_array()
        return round(array) if ndigits is None else round(array, ndigits)

    def __format__(self, spec: str) -> str:
        # A scalar is formatted as a number, an array as its description.
        if spec:
            return format(self._as_array(), spec)
        if getattr(self, "shape", None) != ():
            return str(self)
        array = self._as_array()
        return str(array) if jax_compat.is_traced(array) else printing.content(array)

    def __divmod__(self, other: object) -> Any:
        return divmod(self._as_array(), as_operand(other))

    def __rdivmod__(self, other: object) -> Any:
        return divmod(jnp.asarray(as_operand(other)), self._as_array())


class ArraySurface(ArrayOperators):
    """Gives array methods and attributes too."""

    __slots__ = ()

    def _attribute_of_array(self, name: str) -> Any:
        if name.startswith("_") or not (hasattr(jax.Array, name) or name in _CONCRETE_ONLY):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _WITHHELD:
            raise AttributeError(
                f"{type(self).__name__} does not offer {name!r}: it acts on one array, and the "
                f"array behind this object changes. Take `.value()` first."
            )
        return getattr(self._as_array(), name)

    if not TYPE_CHECKING:  # which would take any misspelt name for an attribute
        __getattr__ = _attribute_of_array


def as_operand(value: object) -> Any:
    """Returns the array behind an object that stands for one, and anything else as it is."""
    if isinstance(value, ArrayOperators):
        return value._as_array()
    if isinstance(value, tuple):
        return tuple(as_operand(v) for v in value)
    return value


def _install() -> None:
    def binary(name: str) -> None:
        op = getattr(operator, f"{name}_" if name in ("and", "or") else name)

        def forward(self: ArrayOperators, other: object) -> Any:
            return op(self._as_array(), as_operand(other))

        def reverse(self: ArrayOperators, other: object) -> Any:
            return op(as_operand(other), self._as_array())

        setattr(ArrayOperators, f"__{name}__", forward)
        if name not in _COMPARE:
            setattr(ArrayOperators, f"__r{name}__", reverse)

    def unary(name: str, op: Callable[[jax.Array], jax.Array]) -> None:
        setattr(ArrayOperators, f"__{name}__", lambda self: op(self._as_array()))

    for name in _BINARY + ["lt", "le", "gt", "ge"]:
        binary(name)
    for name, op in _UNARY.items():
        unary(name, op)


_install()


def elementwise_equal(left: object, right: object) -> Any:
    """Compares two array-likes element by element; unlike shapes are simply unequal."""
    try:
        return jnp.equal(as_operand(left), as_operand(right))
    except (TypeError, ValueError):
        return NotImplemented
