"""Runs replica code of strategies with one replica: by a plain call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from replicax.collectives import in_replica
from replicax.collectives.arguments import Component, checked_axis, require_array, require_dense
from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import EagerReads
from replicax.contexts.replica_context import ReplicaContext
from replicax.execution.local_arguments import LocalArguments, explained_devices, localized
from replicax.foundation import devices, jax_compat
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.foundation.types import Tree
from replicax.tracing.program import note_layout
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import map_structure, select

_T = TypeVar("_T")


class SingleExecutor:
    """Serves the calls across replicas of the only replica.

    Attributes:
      frame: A frame of the strategy, which frames of `merge_call` derive from.
    """

    frame: Frame

    def merge_call(
        self, merge_fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        inner = self.frame.entered(
            Mode.CROSS_REPLICA, executor=self, overlay=frames.current().overlay
        )
        with frames.pushed(inner):
            return select(0, merge_fn(inner.strategy, *args, **kwargs))

    def all_reduce(self, op: ReduceOp, value: Tree, options: CommunicationOptions | None) -> Tree:
        del options

        def alone(leaf: object) -> Component:
            leaf = require_array("all_reduce", leaf)
            return leaf if isinstance(leaf, IndexedSlices) else in_replica.summable(op, leaf)

        return map_structure(alone, value)

    def all_gather(self, value: object, axis: int) -> jax.Array:
        array = require_dense("all_gather", value)
        checked_axis(axis, array.ndim)
        return array

    def shared_variable(self, name: str, create: Callable[[], _T]) -> _T:
        del name
        return create()


def run_single(
    frame: Frame, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> Tree:
    """Runs replica code on the only replica, eagerly or inside a compiled function."""
    layout, overlay = frame.layout, frame.overlay
    if layout is not None and overlay is not None:
        note_layout(overlay, layout)
    replica_id = layout.replica_ids[0] if layout is not None else _default_replica_id()
    reads = EagerReads()
    executor = SingleExecutor()
    inner = executor.frame = frame.entered(
        Mode.REPLICA,
        replica_id=None if layout is None or overlay is not None else 0,
        replica_context=ReplicaContext(frame.strategy, replica_id),
        executor=executor,
        overlay=overlay,
        eager_reads=reads,
    )
    own_args, own_kwargs = select(0, (args, kwargs))
    if layout is None or overlay is not None:
        place = contextlib.nullcontext() if layout is None else devices.device(layout.devices[0])
        with reads, place, frames.pushed(inner):
            return fn(*own_args, **own_kwargs)
    device, given = layout.devices[0], LocalArguments()
    own_args, own_kwargs = map_structure(
        lambda leaf: given.localize(leaf, device), (own_args, own_kwargs)
    )
    with reads, devices.device(device), frames.pushed(inner), explained_devices():
        result = fn(*own_args, **own_kwargs)

    def own(leaf: Tree) -> Tree:
        original = given.original(leaf)
        return original if original is not leaf else localized(leaf, device)

    return map_structure(own, result)


def _default_replica_id() -> jax.Array:
    with jax_compat.eagerly():
        return jnp.asarray(0, jnp.int32)
