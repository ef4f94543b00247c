"""PerReplica and Mirrored: one value on each replica, different or equal."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from replicax.foundation import devices, errors, jax_compat
from replicax.foundation.peers import Peers
from replicax.foundation.types import Tree
from replicax.values import printing
from replicax.values.array_surface import ArrayOperators, ArraySurface, elementwise_equal
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import AXIS, ReplicaLayout

# Per replica of all processes, the shape of each leaf of its component.
AllShapes: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]

# Returned by the finder where code acts for all replicas, or for none.
NOT_HERE = object()


class _Finder:
    # Set once by execution/running_replica.py: values import no contexts.
    find: Callable[[PerReplica], Any] = staticmethod(lambda value: NOT_HERE)


def set_finder(find: Callable[[PerReplica], Any]) -> None:
    """Sets the function that returns the running replica's component of a value, or NOT_HERE."""
    _Finder.find = staticmethod(find)


class DistributedValues:
    """A value for each replica.

    >>> PerReplica((1, 2))
    PerReplica:{
      0: 1,
      1: 2
    }
    """

    __slots__ = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The value of each replica, in replica order."""
        raise NotImplementedError

    def __repr__(self) -> str:
        values = self.values
        return printing.braces(
            type(self).__name__, len(values), lambda i: printing.describe(values[i])
        )


class PerReplica(DistributedValues, ArrayOperators):
    """A different value on each replica; replica code that captures one computes with its own.

    Raises:
      InvalidArgumentError: There is not one component for each replica, their ranks differ between
        workers, or it is used as one array.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> values = strategy.experimental_distribute_values_from_function(
    ...     lambda context: context.replica_id_in_sync_group
    ... )
    >>> isinstance(values, rx.PerReplica), len(values.values)
    (True, 2)
    """

    # Either `_components` (one object per replica, of any kind) or `_stored` (per leaf of
    # the components' structure `_treedef`, the stored array of all replicas) is set first;
    # the other is made on demand. `_scalars` holds which leaves are scalars locally.
    # With a layout of several processes, `_components` are those of the local replicas.
    __slots__ = (
        "__weakref__",
        "_all_shapes",
        "_components",
        "_scalars",
        "_stored",
        "_treedef",
        "layout",
    )

    def __init__(
        self,
        values: Sequence[Any],
        layout: ReplicaLayout | None = None,
        all_shapes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._components: tuple[Any, ...] | None = tuple(values)
        # Per replica of all processes, the shape of each leaf; None if they are not known here.
        self._all_shapes: AllShapes | None = None
        if all_shapes is not None:
            self._all_shapes = tuple((tuple(shape),) for shape in all_shapes)
        self._stored: tuple[Any, ...] | None = None
        self._treedef: Any = None
        self._scalars: tuple[bool, ...] = ()
        self.layout = layout

    @classmethod
    def from_stored(
        cls,
        stored: Sequence[Tree],
        scalars: Sequence[bool],
        treedef: object,
        layout: ReplicaLayout,
    ) -> PerReplica:
        """Wraps arrays that already hold the values of all replicas."""
        self = cls((), layout)
        self._components = None
        self._stored, self._scalars, self._treedef = tuple(stored), tuple(scalars), treedef
        return self

    @property
    def values(self) -> tuple[Any, ...]:
        if self._components is None:
            assert self._stored is not None and self.layout is not None
            leaves = [
                self.layout.split(a, s) for a, s in zip(self._stored, self._scalars, strict=True)
            ]
            self._components = tuple(
                jax.tree.unflatten(self._treedef, parts) for parts in zip(*leaves, strict=True)
            )
            register_components(self, self._components)
        return self._components

    @property
    def treedef(self) -> Any:
        """The structure of one component, set by the first call of `stored`."""
        return self._treedef

    @property
    def scalars(self) -> tuple[bool, ...]:
        """Which leaves of a component are scalars, set by the first call of `stored`."""
        return self._scalars

    @property
    def is_stored(self) -> bool:
        """Whether the components are joined: then they are arrays, of one shape and type."""
        return self._stored is not None

    @property
    def is_split(self) -> bool:
        """Whether the components exist one by one; otherwise `values` makes them."""
        return self._components is not None

    @property
    def num_components(self) -> int:
        """The number of components; taking stored arrays apart is not needed for it."""
        if self._components is not None:
            return len(self._components)
        assert self.layout is not None and self._stored is not None
        is_traced = any(map(jax_compat.is_traced, self._stored))
        return self.layout.num_replicas if is_traced else self.layout.num_local

    def require_replicas(self, layout: ReplicaLayout) -> None:
        """Raises unless there is a component for each local replica; in a trace, for each."""
        count = layout.num_local
        if count != layout.num_replicas and self._is_traced():
            count = layout.num_replicas
        self.require_components(count)

    def _is_traced(self) -> bool:
        leaves = self._stored if self._components is None else jax.tree.leaves(self._components)
        return any(map(jax_compat.is_traced, leaves or ()))

    def require_components(self, count: int) -> None:
        """Raises unless there is one component for each of `count` replicas."""
        if self.num_components != count:
            raise errors.InvalidArgumentError(
                f"A PerReplica value needs one component for each of the {count} replicas",
                f"this one has {self.num_components}",
                "Make it under the strategy that uses it.",
            )

    def require_numbers(self, count: int) -> None:
        """Raises unless there are components of `count` replicas that arithmetic can combine."""
        if self.layout is None or self.layout.num_replicas != count:
            self.require_components(count)
        else:
            self.require_replicas(self.layout)
        if self._stored is None:
            for component in self.values:
                if not isinstance(component, jax.Array | IndexedSlices):
                    require_number(component)

    def stored(self, layout: ReplicaLayout) -> tuple[Any, ...] | None:
        """Returns the stored arrays of all replicas, or None if components are ragged."""
        if self._stored is not None and self.layout == layout:
            return self._stored
        self.require_replicas(layout)
        components = self.values
        flat = [jax.tree.flatten(c) for c in components]
        if layout.peers is not None and not self._is_traced():
            shapes = self.all_shapes(layout)
            if shapes is None or any(other != shapes[0] for other in shapes):
                return None
        if any(treedef != flat[0][1] for _, treedef in flat):
            return None
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        for column in columns:
            if not all(is_array_like(leaf) for leaf in column):
                return None
            if len({(np.shape(leaf), dtype_of(leaf)) for leaf in column}) != 1:
                return None
        is_traced = any(jax_compat.is_traced(leaf) for column in columns for leaf in column)
        with contextlib.nullcontext() if is_traced else jax_compat.eagerly():
            arrays = [[jax.numpy.asarray(leaf) for leaf in column] for column in columns]
            self._stored = tuple(layout.assemble(column) for column in arrays)
        self._treedef = flat[0][1]
        self._scalars = tuple(not column[0].shape for column in arrays)
        self.layout = layout
        return self._stored

    def all_shapes(self, layout: ReplicaLayout) -> AllShapes | None:
        """Returns, for each replica of all processes, the shapes of the leaves of its component.

        All processes call this together, unless the shapes came with the value. None if
        components are not arrays, or differ in structure or type.
        """
        if self._all_shapes is None:
            assert layout.peers is not None
            self._all_shapes = _gathered_shapes(layout.peers, self.values)
        return self._all_shapes or None

    def padded(self, layout: ReplicaLayout) -> tuple[Any, ...]:
        """Returns stored arrays of components that are padded to the largest shape of all."""
        shapes = self.all_shapes(layout)
        assert shapes is not None
        flat = [jax.tree.leaves(component) for component in self.values]
        arrays = []
        for i, column in enumerate(zip(*flat, strict=True)):
            found = [own[i] for own in shapes]
            if len(set(map(len, found))) > 1:
                raise errors.InvalidArgumentError(
                    "A compiled function needs arrays of one rank on all workers",
                    f"their shapes are {', '.join(map(str, found))}",
                    "Add dimensions of size 1 where they are missing.",
                )
            most = tuple(map(max, zip(*found, strict=True)))
            arrays.append(layout.assemble([_padded(leaf, most) for leaf in column]))
        return tuple(arrays)

    def of_all_replicas(self, layout: ReplicaLayout) -> PerReplica:
        """Returns a value of the local replicas as one of all, in the trace around the call.

        All processes call this together. A value that has the components of all replicas already,
        or whose components are not arrays of one structure, is returned as it is.
        """
        if layout.peers is None or self._is_traced():
            return self
        stored = self.stored(layout)
        if stored is not None:
            copies = [jax.numpy.copy(array) for array in stored]
            return PerReplica.from_stored(copies, self._scalars, self._treedef, layout)
        shapes = self.all_shapes(layout)
        if shapes is None:
            return self
        with jax_compat.eagerly():
            arrays = self.padded(layout)
        treedef = jax.tree.structure(self.values[0])
        return PerReplica(without_padding(arrays, shapes, treedef), layout)

    def _as_array(self) -> Any:
        own = _Finder.find(self)
        if own is NOT_HERE:
            raise errors.ArgumentTypeError(
                "Arithmetic on a PerReplica value needs a replica context",
                "this is the value of all replicas at once",
                "Pass it to `strategy.run(fn, args=(value,))`, or combine it first with "
                "`strategy.reduce(...)`.",
            )
        return own

    def own_value(self) -> Any:
        """Returns the running replica's component; raises outside of replica code."""
        own = _Finder.find(self)
        if own is NOT_HERE:
            raise errors.InvalidArgumentError(
                "Only a single value can become an array",
                "this is a PerReplica value outside of a replica context",
                "Use `strategy.reduce`, `strategy.gather` or "
                "`strategy.experimental_local_results`.",
            )
        return own

    def __bool__(self) -> bool:
        own = _Finder.find(self)
        if own is not NOT_HERE:
            return bool(own)
        raise errors.ArgumentTypeError(
            "`if`, `and`, `or`, `not` and `bool()` need one truth value",
            f"a PerReplica value has {self.num_components}, one for each replica",
            "Combine them first with `strategy.reduce(...)`, look at each one with "
            "`strategy.experimental_local_results(value)`, or test inside `strategy.run`.",
        )

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                text += (
                    ": it holds a value for each replica. Combine them with `strategy.reduce` or "
                    "`strategy.gather`, look at each one with "
                    "`strategy.experimental_local_results(value)`, or pass it to `strategy.run`"
                )
            raise AttributeError(text, name=name, obj=self)

    def __jax_array__(self) -> Any:
        return jax.numpy.asarray(self.own_value())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.array(self.__jax_array__(), dtype=dtype, copy=True)


