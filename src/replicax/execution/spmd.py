"""The compiled executor: replica code becomes one program over all replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives import in_replica
from replicax.collectives.arguments import checked_axis, require_array, require_dense
from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import Overlay, View
from replicax.contexts.replica_context import ReplicaContext
from replicax.execution.replica_program import run_captured
from replicax.execution.running_replica import own_component_of
from replicax.execution.unrolled import UnrolledRun
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.foundation.types import Tree
from replicax.tracing import capture as capturing
from replicax.tracing.program import note_layout
from replicax.tracing.structures import require_no_traced_parts
from replicax.values.distributed_values import (
    Mirrored,
    PerReplica,
    TracedPerReplica,
    is_array_like,
)
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import AXIS, ReplicaLayout
from replicax.values.regroup import leaves_of, map_structure

_T = TypeVar("_T")
_ARRAYS = (jax.Array, np.ndarray, IndexedSlices)


class SpmdExecutor:
    """Serves the calls across replicas of compiled replica code: one trace stands for all."""

    def __init__(self, frame: Frame) -> None:
        assert frame.layout is not None
        self._frame = frame
        self._layout = frame.layout

    def merge_call(
        self, merge_fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        merged_args, merged_kwargs = map_structure(self._merge, (args, kwargs))
        overlay = frames.current().overlay
        with frames.pushed(self._frame.entered(Mode.CROSS_REPLICA, overlay=overlay)):
            result = merge_fn(self._frame.strategy, *merged_args, **merged_kwargs)
        return map_structure(_select, result)

    def _merge(self, leaf: Tree) -> Tree:
        if isinstance(leaf, PerReplica):
            leaf = own_component_of(leaf)
        return TracedPerReplica(leaf, self._layout) if isinstance(leaf, _ARRAYS) else leaf

    def all_reduce(self, op: ReduceOp, value: Tree, options: CommunicationOptions | None) -> Tree:
        leaves = [require_array("all_reduce", leaf) for leaf in leaves_of(value)]
        values = [TracedPerReplica(leaf, self._layout) for leaf in leaves]
        targets = [self._layout.devices] * len(values)
        count = self._layout.num_replicas
        reduced = self._frame.reducer.reduce_values(op, values, targets, count, options)
        found = iter(r.values[0] if isinstance(r, Mirrored) else r for r in reduced)
        return map_structure(lambda _: next(found), value)

    def all_gather(self, value: object, axis: int) -> jax.Array:
        array = require_dense("all_gather", value)
        return in_replica.all_gather(array, checked_axis(axis, array.ndim))

    def shared_variable(self, name: str, create: Callable[[], _T]) -> _T:
        del name
        return create()


def run_replicas(
    frame: Frame,
    fn: Callable[..., Tree],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    mode: Mode = Mode.REPLICA,
) -> Tree:
    """Runs `fn` on all replicas inside the program that is being compiled."""
    outer, layout = frame.overlay, frame.layout
    assert outer is not None and layout is not None
    if outer.view is View.READ:
        raise errors.ContextError(
            "`strategy.run` inside a gradient needs `rx.function` around both",
            "it is called eagerly inside `rx.value_and_grad`",
            "Take the gradient inside the function that `run` calls.",
        )
    if outer.view is View.LOCAL:
        return _run_in_merge_call(frame, fn, args, kwargs)
    note_layout(outer, layout)
    if mode is Mode.REPLICA and _is_ragged(layout, args, kwargs):
        args, kwargs = map_structure(lambda leaf: _of_all_replicas(leaf, layout), (args, kwargs))
        return UnrolledRun(frame, fn, args, kwargs).run()
    inputs = _Inputs(layout, args, kwargs)
    overlay = capturing.CapturingOverlay(outer, View.LOCAL)
    executor = SpmdExecutor(frame)
    outputs: list[_Outputs] = []

    def body(*local: jax.Array) -> list[jax.Array]:
        own_args, own_kwargs = inputs.for_replica(local)
        replica_id = jax.lax.axis_index(AXIS)
        context = ReplicaContext(frame.strategy, replica_id) if mode is Mode.REPLICA else None
        inner = frame.entered(mode, replica_context=context, executor=executor, overlay=overlay)
        with frames.pushed(inner):
            result = fn(*own_args, **own_kwargs)
        outputs.append(_Outputs(result, local, inputs))
        return outputs[0].take_arrays()

    captured = capturing.capture(body, inputs.local_shapes(), overlay, layout.num_replicas)
    results = _pass_on(captured, run_captured(captured, layout, outer, inputs), outer)
    return outputs[0].merge(results, layout)


def _pass_on(captured: capturing.Capture, outs: list[jax.Array], outer: Overlay) -> list[jax.Array]:
    """Passes the writes, new variables and remote updates of a program to the trace around it.

    Returns:
      The other outputs: the results.
    """
    found = iter(outs)
    for variable in captured.written:
        outer.write(variable, next(found))
    for variable in captured.created:
        outer.adopt(variable, next(found))
    for template in captured.last_changes:
        outer.record(template.filled([next(found) for _ in range(template.treedef.num_leaves)]))
    for _ in range(captured.num_ids):
        next(found)
    return list(found)


def _run_in_merge_call(
    frame: Frame, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> Tree:
    """Runs `fn` from `merge_call`: the trace around it already stands for all replicas."""
    layout = frame.layout
    assert layout is not None
    inner = frame.entered(
        Mode.REPLICA,
        replica_context=ReplicaContext(frame.strategy, jax.lax.axis_index(AXIS)),
        executor=SpmdExecutor(frame),
        overlay=frame.overlay,
    )
    own_args, own_kwargs = map_structure(_select, (args, kwargs))
    given = {id(leaf) for leaf in leaves_of((args, kwargs))}
    with frames.pushed(inner):
        result = fn(*own_args, **own_kwargs)

    def wrap(leaf: Tree) -> Tree:
        is_own = isinstance(leaf, _ARRAYS) and id(leaf) not in given
        return TracedPerReplica(leaf, layout) if is_own else leaf

    return map_structure(wrap, result)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Stands for arrays of the arguments; `index` counts them in order."""

    index: int
    count: int
    treedef: Any = None


