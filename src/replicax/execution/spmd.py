"""The compiled executor: replica code becomes one program over all replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives import in_replica
from replicax.collectives.arguments import checked_axis, gather_of_slices, require_array
from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import View
from replicax.contexts.replica_context import ReplicaContext
from replicax.contexts.running_replica import own_component_of
from replicax.execution.replica_program import run_captured
from replicax.execution.unrolled import UnrolledRun
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.tracing import capture as capturing
from replicax.tracing.program import note_layout
from replicax.values.distributed_values import (
    Mirrored,
    PerReplica,
    TracedPerReplica,
    is_array_like,
)
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import AXIS, ReplicaLayout
from replicax.values.regroup import leaves_of, map_structure

_ARRAYS = (jax.Array, np.ndarray, IndexedSlices)


class SpmdExecutor:
    """What replica code may ask while it is being compiled: one trace stands for all."""

    def __init__(self, strategy: Any, layout: ReplicaLayout) -> None:
        self._strategy = strategy
        self._layout = layout

    def merge_call(self, merge_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = frames.current()
        merged_args, merged_kwargs = map_structure(self._merge, (args, kwargs))
        inner = Frame(
            Mode.CROSS_REPLICA,
            self._strategy,
            self._layout,
            overlay=frame.overlay,
            opened_at=frame.opened_at,
        )
        with frames.pushed(inner):
            result = merge_fn(self._strategy, *merged_args, **merged_kwargs)
        return map_structure(_select, result)

    def _merge(self, leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            leaf = own_component_of(leaf)
        return TracedPerReplica(leaf, self._layout) if isinstance(leaf, _ARRAYS) else leaf

    def all_reduce(self, op: ReduceOp, value: Any, options: Any) -> Any:
        leaves = [require_array("all_reduce", leaf) for leaf in leaves_of(value)]
        ops = self._strategy.extended.cross_device_ops
        values = [TracedPerReplica(leaf, self._layout) for leaf in leaves]
        devices = self._layout.devices
        reduced = ops.batch_reduce(
            op, [(v, devices) for v in values], options or CommunicationOptions()
        )
        found = iter(r.values[0] if isinstance(r, Mirrored) else r for r in reduced)
        return map_structure(lambda _: next(found), value)

    def all_gather(self, value: Any, axis: int) -> Any:
        if isinstance(value, IndexedSlices):
            raise gather_of_slices()
        array = require_array("all_gather", value)
        axis = checked_axis(axis, array.ndim)
        return in_replica.all_gather(array, axis)

    def shared_variable(self, name: str, create: Any) -> Any:
        del name
        return create()


def run_replicas(
    strategy: Any,
    layout: ReplicaLayout,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    mode: Mode = Mode.REPLICA,
) -> Any:
    """Runs `fn` on all replicas inside the program that is being compiled."""
    frame = frames.current()
    outer = frame.overlay
    assert outer is not None
    if outer.view is View.READ:
        raise errors.ContextError(
            "`strategy.run` inside a gradient needs `rx.function` around both",
            "it is called eagerly inside `rx.value_and_grad`",
            "Take the gradient inside the function that `run` calls.",
        )
    if outer.view is View.LOCAL:
        return _run_in_merge_call(strategy, layout, fn, args, kwargs)
    note_layout(outer, layout)
    if mode is Mode.REPLICA and _is_ragged(layout, args, kwargs):
        return UnrolledRun(strategy, layout, fn, args, kwargs).run()
    inputs = _Inputs(layout, args, kwargs)
    overlay = capturing.CapturingOverlay(outer, View.LOCAL)
    executor = SpmdExecutor(strategy, layout)
    outputs: list[_Outputs] = []

    def body(*local: Any) -> list[Any]:
        own_args, own_kwargs = inputs.for_replica(local)
        replica_id = jax.lax.axis_index(AXIS)
        context = ReplicaContext(strategy, replica_id) if mode is Mode.REPLICA else None
        inner = Frame(
            mode,
            strategy,
            layout,
            replica_context=context,
            executor=executor,
            overlay=overlay,
            opened_at=frame.opened_at,
        )
        with frames.pushed(inner):
            result = fn(*own_args, **own_kwargs)
        outputs.append(_Outputs(result, local, inputs))
        return outputs[0].take_arrays()

    captured = capturing.capture(body, inputs.local_shapes(), overlay, layout.num_replicas)
    results = _pass_on(captured, run_captured(captured, layout, outer, inputs), outer)
    return outputs[0].merge(results, layout)


def _pass_on(captured: capturing.Capture, outs: list[Any], outer: Any) -> list[Any]:
    """Hands what a replica program wrote, created and changed to the trace around it.

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
    strategy: Any, layout: ReplicaLayout, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Runs `fn` from `merge_call`: the trace around it already stands for all replicas."""
    frame = frames.current()
    inner = Frame(
        Mode.REPLICA,
        strategy,
        layout,
        replica_context=ReplicaContext(strategy, jax.lax.axis_index(AXIS)),
        executor=SpmdExecutor(strategy, layout),
        overlay=frame.overlay,
        opened_at=frame.opened_at,
    )
    own_args, own_kwargs = map_structure(_select, (args, kwargs))
    given = {id(leaf) for leaf in leaves_of((args, kwargs))}
    with frames.pushed(inner):
        result = fn(*own_args, **own_kwargs)

    def wrap(leaf: Any) -> Any:
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

    def __init__(self, layout: ReplicaLayout, args: Any, kwargs: Any) -> None:
        self._layout = layout
        self.mapped: list[Any] = []
        self.mapped_scalars: list[bool] = []
        self.whole: list[Any] = []
        self._is_mapped: list[bool] = []
        # The object that an array given to all replicas came from, by its position.
        self.origins: dict[int, Any] = {}
        self._skeleton = map_structure(self._add, (args, kwargs))

    def _add(self, leaf: Any) -> Any:
        start = len(self._is_mapped)
        if isinstance(leaf, Mirrored):
            leaf = leaf.values[0]
        if isinstance(leaf, PerReplica):
            values = leaf.values if not isinstance(leaf, TracedPerReplica) else ()
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
            self.origins[start] = leaf
            self.whole.append(jnp.asarray(leaf))
            self._is_mapped.append(False)
            return _Leaf(start, 1)
        if isinstance(leaf, IndexedSlices):
            return leaf.map_arrays(self._add)
        return leaf

    def local_shapes(self) -> list[Any]:
        """Returns what one replica gets, in argument order."""
        mapped = [
            jax.ShapeDtypeStruct(self._layout.local_shape(a.shape, s), a.dtype)
            for a, s in zip(self.mapped, self.mapped_scalars, strict=True)
        ]
        whole = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in self.whole]
        return self.in_order(mapped, whole)

    def in_order(self, mapped: Any, whole: Any) -> list[Any]:
        """Interleaves the two kinds of arrays in argument order."""
        own, shared = iter(mapped), iter(whole)
        return [next(own) if is_mapped else next(shared) for is_mapped in self._is_mapped]

    def for_replica(self, local: Any) -> Any:
        """Returns the arguments of one replica."""

        def visit(leaf: Any) -> Any:
            if isinstance(leaf, IndexedSlices):
                return leaf.map_arrays(visit)
            if not isinstance(leaf, _Leaf):
                return leaf
            arrays = local[leaf.index : leaf.index + leaf.count]
            return arrays[0] if leaf.treedef is None else jax.tree.unflatten(leaf.treedef, arrays)

        return map_structure(visit, self._skeleton)


class _Outputs:
    """What one replica returned, and how the values of all replicas are merged."""

    def __init__(self, result: Any, local: Any, inputs: _Inputs) -> None:
        self._arrays: list[Any] = []
        self._scalars: list[bool] = []
        # Arrays that all replicas were given: what hands one back, hands back that object.
        self._given = {id(local[i]): origin for i, origin in inputs.origins.items()}
        self._skeleton = map_structure(self._record, result)

    def take_arrays(self) -> list[Any]:
        """Hands the traced arrays over; keeping them would leak the trace."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def _record(self, leaf: Any) -> Any:
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
        return _Constant(leaf)

    def merge(self, arrays: list[Any], layout: ReplicaLayout) -> Any:
        """Returns the merged structure, around the arrays of all replicas."""

        def visit(leaf: Any) -> Any:
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

    value: Any


def _select(leaf: Any) -> Any:
    if isinstance(leaf, TracedPerReplica):
        return leaf.local
    if isinstance(leaf, Mirrored):
        return leaf.values[0]
    if isinstance(leaf, PerReplica):
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *leaf.values)
        return jax.tree.map(lambda s: s[jax.lax.axis_index(AXIS)], stacked)
    return leaf


def _is_ragged(layout: ReplicaLayout, args: Any, kwargs: Any) -> bool:
    """Tells whether arguments are arrays of different shapes on different replicas."""
    for leaf in leaves_of((args, kwargs)):
        if isinstance(leaf, TracedPerReplica) or not isinstance(leaf, PerReplica):
            continue
        is_arrays = all(is_array_like(x) for v in leaf.values for x in jax.tree.leaves(v))
        if is_arrays and leaf.stored(layout) is None:
            return True
    return False


def _are_one_python_value(values: Any) -> bool:
    first = values[0]
    # Equal structures of arrays are arrays of each replica, and their `==` has no truth value.
    is_python = isinstance(first, int | float | bool) or not any(
        map(is_array_like, jax.tree.leaves(first))
    )
    return is_python and all(type(v) is type(first) and v == first for v in values)
