"""Runs replica code: picks the way to run it, and enters single replicas by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import EagerReads, View
from replicax.contexts.replica_context import ReplicaContext
from replicax.execution import spmd
from replicax.execution.single import SingleExecutor, run_single
from replicax.execution.threaded import ThreadedRun
from replicax.execution.unrolled import ReplicaOverlay
from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.types import Tree
from replicax.tracing.function import Function
from replicax.values.layout import ReplicaLayout


class Executor:
    """Runs replica code in this process; the executor part of a strategy."""

    def run(
        self,
        frame: Frame,
        fn: Callable[..., Tree],
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
    ) -> Tree:
        """Calls `fn` once per replica and merges the results.

        Args:
          frame: The frame of the strategy's scope.
          fn: The replica code.
          args: Its arguments; distributed values are replaced by each replica's component.
          kwargs: Its keyword arguments.
        """
        if frame.overlay is None and isinstance(fn, Function):
            return fn.on_replicas(frame.strategy)(*args, **kwargs)
        if frame.layout is None or frame.layout.num_replicas == 1:
            return run_single(frame, fn, args, kwargs)
        if frame.overlay is not None:
            return spmd.run_replicas(frame, fn, args, kwargs)
        return ThreadedRun(frame, fn, args, kwargs).run()

    @contextlib.contextmanager
    def entered(self, frame: Frame, context: ReplicaContext) -> Iterator[None]:
        """Makes a replica context that the user made the current one."""
        outer, layout = frame.overlay, frame.layout
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
            executor = _EnteredExecutor(own)
            inner = executor.frame = frame.entered(
                Mode.REPLICA,
                replica_id=replica_id,
                replica_context=context,
                executor=executor,
                overlay=overlay,
                eager_reads=reads,
            )
            if reads is not None:
                stack.enter_context(reads)
            if layout is not None and replica_id is not None and outer is None:
                stack.enter_context(devices.device(layout.local_devices[replica_id]))
            if own is not None:
                stack.enter_context(own.opened())
            stack.enter_context(frames.pushed(inner))
            yield
            if own is not None:
                own.flush()


class _EnteredExecutor(SingleExecutor):
    """Serves the calls of one replica while the others do not run."""

    def __init__(self, overlay: ReplicaOverlay | None) -> None:
        self._overlay = overlay

    @override
    def merge_call(
        self, merge_fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        if self._overlay is None:
            return super().merge_call(merge_fn, args, kwargs)
        # Code that acts for all replicas sees, and changes, the values of all of them.
        self._overlay.flush()
        with frames.pushed(frames.current().with_overlay(self._overlay.parent)):
            return super().merge_call(merge_fn, args, kwargs)


def _replica_of(layout: ReplicaLayout | None, context: ReplicaContext) -> int | None:
    """Returns the number of the replica of a context, as frames count it.

    None if the context is traced, or the strategy has no replicas.
    """
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
    if not layout.spans_processes or not jax_compat.is_eager():
        return replica_id
    local = replica_id - layout.first_local
    if not 0 <= local < layout.num_local:
        raise errors.InvalidArgumentError(
            "A replica context can be entered on the worker that runs its replica",
            f"it names replica {replica_id}, and this worker runs {layout.num_local} replicas "
            f"from replica {layout.first_local} on",
            "Enter the context of a local replica.",
        )
    return local
