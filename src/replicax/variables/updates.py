"""Updates of variables: pure functions of old value and payload, and payloads of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax.collectives import across_processes, in_replica
from replicax.contexts.frames import Frame
from replicax.foundation import errors, jax_compat, placement
from replicax.foundation.options import ReduceOp, VariableAggregation
from replicax.foundation.types import Tree
from replicax.values.array_surface import as_operand
from replicax.values.distributed_values import Mirrored, PerReplica, TracedPerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import is_concrete_array, map_structure
from replicax.variables import row_numbers, slicing
from replicax.variables.slicing import SlicedValue, api_of

if TYPE_CHECKING:
    from replicax.variables.variable import Variable

# The arrays of an update: an array, IndexedSlices or a SlicedValue; merged over replicas, any of
# them with distributed values in the place of arrays.
Payload: TypeAlias = Tree


def _at(old: jax.Array, slices: IndexedSlices) -> Any:
    """Returns the update helper for rows, or for elements where indices are vectors."""
    # An index out of range is dropped.
    indices = row_numbers.without_negative(slices.indices)
    return old.at[tuple(jnp.moveaxis(indices, -1, 0)) if indices.ndim > 1 else indices]


def _divided(old: jax.Array, slices: IndexedSlices) -> jax.Array:
    """Divides rows; whole numbers exactly, rounded towards zero."""
    if not jnp.issubdtype(old.dtype, jnp.integer):
        return _at(old, slices).divide(slices.values)
    depth = slices.indices.shape[-1] if slices.indices.ndim > 1 else 1
    vectors = row_numbers.without_negative(slices.indices).reshape((-1, depth))
    divisors = slices.values.reshape((-1, *old.shape[depth:]))

    def divide_row(i: jax.Array, table: jax.Array) -> jax.Array:
        # One by one: the product of the divisors of one row may be too large for the type.
        row = table.at[tuple(vectors[i])]
        quotient = jax.lax.div(row.get(mode="fill", fill_value=0), divisors[i])
        return row.set(quotient, mode="drop")

    return jax.lax.fori_loop(0, len(vectors), divide_row, old)


_RULES: dict[str, Callable[[jax.Array, Payload], jax.Array]] = {
    "assign": lambda old, new: jnp.broadcast_to(new, old.shape),
    "assign_add": lambda old, delta: old + delta,
    "assign_sub": lambda old, delta: old - delta,
    "scatter_add": lambda old, s: _at(old, s).add(s.values),
    "scatter_sub": lambda old, s: _at(old, s).subtract(s.values),
    "scatter_mul": lambda old, s: _at(old, s).multiply(s.values),
    "scatter_div": _divided,
    "scatter_min": lambda old, s: _at(old, s).min(s.values),
    "scatter_max": lambda old, s: _at(old, s).max(s.values),
    "scatter_update": lambda old, s: _at(old, s).set(s.values),
    "slice_assign": slicing.assigned,
    "slice_assign_add": slicing.added,
    "slice_assign_sub": slicing.subtracted,
}
# The rows of several replicas cannot be summed or averaged for these.
NOT_REDUCIBLE = frozenset({"scatter_min", "scatter_max", "scatter_update"})


@functools.partial(jax.jit, static_argnums=0)
def _apply_compiled(kind: str, old: jax.Array, payload: Payload) -> jax.Array:
    return _RULES[kind](old, payload).astype(old.dtype)


def apply(kind: str, old: jax.Array, payload: Payload) -> jax.Array:
    """Returns the value after one update."""
    if kind == "assign" and payload.shape == old.shape and payload.dtype == old.dtype:
        return payload
    if jax_compat.is_eager():
        return _apply_compiled(kind, old, payload)
    return _RULES[kind](old, payload).astype(old.dtype)


def apply_beside(kind: str, old: jax.Array, payload: Payload) -> jax.Array:
    """Returns the value after one update, computed where the old value is."""
    return apply(kind, old, placement.usable_on(payload, next(iter(old.devices()))))


def checked_payload(variable: Variable, kind: str, value: Tree) -> Payload:
    """Returns the payload of an update as arrays, or raises if it cannot fit the variable."""
    if isinstance(value, PerReplica):
        value = value.own_value()
    if kind.startswith("scatter"):
        return _checked_slices(variable, kind, value)
    if kind.startswith("slice"):
        return _checked_part(variable, slicing.api_of(kind), *value)
    if isinstance(value, IndexedSlices):
        value = value.to_dense()
    elif not isinstance(value, int | float | jax.Array):
        value = as_operand(value)
    if jax_compat.is_open_size(value):
        value = jnp.asarray(value)
    array = value if isinstance(value, jax.Array) else _as_numpy(variable, kind, value)
    if array.shape != variable.shape:
        raise errors.InvalidArgumentError(
            f"`{kind}` on variable {variable.name!r} needs a value of shape {variable.shape}",
            f"the value has shape {array.shape}",
            "Reshape or broadcast the value first.",
        )
    return cast(variable, kind, value)


def cast(variable: Variable, kind: str, value: Tree) -> jax.Array:
    """Converts a payload to the variable's type; raises if that drops fractions or phases."""
    if isinstance(value, jax.Array) and value.dtype == variable.dtype:
        return value
    source = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if not jnp.can_cast(jnp.dtype(source), variable.dtype) and not _same_kind(
        source, variable.dtype
    ):
        raise errors.InvalidArgumentError(
            f"`{kind}` on variable {variable.name!r} needs a value of type {variable.dtype}",
            f"the value has type {source}",
            f"Convert it with `.astype({variable.dtype})` if that is meant.",
        )
    try:
        return jnp.asarray(value, dtype=variable.dtype)
    except OverflowError as error:
        raise errors.InvalidArgumentError(
            f"`{kind}` on variable {variable.name!r} needs values that {variable.dtype} holds",
            str(error),
            "Use smaller values or a wider variable.",
        ) from None


