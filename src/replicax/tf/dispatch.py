"""How an op runs: on NumPy for the elements of datasets, on JAX, on a tape, or as a Keras node.

An op is a function of arrays, written once:

    @op
    def square(x, name=None):
        return xp().square(x)
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat, lazy
from replicax.tf import tape_recording
from replicax.tf.arguments import DTypeLike, Value
from replicax.tf.dtypes import DType, as_dtype, device_dtype
from replicax.tf.tensor import Tensor, raw, traced_value_error, wrap

if TYPE_CHECKING:
    from replicax.tf import tape_symbolic as _symbolic
else:
    # Imports Keras.
    _symbolic = lazy.module("replicax.tf.tape_symbolic")
# The ops behind the operators are made with this module.
_comparisons = lazy.module("replicax.tf.ops.comparisons")
_maths = lazy.module("replicax.tf.ops.maths")
_matrices = lazy.module("replicax.tf.ops.matrices")

_is_host: contextvars.ContextVar[bool] = contextvars.ContextVar("replicax_tf_host", default=False)


def on_host() -> bool:
    """Tells whether ops run on NumPy, as they do for the elements of datasets."""
    return _is_host.get()


@contextlib.contextmanager
def host_mode(is_host: bool = True) -> Iterator[None]:
    """Lets ops of this thread run on NumPy, where Python can branch on their values.

    >>> from replicax.tf import dispatch
    >>> with dispatch.host_mode():
    ...     dispatch.xp().__name__
    'numpy'
    """
    token = _is_host.set(is_host)
    try:
        yield
    finally:
        _is_host.reset(token)


def call_on_host(fn: Callable[..., Any], args: Iterable[Any]) -> Any:
    """Calls a function in `host_mode`; for each element of a dataset, so without a manager."""
    token = _is_host.set(True)
    try:
        return fn(*args)
    finally:
        _is_host.reset(token)


def xp() -> Any:
    """Returns the array functions of the running op: `numpy` on the host, else `jax.numpy`."""
    return np if _is_host.get() else jnp


def array_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype that an array gets here where a type is asked for.

    On the host all types exist. On devices the 64-bit ones do with `jax_enable_x64` alone; without
    it, they become their 32-bit ones, without a warning.
    """
    return as_dtype(dtype).dtype if _is_host.get() else device_dtype(dtype)


def wrap_tree(tree: Value) -> Any:
    """Wraps all arrays of a structure as tensors; other leaves stay as they are."""
    if type(tree) is np.ndarray:
        return Tensor(tree)
    if isinstance(tree, np.ndarray | np.generic | jax.Array):
        return wrap(tree)
    if isinstance(tree, dict):
        return tree if not tree else tape_recording.mapping(tree, wrap_tree)
    if isinstance(tree, list | tuple):
        return tape_recording.sequence(tree, wrap_tree)
    return tree


def raw_tree(tree: Value) -> Any:
    """Replaces all tensors and variables of a structure by their arrays."""
    return tape_recording.map_leaves(raw, tree)


class Op:
    """A function of tensors, made by `op`.

    Attributes:
      raw: The function of arrays that it was made from.
    """

    def __init__(self, body: Callable[..., Any], name: str | None, is_differentiable: bool) -> None:
        functools.update_wrapper(self, body)
        self.raw = body
        self.__name__ = name or body.__name__
        self._is_differentiable = is_differentiable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_host.get():
            # For each element of a dataset: the quickest way counts here.
            if kwargs:
                kwargs = {name: _on_host(value) for name, value in kwargs.items()}
            found = self.raw(*[_on_host(value) for value in args], **kwargs)
            return Tensor(found) if type(found) is np.ndarray else wrap_tree(found)
        if has_symbolic((args, kwargs)):
            return _symbolic_call(self, args, kwargs)
        if self._is_differentiable and tape_recording.recording_tapes():
            return tape_recording.record(self.raw, args, kwargs, wrap_tree)
        args = tuple(map(raw_tree, args))
        kwargs = {name: raw_tree(value) for name, value in kwargs.items()}
        return wrap_tree(_without_tensors(self.raw(*args, **kwargs)))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> Any:
        return find_op, (self.raw.__module__, self.raw.__qualname__)

    def __repr__(self) -> str:
        return f"<tf op {self.__name__}>"


