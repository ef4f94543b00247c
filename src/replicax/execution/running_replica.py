"""The component of a per-replica value that replica code uses when it captures the whole."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from replicax.collectives import across_processes
from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.values.distributed_values import (
    NOT_HERE,
    PerReplica,
    TracedPerReplica,
    set_finder,
)
from replicax.values.layout import AXIS, ReplicaLayout


def own_component_of(value: PerReplica) -> Tree:
    """Returns the running replica's component, or NOT_HERE outside of replica code."""
    frame = frames.current()
    if frame.mode is not Mode.REPLICA or frame.is_default or frame.layout is None:
        return NOT_HERE
    if isinstance(value, TracedPerReplica):
        return value.local
    value.require_replicas(frame.layout)
    if frame.replica_id is not None or frame.layout.num_replicas == 1:
        _record_read(frame)
        if frame.eager_reads is None and frame.layout.spans_processes:
            # One trace after the other stands for each replica of all processes.
            value = value.of_all_replicas(frame.layout)
        return value.values[frame.replica_id or 0]
    return _in_trace(value, frame.layout)


def _record_read(frame: Frame) -> None:
    """Keeps traces of replica code from being reused by other replicas."""
    if frame.eager_reads is not None and jax_compat.is_staging():
        frame.eager_reads.note()


def _in_trace(value: PerReplica, layout: ReplicaLayout) -> Tree:
    """Picks the component by the replica id, which is traced."""
    stored = value.stored(layout)
    if stored is None:
        raise errors.InvalidArgumentError(
            "Compiled replica code can capture per-replica values of one shape and type",
            f"it captured {value}",
            "Pass the value in `args=`, or call `strategy.run` outside of `rx.function`.",
        )
    replica_id = jax.lax.axis_index(AXIS)
    parts = []
    for array, is_scalar in zip(stored, value.scalars, strict=True):
        if jax_compat.is_traced(array):
            rows = (layout.num_replicas, *layout.local_shape(array.shape, is_scalar))
            joined = jnp.reshape(array, rows)
        else:
            # Of one device each: an array of a mesh would bring its mesh into the program.
            joined = jnp.stack(_components_of_all(array, is_scalar, layout))
        parts.append(joined[replica_id])
    return jax.tree.unflatten(value.treedef, parts)


def _components_of_all(
    array: jax.Array, is_scalar: bool, layout: ReplicaLayout
) -> Sequence[jax.Array]:
    """Returns the component of each replica of all processes, whose programs must be equal."""
    with jax_compat.eagerly():
        components = layout.split(array, is_scalar)
        if not layout.spans_processes:
            return components
        rows = PerReplica([component[None] for component in components], layout)
        return list(across_processes.gather(rows, 0))


set_finder(own_component_of)
