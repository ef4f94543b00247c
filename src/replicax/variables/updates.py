"""The ways to change a variable, each as a pure function of its value and a payload."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.values.array_surface import as_operand
from replicax.values.indexed_slices import IndexedSlices


def _at(old: jax.Array, slices: IndexedSlices) -> Any:
    """Returns the update helper for rows, or for elements where indices are vectors."""
    # An index out of range is dropped; a negative one must not count from the end.
    far = jnp.iinfo(slices.indices.dtype).max
    indices = jnp.where(slices.indices < 0, far, slices.indices)
    return old.at[tuple(jnp.moveaxis(indices, -1, 0)) if indices.ndim > 1 else indices]


_RULES: dict[str, Callable[[Any, Any], Any]] = {
    "assign": lambda old, new: jnp.broadcast_to(new, old.shape),
    "assign_add": lambda old, delta: old + delta,
    "assign_sub": lambda old, delta: old - delta,
    "scatter_add": lambda old, s: _at(old, s).add(s.values),
    "scatter_sub": lambda old, s: _at(old, s).subtract(s.values),
    "scatter_mul": lambda old, s: _at(old, s).multiply(s.values),
    "scatter_div": lambda old, s: _at(old, s).divide(s.values),
    "scatter_min": lambda old, s: _at(old, s).min(s.values),
    "scatter_max": lambda old, s: _at(old, s).max(s.values),
    "scatter_update": lambda old, s: _at(old, s).set(s.values),
}
# A reduction over replicas has no meaning for these: which replica's row would win?
NOT_REDUCIBLE = frozenset({"scatter_min", "scatter_max", "scatter_update"})


@functools.partial(jax.jit, static_argnums=0)
def _apply_compiled(kind: str, old: Any, payload: Any) -> Any:
    return _RULES[kind](old, payload).astype(old.dtype)


def apply(kind: str, old: Any, payload: Any) -> Any:
    """Returns the value after one update."""
    if kind == "assign" and payload.shape == old.shape and payload.dtype == old.dtype:
        return payload
    if jax_compat.is_eager():
        return _apply_compiled(kind, old, payload)
    return _RULES[kind](old, payload).astype(old.dtype)


def checked_payload(variable: Any, kind: str, value: Any) -> Any:
    """Returns the payload of an update as arrays, or raises if it cannot fit the variable."""
    if kind.startswith("scatter"):
        return _checked_slices(variable, kind, value)
    if isinstance(value, IndexedSlices):
        value = value.to_dense()
    value = as_operand(value)
    if jax_compat.is_open_size(value):
        value = jnp.asarray(value)
    array = value if isinstance(value, jax.Array) else _as_numpy(variable, kind, value)
    if array.shape != variable.shape:
        raise errors.InvalidArgumentError(
            errors.message(
                f"`{kind}` on variable {variable.name!r} needs a value of shape {variable.shape}",
                f"the value has shape {array.shape}",
                "Reshape or broadcast the value first.",
            )
        )
    return cast(variable, kind, value)


def cast(variable: Any, kind: str, value: Any) -> Any:
    """Converts a payload to the variable's type; refuses to drop fractions or phases."""
    source = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if not jnp.can_cast(jnp.dtype(source), variable.dtype) and not _same_kind(
        source, variable.dtype
    ):
        raise errors.InvalidArgumentError(
            errors.message(
                f"`{kind}` on variable {variable.name!r} needs a value of type {variable.dtype}",
                f"the value has type {source}",
                f"Convert it with `.astype({variable.dtype})` if that is meant.",
            )
        )
    if isinstance(value, jax.Array) and value.dtype == variable.dtype:
        return value
    try:
        return jnp.asarray(value, dtype=variable.dtype)
    except OverflowError as error:
        raise errors.InvalidArgumentError(
            errors.message(
                f"`{kind}` on variable {variable.name!r} needs values that {variable.dtype} holds",
                str(error),
                "Use smaller values or a wider variable.",
            )
        ) from None


def _as_numpy(variable: Any, kind: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
        is_number = array.dtype.kind in "biufcV"
    except ValueError:
        is_number = False
        array = np.zeros(())
    if not is_number:
        raise errors.InvalidArgumentError(
            errors.message(
                f"`{kind}` on variable {variable.name!r} needs numbers of shape {variable.shape}",
                f"{value!r} was given",
                "Pass an array, a number or a nested list with rows of one length.",
            )
        )
    return array


def _same_kind(source: Any, target: Any) -> bool:
    order = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)

    def rank(dtype: Any) -> int:
        return next((i for i, kind in enumerate(order) if jnp.issubdtype(dtype, kind)), -1)

    return -1 < rank(source) <= rank(target)


def _checked_slices(variable: Any, kind: str, value: Any) -> IndexedSlices:
    if not isinstance(value, IndexedSlices):
        raise errors.ArgumentTypeError(
            errors.message(
                f"`{kind}` needs rx.IndexedSlices",
                f"{type(value).__name__} was given",
                "Pass rx.IndexedSlices(values, indices).",
            )
        )
    indices = jnp.asarray(as_operand(value.indices))
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise errors.InvalidArgumentError(
            errors.message(
                f"`{kind}` needs integer indices",
                f"they have type {indices.dtype}",
                "Convert them with `.astype(int)`.",
            )
        )
    depth = indices.shape[-1] if indices.ndim > 1 else 1
    if depth > len(variable.shape):
        raise errors.InvalidArgumentError(
            errors.message(
                f"`{kind}` on variable {variable.name!r} needs indices of at most "
                f"{len(variable.shape)} numbers each",
                f"they have {depth}",
                "Give one number per dimension of the variable, or fewer.",
            )
        )
    count = indices.shape[:-1] if indices.ndim > 1 else indices.shape
    rows = jnp.asarray(as_operand(value.values))
    expected = (*count, *variable.shape[depth:])
    if rows.shape != expected and rows.shape != ():
        raise errors.InvalidArgumentError(
            errors.message(
                f"`{kind}` on variable {variable.name!r} of shape {variable.shape} with "
                f"{count} indices needs values of shape {expected}",
                f"they have shape {rows.shape}",
                "Give one row per index.",
            )
        )
    _require_in_range(variable, kind, indices)
    rows = jnp.broadcast_to(cast(variable, kind, rows), expected)
    return IndexedSlices(rows, indices, variable.shape)


def _require_in_range(variable: Any, kind: str, indices: jax.Array) -> None:
    """Refuses concrete indices out of range; compiled code drops them, as XLA does."""
    if jax_compat.is_traced(indices) or indices.size == 0:
        return
    limits = np.asarray(variable.shape[: indices.shape[-1] if indices.ndim > 1 else 1])
    found = np.asarray(indices)
    if (found < 0).any() or (found >= limits).any():
        raise errors.InvalidArgumentError(
            errors.message(
                f"`{kind}` on variable {variable.name!r} needs indices in "
                f"[0, {', '.join(map(str, limits))})",
                f"they reach from {found.min()} to {found.max()}",
                "Correct the indices.",
            )
        )
