"""Lookups of several rows per example, which are combined: for features of many ids."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tracing.gradients import Table, embedding_lookup
from replicax.values.sparse_tensor import SparseTensor

_Array: TypeAlias = jax.Array | np.ndarray
# An `rx.SparseTensor`, a BCOO matrix, a triple or a pair of arrays, or an object like these.
Sparse: TypeAlias = object

_COMBINERS = ("mean", "sqrtn", "sum")
# 16-bit numbers are summed in 32 bits.
_ADDED_IN = {jnp.dtype(jnp.float16): jnp.float32, jnp.dtype(jnp.bfloat16): jnp.float32}


def embedding_lookup_sparse(
    params: Table,
    sp_ids: Sparse,
    sp_weights: Sparse | None,
    combiner: str | None = None,
    max_norm: float | None = None,
    name: str | None = None,
) -> jax.Array:
    """Looks up the rows of several ids per example, and combines them into one row.

    The gradient of a variable consists of rows, as that of `embedding_lookup`. An example
    without ids is a row of zeros.

    Args:
      params: A table: a variable, also a sharded one or one on parameter servers, an array, or
        a list of the parts of a table.
      sp_ids: The ids of each example: an `rx.SparseTensor` or BCOO matrix with one row per
        example, a triple (indices, values, dense_shape), a pair (values, row_splits), or an
        object with these attributes. Entries outside of the shape, or after the last split,
        are absent: so the number of entries, which is part of a compiled program, can be kept.
      sp_weights: The weight of each entry, in the same format; 1 if None.
      combiner: "mean" (the default), "sum", or "sqrtn": the weighted sum, divided by the sum
        of the weights, by nothing, or by the root of the sum of their squares.
      max_norm: If given, longer rows are scaled down to this length first.
      name: Accepted for portability.

    Raises:
      InvalidArgumentError: The ids have more dimensions, the weights do not fit them, or `combiner`
        does not exist.
      ArgumentTypeError: The ids are not integers.

    >>> import replicax as rx
    >>> table = rx.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    >>> ids = rx.SparseTensor([[0, 0], [0, 1], [1, 0]], [0, 1, 3], dense_shape=(2, 2))
    >>> rx.nn.embedding_lookup_sparse(table, ids, None, combiner="sum")
    Array([[4., 6.],
           [7., 8.]], dtype=float32)
    """
    del name
    entries = _entries("embedding_lookup_sparse", sp_ids, sp_weights)
    if len(entries.rows_shape) != 1:
        raise errors.InvalidArgumentError(
            "`embedding_lookup_sparse` needs ids with one row per example",
            f"they have {len(entries.rows_shape) + 1} dimensions",
            "Use rx.nn.safe_embedding_lookup_sparse for more dimensions.",
        )
    combine = _checked_combiner(combiner)
    return _looked_up(params, entries, combine, max_norm, None)


def safe_embedding_lookup_sparse(
    embedding_weights: Table,
    sparse_ids: Sparse,
    sparse_weights: Sparse | None = None,
    combiner: str | None = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
    name: str | None = None,
) -> jax.Array:
    """Looks up rows as `embedding_lookup_sparse`, and handles missing and invalid ids.

    Ids below 0 are left out, and, unless the combiner is "sum", weights that are not
    positive. Ids may have more than two dimensions: the last one is combined.

    Args:
      embedding_weights: As `params` of `embedding_lookup_sparse`.
      sparse_ids: As there.
      sparse_weights: As there.
      combiner: As there.
      default_id: The row of examples without ids; zeros if None.
      max_norm: As there.
      name: Accepted for portability.

    Raises:
      InvalidArgumentError: There is no table, the weights do not fit the ids, or `combiner` does
        not exist.
      ArgumentTypeError: The ids are not integers.

    >>> import replicax as rx
    >>> table = rx.Variable([[1.0], [3.0]])
    >>> ids = rx.SparseTensor([[0, 0], [0, 1], [1, 0]], [1, -1, -1], dense_shape=(3, 2))
    >>> rx.nn.safe_embedding_lookup_sparse(table, ids, default_id=0).tolist()
    [[3.0], [1.0], [1.0]]
    """
    del name
    if embedding_weights is None or (
        isinstance(embedding_weights, list | tuple) and not embedding_weights
    ):
        raise errors.InvalidArgumentError(
            "`embedding_weights` must be a table",
            f"it is {embedding_weights!r}",
            "Pass a variable or the parts of one.",
        )
    entries = _entries("safe_embedding_lookup_sparse", sparse_ids, sparse_weights)
    combine = _checked_combiner(combiner)
    is_valid = entries.is_valid & (entries.ids >= 0)
    if entries.weights is not None and combine != "sum":
        is_valid &= entries.weights > 0
    entries = dataclasses.replace(entries, is_valid=is_valid)
    found = _looked_up(embedding_weights, entries, combine, max_norm, default_id)
    return found.reshape(*entries.rows_shape, *found.shape[1:])


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Ids as a list of entries.

    Attributes:
      ids: The id of each entry.
      rows: The number of its example.
      is_valid: Whether it counts.
      weights: Its weight; None if all weigh 1.
      rows_shape: The shape of the examples.
    """

    ids: _Array
    rows: _Array
    is_valid: _Array
    weights: _Array | None
    rows_shape: tuple[int, ...]

    @property
    def is_traced(self) -> bool:
        """Whether they are known only when a compiled program runs."""
        return any(map(jax_compat.is_traced, (self.ids, self.rows, self.is_valid)))

    @property
    def num_rows(self) -> int:
        """The number of examples."""
        return int(np.prod(self.rows_shape, dtype=np.int64))


