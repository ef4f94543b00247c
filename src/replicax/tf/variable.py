"""`tf.Variable`: a variable of replicax that computes with tensors."""

from __future__ import annotations

import re
import sys
from typing import Any

import jax
import numpy as np

from replicax.foundation import jax_compat
from replicax.foundation.options import VariableAggregation
from replicax.tf import dispatch, tape_recording
from replicax.tf.arguments import DTypeLike, Ignored, ShapeLike, Value, VariableLike
from replicax.tf.dispatch import op
from replicax.tf.dtypes import DType, as_dtype
from replicax.tf.tensor import Tensor, TensorShape, raw
from replicax.variables import slicing
from replicax.variables import variable as rx_variable
from replicax.variables.replicated import MirroredVariable
from replicax.variables.sharded import ShardedVariable

_READ = rx_variable.Variable.read_value


@op(name="read_value")
def value_of(variable: VariableLike) -> Any:
    """Returns the current value of a variable, of Keras too, as a tensor."""
    return variable


def _is_asked_by_replicax(also_tf: bool = False) -> bool:
    """Tells whether the caller of the calling function is code of replicax below `tf`."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("replicax.") and (also_tf or not name.startswith("replicax.tf."))


class TensorVariable(rx_variable.Variable):
    """What `tf.Variable` adds to variables of all kinds: results are tensors.

    Its class is that of the strategy's variable with this one in front, so checkpoints,
    optimizers and compiled functions take it as any other variable.
    """

    __slots__ = ()
    # Workers give their variable the same methods.
    shipped_as = "replicax.tf.variable:as_tensor_variable"

    @property
    def shape(self) -> TensorShape:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The sizes of all dimensions; to code of replicax itself, as a tuple."""
        # A tuple without sizes is false, a shape without sizes is true.
        found = _SHAPE.__get__(self)
        return found if _is_asked_by_replicax() else TensorShape(found)

    @shape.setter
    def shape(self, shape: ShapeLike) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _SHAPE.__set__(self, tuple(shape))

    def get_shape(self) -> Any:
        """Returns the shape."""
        return self.shape

    @property
    def dtype(self) -> DType:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The type of the elements; to code of replicax itself, as a NumPy dtype."""
        found = _DTYPE.__get__(self)
        return found if _is_asked_by_replicax() else as_dtype(found)

    @dtype.setter
    def dtype(self, dtype: DTypeLike) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _DTYPE.__set__(self, np.dtype(dtype))

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The name, as TensorFlow gives it; to code of this package, without its `:0`.

        Parts of a variable have names without it: `w/part_0`.
        """
        found = _NAME.__get__(self)
        is_plain = _is_asked_by_replicax(also_tf=True) or _PART.search(found)
        return found if is_plain else f"{found}:0"

    @name.setter
    def name(self, name: str) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _NAME.__set__(self, name)

    def value(self) -> Any:
        """Returns the current value as a tensor."""
        return value_of(self)

    def read_value(self) -> Any:
        """Returns the current value as a tensor; to code of this package, as an array."""
        if _is_asked_by_replicax(also_tf=True):
            return _READ(self)
        return value_of(self)

    def numpy(self) -> Any:
        """Returns a NumPy copy of the value; a NumPy number for a scalar."""
        found = super().numpy()
        return found if found.shape else found[()]

    def eval(self, *_: Any, **__: Any) -> Any:
        """Returns the value, as `numpy` does."""
        return self.numpy()

    def sparse_read(self, indices: Value, name: str | None = None) -> Any:  # type: ignore[override]
        """Returns the rows with the given indices, as a tensor."""
        del name
        return _rows(self, indices)

    def gather_nd(self, indices: Value, name: str | None = None) -> Any:  # type: ignore[override]
        """Returns the elements or rows at vectors of indices, as a tensor."""
        del name
        return _elements(self, indices)

    def __getitem__(self, index: Value) -> Any:
        """Returns a part of the value, whose `assign` changes that part of the variable."""
        part = dispatch.get_item(self, index)
        return VariablePart(part, self, _plain_index(index))

    def _update(self, kind: str, value: Value, read_value: bool = True) -> Any:
        # Assignments have no gradient.
        with tape_recording.suspended():
            plain = tape_recording.map_leaves(raw, value)
            if hasattr(plain, "map_arrays"):
                plain = plain.map_arrays(raw)
            return super()._update(kind, plain, read_value)

    def __iter__(self) -> Any:
        return iter(value_of(self))

    def __bool__(self) -> bool:
        return bool(self._plain())

    def __int__(self) -> int:
        return int(self._plain())

    def __float__(self) -> float:
        return float(self._plain())

    def __index__(self) -> int:
        return self._plain().__index__()

    def _plain(self) -> Tensor:
        return Tensor(_READ(self))

    def __eq__(self, other: object) -> Any:
        if other is self and not self.shape:
            return True
        return dispatch.equal(self, other)

    def __ne__(self, other: object) -> Any:
        return dispatch.not_equal(self, other)

    __hash__ = object.__hash__  # type: ignore[assignment]

    def describe(self) -> str:
        """Describes one copy by name, shape, type and content."""
        return super().describe().replace("<rx.Variable", "<tf.Variable", 1)

    def __repr__(self) -> str:
        return super().__repr__().replace("<rx.Variable", "<tf.Variable")

    def __tf_tensor__(self, dtype: DTypeLike = None, name: str | None = None) -> Any:
        """Returns the value, for functions that convert their arguments."""
        del dtype, name
        return value_of(self)

    @property
    def op(self) -> Any:
        """The variable itself: there is no graph, and programs use it for the name."""
        return self