class TracedPerReplica(PerReplica):
    """A PerReplica inside compiled replica code: this replica's value stands for all."""

    __slots__ = ("local",)

    def __init__(self, local: Tree, layout: ReplicaLayout) -> None:
        super().__init__((), layout)
        self._components = None
        self.local = local

    @property
    def values(self) -> tuple[Any, ...]:
        if self._components is None:
            assert self.layout is not None
            count = self.layout.num_replicas
            gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS), self.local)
            self._components = tuple(
                jax.tree.map(lambda x, i=i: x[i], gathered) for i in range(count)
            )
        return self._components

    @property
    def num_components(self) -> int:
        assert self.layout is not None
        return self.layout.num_replicas

    def require_replicas(self, layout: ReplicaLayout) -> None:
        """Raises unless the trace is one of as many replicas."""
        self.require_components(layout.num_replicas)

    def require_numbers(self, count: int) -> None:
        """Does nothing: the trace checks its own arrays."""

    def of_all_replicas(self, layout: ReplicaLayout) -> PerReplica:
        """Returns this value: its trace stands for all replicas."""
        return self

    def __repr__(self) -> str:
        return f"PerReplica:{{ {printing.describe(self.local)} on each replica }}"


class Mirrored(DistributedValues, ArraySurface):
    """An equal value on each replica; computes as the copy of the current device.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> with strategy.scope():
    ...     v = rx.Variable(2.0)
    ...     total = strategy.extended.reduce_to("SUM", strategy.run(lambda: 3.0), v)
    >>> float(total)
    6.0
    """

    __slots__ = ("__weakref__", "_components")

    def __init__(self, values: Sequence[Any]) -> None:
        self._components = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        return self._components

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._components[0].shape

    @property
    def dtype(self) -> Any:
        """The type of the value."""
        return self._components[0].dtype

    def _as_array(self) -> Any:
        device = devices.explicit()
        if device is not None:
            for copy in self._components:
                if not jax_compat.is_traced(copy) and device in copy.devices():
                    return copy
        return self._components[0]

    def __eq__(self, other: object) -> Any:
        return elementwise_equal(self, other)

    def __ne__(self, other: object) -> Any:
        equal = elementwise_equal(self, other)
        return equal if equal is NotImplemented else jax.numpy.logical_not(equal)

    __hash__ = object.__hash__  # type: ignore[assignment]