def _looked_up(
    params: Table, entries: _Entries, combiner: str, max_norm: float | None, default_id: int | None
) -> jax.Array:
    entries = _without_invalid(entries)
    ids, needs_default = entries.ids, default_id is not None
    if needs_default and not entries.is_traced:
        filled = np.zeros(entries.num_rows, bool)
        filled[np.asarray(entries.rows)[np.asarray(entries.is_valid)]] = True
        needs_default = not filled.all()
    if needs_default:
        xp = jnp if jax_compat.is_traced(ids) else np
        ids = xp.concatenate([ids, xp.asarray([default_id], ids.dtype)])
    looked_up = _clipped(embedding_lookup(params, ids), max_norm)
    rows = looked_up[: len(entries.ids)]
    found = _combined(rows, entries, combiner)
    if not needs_default:
        return found
    counts = jax.ops.segment_sum(
        jnp.asarray(entries.is_valid, jnp.int32), jnp.asarray(entries.rows), entries.num_rows
    )
    is_empty = (counts == 0).reshape(-1, *(1,) * (found.ndim - 1))
    return jnp.where(is_empty, looked_up[-1], found)


def _without_invalid(entries: _Entries) -> _Entries:
    """Drops invalid entries; in compiled code, replaces their ids by one that is used."""
    parts = entries.ids, entries.rows, entries.is_valid
    if not entries.is_traced:
        kept = np.flatnonzero(np.asarray(entries.is_valid))
        weights = None if entries.weights is None else jnp.asarray(entries.weights)[kept]
        ids, rows, is_valid = (np.asarray(part)[kept] for part in parts)
        return dataclasses.replace(entries, ids=ids, rows=rows, is_valid=is_valid, weights=weights)
    if not len(entries.ids):
        return entries
    # Their gradient is zero, but momentum would still move another row.
    ids, is_valid = jnp.asarray(entries.ids), jnp.asarray(entries.is_valid)
    used = jnp.where(jnp.any(is_valid), ids[jnp.argmax(is_valid)], 0)
    return dataclasses.replace(entries, ids=jnp.where(is_valid, ids, used))


def _clipped(rows: jax.Array, max_norm: float | None) -> jax.Array:
    if max_norm is None:
        return rows
    axes = tuple(range(1, rows.ndim))
    squares = jnp.sum(jnp.square(rows), axes, keepdims=True)
    # The root of 0 has no gradient.
    norms = jnp.sqrt(jnp.where(squares > 0, squares, 1))
    return rows * (max_norm / jnp.maximum(norms, max_norm)).astype(rows.dtype)


def _combined(rows: jax.Array, entries: _Entries, combiner: str) -> jax.Array:
    dtype = rows.dtype
    rows = rows.astype(_ADDED_IN.get(jnp.dtype(dtype), dtype))
    is_valid = jnp.asarray(entries.is_valid)
    weights = is_valid.astype(rows.dtype)
    if entries.weights is not None:
        weights = jnp.where(is_valid, jnp.asarray(entries.weights).astype(rows.dtype), 0)
    numbers = jnp.asarray(entries.rows)

    def total(values: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, numbers, entries.num_rows)

    factors = weights.reshape(-1, *(1,) * (rows.ndim - 1))
    found = total(jnp.where(factors != 0, rows * factors, 0))
    if combiner == "sum":
        return found.astype(dtype)
    sums = total(weights if combiner == "mean" else jnp.square(weights))
    sums = sums.reshape(-1, *(1,) * (rows.ndim - 1))
    # As in TensorFlow, zero weights give zero. The root of 0 has no gradient.
    divisor = jnp.where(sums == 0, 1, sums)
    divisor = divisor if combiner == "mean" else jnp.sqrt(divisor)
    return jnp.where(sums == 0, 0, found / divisor).astype(dtype)


