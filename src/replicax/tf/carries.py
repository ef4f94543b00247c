"""Values that a compiled loop carries from round to round: tensors, and arrays of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from replicax.tf import tape_recording
from replicax.tf.arguments import Value
from replicax.tf.dispatch import raw_tree, wrap_tree
from replicax.tf.tensor import raw
from replicax.tf.tensor_array import TensorArray


def known(values: list[Any]) -> list[Any]:
    """Returns the tensors of values, for the node of a tape."""
    return [v.stack() if isinstance(v, TensorArray) else v for v in values]


def arrays(value: Value) -> Any:
    """Returns arrays for tensors and for the rows of a TensorArray."""
    return _Carried(value) if isinstance(value, TensorArray) else raw_tree(value)


def tensors(value: Value) -> Any:
    """Returns what `arrays` was given."""
    if isinstance(value, _Carried):
        return value.array
    return [tensors(v) for v in value] if isinstance(value, list) else wrap_tree(value)


def like(values: list[Any], leaves: Value) -> list[Any]:
    """Returns values of the kinds of other ones, from the arrays that a loop ended with."""
    structure = jax.tree.structure(list(map(arrays, values)))
    return tensors(jax.tree.unflatten(structure, leaves))


class _Carried:
    """A TensorArray in the carry of a loop: an array of its rows."""

    def __init__(self, array: TensorArray) -> None:
        self.array = array


jax.tree_util.register_pytree_node(
    _Carried,
    lambda carried: ((raw(carried.array.stack()),), carried.array.facts()),
    lambda facts, rows: _Carried(facts.array_of(wrap_tree(rows[0]))),
)


def with_rows(values: list[Any], step: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Gives each TensorArray that has no rows yet the shape that the first round writes.

    Args:
      values: The values before the first round.
      step: One round.
    """
    if all(not isinstance(v, TensorArray) or v.is_joined for v in values):
        return values
    shapes: list[Any] = []

    def probe() -> int:
        found = step(values)
        shapes[:] = [v.stack().shape[1:] if isinstance(v, TensorArray) else None for v in found]
        return 0

    with tape_recording.suspended():
        jax.eval_shape(probe)
    return [
        v.with_rows(shape) if isinstance(v, TensorArray) else v
        for v, shape in zip(values, shapes, strict=True)
    ]
