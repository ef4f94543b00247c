"""Reductions in eager code of values whose replicas run in several processes.

Each is a small program over the mesh of all processes, which all of them dispatch together; the
result of each process is on its own devices.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives import in_replica
from replicax.collectives.arguments import Component, common_axis
from replicax.foundation import device_spans, errors, gate, jax_compat, spans
from replicax.foundation.options import ReduceOp
from replicax.foundation.types import Tree
from replicax.values.distributed_values import Mirrored, PerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import ReplicaLayout

# Programs that are kept; the shapes of eager values are few.
_MOST_PROGRAMS = 1024
# Values of several replicas inside a program, and what it makes of them.
_Body = Callable[..., list[jax.Array]]


class MeshProgram:
    """A program over the replicas of all processes; its results are equal on all of them.

    Args:
      name: The operation, for messages.
      layout: The replicas.
      key: Everything in which the program must not differ between processes.
      body: Computes the results from stored arrays of all replicas.
    """

    def __init__(self, name: str, layout: ReplicaLayout, key: Hashable, body: _Body) -> None:
        def program(stored: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
            return body(*stored), jnp.zeros((), jnp.int8)

        assert layout.peers is not None
        self._peers = layout.peers
        self._run = jax.jit(program, out_shardings=layout.replicated)
        self._takes_turns = gate.needs_turns(layout.devices)
        self._fingerprint = hashlib.sha256(repr(key).encode()).hexdigest()
        self._name = name
        self._number: int | None = None

    def __call__(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        if self._number is None:
            self._number = self._peers.confirm(self._name, self._fingerprint)
        with self._peers.guarded(), gate.state():
            if self._takes_turns:
                gate.wait_for_previous(self)
            self._peers.record(self._number)
            began = spans.now()
            results, token = self._run(list(stored))
            if began:
                device_spans.watch(token, began, "all-reduce", self._name)
            if self._takes_turns:
                gate.set_running(token)
        return results


def reduce_arrays(
    name: str,
    columns: Sequence[Sequence[jax.Array]],
    layout: ReplicaLayout,
    combine: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
    key: Hashable = None,
) -> list[jax.Array]:
    """Combines arrays over all replicas.

    Args:
      name: The reduction, for messages.
      columns: For each value, the arrays of the local replicas, of one shape.
      layout: The replicas.
      combine: Combines the values of one replica with those of the others, in replica code.
      key: Everything that `combine` depends on.

    Returns:
      For each value, an array that is equal on all replicas.
    """
    scalars = tuple(not np.shape(column[0]) for column in columns)

    def body(*stored: jax.Array) -> list[jax.Array]:
        return layout.map_replicas(
            lambda *local: list(combine(local)), stored, (), scalars, num_equal=len(stored)
        )

    with jax_compat.eagerly():
        stored = [layout.assemble(column) for column in columns]
    return run_on_mesh(name, layout, (key, scalars), body, stored)


def gather(value: PerReplica, axis: int) -> jax.Array:
    """Concatenates arrays of any sizes along an axis, over all replicas; on a local device."""
    layout = value.layout
    assert layout is not None
    shapes = value.all_shapes(layout)
    if shapes is None:
        raise errors.InvalidArgumentError(
            "Gathering across workers needs arrays of one type on all of them",
            f"this worker has {value}, and others have another structure or type",
            "Convert the values, and gather one array at a time.",
        )
    found = [shape for (shape,) in shapes]
    axis = common_axis(axis, found)
    most = tuple(map(max, zip(*found, strict=True)))

    def body(stored: jax.Array) -> list[jax.Array]:
        rows = stored.reshape((layout.num_replicas, *most))
        parts = [
            jax.lax.slice_in_dim(rows[i], 0, shape[axis], axis=axis)
            for i, shape in enumerate(found)
        ]
        return [jnp.concatenate(parts, axis)]

    results = run_on_mesh("gather", layout, (tuple(found), axis), body, value.padded(layout))
    return local_copy(results[0])


def gather_slices(
    op: ReduceOp, column: Sequence[Component], layout: ReplicaLayout
) -> IndexedSlices:
    """Joins the rows of all replicas; their mean is the sum of rows that are divided."""
    slices = [component for component in column if isinstance(component, IndexedSlices)]
    values = [in_replica.summable(op, own.values) for own in slices]
    rows = gather(PerReplica(values, layout), 0)
    indices = gather(PerReplica([own.indices for own in slices], layout), 0)
    if op is ReduceOp.MEAN:
        rows = rows / layout.num_replicas
    return IndexedSlices(rows, indices, dense_shape=slices[0].dense_shape)


def first_replica(columns: Sequence[Sequence[jax.Array]], layout: ReplicaLayout) -> list[jax.Array]:
    """Returns the arrays of the first replica of all."""

    def combine(local: Sequence[jax.Array]) -> list[jax.Array]:
        return [in_replica.first_replica(array) for array in local]

    return reduce_arrays("value of the first replica", columns, layout, combine)


def first_component(value: PerReplica, layout: ReplicaLayout) -> Tree:
    """Returns the component of the first replica of all, on the local devices."""
    flat = [jax.tree.flatten(component) for component in value.values]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    copies = [layout.copies(array) for array in first_replica(columns, layout)]
    parts = [jax.tree.unflatten(flat[0][1], row) for row in zip(*copies, strict=True)]
    return parts[0] if len(parts) == 1 else Mirrored(parts)


def run_on_mesh(
    name: str, layout: ReplicaLayout, key: Hashable, body: _Body, stored: Sequence[jax.Array]
) -> list[jax.Array]:
    """Runs a program over stored arrays of all replicas; compiled once for each key."""
    kinds = tuple((array.shape, str(array.dtype)) for array in stored)
    key = (name, key, kinds)
    programs = _programs_of(layout)
    if key not in programs:
        if len(programs) >= _MOST_PROGRAMS:
            programs.clear()
        shown = f"{name} of {len(kinds)} arrays {', '.join(map(str, kinds[:3]))}"
        programs[key] = MeshProgram(shown, layout, key, body)
    return programs[key](stored)


def local_copy(array: jax.Array) -> jax.Array:
    """Returns the copy of a replicated array on the first local device."""
    return array.addressable_data(0)


@functools.lru_cache(maxsize=16)
def _programs_of(layout: ReplicaLayout) -> dict[Hashable, MeshProgram]:
    return {}
