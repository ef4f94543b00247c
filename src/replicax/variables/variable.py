"""`Variable`: mutable state that behaves like an array."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import ArrayLike, DTypeLike
from typing_extensions import Unpack

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode, Strategy, StrategyHooks
from replicax.contexts.overlay import UnsharedState
from replicax.foundation import devices, errors, gate, jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.notebook import html_table
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.foundation.types import Tree
from replicax.values import printing
from replicax.values.array_surface import ArraySurface, as_operand, elementwise_equal
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import ReplicaLayout
from replicax.variables import creators, row_numbers, slicing, updates
from replicax.variables.facts import Reference, Shape, table_rows
from replicax.variables.updates import Payload


class _VariableMeta(type):
    """Sends `rx.Variable(...)` through the creator stack, so that scopes can replace it."""

    if not TYPE_CHECKING:  # which then looks at `__init__`

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is Variable:
                return creators.create(*args, **kwargs)
            return super().__call__(*args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The arguments of the constructor, for `help()` and editors."""
        found = inspect.signature(cls.__init__)
        return found.replace(parameters=list(found.parameters.values())[1:])


class Variable(ArraySurface, UnsharedState, metaclass=_VariableMeta):
    """An array that can be changed, placed by the strategy in whose scope it is made.

    Args:
      initial_value: An array-like, or a function without arguments that returns one.
      trainable: Whether optimizers change it; by default yes, unless synchronized ON_READ.
      name: Its name; need not be unique.
      dtype, shape: Its type and shape, if the initial value is to be converted or checked.
      synchronization: When copies are brought into agreement.
      aggregation: How the replicas' writes (or ON_READ copies) become one value.
      constraint: What optimizers apply to each new value.
      per_worker_variable: Whether each worker of a `ParameterServerStrategy` has a copy of its own,
        which is not synchronized; `read_all()` returns all. Other strategies have one worker.

    Raises:
      ContextError: An update runs under a strategy that does not own it; `initial_value` is read.
      InvalidArgumentError: A value, or the indices of an update, do not fit the variable.
      OutOfRangeError: An index of `variable[index]` is known to be out of range.
      ArgumentTypeError: A scatter method was given something else than IndexedSlices.
      UnsupportedError: A subclass was called.

    >>> v = Variable(1.0, name="v")
    >>> v.assign_add(2.0)
    <rx.Variable 'v:0' shape=() dtype=float32, numpy=3.0>
    """

    __slots__ = (
        "__weakref__",
        "aggregation",
        "constraint",
        "dtype",
        "intended_device",
        "is_lent",
        "layout",
        "mesh_copy",
        "name",
        "owner",
        "shape",
        "stored",
        "synchronization",
        "trainable",
    )
    # Whether `stored` holds the values of all replicas next to each other.
    is_per_replica = False
    # Whether another process holds the value; `stored` is None then.
    is_remote = False

    def __init_subclass__(cls) -> None:
        # To JAX a variable is its value, read when functions of `jnp` and transformations get it.
        jax.tree_util.register_pytree_node(
            cls,
            lambda variable: ((variable.read_value(),), None),
            lambda _, value: value[0],  # type: ignore[arg-type,return-value]
        )

    def __init__(
        self,
        initial_value: ArrayLike | Sequence[Any] | Callable[[], Any] | None = None,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        shape: int | Sequence[int] | None = None,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
        constraint: Callable[[jax.Array], jax.Array] | None = None,
        per_worker_variable: bool = False,
        **ignored: Unpack[creators.IgnoredArguments],
    ) -> None:
        # For the signature of `rx.Variable`: the metaclass passes the arguments to the creators.
        raise errors.UnsupportedError(
            "Variables are made with rx.Variable, in the scope of a strategy",
            f"{type(self).__name__} was called",
            "Call rx.Variable; the strategy decides of which kind it is.",
        )

    def set_up(
        self,
        attributes: creators.VariableAttributes,
        stored: jax.Array | None,
        *,
        owner: StrategyHooks | None = None,
        layout: ReplicaLayout | None = None,
    ) -> None:
        """Sets what variables of all kinds have."""
        self.name: str = attributes.name
        self.shape: tuple[int, ...] = attributes.shape  # type: ignore[override]
        self.dtype: np.dtype = attributes.dtype  # type: ignore[override]
        self.trainable = attributes.trainable
        self.synchronization: VariableSynchronization = attributes.synchronization
        self.aggregation: VariableAggregation = attributes.aggregation
        self.constraint = attributes.constraint
        # The strategy's StrategyExtended, or None outside of every scope.
        self.owner: StrategyHooks | None = owner
        self.layout: ReplicaLayout | None = layout
        # The array behind the variable; None until a compiled function that creates the
        # variable has run. Read and replaced by compiled functions, under `gate.state`.
        self.stored: Any = stored
        # Where a variable with one copy belongs, if a compiled function creates it.
        self.intended_device: Device | None = None
        # Whether other objects may hold (a part of) `stored`: then it must not be donated.
        self.is_lent = True
        # A cache of compiled functions on other devices: a `stored` array, and its copy on their
        # devices, valid while `stored` is that array.
        self.mesh_copy: tuple[jax.Array, jax.Array] | None = None

    # Facts.

    @property
    def placement(self) -> tuple[Device, ...]:
        """The devices that hold a copy."""
        if self.layout is not None:
            return self.layout.local_devices
        if self.stored is None or jax_compat.is_traced(self.stored):
            return (self.intended_device or devices.current(),)
        return tuple(self.stored.devices())

    @property
    def replicas(self) -> ReplicaLayout:
        """The layout of a variable with a copy on each replica."""
        assert self.layout is not None
        return self.layout

    @property
    def device(self) -> str:
        """The canonical name of the first device that holds a copy."""
        return devices.name_of(self.placement[0])

    @property
    def sharding_of_stored(self) -> Sharding | None:
        """The sharding that new values of `stored` must have; None to leave it to JAX."""
        return None if self.stored is None else self.stored.sharding

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def components(self) -> tuple[Variable, ...]:
        """The copies of the variable; itself, if there is only one."""
        return (self,)

    @property
    def distribute_strategy(self) -> Strategy | None:
        """The strategy in whose scope it was made; None outside of every scope."""
        return None if self.owner is None else self.owner.container_strategy

    @property
    def initial_value(self) -> NoReturn:
        """Not kept, as it may be as large as the variable: raises, as TensorFlow does eagerly."""
        raise errors.ContextError(
            "The initial value of a variable is not kept after it was made",
            f"that of variable {self.name!r} was read",
            "Keep the value or the initialiser, or copy `read_value()` before training.",
        )

    def get_shape(self) -> Shape:
        """Returns the shape: a tuple that also has `as_list()` and `num_elements()`.

        >>> Variable([[1.0, 2.0]]).get_shape().as_list()
        [1, 2]
        """
        return Shape(self.shape)

    def is_initialized(self) -> bool:
        """Tells whether it has a value; False while the function that creates it runs."""
        return self.stored is not None or self.is_remote

    def ref(self) -> Reference[Self]:
        """Returns a hashable handle of this variable; `deref()` gives the variable back."""
        return Reference(self)

    # Reading.

    def read_value(self) -> jax.Array:
        """Returns the current value as an array."""
        frame = frames.current()
        self.check_frame(frame, "The value of")
        return self.read(frame)

    value = read_value

    def numpy(self) -> np.ndarray:
        """Returns a copy of the current value."""
        with self._reading():
            return np.array(self.read_value(), copy=True)

    def read(self, frame: Frame) -> jax.Array:
        """Returns the value that code in `frame` sees."""
        if frame.overlay is not None:
            return frame.overlay.read(self)
        require_readable(self, frame)
        with gate.state():
            self.is_lent = True
            array = self.stored
        if frame.replica_id is not None and frame.layout is not None:
            return placement.put(array, frame.layout.local_devices[frame.replica_id])
        return placement.uncommitted(array)

    def sparse_read(self, indices: ArrayLike) -> jax.Array:
        """Returns the rows with the given indices.

        Raises for an index out of range; compiled code returns NaN there.
        """
        ids = row_numbers.checked("sparse_read", self, as_operand(indices))
        return row_numbers.take(self.read_value(), ids)

    def gather_nd(self, indices: ArrayLike) -> jax.Array:
        """Returns the elements or rows at vectors of indices; out of range as `sparse_read`."""
        vectors = jnp.asarray(as_operand(indices))
        if not vectors.ndim:
            raise errors.InvalidArgumentError(
                "`gather_nd` needs vectors of indices", "a scalar was given", "Pass `[index]`."
            )
        vectors = row_numbers.checked("gather_nd", self, vectors, vectors.shape[-1])
        return row_numbers.take_at(self.read_value(), vectors)

    def __getitem__(self, index: slicing.Index) -> Any:
        """Returns a part of the value, whose `assign` changes that part of the variable.

        >>> v = Variable([1.0, 2.0, 3.0], name="v")
        >>> v[1:].assign([5.0, 6.0])
        <rx.Variable 'v:0' shape=(3,) dtype=float32, numpy=array([1., 5., 6.], dtype=float32)>
        >>> v[0] + v[1]
        Array(6., dtype=float32)
        """
        index = slicing.in_range(as_operand(index), self.shape, self.name)
        change = functools.partial(self._update_part, index)
        return slicing.with_methods(self.read_part(index), change)

    def read_part(self, index: slicing.Index) -> jax.Array:
        """Returns a part of the value, in an array object that is used for nothing else."""
        whole = self.read_value()
        part = whole[index]
        return jax_compat.alias(part) if part is whole else part  # as for `[:]`

    # Writing.

    def _update_part(
        self,
        index: slicing.Index,
        kind: str,
        value: object,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Does what `assign`, `assign_add` and `assign_sub` of a part do."""
        return self._update(kind, (index, value), read_value)

    def assign(
        self,
        value: object,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Sets the value."""
        return self._update("assign", value, read_value)

    def assign_add(
        self,
        delta: object,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Adds to the value."""
        return self._update("assign_add", delta, read_value)

    def assign_sub(
        self,
        delta: object,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtracts from the value."""
        return self._update("assign_sub", delta, read_value)

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Adds rows."""
        return self._update("scatter_add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Subtracts rows."""
        return self._update("scatter_sub", sparse_delta)

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Multiplies rows."""
        return self._update("scatter_mul", sparse_delta)

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Divides rows."""
        return self._update("scatter_div", sparse_delta)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Takes the smaller of old and given rows, element by element."""
        return self._update("scatter_min", sparse_delta)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Takes the larger of old and given rows, element by element."""
        return self._update("scatter_max", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Replaces rows."""
        return self._update("scatter_update", sparse_delta)

    def scatter_nd_add(
        self, indices: ArrayLike, updates: ArrayLike, name: str | None = None
    ) -> Any:
        """Adds elements or rows at vectors of indices."""
        return self._update("scatter_add", IndexedSlices(updates, indices))

    def scatter_nd_sub(
        self, indices: ArrayLike, updates: ArrayLike, name: str | None = None
    ) -> Any:
        """Subtracts elements or rows at vectors of indices."""
        return self._update("scatter_sub", IndexedSlices(updates, indices))

    def scatter_nd_update(
        self, indices: ArrayLike, updates: ArrayLike, name: str | None = None
    ) -> Any:
        """Replaces elements or rows at vectors of indices."""
        return self._update("scatter_update", IndexedSlices(updates, indices))

    def scatter_nd_max(
        self, indices: ArrayLike, updates: ArrayLike, name: str | None = None
    ) -> Any:
        """Takes the larger of old and given elements or rows at vectors of indices."""
        return self._update("scatter_max", IndexedSlices(updates, indices))

    def scatter_nd_min(
        self, indices: ArrayLike, updates: ArrayLike, name: str | None = None
    ) -> Any:
        """Takes the smaller of old and given elements or rows at vectors of indices."""
        return self._update("scatter_min", IndexedSlices(updates, indices))

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Replaces rows of each part along the first dimensions.

        With indices of shape (a, b, n), element (i, j, k) of them names the row `v[i, j, index]`
        that the value (i, j, k) replaces.

        >>> v = Variable([[1.0, 2.0], [3.0, 4.0]], name="v")
        >>> v.batch_scatter_update(IndexedSlices([[9.0], [8.0]], [[1], [0]])).numpy().tolist()
        [[1.0, 9.0], [8.0, 4.0]]
        """
        slices = updates.batch_slices(self, "batch_scatter_update", sparse_delta)
        return self._update("scatter_update", slices)

    def _update(self, kind: str, value: object, read_value: bool = True) -> Self | None:
        frame = frames.current()
        if self.owner is not None and self.owner is not frame.hooks and not frame.is_default:
            raise self._wrong_strategy(frame, f"`{slicing.api_of(kind)}` of")
        if frame.overlay is None:
            require_concrete(self, value)
        self.apply_update(frame, kind, updates.checked_payload(self, kind, value))
        reads = frame.eager_reads
        if reads is not None and reads.has_inner_reads:
            reads.renew()
        return self if read_value else None

    def apply_update(self, frame: Frame, kind: str, payload: Payload) -> None:
        """Applies an update from code in `frame`."""
        layout = frame.layout
        if frame.mode is Mode.REPLICA and layout is not None and layout.num_replicas > 1:
            raise errors.ContextError(
                f"A write to variable {self.name!r} by several replicas needs copies "
                "that the strategy keeps in agreement",
                f"the variable was created outside the scope of {frame.describe()}",
                "Create it inside `with strategy.scope():`, with an `aggregation=`.",
            )
        self.apply_directly(frame, kind, payload)

    def apply_directly(self, frame: Frame, kind: str, payload: Payload) -> None:
        """Applies an update to what code in `frame` sees, as one step."""
        if frame.overlay is not None:
            self.store(frame, updates.apply(kind, self.read(frame), payload))
            return
        with gate.state():
            old = self.read_copy(frame.replica_id or 0)
            self.store(frame, updates.apply_beside(kind, old, payload))

    def read_copy(self, replica_id: int) -> jax.Array:
        """Returns one copy, whatever code is running."""
        del replica_id
        with gate.state():
            self.is_lent = True
            return self.stored

    def store_all_copies(self, frame: Frame, value: ArrayLike) -> None:
        """Replaces the value of every copy."""
        self.store(frame, value)

    def store(self, frame: Frame, value: ArrayLike) -> None:
        """Replaces the value, in the view that code in `frame` has of it."""
        if frame.overlay is not None:
            frame.overlay.write(self, value)
            return
        require_concrete(self, value)
        with gate.state():
            self.stored = jax.device_put(value, self.sharding_of_stored)
            self.is_lent = True

    # Being part of a program.

    def check_frame(self, frame: Frame, what: str) -> None:
        """Raises if the variable belongs to another strategy than the current one."""
        if self.owner is not None and self.owner is not frame.hooks and not frame.is_default:
            raise self._wrong_strategy(frame, what)

    def _wrong_strategy(self, frame: Frame, what: str) -> errors.ContextError:
        assert self.owner is not None
        return errors.ContextError(
            f"{what} variable {self.name!r} needs the strategy that owns it, "
            f"{type(self.owner.container_strategy).__name__}",
            f"this is {frame.describe()}",
            "Leave that scope first, or create the variable in it.",
        )

    def initialize(self, value: ArrayLike) -> None:
        """Sets the first value of a variable that a compiled function created."""
        array = jnp.array(value, dtype=self.dtype, copy=True)
        self.stored = jax.device_put(array, self.intended_device or array.sharding)

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        clone = copy.copy(self)
        memo[id(self)] = clone
        return clone

    def __copy__(self) -> Variable:
        clone = object.__new__(type(self))
        for cls in type(self).__mro__:
            for slot in getattr(cls, "__slots__", ()):
                if slot != "__weakref__" and hasattr(self, slot):
                    object.__setattr__(clone, slot, getattr(self, slot))
        # Both now hold one array; the first donation copies it.
        self.is_lent = clone.is_lent = True
        return clone

    def _as_array(self) -> jax.Array:
        return self.read_value()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a variable without dimensions")
        return self.shape[0]

    def __eq__(self, other: object) -> Any:
        return True if other is self and not self.shape else elementwise_equal(self, other)

    def __ne__(self, other: object) -> Any:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else jnp.logical_not(equal)

    __hash__ = object.__hash__  # type: ignore[assignment]

    def describe(self) -> str:
        """Describes one copy by name, shape, type and content."""
        head = f"<rx.Variable '{self.name}:0' shape={self.shape} dtype={self.dtype}"
        value = None if self.stored is None else self.read(frames.current())
        if value is None or jax_compat.is_traced(value):
            return f"{head}, traced>"
        return f"{head}, numpy={printing.content(value)}>"

    def __repr__(self) -> str:
        return self.describe()

    def __format__(self, spec: str) -> str:
        if not spec and not self.shape:
            try:
                return super().__format__(spec)
            except errors.DistributeError:
                # No value yet, or copies without an aggregation: describe it.
                return str(self)
        return super().__format__(spec)

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, table_rows(self))


class LocalVariable(Variable):
    """A variable whose array is in this process."""

    __slots__ = ()

    def __init__(
        self,
        attributes: creators.VariableAttributes,
        stored: jax.Array | None,
        *,
        owner: StrategyHooks | None = None,
        layout: ReplicaLayout | None = None,
    ) -> None:
        self.set_up(attributes, stored, owner=owner, layout=layout)


def require_readable(variable: Variable, frame: Frame) -> None:
    """Raises where a read would become a constant of a program that JAX caches."""
    if variable.stored is None:
        raise errors.TracingError(
            f"Variable {variable.name!r} needs a value",
            "the compiled function that creates it has not finished its first call",
            "Read it after that call, or inside the same function.",
        )
    require_outside_traces(variable, frame)


def require_outside_traces(variable: Variable, frame: Frame) -> None:
    """Raises where a read belongs to a trace that would not see later values."""
    if not jax_compat.is_staging():
        return
    if frame.eager_reads is None:
        raise errors.TracingError(
            f"A read of variable {variable.name!r} inside traced code needs `rx.function`",
            "the surrounding jax.jit, scan, cond or while would keep today's value for ever",
            "Use `rx.function` instead of `jax.jit`, rx.scan, rx.fori_loop, rx.while_loop or "
            "rx.cond in the place of jax.lax, or read the variable before the loop.",
        )
    frame.eager_reads.note()


def require_concrete(variable: Variable, value: Tree) -> None:
    """Raises if the value would leave the trace it belongs to."""
    if any(map(jax_compat.is_traced, jax.tree.leaves(value))) or jax_compat.is_staging():
        raise errors.TracingError(
            f"A write to variable {variable.name!r} inside traced code needs `rx.function`",
            "the code runs under a bare jax.jit, jax.grad, jax.vmap, scan or the like",
            "Use `rx.function` and `rx.value_and_grad` instead, and rx.scan, rx.fori_loop, "
            "rx.while_loop or rx.cond in the place of jax.lax.",
        )
