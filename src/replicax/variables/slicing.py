"""Sliced assignment: `v[1:3].assign(x)` changes a part of a variable.

`v[1:3]` is a plain array that has the methods `assign`, `assign_add` and `assign_sub` on top.
An update of a part travels like any other: its kind starts with "slice", its payload is a
`SlicedValue`. See docs/design/0022.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsInt, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.values.indexed_slices import IndexedSlices

if TYPE_CHECKING:
    from replicax.variables.variable import Variable

# What arrays are indexed with: an int, a slice, None, ..., an array, or a tuple of such.
Index: TypeAlias = object

# The methods that parts of variables have, and the kinds of their updates.
KINDS = {
    "assign": "slice_assign",
    "assign_add": "slice_assign_add",
    "assign_sub": "slice_assign_sub",
}
_OF_ROWS = {
    "slice_assign": "scatter_update",
    "slice_assign_add": "scatter_add",
    "slice_assign_sub": "scatter_sub",
}


@dataclasses.dataclass(frozen=True)
class KnownArray:
    """An index that is an array whose elements are known; equal ones compare equal."""

    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: jax.Array | np.ndarray) -> KnownArray:
        """Returns a hashable index with the elements of an array."""
        return cls(array.shape, np.asarray(array, np.int64).tobytes())


@jax.tree_util.register_pytree_node_class
class SlicedValue:
    """A value for a part of a variable.

    Attributes:
      value: The value.
      arrays: The indices that are arrays.
      key: One entry per index: an int, a tuple (start, stop, step) for a slice, None for a new
        dimension, a `KnownArray`, or "array" for the next of `arrays`. Equal keys without
        arrays name equal parts.
    """

    __slots__ = ("arrays", "key", "value")

    def __init__(self, value: Tree, arrays: Sequence[Tree], key: tuple[Any, ...]) -> None:
        self.value = value
        self.arrays = tuple(arrays)
        self.key = key

    @property
    def index(self) -> tuple[Any, ...]:
        """The index, as arrays take it."""
        arrays = iter(self.arrays)

        def of(item: object) -> object:
            if isinstance(item, KnownArray):
                return np.frombuffer(item.data, np.int64).reshape(item.shape)
            if item == "array":
                return next(arrays)
            return slice(*item) if isinstance(item, tuple) else item

        return tuple(map(of, self.key))

    def with_known_arrays(self) -> SlicedValue | None:
        """Makes the arrays a part of the key; None if some are known to the compiler only."""
        if any(map(jax_compat.is_traced, self.arrays)):
            return None
        arrays = map(KnownArray.of, self.arrays)
        key = tuple(next(arrays) if item == "array" else item for item in self.key)
        return SlicedValue(self.value, (), key)

    def map_arrays(self, fn: Callable[[Tree], Tree]) -> SlicedValue:
        """Applies `fn` to the value and to the indices that are arrays."""
        return SlicedValue(fn(self.value), [fn(array) for array in self.arrays], self.key)

    def __repr__(self) -> str:
        return f"a value for the part [{', '.join(map(_shown, self.key))}]"

    def tree_flatten(self) -> tuple[tuple[Any, tuple[Any, ...]], Any]:
        return (self.value, self.arrays), self.key

    @classmethod
    def tree_unflatten(
        cls, key: tuple[Any, ...], children: tuple[Tree, tuple[Tree, ...]]
    ) -> SlicedValue:
        return cls(*children, key=key)


def _shown(item: object) -> str:
    if isinstance(item, KnownArray):
        return f"array of shape {item.shape}"
    if not isinstance(item, tuple):
        return str(item)
    start, stop, step = ("" if bound is None else str(bound) for bound in item)
    return f"{start}:{stop}" + (f":{step}" if step else "")


def api_of(kind: str) -> str:
    """Returns the name of the method that makes a kind of update."""
    return kind.removeprefix("slice_")


def with_methods(part: jax.Array, change: Callable[..., Any]) -> jax.Array:
    """Returns a part of a value as it is, but with methods that change the part.

    Args:
      part: An array object that is used for nothing else.
      change: Takes the kind of the update and the arguments of the method.
    """
    methods = {name: functools.partial(change, kind) for name, kind in KINDS.items()}
    return jax_compat.with_methods(part, methods)


def checked(variable: Variable, api: str, index: Index) -> tuple[SlicedValue, tuple[int, ...]]:
    """Returns an index as the key of a `SlicedValue`, and the shape of the part.

    Raises:
      InvalidArgumentError: There is no such part.
    """
    items = index if isinstance(index, tuple) else (index,)
    key: list[Any] = []
    arrays: list[Any] = []
    for item in _without_ellipsis(items, len(variable.shape)):
        if isinstance(item, slice):
            key.append(tuple(map(_bound, (item.start, item.stop, item.step))))
        elif item is None:
            key.append(None)
        elif isinstance(item, bool | np.bool_):
            raise _wrong(variable, api, f"{item} was given", "Use numbers or slices.")
        elif _is_number(item):
            key.append(int(item))
        else:
            more = _positions(variable, api, item)
            arrays += more
            key += ["array"] * len(more)
    found = SlicedValue(None, arrays, tuple(key))
    # NumPy computes the shape, and finds indices out of range, without any data.
    known = [
        np.zeros(a.shape, np.intp) if jax_compat.is_traced(a) else np.asarray(a) for a in arrays
    ]
    try:
        shape = np.broadcast_to(np.False_, variable.shape)[
            SlicedValue(None, known, found.key).index
        ].shape
    except (IndexError, TypeError, ValueError) as error:
        raise _wrong(variable, api, str(error), "Correct the index.") from None
    return found, shape


def _without_ellipsis(items: tuple[Any, ...], rank: int) -> list[Any]:
    """Puts full slices in the place of an ellipsis."""
    where = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(where) != 1:
        return [item for item in items if item is not Ellipsis] if not where else list(items)
    used = sum(
        np.ndim(item) if str(getattr(item, "dtype", "")) == "bool" else 1
        for item in items
        if item is not None and item is not Ellipsis
    )
    full = [slice(None)] * (rank - used)
    return [*items[: where[0]], *full, *items[where[0] + 1 :]]


def in_range(index: Index, shape: tuple[int, ...], name: str) -> Index:
    """Returns an index of a variable; raises for a number in it that is known to be out of range.

    JAX would read the nearest element. Numbers that a program computes are not known here.
    """
    items = index if isinstance(index, tuple) else (index,)
    dimension = 0
    for item in _without_ellipsis(items, len(shape)):
        if item is None or isinstance(item, bool | np.bool_):
            continue
        if str(getattr(item, "dtype", "")) == "bool":
            dimension += np.ndim(item)
            continue
        is_array = isinstance(item, np.ndarray | jax.Array) and not jax_compat.is_traced(item)
        if dimension < len(shape) and (is_array or _is_number(item)):
            found, size = np.asarray(item), shape[dimension]
            is_whole = found.size > 0 and np.issubdtype(found.dtype, np.integer)
            if is_whole and not (-size <= found.min() and found.max() < size):
                what = f"Indices along dimension {dimension}" if dimension else "Row numbers"
                raise errors.OutOfRangeError(
                    f"{what} of {name!r} must be in [{-size}, {size})",
                    f"{found.max() if found.max() >= size else found.min()} was given",
                    "Correct the index.",
                )
        dimension += 1
    return index


def _is_number(item: object) -> bool:
    if isinstance(item, int | np.integer):
        return True
    if not isinstance(item, np.ndarray | jax.Array) or item.ndim or jax_compat.is_traced(item):
        return False
    return jnp.issubdtype(item.dtype, jnp.integer)


def _bound(value: SupportsInt | None) -> int | None:
    return None if value is None else int(value)


def _positions(variable: Variable, api: str, item: object) -> list[Any]:
    """Returns an index that is an array as arrays of integers; a mask gives one per dimension."""
    array = item if isinstance(item, np.ndarray | jax.Array) else np.asarray(item)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return [array]
    if array.dtype == bool and not jax_compat.is_traced(array):
        return list(np.nonzero(np.asarray(array)))
    found = f"an array of type {array.dtype} was given"
    if array.dtype == bool:
        found += " whose elements are known to the compiled program only"
    raise _wrong(variable, api, found, "Use integers, slices, or `assign` with jnp.where.")


def _wrong(variable: Variable, api: str, found: str, todo: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"`{api}` of a part of variable {variable.name!r} needs an index into shape "
        f"{variable.shape}",
        found,
        todo,
    )


# The three rules; compiled code skips an index out of range.


def assigned(old: jax.Array, part: SlicedValue) -> jax.Array:
    """Returns the value with a part replaced."""
    return old.at[part.index].set(part.value, mode="drop")


def added(old: jax.Array, part: SlicedValue) -> jax.Array:
    """Returns the value with something added to a part."""
    return old.at[part.index].add(part.value, mode="drop")


def subtracted(old: jax.Array, part: SlicedValue) -> jax.Array:
    """Returns the value with something subtracted from a part."""
    return old.at[part.index].subtract(part.value, mode="drop")


def as_rows(
    variable: Variable, kind: str, part: SlicedValue, read_rows: Callable[[ArrayLike], jax.Array]
) -> tuple[str, Tree]:
    """Returns an update of a part as an update of whole rows, which parameter servers take.

    Parts of rows that are replaced are read first, by `read_rows(ids)`: another writer of the
    same rows may come between.
    """
    shape = variable.shape
    if not shape:
        return api_of(kind), jnp.reshape(part.value, ())
    first, *rest = [item for item in part.index if item is not None] or [slice(None)]
    is_array = not isinstance(first, int | slice)
    if any(not isinstance(item, int | slice) for item in rest) or (
        is_array and (rest or None in part.key)
    ):
        raise errors.UnsupportedError(
            f"`{api_of(kind)}` of a part of {variable.name!r}, which is kept "
            "in rows, needs numbers and slices as index, or one array of row numbers",
            f"the index is that of {part!r}",
            "Use `scatter_update` or `scatter_add` with whole rows.",
        )
    ids = _row_numbers(first, shape[0])
    whole = (slice(None), *rest)
    row_part = np.broadcast_to(np.False_, (1, *shape[1:]))[whole].shape[1:]
    values = jnp.reshape(part.value, (*ids.shape, *row_part))
    if row_part != shape[1:]:
        is_assign = kind == "slice_assign"
        zeros = jnp.zeros((*ids.shape, *shape[1:]), variable.dtype)
        values = (read_rows(ids) if is_assign else zeros).at[whole].set(values)
    elif rest:
        # All elements of each row, maybe in another order.
        values = jnp.zeros((*ids.shape, *shape[1:]), variable.dtype).at[whole].set(values)
    return _OF_ROWS[kind], IndexedSlices(values, ids, shape)


def _row_numbers(first: Tree, num_rows: int) -> np.ndarray | jax.Array:
    if isinstance(first, slice):
        return np.arange(*first.indices(num_rows), dtype=np.int32)
    if isinstance(first, int):
        return np.asarray([first % num_rows], np.int32)
    ids = jnp.asarray(first).reshape(-1)
    return jnp.where(ids < 0, ids + num_rows, ids)