_NAME: Any = rx_variable.Variable.__dict__["name"]
_PART = re.compile(r"/part_\d+$")
_SHAPE: Any = rx_variable.Variable.__dict__["shape"]
_DTYPE: Any = rx_variable.Variable.__dict__["dtype"]


def _install_operators() -> None:
    def binary(name: str) -> None:
        operator = getattr(dispatch.OPERATORS, name)
        setattr(TensorVariable, f"__{name}__", lambda self, other: operator(self, other))
        if hasattr(Tensor, f"__r{name}__"):
            setattr(TensorVariable, f"__r{name}__", lambda self, other: operator(other, self))

    for name in (*dispatch.BINARY, *dispatch.COMPARISONS):
        binary(name)
    for name in ("neg", "pos", "abs", "invert"):
        operator = getattr(dispatch.OPERATORS, name)
        setattr(TensorVariable, f"__{name}__", lambda self, operator=operator: operator(self))


_install_operators()


class VariablePart(Tensor):
    """A part of a variable: a tensor that can be assigned."""

    __slots__ = ("_index", "_variable")

    def __init__(self, part: Tensor, variable: TensorVariable, index: Value) -> None:
        super().__init__(part._raw)
        self._variable = variable
        self._index = index

    def assign(self, value: Value, use_locking: bool = False, name: Value = None) -> Any:
        """Sets this part of the variable."""
        return self._change("assign", value)

    def assign_add(self, delta: Value, use_locking: bool = False, name: Value = None) -> Any:
        """Adds to this part of the variable."""
        return self._change("assign_add", delta)

    def assign_sub(self, delta: Value, use_locking: bool = False, name: Value = None) -> Any:
        """Subtracts from this part of the variable."""
        return self._change("assign_sub", delta)

    def _change(self, kind: str, value: Value) -> Any:
        return self._variable._update_part(self._index, slicing.KINDS[kind], raw(value))


def _tensor_of(_: None, children: tuple[Any, ...]) -> Any:
    return children[0]


jax.tree_util.register_pytree_node(
    VariablePart, lambda part: ((Tensor(part._raw),), None), _tensor_of
)
tape_recording.register_tensor_type(VariablePart)


def _plain_index(index: Value) -> Any:
    return tape_recording.map_leaves(lambda part: raw(dispatch.index_of(part)), index)


@op(name="sparse_read")
def _rows(table: Value, indices: Value) -> Any:
    return dispatch.xp().take(table, indices, axis=0)


