"""Signatures of compiled functions: the key of a call's arguments, and specs of arrays."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from typing_extensions import TypeIs

from replicax.foundation import errors
from replicax.foundation.jax_compat import Device
from replicax.foundation.types import Tree, TreeDef
from replicax.tracing.iterators import Feed, PythonIterator, is_iterator
from replicax.values import printing
from replicax.values.array_surface import ArraySurface
from replicax.values.distributed_values import (
    AllShapes,
    Mirrored,
    PerReplica,
    TracedPerReplica,
    without_padding,
)
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import leaves_of, map_structure


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The shape and type of an argument; None in a shape fits every size.

    >>> TensorSpec((None, 2)).dtype
    dtype('float32')
    """

    shape: tuple[int | None, ...] | None = None
    dtype: Any = jnp.float32
    name: str | None = None

    if TYPE_CHECKING:
        # A list, or a name of a type, is converted.
        def __init__(
            self,
            shape: Sequence[int | str | None] | None = None,
            dtype: DTypeLike = jnp.float32,
            name: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Returns whether an array of this shape fits."""
        if self.shape is None:
            return True
        sizes = zip(self.shape, shape, strict=False)
        return len(self.shape) == len(shape) and all(a is None or a == b for a, b in sizes)


@dataclasses.dataclass(frozen=True)
class PerReplicaSpec:
    """The spec of a per-replica value: one spec per replica.

    >>> PerReplicaSpec((TensorSpec((None, 2)), TensorSpec((None, 2)))).dtype
    dtype('float32')
    """

    value_specs: tuple[TensorSpec, ...]

    def __repr__(self) -> str:
        first, *others = self.value_specs
        if all(spec == first for spec in others):
            return f"PerReplicaSpec({len(self.value_specs)} x {first})"
        return f"PerReplicaSpec({printing.listing([str(spec) for spec in self.value_specs])})"

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """The shape of each replica's value."""
        return self.value_specs[0].shape

    @property
    def dtype(self) -> Any:
        """The type of each replica's value."""
        return self.value_specs[0].dtype


@dataclasses.dataclass(frozen=True)
class Slot:
    """Replaces an array, or the arrays of a distributed value, in a skeleton."""

    index: int
    kind: str  # "array", "per_replica", "mirrored", or "traced" in compiled replica code
    count: int = 1
    layout: ReplicaLayout | None = None
    treedef: TreeDef | None = None
    scalars: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class RaggedSlot:
    """Replaces a per-replica argument whose components differ in shape."""

    # For each replica, the index of its first array, the number of arrays, and their structure.
    parts: tuple[tuple[int, int, TreeDef], ...]
    layout: ReplicaLayout | None


@dataclasses.dataclass(frozen=True)
class PaddedSlot:
    """Replaces a per-replica argument whose components differ in shape, on several processes.

    Its arrays hold the components of all replicas, padded to the largest shape.
    """

    index: int
    layout: ReplicaLayout
    treedef: TreeDef
    # Per replica, the shape of each leaf of its component.
    shapes: AllShapes

    def components(self, arrays: Sequence[ArrayLike]) -> list[Tree]:
        """Returns the component of each replica, without padding."""
        return without_padding(arrays[self.index :], self.shapes, self.treedef)


class Ragged(Exception):
    """Raised for per-replica arguments that one compiled program cannot take."""


class Arguments:
    """The arguments of one call, split into arrays and everything else."""

    __slots__ = ("_args", "_as_arrays", "_kwargs", "_layout", "_skeleton", "arrays", "feeds", "key")

    def __init__(
        self,
        args: Sequence[Tree],
        kwargs: dict[str, Tree],
        layout: ReplicaLayout | None,
        as_arrays: frozenset[int] = frozenset(),
    ) -> None:
        self.arrays: list[jax.Array | np.ndarray] = []
        # Indices, in the key, of Python numbers that are passed as arrays.
        self._as_arrays = as_arrays
        # Data iterators: one trace serves all of them, regardless of their identity.
        self.feeds: list[Feed] = []
        self._args, self._kwargs, self._layout = args, kwargs, layout
        self._skeleton: tuple[tuple[Tree, ...], dict[str, Tree]] | None = None
        entries = None if kwargs else self._entries_of_arrays()
        if entries is not None:
            self.key: Key = (entries, len(args))
            return
        key: list[Hashable] = []
        skeleton = self._skeleton = self._made_skeleton(key)
        self.key = (tuple(key), _structure_key(skeleton))

    def _entries_of_arrays(self) -> tuple[Hashable, ...] | None:
        """Adds arguments that are arrays, or stored arrays of all replicas, without structure.

        The common case, and the fast one: what a trace needs beyond the key is made on demand.

        Returns:
          Their entries in the key; None, with nothing added, if there are other arguments.
        """
        arrays: list[jax.Array | np.ndarray] = []
        key: list[Hashable] = []
        for argument in self._args:
            if isinstance(argument, PerReplica):
                layout = argument.layout
                if layout is None or not argument.is_stored:
                    return None
                if argument.is_split and _are_python_values(argument.values):
                    return None
                stored = argument.stored(layout)
                assert stored is not None
                key.append(_entry_of_stored(argument, stored, layout))
                arrays += stored
            elif isinstance(argument, jax.Array | np.ndarray):
                key.append(_entry_of_array(argument))
                arrays.append(argument)
            else:
                return None
        self.arrays = arrays
        return tuple(key)

    @property
    def skeleton(self) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """The arguments with slots instead of arrays."""
        if self._skeleton is None:
            self.arrays = []
            self._skeleton = self._made_skeleton([])
        return self._skeleton

    def _made_skeleton(self, key: list[Hashable]) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """Adds all arguments, and their entries to the key."""
        add, layout, kwargs = self._add, self._layout, self._kwargs

        def visit(leaf: object) -> Tree:
            return add(leaf, key, layout)

        return (
            tuple(map_structure(visit, a) for a in self._args),
            {name: map_structure(visit, kwargs[name]) for name in sorted(kwargs)},
        )

    def _add(self, leaf: object, key: list[Hashable], layout: ReplicaLayout | None) -> Tree:
        if isinstance(leaf, jax.Array | np.ndarray):
            return self._add_array(leaf, key)
        if is_numpy_number(leaf):
            # An array, as `jit` compiles one program for both.
            return self._add_array(np.asarray(leaf), key)
        if isinstance(leaf, PerReplica):
            return self._add_per_replica(leaf, key, layout)
        if isinstance(leaf, Mirrored):
            return self._add_mirrored(leaf, key)
        if isinstance(leaf, IndexedSlices):
            return leaf.map_arrays(lambda x: self._add(x, key, layout))
        if isinstance(leaf, Feed):
            key.append("iterator")
            self.feeds.append(leaf)
            return leaf
        if is_iterator(leaf):
            return self._add(PythonIterator(leaf), key, layout)
        is_number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
        if self._as_arrays and is_number and len(key) in self._as_arrays:
            # Weakly typed, as Python numbers are.
            return self._add_array(jnp.asarray(leaf), key)
        key.append(static_key(leaf))
        return leaf

    @property
    def python_numbers(self) -> dict[int, Hashable]:
        """The entries of Python numbers in the key, by their index."""
        return {
            index: entry
            for index, entry in enumerate(self.key[0])
            if isinstance(entry, tuple) and entry[0] == "static" and entry[1] in (int, float)
        }

    def _add_array(self, array: jax.Array | np.ndarray, key: list[Hashable]) -> Slot:
        key.append(_entry_of_array(array))
        self.arrays.append(array)
        return Slot(len(self.arrays) - 1, "array")

    def _add_mirrored(self, leaf: Mirrored, key: list[Hashable]) -> Slot:
        copies = [jnp.asarray(copy) for copy in leaf.values]
        layout = _layout_on([next(iter(copy.devices())) for copy in copies])
        key.append(("mirrored", copies[0].shape, copies[0].dtype, len(copies), layout))
        self.arrays.append(copies[0] if layout is None else layout.from_copies(copies))
        return Slot(len(self.arrays) - 1, "mirrored", len(copies), layout)

    def _add_per_replica(
        self, leaf: PerReplica, key: list[Hashable], layout: ReplicaLayout | None
    ) -> Slot | RaggedSlot | PaddedSlot | PerReplica:
        layout = leaf.layout or layout
        # Batches of datasets are not split, and stay so: splitting one in each call is slow.
        if leaf.is_split and _are_python_values(leaf.values):
            key.append(("per_replica_python", tuple(map(static_key, leaf.values))))
            return leaf
        if layout is None:
            # Made by hand: which replicas it is for is told by where it is used, so what is
            # assumed here is not kept.
            leaf, layout = PerReplica(leaf.values), _layout_of_components(leaf)
        if layout is None:
            return self._add_ragged(leaf, key, None)
        stored = leaf.stored(layout)
        if stored is None and layout.spans_processes:
            return self._add_padded(leaf, key, layout)
        if stored is None:
            return self._add_ragged(leaf, key, layout)
        start = len(self.arrays)
        self.arrays += stored
        key.append(_entry_of_stored(leaf, stored, layout))
        return Slot(start, "per_replica", len(stored), layout, leaf.treedef, leaf.scalars)

    def _add_padded(
        self, leaf: PerReplica, key: list[Hashable], layout: ReplicaLayout
    ) -> PaddedSlot:
        shapes = leaf.all_shapes(layout)
        if shapes is None:
            raise Ragged
        treedef = jax.tree.structure(leaf.values[0])
        slot = PaddedSlot(len(self.arrays), layout, treedef, shapes)
        arrays = leaf.padded(layout)
        self.arrays += arrays
        key.append(("padded", layout, shapes, tuple(a.dtype for a in arrays), treedef))
        return slot

    def _add_ragged(
        self, leaf: PerReplica, key: list[Hashable], layout: ReplicaLayout | None
    ) -> RaggedSlot:
        parts = []
        shapes: list[Hashable] = []
        for component in leaf.values:
            found, treedef = jax.tree.flatten(component)
            if not found or not all(map(_is_array, found)):
                raise Ragged
            parts.append((len(self.arrays), len(found), treedef))
            self.arrays += found
            shapes += [(a.shape, a.dtype) for a in found]
        key.append(("ragged", layout, tuple(shapes), tuple(p[2] for p in parts)))
        return RaggedSlot(tuple(parts), layout)


def _entry_of_array(array: jax.Array | np.ndarray) -> Hashable:
    return array.shape, array.dtype, getattr(array, "weak_type", False)


def _entry_of_stored(leaf: PerReplica, stored: tuple[Any, ...], layout: ReplicaLayout) -> Hashable:
    shapes = tuple([(array.shape, array.dtype) for array in stored])
    return "per_replica", layout, shapes, leaf.scalars, leaf.treedef


def _layout_of_components(leaf: PerReplica) -> ReplicaLayout | None:
    """Returns the replicas on the devices of a value's components; None if they share one."""
    arrays = [jax.tree.leaves(component) for component in leaf.values]
    if not all(found and isinstance(found[0], jax.Array) for found in arrays):
        return None
    return _layout_on([next(iter(found[0].devices())) for found in arrays])


def _are_python_values(values: tuple[Any, ...]) -> bool:
    first = values[0]
    is_python = isinstance(first, int | float | str) and not isinstance(first, np.number)
    return is_python and all(type(value) is type(first) for value in values)


def is_numpy_number(value: object) -> TypeIs[np.generic]:
    """Returns whether a value is a NumPy scalar, which is passed as an array.

    >>> is_numpy_number(np.float32(3)), is_numpy_number(3.0), is_numpy_number(np.str_("x"))
    (True, False, False)
    """
    if not isinstance(value, np.generic):
        return False
    return value.dtype.kind in "biufc" or jnp.issubdtype(value.dtype, np.number)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) or is_numpy_number(leaf)