def _checked_combiner(combiner: str | None) -> str:
    if combiner is None:
        return "mean"
    if combiner not in _COMBINERS:
        raise errors.InvalidArgumentError(
            '`combiner` must be "mean", "sqrtn" or "sum"',
            f"it is {combiner!r}",
            "Choose one of them.",
        )
    return combiner


def _entries(api: str, ids: Sparse, weights: Sparse | None) -> _Entries:
    values, rows, is_valid, rows_shape = _parts(api, "ids", ids)
    if np.dtype(values.dtype).kind not in "iu":
        raise errors.ArgumentTypeError(
            f"`{api}` needs ids that are integers",
            f"they have type {values.dtype}",
            "Convert them with `.astype(int)`.",
        )
    factors = None
    if weights is not None:
        factors, _, _, shape = _parts(api, "weights", weights)
        if factors.shape != values.shape or shape != rows_shape:
            raise errors.InvalidArgumentError(
                f"`{api}` needs one weight for each of {values.shape[0]} entries, in "
                f"{rows_shape} rows",
                f"there are {factors.shape[0]} weights in {shape} rows",
                "Make the weights with the indices of the ids.",
            )
    return _Entries(values, rows, is_valid, factors, rows_shape)


# Values, row numbers, whether entries are valid, and the shape of the rows.
_Parts: TypeAlias = tuple[_Array, _Array, _Array, tuple[int, ...]]


def _parts(api: str, what: str, given: Sparse) -> _Parts:
    parts = tuple(given) if isinstance(given, tuple | list) else ()
    if len(parts) == 2:
        return _ragged_parts(_array(parts[0]), _array(parts[1]))
    splits, indices = getattr(given, "row_splits", None), getattr(given, "indices", None)
    shape, values = getattr(given, "dense_shape", None), getattr(given, "values", None)
    if splits is not None:
        return _ragged_parts(_array(values), _array(splits))
    if len(parts) == 3:
        indices, values, shape = parts
    elif shape is None and indices is not None:
        # A matrix of jax.experimental.sparse.
        values, shape = getattr(given, "data", None), getattr(given, "shape", None)
    if indices is None or values is None or shape is None:
        raise errors.ArgumentTypeError(
            f"`{api}` needs sparse {what}: an rx.SparseTensor, a BCOO matrix, a triple "
            "(indices, values, dense_shape) or a pair (values, row_splits)",
            f"{type(given).__name__} was given",
            "Use rx.nn.embedding_lookup for dense ids.",
        )
    return _sparse_parts(api, what, SparseTensor(_array(indices), _array(values), shape))


def _sparse_parts(api: str, what: str, given: SparseTensor) -> _Parts:
    indices, values, shape = given.indices, given.values, given.dense_shape
    if not indices.size:
        indices = np.zeros((0, len(shape)), np.int32)
    if values.ndim != 1 or indices.shape != (values.shape[0], len(shape)) or len(shape) < 2:
        raise errors.InvalidArgumentError(
            f"`{api}` needs sparse {what} with a vector of values, one index for each, and at "
            "least two dimensions",
            f"there are values of shape {values.shape}, indices of shape {indices.shape} and "
            f"the dense shape {shape}",
            "Make indices of shape (entries, dimensions).",
        )
    xp = jnp if jax_compat.is_traced(indices) else np
    is_valid = xp.all((indices >= 0) & (indices < np.asarray(shape)), axis=1)
    strides = np.cumprod([1, *shape[-2:0:-1]])[::-1].astype(np.int64)
    rows = xp.sum(indices[:, :-1] * strides.astype(indices.dtype), axis=1)
    num_rows = int(np.prod(shape[:-1], dtype=np.int64))
    return values, xp.where(is_valid, rows, num_rows), is_valid, shape[:-1]


def _ragged_parts(values: _Array, splits: _Array) -> _Parts:
    if values.ndim != 1 or splits.ndim != 1 or not splits.shape[0]:
        raise errors.InvalidArgumentError(
            "Ragged ids must be a vector of values and a vector of row splits",
            f"they have shapes {values.shape} and {splits.shape}",
            "Pass (values, row_splits), with one split more than there are rows.",
        )
    xp = jnp if jax_compat.is_traced(splits) else np
    number = xp.arange(values.shape[0])
    rows = xp.searchsorted(splits, number, side="right") - 1
    is_valid = (number >= splits[0]) & (number < splits[-1])
    num_rows = splits.shape[0] - 1
    return values, xp.where(is_valid, rows, num_rows), is_valid, (num_rows,)


def _array(value: object) -> _Array:
    """Returns a JAX array if the value is traced, else a NumPy array."""
    if isinstance(value, jax.Array) and jax_compat.is_traced(value):
        return value
    return np.asarray(value)