class _Inputs:
    """The arguments of a run, split into arrays of each replica and arrays for all."""

    def __init__(
        self, layout: ReplicaLayout, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> None:
        self._layout = layout
        self.mapped: list[jax.Array] = []
        self.mapped_scalars: list[bool] = []
        self.whole: list[jax.Array] = []
        self._is_mapped: list[bool] = []
        # The argument that each array of all replicas was made from, by its position.
        self.sources: dict[int, jax.Array | np.ndarray] = {}
        self._skeleton = map_structure(self._add, (args, kwargs))

    def _add(self, leaf: Tree) -> Tree:
        start = len(self._is_mapped)
        if isinstance(leaf, Mirrored):
            leaf = leaf.values[0]
        if isinstance(leaf, PerReplica):
            values = leaf.values if leaf.is_split else ()
            if values and _are_one_python_value(values):
                return values[0]
            stored = leaf.stored(self._layout)
            if stored is None:
                raise errors.InvalidArgumentError(
                    "Compiled replica code needs per-replica arguments of one shape and type",
                    f"it got {leaf}",
                    "Pad them, or call `strategy.run` outside of `rx.function`.",
                )
            self.mapped += stored
            self.mapped_scalars += leaf.scalars
            self._is_mapped += [True] * len(stored)
            return _Leaf(start, len(stored), leaf.treedef)
        if isinstance(leaf, jax.Array | np.ndarray):
            self.sources[start] = leaf
            self.whole.append(jnp.asarray(leaf))
            self._is_mapped.append(False)
            return _Leaf(start, 1)
        if isinstance(leaf, IndexedSlices):
            return leaf.map_arrays(self._add)
        return leaf

    def local_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of one replica's arguments, in order."""
        mapped = [
            jax.ShapeDtypeStruct(self._layout.local_shape(a.shape, s), a.dtype)
            for a, s in zip(self.mapped, self.mapped_scalars, strict=True)
        ]
        whole = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in self.whole]
        return self.in_order(mapped, whole)

    def in_order(self, mapped: Sequence[_T], whole: Sequence[_T]) -> list[_T]:
        """Interleaves the two kinds of arrays in argument order."""
        own, shared = iter(mapped), iter(whole)
        return [next(own) if is_mapped else next(shared) for is_mapped in self._is_mapped]

    def for_replica(self, local: Sequence[jax.Array]) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """Returns the arguments of one replica."""

        def visit(leaf: Tree) -> Tree:
            if isinstance(leaf, IndexedSlices):
                return leaf.map_arrays(visit)
            if not isinstance(leaf, _Leaf):
                return leaf
            arrays = local[leaf.index : leaf.index + leaf.count]
            return arrays[0] if leaf.treedef is None else jax.tree.unflatten(leaf.treedef, arrays)

        return map_structure(visit, self._skeleton)