def _layout_on(devices: Sequence[Device]) -> ReplicaLayout | None:
    """Returns the layout of replicas on these devices: one on each, or all on one."""
    num_devices = len(set(devices))
    if num_devices == len(devices):
        return ReplicaLayout(devices)
    return ReplicaLayout(devices[:1], len(devices)) if num_devices == 1 else None


def fill(skeleton: Tree, arrays: Sequence[ArrayLike]) -> Tree:
    """Puts arrays (or tracers) back into the structure that they came from."""

    def visit(leaf: object) -> Tree:
        if isinstance(leaf, IndexedSlices):
            return leaf.map_arrays(visit)
        if isinstance(leaf, RaggedSlot):
            components = [jax.tree.unflatten(t, arrays[a : a + n]) for a, n, t in leaf.parts]
            return PerReplica(components, leaf.layout)
        if isinstance(leaf, PaddedSlot):
            return PerReplica(leaf.components(arrays), leaf.layout)
        if not isinstance(leaf, Slot):
            return leaf
        if leaf.kind == "array":
            return arrays[leaf.index]
        if leaf.kind == "mirrored":
            return Mirrored((arrays[leaf.index],) * leaf.count)
        own = arrays[leaf.index : leaf.index + leaf.count]
        assert leaf.layout is not None
        if leaf.kind == "traced":
            return TracedPerReplica(jax.tree.unflatten(leaf.treedef, own), leaf.layout)
        return PerReplica.from_stored(own, leaf.scalars, leaf.treedef, leaf.layout)

    return map_structure(visit, skeleton)