def _as_numpy(variable: Variable, kind: str, value: object) -> np.ndarray:
    try:
        array = np.asarray(value)
        is_number = array.dtype.kind in "biufcV"
    except ValueError:
        is_number = False
        array = np.zeros(())
    if not is_number:
        raise errors.InvalidArgumentError(
            f"`{kind}` on variable {variable.name!r} needs numbers of shape {variable.shape}",
            f"{value!r} was given",
            "Pass an array, a number or a nested list with rows of one length.",
        )
    return array


def _same_kind(source: DTypeLike, target: DTypeLike) -> bool:
    order = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)

    def rank(dtype: DTypeLike) -> int:
        return next((i for i, kind in enumerate(order) if jnp.issubdtype(dtype, kind)), -1)

    return -1 < rank(source) <= rank(target)


def _checked_part(
    variable: Variable, api: str, index: slicing.Index, value: object
) -> slicing.SlicedValue:
    part, shape = slicing.checked(variable, api, index)
    value = as_operand(value)
    array = value if isinstance(value, jax.Array) else _as_numpy(variable, api, value)
    if array.shape != shape and array.shape != ():
        raise errors.InvalidArgumentError(
            f"`{api}` of a part of variable {variable.name!r} needs a value of shape {shape}",
            f"the value has shape {array.shape}",
            "Reshape the value, or correct the index.",
        )
    part.value = jnp.broadcast_to(cast(variable, api, value), shape)
    return part


def _checked_slices(variable: Variable, kind: str, value: object) -> IndexedSlices:
    if not isinstance(value, IndexedSlices):
        raise errors.ArgumentTypeError(
            f"`{kind}` needs rx.IndexedSlices",
            f"{type(value).__name__} was given",
            "Pass rx.IndexedSlices(values, indices).",
        )
    indices = jnp.asarray(as_operand(value.indices))
    depth = indices.shape[-1] if indices.ndim > 1 else 1
    indices = row_numbers.checked(kind, variable, indices, depth)
    count = indices.shape[:-1] if indices.ndim > 1 else indices.shape
    rows = jnp.asarray(as_operand(value.values))
    expected = (*count, *variable.shape[depth:])
    if rows.shape != expected and rows.shape != ():
        raise errors.InvalidArgumentError(
            f"`{kind}` on variable {variable.name!r} of shape {variable.shape} with "
            f"{count} indices needs values of shape {expected}",
            f"they have shape {rows.shape}",
            "Give one row per index.",
        )
    rows = jnp.broadcast_to(cast(variable, kind, rows), expected)
    if kind == "scatter_div":
        _refuse_zero_divisors(variable, rows)
    return IndexedSlices(rows, indices, variable.shape)


def batch_slices(variable: Variable, api: str, slices: object) -> IndexedSlices:
    """Returns indices into parts along the first dimensions as vectors of indices."""
    if not isinstance(slices, IndexedSlices):
        raise errors.ArgumentTypeError(
            f"`{api}` needs rx.IndexedSlices",
            f"{type(slices).__name__} was given",
            "Pass rx.IndexedSlices(values, indices).",
        )
    indices = jnp.asarray(as_operand(slices.indices))
    depth = max(indices.ndim, 1)
    if indices.shape[:-1] != tuple(variable.shape[: depth - 1]):
        raise errors.InvalidArgumentError(
            f"`{api}` on variable {variable.name!r} of shape {variable.shape} needs indices "
            "whose shape begins like that of the variable",
            f"their shape is {indices.shape}",
            "Give a list of row numbers for each part.",
        )
    prefix = jnp.indices(indices.shape)[: depth - 1]
    vectors = jnp.stack([*prefix.astype(indices.dtype), indices], -1) if depth > 1 else indices
    return IndexedSlices(slices.values, vectors)