@overload
def op(body: Callable[..., Any]) -> Op: ...


@overload
def op(
    body: None = None, *, name: str | None = None, differentiable: bool = True
) -> Callable[[Callable[..., Any]], Op]: ...


def op(
    body: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    differentiable: bool = True,
) -> Any:
    """Makes an op from a function of arrays.

    Args:
      body: The function; leave out to use `op` as a decorator with arguments.
      name: Its name, if not that of the function.
      differentiable: Whether tapes record it. If not, its results have no gradient.

    >>> @op
    ... def double(x, name=None):
    ...     return xp().multiply(x, 2)
    >>> double(Tensor(jnp.asarray([1, 2]))).numpy().tolist()
    [2, 4]
    """
    if body is None:
        return functools.partial(_make_op, name=name, differentiable=differentiable)
    return _make_op(body, name=name, differentiable=differentiable)


def _make_op(body: Callable[..., Any], name: str | None, differentiable: bool) -> Op:
    return Op(body, name, differentiable)


def find_op(module: str, name: str) -> Any:
    """Returns an op by its module and its name there."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


# Of which no part can be a tensor.
_HOST_VALUES = frozenset({int, float, bool, str, bytes, np.ndarray, type(None), DType})


def _on_host(value: Value) -> Any:
    """Returns NumPy arrays for tensors and arrays in an argument."""
    if type(value) in _HOST_VALUES:
        return value
    if isinstance(value, Tensor):
        return value._raw if isinstance(value._raw, np.ndarray) else np.asarray(value._raw)
    if isinstance(value, np.ndarray | str | bytes | int | float):
        return value
    if isinstance(value, list | tuple):
        return tape_recording.sequence(value, _on_host)
    if isinstance(value, dict):
        return tape_recording.mapping(value, _on_host)
    if isinstance(value, jax.Array) or tape_recording.is_variable(value):
        return np.asarray(value)
    return value


def _without_tensors(result: Value) -> Any:
    """Unwraps what a body took from other ops."""
    return raw_tree(result) if isinstance(result, Tensor | list | tuple | dict) else result


def has_symbolic(value: Value) -> bool:
    """Tells whether a structure holds inputs or outputs of Keras layers without values."""
    if isinstance(value, Tensor | np.ndarray | int | float | str):
        return False
    if isinstance(value, list | tuple):
        return any(map(has_symbolic, value))
    if isinstance(value, dict):
        return any(map(has_symbolic, value.values()))
    return type(value).__name__ == "KerasTensor"


def _symbolic_call(called: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _symbolic.call(called, args, kwargs)


# Operators.


def default_array(value: Value) -> Any:
    """Returns a Python or NumPy value as an array of TensorFlow's default dtype."""
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    if not isinstance(value, np.ndarray | np.generic):
        array = array.astype({"f": np.float32, "i": np.int32}.get(array.dtype.kind, array.dtype))
    return array if _is_host.get() else jnp.asarray(array.astype(device_dtype(array.dtype)))


# Each is the op of its name: the same rules for dtypes, and the same errors.
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: _maths.add.raw(x, y),
    "sub": lambda x, y: _maths.subtract.raw(x, y),
    "mul": lambda x, y: _maths.product(x, y),
    "truediv": lambda x, y: _maths.truediv.raw(x, y),
    "floordiv": lambda x, y: _maths.floordiv.raw(x, y),
    "mod": lambda x, y: _maths.floormod.raw(x, y),
    "pow": lambda x, y: _maths.pow.raw(x, y),
    "matmul": lambda x, y: _matrices.matmul.raw(x, y),
    "and": lambda x, y: _comparisons.joined(x, y, "and"),
    "or": lambda x, y: _comparisons.joined(x, y, "or"),
    "xor": lambda x, y: _comparisons.joined(x, y, "xor"),
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda x, y: _comparisons.less.raw(x, y),
    "le": lambda x, y: _comparisons.less_equal.raw(x, y),
    "gt": lambda x, y: _comparisons.greater.raw(x, y),
    "ge": lambda x, y: _comparisons.greater_equal.raw(x, y),
}