def layouts_of(skeleton: Tree) -> list[ReplicaLayout]:
    """Returns the layouts that the arguments of a call are distributed over."""
    slots = [leaf for leaf in leaves_of(skeleton) if isinstance(leaf, Slot | PaddedSlot)]
    return [slot.layout for slot in slots if slot.layout is not None]


def apply_input_signature(
    fn: Callable[..., Tree],
    signature: Sequence[Tree],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
) -> tuple[Tree, ...]:
    """Converts arguments to the types of a signature, or raises if one does not fit."""
    if kwargs:
        args = inspect.signature(fn).bind(*args, **kwargs).args
    if len(args) != len(signature):
        raise errors.ArgumentTypeError(
            f"{_name(fn)} has an input_signature of {len(signature)} arguments",
            f"{len(args)} were given",
            "Pass one argument per entry.",
        )

    name = _name(fn)
    return tuple(
        map_structure(functools.partial(fitted, name), spec, value)
        for spec, value in zip(signature, args, strict=True)
    )


class _Spec(Protocol):
    """A spec of an array: `TensorSpec`, `PerReplicaSpec` or `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


def fitted(name: str, spec: _Spec, value: Tree) -> Tree:
    """Converts an argument of the function `name` to a spec, or raises if it does not fit."""
    if isinstance(value, PerReplica):
        _require_components(name, spec, value)
        return value
    if not hasattr(spec, "dtype"):
        return value
    if not isinstance(spec, TensorSpec):
        spec = TensorSpec(spec.shape, spec.dtype)
    if isinstance(value, int | float | bool | complex):
        value = jnp.asarray(value, spec.dtype)
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    if not spec.accepts(array.shape) or array.dtype != _array_type(spec):
        raise errors.InvalidArgumentError(
            f"{name} needs an argument of shape {spec.shape} and type {spec.dtype}",
            f"shape {array.shape} and type {array.dtype} were given",
            "Convert the argument, or change the signature.",
        )
    return array


def _array_type(spec: _Spec) -> np.dtype:
    """Returns the type of the arrays that fit a spec: of 32 bits, unless JAX has 64-bit types."""
    return jax.dtypes.canonicalize_dtype(spec.dtype)


def _require_components(name: str, spec: object, value: PerReplica) -> None:
    """Raises unless the components of a distributed value fit a spec per replica."""
    if not isinstance(spec, PerReplicaSpec):
        return
    value.require_components(len(spec.value_specs))
    for i, (own, component) in enumerate(zip(spec.value_specs, value.values, strict=True)):
        if not own.accepts(component.shape) or component.dtype != _array_type(own):
            raise errors.InvalidArgumentError(
                f"{name} needs shape {own.shape} and type {own.dtype} on replica {i}",
                f"shape {component.shape} and type {component.dtype} were given",
                "Pass elements of the dataset whose element_spec this is.",
            )


# The entries of the leaves, and the structure.
Key: TypeAlias = tuple[tuple[Hashable, ...], Hashable]


def difference(old: Key, new: Key) -> str:
    """Describes how two keys of arguments differ."""
    if old[1] != new[1]:
        return "the structure of the arguments changed"
    changed = [
        f"argument {i}: {_show(a)} became {_show(b)}"
        for i, (a, b) in enumerate(zip(old[0], new[0], strict=False))
        if _differ(a, b)
    ]
    if len(old[0]) != len(new[0]):
        return "the number of arguments changed"
    return "; ".join(changed) or "settings of JAX or the strategy in scope changed"


def _differ(a: object, b: object) -> bool:
    """Compares two entries of keys; variables in them are compared by identity."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) != len(b) or any(map(_differ, a, b))
    if isinstance(a, ArraySurface) or isinstance(b, ArraySurface):
        return a is not b
    return a != b