def _gathered_shapes(peers: Peers, components: Sequence[Tree]) -> AllShapes:
    """Exchanges the shapes of local components with all processes; () if they cannot be joined."""
    own: list[object] = []
    for component in components:
        leaves, treedef = jax.tree.flatten(component)
        if not all(map(is_array_like, leaves)):
            own.append(None)
            continue
        kinds = [[list(np.shape(leaf)), str(dtype_of(leaf))] for leaf in leaves]
        own.append([str(treedef), kinds])
    found = peers.exchange("shapes of a per-replica value", json.dumps(own).encode())
    replicas = [replica for one in found for replica in json.loads(one)]
    if any(replica is None for replica in replicas):
        return ()
    structures = {(tree, *(dtype for _, dtype in kinds)) for tree, kinds in replicas}
    if len(structures) > 1:
        return ()
    return tuple(tuple(tuple(shape) for shape, _ in kinds) for _, kinds in replicas)


def without_padding(arrays: Sequence[ArrayLike], shapes: AllShapes, treedef: Any) -> list[Tree]:
    """Returns the components of all replicas in stored arrays that `PerReplica.padded` made."""
    found: list[list[Tree]] = []
    for replica, own in enumerate(shapes):
        leaves: list[Tree] = []
        for i, shape in enumerate(own):
            most = tuple(max(other[i][d] for other in shapes) for d in range(len(shape)))
            row = jax.numpy.asarray(arrays[i]).reshape((len(shapes), *most))[replica]
            leaves.append(row[tuple(slice(size) for size in shape)])
        found.append(leaves)
    return [jax.tree.unflatten(treedef, leaves) for leaves in found]


