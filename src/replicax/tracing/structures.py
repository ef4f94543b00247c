"""Nests of values as arrays and a skeleton, into which other arrays can be put."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import ArrayLike
from typing_extensions import override

from replicax.contexts import frames
from replicax.foundation import errors, jax_compat, placement
from replicax.foundation.types import Tree, TreeDef
from replicax.tracing import signature
from replicax.tracing.signature import PerReplicaSpec, Slot, TensorSpec
from replicax.values.array_surface import ArraySurface
from replicax.values.distributed_values import Mirrored, PerReplica, TracedPerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import leaves_of, map_structure
from replicax.variables.variable import Variable

# Makes a value from the output arrays of a call.
_Maker: TypeAlias = Callable[[Sequence[jax.Array]], Tree]
# Objects in attributes of objects that are searched for arrays of a trace.
_MOST_LEVELS = 2


class Structure:
    """A nest of values whose arrays are replaced by slots.

    Attributes:
      skeleton: The nest with a `Slot` instead of each array.
      count: The number of arrays.
      layouts: For each array, the layout of the replicas whose values it holds; None otherwise.
    """

    def __init__(self, value: Tree) -> None:
        self._arrays: list[jax.Array] = []
        self.layouts: list[ReplicaLayout | None] = []
        self.skeleton = map_structure(self._record, value)
        self.count = len(self._arrays)

    def take_arrays(self) -> list[jax.Array]:
        """Returns the arrays and drops them: references would leak the trace."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def filled(self, arrays: Sequence[jax.Array]) -> Tree:
        """Returns the structure with other arrays in it."""
        return signature.fill(self.skeleton, arrays)

    def filled_with_stacks(self, arrays: Sequence[jax.Array]) -> Tree:
        """Returns the structure with arrays that have an additional leading dimension."""

        def visit(leaf: object) -> Tree:
            if isinstance(leaf, IndexedSlices):
                return leaf.map_arrays(visit)
            if not isinstance(leaf, Slot):
                return leaf
            layout = leaf.layout
            if leaf.kind != "per_replica" or layout is None:
                return signature.fill(leaf, arrays)
            own = arrays[leaf.index : leaf.index + leaf.count]
            stored = [
                _replicas_of_steps(layout, array, is_scalar)
                for array, is_scalar in zip(own, leaf.scalars, strict=True)
            ]
            return PerReplica.from_stored(stored, (False,) * leaf.count, leaf.treedef, layout)

        return map_structure(visit, self.skeleton)

    def is_like(self, other: Structure) -> bool:
        """Returns whether two structures differ in their arrays only."""
        mine, others = leaves_of(self.skeleton), leaves_of(other.skeleton)
        if _tree(self.skeleton) != _tree(other.skeleton) or len(mine) != len(others):
            return False
        return all(map(_is_same_leaf, mine, others))

    def _record(self, leaf: object) -> Tree:
        if isinstance(leaf, TracedPerReplica):
            own, treedef = jax.tree.flatten(leaf.local)
            start = self._add([jnp.asarray(a) for a in own])
            return Slot(start, "traced", len(own), leaf.layout, treedef)
        if isinstance(leaf, PerReplica):
            return self._record_per_replica(leaf)
        if isinstance(leaf, Mirrored):
            return Slot(self._add([leaf.values[0]]), "mirrored", len(leaf.values))
        if isinstance(leaf, IndexedSlices):
            return leaf.map_arrays(self._record)
        leaf = as_array(leaf)
        return Slot(self._add([leaf]), "array") if isinstance(leaf, jax.Array) else leaf

    def _record_per_replica(self, leaf: PerReplica) -> Tree:
        layout = leaf.layout or frames.current().layout
        stored = None if layout is None else leaf.stored(layout)
        if stored is None:
            raise errors.InvalidArgumentError(
                "A compiled loop or branch needs per-replica values of one shape and type",
                f"it got {leaf}",
                "Pad them, or run the code outside of `rx.function`.",
            )
        return self._stored_slot(leaf, stored, layout)

    def _stored_slot(
        self, leaf: PerReplica, stored: Sequence[jax.Array], layout: ReplicaLayout | None
    ) -> Slot:
        start = self._add(stored, layout)
        return Slot(start, "per_replica", len(stored), layout, leaf.treedef, leaf.scalars)

    def _add(self, arrays: Sequence[jax.Array], layout: ReplicaLayout | None = None) -> int:
        """Adds arrays and returns the index of the first one."""
        start = len(self._arrays)
        self._arrays += arrays
        self.layouts += [layout] * len(arrays)
        return start