def _refuse_zero_divisors(variable: Variable, divisors: jax.Array) -> None:
    """Raises for a division of integers by a known zero."""
    if jax_compat.is_traced(divisors) or not jnp.issubdtype(divisors.dtype, jnp.integer):
        return
    if not np.asarray(divisors).all():
        raise errors.InvalidArgumentError(
            f"`scatter_div` on variable {variable.name!r} of type {variable.dtype} needs "
            "divisors other than 0",
            "there is a 0 among them",
            "Correct the values.",
        )


# The payloads that all replicas pass to one write become one payload.

OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


def merged(payloads: list[Payload], frame: Frame) -> Payload:
    """Merges the payloads of all replicas; an object that all of them pass stays one."""
    first = payloads[0]
    # Other processes may have another array where the local replicas have one.
    is_apart = frame.layout is not None and frame.layout.spans_processes
    if all(payload is first for payload in payloads) and not (
        is_apart and (isinstance(first, SlicedValue) or is_concrete_array(first))
    ):
        return first
    if not isinstance(first, SlicedValue):
        return PerReplica(payloads, frame.layout)
    return map_structure(
        lambda *leaves: merged(list(leaves), frame),
        *payloads,
    )


def combined(frame: Frame, variable: Variable, payload: Payload) -> Payload:
    """Aggregates merged payloads by the rule of the variable."""
    if isinstance(payload, SlicedValue):
        return payload.map_arrays(lambda array: combined(frame, variable, array))
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return _first(payload, frame.layout)
    op = OPS[variable.aggregation]
    count = 1 if frame.layout is None else frame.layout.num_replicas
    if isinstance(payload, PerReplica):
        return frame.reducer.reduce_values(op, [payload], [variable.placement], count)[0]
    # Every replica passed the same object.
    return _scaled(payload, count) if op is ReduceOp.SUM else payload


def _scaled(payload: Payload, factor: int) -> Payload:
    """Multiplies a payload; rows of IndexedSlices too."""
    if isinstance(payload, IndexedSlices):
        return payload.map_values(lambda v: v * factor)
    return payload * factor


def payload_for(payload: Payload, replica_id: int) -> Payload:
    """Returns the copy of a payload on the device of one replica."""
    if isinstance(payload, SlicedValue):
        return payload.map_arrays(lambda array: payload_for(array, replica_id))
    return payload.values[replica_id] if isinstance(payload, Mirrored) else payload


def require_reducible(variable: Variable, kind: str) -> None:
    """Raises where the updates of several replicas cannot become one."""
    if variable.aggregation is VariableAggregation.NONE:
        raise errors.InvalidArgumentError(
            f"`{api_of(kind)}` on variable {variable.name!r} in replica context needs a rule "
            "to combine what the replicas write",
            "its aggregation is NONE",
            "Create it with aggregation=rx.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA.",
        )
    first = variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
    if kind in NOT_REDUCIBLE and not first:
        raise errors.UnsupportedError(
            f"`{api_of(kind)}` on variable {variable.name!r} in replica context needs "
            "aggregation ONLY_FIRST_REPLICA",
            f"its aggregation is {variable.aggregation.name}",
            "Rows of several replicas cannot be summed or averaged there: change the "
            "aggregation, or write in cross-replica context.",
        )


def of_common_part(variable: Variable, kind: str, payload: SlicedValue) -> SlicedValue:
    """Returns a value for a part that is the same on all replicas, or raises."""
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return payload
    common = payload.with_known_arrays()
    if common is None:
        raise errors.UnsupportedError(
            f"`{api_of(kind)}` of a part of variable {variable.name!r} in replica context "
            "needs the same index on all replicas",
            "the index is computed by the compiled program, on each replica by itself",
            "Use Python numbers, aggregation ONLY_FIRST_REPLICA, or `scatter_add`, which "
            "joins the rows of all replicas.",
        )
    return common


def _first(payload: Payload, layout: ReplicaLayout | None) -> Payload:
    if isinstance(payload, TracedPerReplica):
        return jax.tree.map(in_replica.first_replica, payload.local)
    is_local = isinstance(payload, PerReplica) and not jax_compat.is_traced(
        jax.tree.leaves(payload.values)[0]
    )
    if is_local and layout is not None and layout.spans_processes:
        return across_processes.first_component(payload, layout)
    return payload.values[0] if isinstance(payload, PerReplica) else payload
