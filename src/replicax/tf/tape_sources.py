"""Sources of gradients that are more than one value: variables in parts, and rows of tables.

A lookup takes rows of a table on parameter servers, and the table itself does not travel. A tape
follows the rows, and the gradient of the table is `IndexedSlices`, as it is in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from replicax.tf.arguments import ShapeLike, Value
from replicax.tf.dispatch import op
from replicax.tf.tape_recording import array_of, identity_of
from replicax.tf.tensor import Tensor
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables.sharded import ShardedVariable


class Lookup(NamedTuple):
    """Rows that were taken from a table.

    Attributes:
      table: The variable.
      ids: The numbers of the rows.
      rows: The rows, which the tape follows.
    """

    table: Any
    ids: Any
    rows: Any


class _Term(NamedTuple):
    """One part of the gradient of a source: that of a followed value, brought into its shape."""

    key: int
    shaped: Callable[[Any], Any]


class Sources:
    """The values whose gradients make up those of the sources.

    Args:
      leaves: The sources: tensors and variables.
      lookups: The lookups that the tape has followed.
      key_of: Returns the identity of a source.

    Attributes:
      keys: The identities of the values.
    """

    def __init__(
        self, leaves: Sequence[Any], lookups: Sequence[Lookup], key_of: Callable[[Any], int]
    ) -> None:
        self._terms = [_terms(leaf, lookups, key_of) for leaf in leaves]
        self.keys = list(dict.fromkeys(term.key for terms in self._terms for term in terms))

    def combined(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradient of each source: a tensor, `IndexedSlices`, or None."""
        found = dict(zip(self.keys, gradients, strict=True))
        return [
            _sum([t.shaped(found[t.key]) for t in terms if found[t.key] is not None])
            for terms in self._terms
        ]


def _terms(leaf: Value, lookups: Sequence[Lookup], key_of: Callable[[Any], int]) -> list[_Term]:
    terms = [_Term(key_of(leaf), lambda gradient: gradient)]
    leaf = identity_of(leaf)
    terms += [
        _Term(id(one.rows), lambda gradient, one=one: _slices(one, gradient))
        for one in lookups
        if identity_of(one.table) is leaf
    ]
    if isinstance(leaf, ShardedVariable):
        for start, part in zip(leaf.starts, leaf.variables, strict=True):
            end = leaf.shape[0] - start - part.shape[0]
            terms.append(
                _Term(key_of(part), lambda gradient, a=start, b=end: _padded(gradient, a, b))
            )
        return terms
    whole = getattr(leaf, "container", None)
    if isinstance(whole, ShardedVariable):
        start = next(s for s, v in zip(whole.starts, whole.variables, strict=True) if v is leaf)
        rows = leaf.shape[0]
        terms.append(_Term(key_of(whole), lambda gradient: gradient[start : start + rows]))
        terms += [
            _Term(id(one.rows), lambda gradient, one=one: _own_rows(one, gradient, start, rows))
            for one in lookups
            if one.table is whole
        ]
    return terms


def _slices(lookup: Lookup, gradient: Value) -> IndexedSlices:
    shape = lookup.table.shape
    ids = Tensor(jnp.reshape(lookup.ids, -1))
    return IndexedSlices(_flat_rows(gradient, shape[1:]), ids, tuple(shape))


def _own_rows(lookup: Lookup, gradient: Value, start: int, rows: int) -> Any:
    """Returns the gradient of one part of a table, of which the lookup may have taken no row."""
    return _scattered(_flat_rows(gradient, lookup.table.shape[1:]), lookup.ids, start, rows)


def _sum(found: list[Any]) -> Any:
    slices = [one for one in found if isinstance(one, IndexedSlices)]
    if not slices:
        return _added(found) if found else None
    if len(slices) < len(found):
        rest = [one for one in found if not isinstance(one, IndexedSlices)]
        return _added([*rest, *map(dense, slices)])
    if len(slices) == 1:
        return slices[0]
    values = _joined([one.values for one in slices])
    ids = jnp.concatenate([array_of(one.indices) for one in slices])
    return IndexedSlices(values, Tensor(ids), slices[0].dense_shape)


def dense(slices: IndexedSlices) -> Any:
    """Returns `IndexedSlices` of tensors as one tensor."""
    assert slices.dense_shape is not None
    return _scattered(slices.values, array_of(slices.indices), 0, slices.dense_shape[0])


def _added(found: list[Any]) -> Any:
    total = found[0]
    for one in found[1:]:
        total = total + one
    return total


@op
def _flat_rows(rows: Value, shape: ShapeLike) -> Any:
    return jnp.reshape(rows, (-1, *shape))


@op
def _joined(rows: Value) -> Any:
    return jnp.concatenate(rows)


@op
def _padded(rows: Value, before: int, after: int) -> Any:
    return jnp.pad(rows, ((before, after), *((0, 0) for _ in range(rows.ndim - 1))))


@op
def _scattered(values: Value, ids: Value, start: int, rows: int) -> Any:
    """Adds rows into zeros; those outside of `start` to `start + rows` are left out."""
    numbers = jnp.reshape(ids, -1) - start
    numbers = jnp.where(numbers < 0, rows, numbers)
    zeros = jnp.zeros((rows, *values.shape[1:]), values.dtype)
    return zeros.at[numbers].add(values, mode="drop")