class Results(Structure):
    """The results of a compiled function, made from the output arrays of each call."""

    def __init__(self, value: Tree) -> None:
        super().__init__(value)
        # Numbers as leaves: `map_structure` recognises them at once, unlike slots.
        self._leaves = leaves_of(self.skeleton)
        numbers = iter(range(len(self._leaves)))
        self._numbered = map_structure(lambda _: next(numbers), self.skeleton)

    @property
    def layout(self) -> ReplicaLayout | None:
        """The layout of the last per-replica result; None if there is none."""
        return next((layout for layout in reversed(self.layouts) if layout is not None), None)

    @override
    def _record(self, leaf: object) -> Tree:
        if isinstance(leaf, Variable | TracedPerReplica):
            return leaf
        found = super()._record(leaf)
        if found is leaf:
            require_no_traced_parts(leaf)
        return found

    @override
    def _record_per_replica(self, leaf: PerReplica) -> Tree:
        stored = None if leaf.layout is None else leaf.stored(leaf.layout)
        if stored is None:
            # Components of different shapes are separate outputs.
            return PerReplica([self._record(v) for v in leaf.values], leaf.layout)
        return self._stored_slot(leaf, stored, leaf.layout)

    def specs(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> Tree:
        """Returns the structure of the results, with a spec for each array."""

        def visit(leaf: object) -> Tree:
            if isinstance(leaf, PerReplica):
                return PerReplicaSpec(tuple(visit(v) for v in leaf.values))
            if isinstance(leaf, IndexedSlices):
                return leaf.map_arrays(visit)
            if not isinstance(leaf, Slot):
                return leaf
            layout = leaf.layout
            if leaf.kind != "per_replica" or layout is None:
                return TensorSpec(shapes[leaf.index].shape, shapes[leaf.index].dtype)
            own = []
            for i, is_scalar in enumerate(leaf.scalars, leaf.index):
                spec = TensorSpec(layout.local_shape(shapes[i].shape, is_scalar), shapes[i].dtype)
                own.append(PerReplicaSpec((spec,) * layout.num_replicas))
            return jax.tree.unflatten(_treedef(leaf), own)

        return map_structure(visit, self.skeleton)

    def shardings(self, layout: ReplicaLayout | None, replicated: Sharding) -> list[Sharding]:
        """Returns the sharding of each output of a program that runs on `layout`."""
        return [
            layout.per_replica if layout is not None and own == layout else replicated
            for own in self.layouts
        ]

    def rebuilder(
        self,
        layout: ReplicaLayout | None,
        shapes: Sequence[jax.ShapeDtypeStruct],
        is_on_one_device: bool,
    ) -> _Maker:
        """Returns a function that makes the results of a call from its output arrays.

        What can be decided beforehand is decided here, since every call rebuilds its results.

        Args:
          layout: The replicas that the program runs on.
          shapes: The shapes and types of the outputs.
          is_on_one_device: Whether outputs are known to be on one device without a mesh.
        """
        mesh = layout if layout is not None and layout.is_mesh else None

        def maker(leaf: object) -> _Maker:
            if isinstance(leaf, Slot):
                if leaf.kind == "array" and isinstance(shapes[leaf.index].dtype, np.dtype):
                    if mesh is not None:
                        return _first_shard(leaf.index)
                    if is_on_one_device:
                        return _only_shard(leaf.index)
                return lambda arrays: _result(leaf, arrays, layout, mesh)
            if isinstance(leaf, PerReplica):
                parts = [maker(value) for value in _local_values(leaf)]
                return lambda arrays: PerReplica([make(arrays) for make in parts], leaf.layout)
            if isinstance(leaf, IndexedSlices):
                return lambda arrays: leaf.map_arrays(lambda own: maker(own)(arrays))
            return lambda _: leaf

        makers = [maker(leaf) for leaf in self._leaves]
        numbered = self._numbered
        if type(numbered) is int:
            return makers[0]
        if type(numbered) is tuple and numbered == tuple(range(len(makers))):
            return lambda arrays: tuple([make(arrays) for make in makers])
        return lambda arrays: map_structure(lambda number: makers[number](arrays), numbered)


def require_no_traced_parts(result: object) -> None:
    """Raises if a result that JAX takes for a leaf has attributes that belong to the trace.

    The arrays in it would not become those of a call: code after the call would find tracers.
    """
    name = _traced_attribute(result)
    if name is not None:
        kind = type(result).__name__
        raise errors.ArgumentTypeError(
            "A result of a compiled function must be a structure of arrays that JAX knows",
            f"{kind} is none, and its attribute {name!r} holds an array of the trace",
            "Return a tuple, a named tuple or a dict, or register the class, for example with "
            "`jax.tree_util.register_dataclass`.",
        )


def _traced_attribute(value: object, level: int = 0) -> str | None:
    """Returns the name of an attribute that holds a tracer, also in a structure or object."""
    if isinstance(value, ArraySurface | type) or callable(value):
        return None
    own = getattr(value, "__dict__", None)
    names = list(own) if isinstance(own, dict) else []
    names += [n for cls in type(value).__mro__ for n in _slots_of(cls) if hasattr(value, n)]
    for name in names:
        for leaf in leaves_of(getattr(value, name, None)):
            own_value = leaf.local if isinstance(leaf, TracedPerReplica) else leaf
            if any(map(jax_compat.is_of_current_trace, jax.tree.leaves(own_value))):
                return name
            if level < _MOST_LEVELS and _traced_attribute(leaf, level + 1) is not None:
                return name
    return None


def _slots_of(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _first_shard(index: int) -> _Maker:
    """Returns what makes the result of an output that is equal on the devices of a mesh."""

    def make(arrays: Sequence[jax.Array]) -> Tree:
        array = arrays[index].addressable_data(0)
        return jax_compat.uncommitted_view(array) if array.committed else array

    return make


def _only_shard(index: int) -> _Maker:
    """Returns what makes the result of an output on one device."""

    def make(arrays: Sequence[jax.Array]) -> Tree:
        array = arrays[index]
        return jax_compat.uncommitted_view(array) if array.committed else array

    return make


def _local_values(value: PerReplica) -> tuple[Any, ...]:
    """Returns the components of local replicas: a program has made those of all."""
    layout = value.layout
    if layout is None or len(value.values) != layout.num_replicas:
        return value.values
    return value.values[layout.first_local : layout.first_local + layout.num_local]


def _result(
    slot: Slot,
    arrays: Sequence[jax.Array],
    layout: ReplicaLayout | None,
    mesh: ReplicaLayout | None,
) -> Tree:
    if slot.kind == "per_replica" and slot.layout is not None:
        stored = arrays[slot.index : slot.index + slot.count]
        if slot.layout != layout:
            # Replicas of another strategy than the one whose devices ran the program.
            stored = jax.device_put(stored, slot.layout.per_replica)
        return PerReplica.from_stored(stored, slot.scalars, slot.treedef, slot.layout)
    array = arrays[slot.index]
    if slot.kind == "mirrored":
        copies = (array,) if mesh is None else mesh.copies(array)
        copies = tuple(map(placement.uncommitted, copies))
        is_each = len(copies) == slot.count or (mesh is not None and mesh.spans_processes)
        return Mirrored(copies if is_each else copies[:1] * slot.count)
    first = array if mesh is None else array.addressable_data(0)
    return placement.uncommitted(first) if first.committed else first


@overload
def as_array(leaf: ArrayLike) -> jax.Array: ...


@overload
def as_array(leaf: object) -> object: ...


def as_array(leaf: object) -> object:
    """Converts numbers and variables to arrays; returns other values unchanged."""
    if isinstance(leaf, Variable):
        return leaf.read_value()
    if isinstance(leaf, bool | int | float | complex | np.ndarray):
        return jnp.asarray(leaf)
    return jnp.asarray(leaf) if signature.is_numpy_number(leaf) else leaf


def _treedef(slot: Slot) -> TreeDef:
    assert slot.treedef is not None
    return slot.treedef


def _tree(skeleton: Tree) -> TreeDef:
    leaves = (Slot, PerReplica, ArraySurface, IndexedSlices)
    return jax.tree.structure(skeleton, is_leaf=lambda leaf: isinstance(leaf, leaves))


def _is_same_leaf(one: object, other: object) -> bool:
    if isinstance(one, IndexedSlices) and isinstance(other, IndexedSlices):
        return (one.values, one.indices) == (other.values, other.indices)
    return one is other or (type(one) is type(other) and bool(one == other))


def _replicas_of_steps(layout: ReplicaLayout, array: jax.Array, is_scalar: bool) -> jax.Array:
    """Turns [step, all replicas] into the stored array of [replica, steps]."""
    local = layout.local_shape(array.shape[1:], is_scalar)
    rows = array.reshape((array.shape[0], layout.num_replicas, *local))
    return rows.swapaxes(0, 1).reshape((layout.num_replicas * array.shape[0], *local))