@op(name="gather_nd")
def _elements(table: Value, indices: Value) -> Any:
    vectors = dispatch.xp().asarray(indices)
    return table[tuple(vectors[..., i] for i in range(vectors.shape[-1]))]


class _VariableMeta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _make(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return tape_recording.is_variable(instance)


class Variable(metaclass=_VariableMeta):
    """A variable, placed by the strategy in whose scope it is made; computes with tensors.

    Variables of Keras and of replicax are instances of it, too.

    Args:
      initial_value: A tensor or array-like, or a function without arguments that returns one.
      trainable: Whether tapes watch it, and optimizers change it.
      validate_shape: Accepted for portability, without effect.
      caching_device: Accepted for portability, without effect.
      name: Its name.
      variable_def: Accepted for portability, without effect.
      dtype: Its type, if not that of the initial value.
      import_scope: Accepted for portability, without effect.
      constraint: What optimizers apply to each new value.
      synchronization: When copies are brought into agreement.
      aggregation: How the replicas' writes become one value.
      shape: The shape, if the initial value is to be checked against one.

    >>> v = Variable([1.0, 2.0], name="v")
    >>> v * 2
    <tf.Tensor: shape=(2,), dtype=float32, numpy=array([2., 4.], dtype=float32)>
    >>> v.assign_add([1.0, 1.0])
    <tf.Variable 'v:0' shape=(2,) dtype=float32, numpy=array([2., 3.], dtype=float32)>
    """


def _make(
    initial_value: Value = None,
    trainable: bool | None = None,
    validate_shape: bool = True,
    caching_device: Ignored = None,
    name: str | None = None,
    variable_def: Ignored = None,
    dtype: DTypeLike = None,
    import_scope: Ignored = None,
    constraint: Value = None,
    synchronization: Value = None,
    aggregation: Value = None,
    shape: ShapeLike = None,
    experimental_enable_variable_lifting: bool = True,
    per_worker_variable: bool = False,
) -> Any:
    del validate_shape, caching_device, variable_def, import_scope
    del experimental_enable_variable_lifting

    def initial() -> Any:
        value = initial_value()
        return _as_initial(value, dtype)

    given = initial if callable(initial_value) else _as_initial(initial_value, dtype)
    wanted = TensorShape(shape) if shape is not None else None
    found = rx_variable.Variable(
        given,
        trainable,
        name=name,
        dtype=None if dtype is None else dispatch.array_dtype(dtype),
        shape=tuple(wanted) if wanted is not None and wanted.is_fully_defined() else None,
        synchronization=synchronization,
        aggregation=aggregation,
        constraint=constraint,
        per_worker_variable=per_worker_variable,
    )
    if isinstance(found, MirroredVariable) and found.aggregation is VariableAggregation.NONE:
        # TensorFlow lets each replica write its own copy. Programs write the same value on all of
        # them, so the first one's is right, and copies cannot differ.
        found.aggregation = VariableAggregation.ONLY_FIRST_REPLICA
    return as_tensor_variable(found)


def _as_initial(value: Value, dtype: DTypeLike) -> Any:
    value = tape_recording.map_leaves(raw, value)
    if value is None or isinstance(value, np.ndarray) or hasattr(value, "aval"):
        return value if not isinstance(value, np.ndarray) else _on_device(value, dtype)
    with jax_compat.eagerly():
        return _on_device(np.asarray(dispatch.default_array(value)), dtype)


def _on_device(value: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    return value.astype(dispatch.array_dtype(value.dtype if dtype is None else dtype))


_classes: dict[type, type] = {}


def as_tensor_variable(variable: VariableLike) -> Any:
    """Gives a variable of replicax the methods of `tf.Variable`."""
    cls = type(variable)
    if isinstance(variable, rx_variable.Variable) and not isinstance(variable, TensorVariable):
        variable.__class__ = _classes.get(cls) or _tensor_class(cls)
    if isinstance(variable, ShardedVariable):
        for part in variable.variables:
            as_tensor_variable(part)
    return variable


def _tensor_class(cls: type) -> type:
    names = {"__slots__": (), "__module__": __name__}
    return _classes.setdefault(cls, type(cls)(cls.__name__, (TensorVariable, cls), names))
