"""The executor of strategies with one replica: replica code is just called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from replicax.collectives import in_replica
from replicax.collectives.arguments import checked_axis, gather_of_slices, require_array
from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import EagerReads
from replicax.contexts.replica_context import ReplicaContext
from replicax.execution.local_arguments import LocalArguments, explained_devices, localized
from replicax.foundation import devices, jax_compat
from replicax.foundation.options import ReduceOp
from replicax.tracing.program import note_layout
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import map_structure, select


class SingleExecutor:
    """What replica code may ask where it is the only replica."""

    def __init__(self, strategy: Any, layout: ReplicaLayout | None) -> None:
        self._strategy = strategy
        self._layout = layout

    def merge_call(self, merge_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = frames.current()
        inner = Frame(
            Mode.CROSS_REPLICA,
            self._strategy,
            self._layout,
            executor=self,
            overlay=frame.overlay,
            is_default=frame.is_default,
            opened_at=frame.opened_at,
        )
        with frames.pushed(inner):
            return select(0, merge_fn(self._strategy, *args, **kwargs))

    def all_reduce(self, op: ReduceOp, value: Any, options: Any) -> Any:
        del options

        def alone(leaf: Any) -> Any:
            leaf = require_array("all_reduce", leaf)
            if isinstance(leaf, IndexedSlices):
                return leaf
            return in_replica.summable(op, leaf)

        return map_structure(alone, value)

    def all_gather(self, value: Any, axis: int) -> Any:
        if isinstance(value, IndexedSlices):
            raise gather_of_slices()
        array = require_array("all_gather", value)
        checked_axis(axis, array.ndim)
        return array

    def shared_variable(self, name: str, create: Callable[[], Any]) -> Any:
        del name
        return create()


def run_single(
    strategy: Any, layout: ReplicaLayout | None, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Runs replica code on the only replica, eagerly or inside a compiled function."""
    frame = frames.current()
    overlay = frame.overlay
    if layout is not None and overlay is not None:
        note_layout(overlay, layout)
    replica_id = layout.replica_ids[0] if layout is not None else default_replica_id()
    reads = EagerReads()
    inner = Frame(
        Mode.REPLICA,
        strategy,
        layout,
        replica_id=None if layout is None or overlay is not None else 0,
        replica_context=ReplicaContext(strategy, replica_id),
        executor=SingleExecutor(strategy, layout),
        overlay=overlay,
        eager_reads=reads,
        is_default=layout is None,
        opened_at=frame.opened_at,
    )
    own_args, own_kwargs = select(0, (args, kwargs))
    if layout is None or overlay is not None:
        with reads, _on_device(layout), frames.pushed(inner):
            return fn(*own_args, **own_kwargs)
    device, given = layout.devices[0], LocalArguments()
    own_args, own_kwargs = map_structure(
        lambda leaf: given.localize(leaf, device), (own_args, own_kwargs)
    )
    with reads, _on_device(layout), frames.pushed(inner), explained_devices():
        result = fn(*own_args, **own_kwargs)

    def own(leaf: Any) -> Any:
        original = given.original(leaf)
        return original if original is not leaf else localized(leaf, device)

    return map_structure(own, result)


def default_replica_id() -> Any:
    """Returns the id of the only replica as a scalar array."""
    with jax_compat.eagerly():
        return jnp.asarray(0, jnp.int32)


@contextlib.contextmanager
def _on_device(layout: ReplicaLayout | None) -> Iterator[None]:
    if layout is None:
        yield
    else:
        with devices.device(layout.devices[0]):
            yield
