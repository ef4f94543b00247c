"""The compiled executor for uneven parts: the replicas are traced one after the other.

One trace cannot stand for replicas whose arguments differ in shape. So each replica is
traced by itself, in turns as in eager mode, all into the trace of the function that is
being compiled. Every device then computes the parts of all replicas, which is what the
last, partial batch of an epoch is worth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import EagerReads, Overlay, TracedState, View
from replicax.contexts.replica_context import ReplicaContext
from replicax.execution import eager_collectives
from replicax.execution.threaded import ThreadedRun
from replicax.foundation import jax_compat
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.foundation.types import Tree
from replicax.tracing import signature
from replicax.values.distributed_values import PerReplica
from replicax.values.regroup import leaves_of, map_structure


class ReplicaOverlay(Overlay):
    """The values that one replica sees: equal copies of the trace around it, its own of others."""

    def __init__(self, parent: Overlay, replica_id: int) -> None:
        super().__init__(parent, View.LOCAL)
        self._replica_id = replica_id

    @override
    def read(self, variable: TracedState) -> Tree:
        if variable in self.values:
            return self.values[variable]
        assert self.parent is not None
        value = self.parent.read(variable)
        if not variable.is_per_replica:
            return value
        with jax_compat.in_trace(self.parent.trace):
            return variable.replicas.component(value, self._replica_id, not variable.shape)

    def flush(self) -> None:
        """Writes the new values of this replica's copies into the trace around it."""
        assert self.parent is not None
        for variable, value in self.values.items():
            if variable.is_per_replica:
                stored = self.parent.read(variable)
                is_scalar = not variable.shape
                layout = variable.replicas
                value = layout.with_component(stored, self._replica_id, is_scalar, value)
            self.parent.write(variable, value)
        self.values = {}


def _with_own_results(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Makes replicas return arrays of their own, also where they computed one together.

    An argument of all replicas that they return stays one value.
    """

    def called(*args: Tree, **kwargs: Tree) -> Tree:
        given = {id(leaf) for leaf in leaves_of((args, kwargs))}

        def own(leaf: Tree) -> Tree:
            is_new = jax_compat.is_traced(leaf) and id(leaf) not in given
            return jnp.copy(leaf) if is_new else leaf

        return map_structure(own, fn(*args, **kwargs))

    return called


def _as_constant(replica_id: int) -> jax.Array:
    with jax_compat.eagerly():
        return jnp.asarray(replica_id, jnp.int32)


class UnrolledRun(ThreadedRun):
    """One `run` inside a function that is being compiled, replica by replica."""

    def __init__(
        self,
        frame: Frame,
        fn: Callable[..., Tree],
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
    ) -> None:
        super().__init__(frame, _with_own_results(fn), args, kwargs)
        assert frame.overlay is not None
        self._outer: Overlay = frame.overlay
        self._overlays = [ReplicaOverlay(self._outer, i) for i in range(self.num_replicas)]

    @property
    @override
    def num_running(self) -> int:
        """All replicas: each process traces those of the others as well."""
        return self._layout.num_replicas

    @override
    def run(self) -> Tree:
        result = super().run()
        self._flush()
        if self._layout.spans_processes:
            result = map_structure(self._of_all, result)
        return result

    def _of_all(self, leaf: Tree) -> Tree:
        """Makes numbers that differ between replicas arrays of the trace.

        Otherwise they would be taken for the values of the local replicas, of which there are
        fewer.
        """
        if not isinstance(leaf, PerReplica) or not leaf.is_split:
            return leaf
        if not all(isinstance(value, bool | int | float | complex) for value in leaf.values):
            return leaf
        with jax_compat.in_trace(self._outer.trace):
            return PerReplica([jnp.copy(jnp.asarray(v)) for v in leaf.values], self._layout)

    def _flush(self) -> None:
        for overlay in self._overlays:
            overlay.flush()

    @contextlib.contextmanager
    @override
    def _replica_frame(self, i: int, reads: EagerReads) -> Iterator[None]:
        frame = self._frame.entered(
            Mode.REPLICA,
            replica_id=i,
            replica_context=ReplicaContext(self._frame.strategy, _as_constant(i)),
            executor=self,
            overlay=self._overlays[i],
        )
        # The thread of a replica has no trace of its own.
        with (
            jax_compat.in_trace(self._outer.trace),
            self._overlays[i].opened(),
            frames.pushed(frame),
        ):
            yield

    @override
    def _localize(self, i: int, leaf: Tree) -> Tree:
        return leaf

    @override
    def _own(self, i: int, leaf: Tree) -> Tree:
        return leaf

    @override
    def _require_meeting(self, frame: Frame) -> int:
        overlay = frame.overlay
        if overlay not in self._overlays or not overlay.is_current_trace():
            # Inside a gradient or a loop: only eager code meets there.
            raise signature.Ragged
        assert frame.replica_id is not None
        return frame.replica_id

    @contextlib.contextmanager
    @override
    def _merge_frame(self) -> Iterator[None]:
        self._flush()
        with frames.pushed(self._frame.entered(Mode.CROSS_REPLICA, overlay=self._outer)):
            yield

    @override
    def all_reduce(self, op: ReduceOp, value: Tree, options: CommunicationOptions | None) -> Tree:
        self._require_meeting(frames.current())
        return eager_collectives.reduce_in_trace(self, op, value, options)

    @override
    def all_gather(self, value: object, axis: int) -> jax.Array:
        self._require_meeting(frames.current())
        return eager_collectives.gather_in_trace(self, value, axis)
