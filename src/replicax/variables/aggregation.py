"""How the writes of several replicas become one write, and a write reaches every copy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from replicax.collectives import in_replica
from replicax.contexts import frames
from replicax.contexts.frames import Frame
from replicax.foundation import errors, gate
from replicax.foundation.options import ReduceOp, VariableAggregation
from replicax.values.distributed_values import Mirrored, PerReplica, TracedPerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables import updates
from replicax.variables.slicing import SlicedValue, api_of


def change_from_replicas(variable: Any, frame: Frame, kind: str, payload: Any) -> None:
    """Applies the aggregate of what all replicas pass to every copy of a variable."""
    require_aggregation(variable, kind)
    if isinstance(payload, SlicedValue):
        payload = _of_common_part(variable, kind, payload)
    assert frame.executor is not None
    if frame.overlay is not None and not frame.overlay.meets_other_replicas:
        _change_under_gradient(variable, frame, kind, payload)
        return
    frame.executor.merge_call(_merged_change, (variable, kind, payload), {})


def _merged_change(strategy: Any, variable: Any, kind: str, payload: Any) -> None:
    combined = combine(strategy, variable, payload)
    apply_to_copies(variable, frames.current(), kind, combined)


def combine(strategy: Any, variable: Any, payload: Any) -> Any:
    """Aggregates merged payloads as the variable asks."""
    if isinstance(payload, SlicedValue):
        return payload.map_arrays(lambda array: combine(strategy, variable, array))
    count = strategy.num_replicas_in_sync
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return _first(payload)
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    if isinstance(payload, PerReplica):
        return strategy.extended.reduce_to(op, payload, variable)
    # Every replica passed the same object: plain arithmetic.
    return scale(payload, count) if op is ReduceOp.SUM else payload


def scale(payload: Any, factor: Any) -> Any:
    """Multiplies a payload; rows of IndexedSlices too."""
    if isinstance(payload, IndexedSlices):
        return payload.map_values(lambda v: v * factor)
    return payload * factor


def apply_to_copies(variable: Any, frame: Frame, kind: str, payload: Any) -> None:
    """Applies one update, as one step, to every copy of a variable with equal copies."""
    if variable.is_remote:
        variable.apply_directly(frame, kind, payload)
        return
    with gate.state():
        _apply_to_copies(variable, frame, kind, payload)


def _apply_to_copies(variable: Any, frame: Frame, kind: str, payload: Any) -> None:
    layout = variable.layout
    if frame.overlay is not None or layout is None or not layout.is_mesh:
        own = payload_for(payload, 0)
        if frame.overlay is None:
            new = updates.apply_beside(kind, variable.read_copy(0), own)
        else:
            new = updates.apply(kind, frame.overlay.read(variable), own)
        variable.store_all_copies(frame, new)
        return
    new = [
        updates.apply_beside(kind, variable.read_copy(i), payload_for(payload, i))
        for i in range(layout.num_replicas)
    ]
    variable.store_copies(new)


def payload_for(payload: Any, replica_id: int) -> Any:
    """Returns the copy of a payload on the device of one replica."""
    if isinstance(payload, SlicedValue):
        return payload.map_arrays(lambda array: payload_for(array, replica_id))
    return payload.values[replica_id] if isinstance(payload, Mirrored) else payload


def require_aggregation(variable: Any, kind: str) -> None:
    """Raises where the writes of several replicas cannot become one."""
    if variable.aggregation is VariableAggregation.NONE:
        raise errors.InvalidArgumentError(
            f"`{api_of(kind)}` on variable {variable.name!r} in replica context needs a rule "
            "to combine what the replicas write",
            "its aggregation is NONE",
            "Create it with aggregation=rx.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA.",
        )
    first = variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
    if kind in updates.NOT_REDUCIBLE and not first:
        raise errors.UnsupportedError(
            f"`{api_of(kind)}` on variable {variable.name!r} in replica context needs "
            "aggregation ONLY_FIRST_REPLICA",
            f"its aggregation is {variable.aggregation.name}",
            "Rows of several replicas cannot be summed or averaged there: change the "
            "aggregation, or write in cross-replica context.",
        )


def _of_common_part(variable: Any, kind: str, payload: SlicedValue) -> SlicedValue:
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


def _change_under_gradient(variable: Any, frame: Frame, kind: str, payload: Any) -> None:
    """Aggregates values that `rx.value_and_grad` is differentiating, then writes its copy."""
    assert frame.executor is not None and frame.overlay is not None
    # Before the replicas meet: another replica may store into a shared copy right after.
    old = None if variable.is_remote else frame.overlay.read(variable)
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        gather = frame.executor.all_gather
        combined = jax.tree.map(lambda x: gather(jnp.expand_dims(x, 0), 0)[0], payload)
    else:
        op = ReduceOp.from_variable_aggregation(variable.aggregation)
        combined = frame.executor.all_reduce(op, payload, None)
    combined = jax.lax.stop_gradient(combined)
    if variable.is_remote:
        variable.apply_directly(frame, kind, combined)
    else:
        frame.overlay.write(variable, updates.apply(kind, old, combined))


def _first(payload: Any) -> Any:
    if isinstance(payload, TracedPerReplica):
        return jax.tree.map(in_replica.first_replica, payload.local)
    return payload.values[0] if isinstance(payload, PerReplica) else payload