def _install_operators() -> None:
    def binary(name: str, compute: Callable[[Any, Any], Any], is_recorded: bool) -> None:
        def body(x: Value, y: Value) -> Any:
            return compute(x, y)

        body.__qualname__ = f"OPERATORS.{name}"
        operator = Op(body, name, is_recorded)
        setattr(OPERATORS, name, operator)

        def forward(self: Any, other: Value) -> Any:
            return operator(self, other) if _is_operand(other) else NotImplemented

        def backward(self: Any, other: Value) -> Any:
            return operator(other, self) if _is_operand(other) else NotImplemented

        setattr(Tensor, f"__{name}__", forward)
        if is_recorded:
            setattr(Tensor, f"__r{name}__", backward)

    def unary(name: str, compute: Callable[[Any], Any]) -> None:
        def body(x: Value) -> Any:
            return compute(x)

        body.__qualname__ = f"OPERATORS.{name}"
        operator = Op(body, name, True)
        setattr(OPERATORS, name, operator)
        setattr(Tensor, f"__{name}__", lambda self: operator(self))

    for name, compute in BINARY.items():
        binary(name, compute, True)
    for name, compute in COMPARISONS.items():
        binary(name, compute, False)
    unary("neg", lambda x: _maths.negative.raw(x))
    unary("pos", lambda x: x)
    unary("abs", lambda x: _maths.abs.raw(x))
    unary("invert", lambda x: _comparisons.inverted(x))


class OPERATORS:
    """The ops behind Python's operators, by name."""


_OPERANDS = (
    *(Tensor, int, float, complex, np.ndarray, np.generic, jax.Array),
    *(list, tuple, str, bytes),
)


def _is_operand(value: object) -> bool:
    if isinstance(value, _OPERANDS):
        return True
    return type(value).__name__ == "KerasTensor" or tape_recording.is_variable(value)


@op(name="equal", differentiable=False)
def _equal(x: Value, y: Value) -> Any:
    return _comparisons.equal_or_unlike(x, y)


def equal(self: Any, other: Value) -> Any:
    """Compares a tensor element by element; anything but a tensor or number is unequal."""
    return _equal(self, other) if _is_operand(other) else NotImplemented


def not_equal(self: Any, other: Value) -> Any:
    """Compares a tensor element by element."""
    return ~_equal(self, other) if _is_operand(other) else NotImplemented


def index_of(index: Value) -> Any:
    """Returns an index whose bounds are Python numbers."""
    if isinstance(index, slice):
        return slice(*(_bound(part) for part in (index.start, index.stop, index.step)))
    if isinstance(index, tuple):
        return tuple(map(index_of, index))
    return index


def _bound(value: Value) -> int | None:
    value = raw(value)
    if jax_compat.is_traced(value):
        raise traced_value_error("A bound of a slice")
    return None if value is None else int(value)


@op(name="getitem")
def _take(tensor: Value, *indices: Any) -> Any:
    shape = np.shape(tensor)
    if Ellipsis not in [i for i in indices if not hasattr(i, "dtype")]:
        axis = 0
        for index in indices:
            if index is None:
                continue
            if isinstance(index, int | np.integer) and not isinstance(index, bool):
                _require_in_range(int(index), shape, axis)
            axis += 1
    found = tensor[indices]
    return np.asarray(found, object) if isinstance(found, bytes) else found


def _require_in_range(index: int, shape: tuple[int, ...], axis: int) -> None:
    if axis >= len(shape):
        raise errors.InvalidArgumentError(
            f"A tensor of shape {shape} takes at most {len(shape)} indices",
            "more were given",
            "Remove one.",
        )
    if not -shape[axis] <= index < shape[axis]:
        raise errors.OutOfRangeError(
            f"An index of axis {axis} must be in [{-shape[axis]}, {shape[axis]})",
            f"it is {index}",
            "Check the shape of the tensor.",
        )


def get_item(self: Any, index: Value) -> Any:
    """Returns a part of a tensor; bounds and indices may be tensors."""
    if isinstance(index, Tensor) and index.dtype == "bool" and jax_compat.is_traced(raw(index)):
        raise traced_value_error("A mask as an index")
    # A list stands for a tuple, as in TensorFlow and unlike in NumPy.
    indices = tuple(index) if isinstance(index, tuple | list) else (index,)
    return _take(self, *(index_of(i) for i in indices))


_install_operators()
setattr(Tensor, "__eq__", equal)
setattr(Tensor, "__ne__", not_equal)
setattr(Tensor, "__getitem__", get_item)