def _padded(leaf: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(leaf)
    whole = np.zeros(shape, array.dtype)
    whole[tuple(slice(size) for size in array.shape)] = array
    return whole


# The container of a component, by the component's id. Entries go when the container goes;
# `container_of` confirms a hit by identity, since ids are reused.
_containers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register_components(container: object, components: Sequence[object]) -> None:
    """Registers a container as the owner of its components; the entry ends with the container."""
    for component in components:
        if isinstance(component, jax.Array):
            _containers[id(component)] = container


def container_of(component: object) -> Any:
    """Returns the distributed value or variable of a component, else the component."""
    container = _containers.get(id(component))
    if container is not None and any(v is component for v in container.values):
        return container
    return getattr(component, "container", component)


def is_array_like(value: object) -> bool:
    """Tells whether a leaf can become an array."""
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float | bool | complex)


def require_number(value: object) -> Any:
    """Returns a value that arithmetic can combine, or raises."""
    if isinstance(value, ArraySurface):
        return value.__jax_array__()
    if not is_array_like(value):
        raise errors.ArgumentTypeError(
            "A reduction needs arrays or numbers",
            f"{type(value).__name__} was given",
            "Pass results of `strategy.run` that are arrays.",
        )
    return value


def dtype_of(value: Tree) -> np.dtype:
    """Returns the dtype that a leaf has, or would get from JAX."""
    return value.dtype if hasattr(value, "dtype") else jax.numpy.asarray(value).dtype


def _flatten(value: PerReplica) -> tuple[Sequence[Any], bool]:
    own = _Finder.find(value)
    return (value.values, False) if own is NOT_HERE else ((own,), True)


# To JAX a per-replica value that replica code captured is the replica's own component.
jax.tree_util.register_pytree_node(
    PerReplica,
    _flatten,
    lambda is_own, values: values[0] if is_own else PerReplica(values),
)
# To JAX a mirrored value is any of its copies, as an argument of `jnp` functions and jit.
jax.tree_util.register_pytree_node(
    Mirrored, lambda value: ((value._components[0],), None), lambda _, value: value[0]
)
