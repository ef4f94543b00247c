"""Replica code without `run`: one replica, entered by hand with its `ReplicaContext`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import EagerReads, View
from replicax.contexts.replica_context import ReplicaContext
from replicax.execution.single import SingleExecutor
from replicax.execution.unrolled import ReplicaOverlay
from replicax.foundation import devices, errors, jax_compat
from replicax.values.layout import ReplicaLayout


class _EnteredExecutor(SingleExecutor):
    """What one replica may ask where the others do not run."""

    def __init__(
        self, strategy: Any, layout: ReplicaLayout | None, overlay: ReplicaOverlay | None
    ) -> None:
        super().__init__(strategy, layout)
        self._overlay = overlay

    @override
    def merge_call(self, merge_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._overlay is None:
            return super().merge_call(merge_fn, args, kwargs)
        # Code that acts for all replicas sees, and changes, the values of all of them.
        self._overlay.flush()
        with frames.pushed(frames.current().with_overlay(self._overlay.parent)):
            return super().merge_call(merge_fn, args, kwargs)


@contextlib.contextmanager
def entered_replica(
    strategy: Any, layout: ReplicaLayout | None, context: ReplicaContext
) -> Iterator[None]:
    """Makes a hand-made replica context the current one, eagerly or in a compiled function."""
    outer = frames.current().overlay
    replica_id = _replica_of(layout, context)
    overlay = outer
    own: ReplicaOverlay | None = None
    if outer is not None and outer.view is View.STORED and replica_id is not None:
        overlay = own = ReplicaOverlay(outer, replica_id)
    elif outer is not None and outer.view is View.LOCAL:
        # Compiled replica code, where one trace stands for all replicas.
        replica_id = None
    with contextlib.ExitStack() as stack:
        reads = EagerReads() if outer is None else None
        frame = Frame(
            Mode.REPLICA,
            strategy,
            layout,
            replica_id=replica_id,
            replica_context=context,
            executor=_EnteredExecutor(strategy, layout, own),
            overlay=overlay,
            eager_reads=reads,
            is_default=layout is None,
        )
        if reads is not None:
            stack.enter_context(reads)
        if layout is not None and replica_id is not None and outer is None:
            stack.enter_context(devices.device(layout.devices[replica_id]))
        if own is not None:
            stack.enter_context(own.opened())
        stack.enter_context(frames.pushed(frame))
        yield
        if own is not None:
            own.flush()


def _replica_of(layout: ReplicaLayout | None, context: ReplicaContext) -> int | None:
    """Returns which replica a context names; None where there are none, or it is traced."""
    named = context.replica_id_in_sync_group
    if layout is None or jax_compat.is_traced(named):
        return None
    with jax_compat.eagerly():
        replica_id = 0 if named is None else int(named)
    if not 0 <= replica_id < layout.num_replicas:
        raise errors.InvalidArgumentError(
            "A replica context can be entered for one of the replicas of its strategy",
            f"it names replica {replica_id}, and the strategy has {layout.num_replicas} replicas",
            "Pass a number from 0 to num_replicas_in_sync - 1.",
        )
    return replica_id