def _show(key: Hashable) -> str:
    if isinstance(key, tuple) and len(key) == 3 and isinstance(key[0], tuple):
        return f"{key[1]}{list(key[0])}"
    if isinstance(key, tuple) and key[:1] == ("static",):
        return f"{key[2]!r}"
    return f"{key}"


def static_key(leaf: object) -> Hashable:
    """Returns the entry of a Python value in a key."""
    if isinstance(leaf, ArraySurface):
        return ("static", "variable", leaf)
    if isinstance(leaf, float | complex):
        # By its text: 0.0 and -0.0 are equal, and nan is not equal to itself.
        return ("static", type(leaf), repr(leaf))
    try:
        hash(leaf)
    except TypeError:
        raise errors.ArgumentTypeError(
            "An argument of a compiled function must be an array, a structure of arrays "
            "or hashable",
            f"{type(leaf).__name__} is none of these",
            "Pass arrays, or capture the object from outside the function.",
        ) from None
    return ("static", type(leaf), leaf)


def _structure_key(skeleton: tuple[tuple[Tree, ...], dict[str, Tree]]) -> Hashable:
    args, kwargs = skeleton
    if all(isinstance(a, Slot) for a in args) and not kwargs:
        return len(args)
    leaves = (Slot, RaggedSlot, PaddedSlot, PerReplica, ArraySurface)
    return jax.tree.structure((args, kwargs), is_leaf=lambda x: isinstance(x, leaves))


def _name(fn: Callable[..., Tree]) -> str:
    return f"`{getattr(fn, '__name__', type(fn).__name__)}`"


def require_arguments(args: object, kwargs: object) -> None:
    """Raises unless these are the arguments of a call: a list or tuple, and a mapping or None."""
    if not isinstance(args, list | tuple):
        raise errors.InvalidArgumentError(
            "`args` must be a list or tuple",
            f"it is {type(args).__name__}",
            "For a single argument pass `args=(value,)`.",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise errors.ArgumentTypeError(
            "`kwargs` must be a dict of keyword arguments",
            f"it is {type(kwargs).__name__}",
            'Pass e.g. `kwargs={"name": value}`.',
        )