class _Outputs:
    """The results of one replica, and how those of all replicas are merged."""

    def __init__(self, result: Tree, local: Sequence[jax.Array], inputs: _Inputs) -> None:
        self._arrays: list[jax.Array] = []
        self._scalars: list[bool] = []
        # Arrays that all replicas were given; a replica that returns one returns that object.
        self._given = {id(local[i]): source for i, source in inputs.sources.items()}
        self._skeleton = map_structure(self._record, result)

    def take_arrays(self) -> list[jax.Array]:
        """Returns the traced arrays and drops them; keeping them would leak the trace."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def _record(self, leaf: Tree) -> _Leaf | _Constant:
        if id(leaf) in self._given:
            return _Constant(self._given[id(leaf)])
        if isinstance(leaf, Mirrored):
            leaf = leaf.values[0]
        if isinstance(leaf, jax.Array) and not jax_compat.is_traced(leaf):
            # Captured from outside, so the same object on every replica.
            return _Constant(leaf)
        if isinstance(leaf, _ARRAYS):
            children, treedef = jax.tree.flatten(leaf)
            start = len(self._arrays)
            self._arrays += [jnp.asarray(c) for c in children]
            self._scalars += [jnp.ndim(c) == 0 for c in children]
            return _Leaf(start, len(children), treedef)
        require_no_traced_parts(leaf)
        return _Constant(leaf)

    def merge(self, arrays: list[jax.Array], layout: ReplicaLayout) -> Tree:
        """Returns the merged structure, around the arrays of all replicas."""

        def visit(leaf: Tree) -> Tree:
            if isinstance(leaf, _Constant):
                return leaf.value
            end = leaf.index + leaf.count
            return PerReplica.from_stored(
                arrays[leaf.index : end], self._scalars[leaf.index : end], leaf.treedef, layout
            )

        return map_structure(visit, self._skeleton)


@dataclasses.dataclass(frozen=True)
class _Constant:
    """Wraps a result that is the same object on all replicas."""

    value: object


def _select(leaf: Tree) -> Tree:
    if isinstance(leaf, TracedPerReplica):
        return leaf.local
    if isinstance(leaf, Mirrored):
        return leaf.values[0]
    if isinstance(leaf, PerReplica):
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *leaf.values)
        return jax.tree.map(lambda s: s[jax.lax.axis_index(AXIS)], stacked)
    return leaf


def _is_ragged(layout: ReplicaLayout, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> bool:
    """Tells whether arguments are arrays of different shapes on different replicas."""
    for leaf in leaves_of((args, kwargs)):
        if not isinstance(leaf, PerReplica) or isinstance(leaf, TracedPerReplica) or leaf.is_stored:
            continue
        is_arrays = all(is_array_like(x) for v in leaf.values for x in jax.tree.leaves(v))
        if is_arrays and leaf.stored(layout) is None:
            return True
    return False


def _of_all_replicas(leaf: Tree, layout: ReplicaLayout) -> Tree:
    if not isinstance(leaf, PerReplica) or not layout.spans_processes:
        return leaf
    if leaf.is_split and _are_one_python_value(leaf.values):
        return leaf.values[0]
    return leaf.of_all_replicas(layout)


def _are_one_python_value(values: Sequence[object]) -> bool:
    first = values[0]
    # Equal structures of arrays are arrays of each replica, and their `==` has no truth value.
    is_python = isinstance(first, int | float | bool) or not any(
        map(is_array_like, jax.tree.leaves(first))
    )
    return is_python and all(type(v) is type(first) and v == first for v in values)
