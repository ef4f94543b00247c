"""`Tensor`: an array under TensorFlow's surface, and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax.contexts import frames
from replicax.foundation import devices, errors, jax_compat
from replicax.tf import tape_recording
from replicax.tf.arguments import ShapeLike, Value
from replicax.tf.dtypes import DType, as_dtype, string
from replicax.values import printing
from replicax.values.distributed_values import DistributedValues
from replicax.variables.facts import Reference


class TensorShape(tuple[Any, ...]):
    """A shape: a tuple of sizes, with None where a size is not known.

    >>> shape = TensorShape([None, 3])
    >>> shape.as_list(), shape.rank, shape.is_fully_defined(), shape[1:]
    ([None, 3], 2, False, TensorShape([3]))
    """

    _is_unknown: bool
    # A shape is an argument as a whole, although it is a tuple.
    is_shape = True

    def __new__(cls, dims: ShapeLike = ()) -> TensorShape:
        """Makes a shape from sizes, a number, or None for an unknown number of dimensions."""
        if isinstance(dims, TensorShape):
            return dims
        if isinstance(dims, int):
            dims = (dims,)
        sizes = () if dims is None else tuple(_size(size) for size in _sizes(dims))
        self = super().__new__(cls, sizes)
        self._is_unknown = dims is None
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return TensorShape, (None if self._is_unknown else list(self),)

    @property
    def rank(self) -> int | None:
        """The number of dimensions; None if it is not known."""
        return None if self._is_unknown else len(self)

    @property
    def ndims(self) -> int | None:
        """The number of dimensions; None if it is not known."""
        return self.rank

    @property
    def dims(self) -> list[int | None] | None:
        """The sizes, as a list; None if their number is not known."""
        return None if self._is_unknown else list(self)

    def as_list(self) -> list[Any]:
        """Returns the sizes as a list."""
        if self._is_unknown:
            raise errors.InvalidArgumentError(
                "`as_list` needs a known number of dimensions",
                "this shape has none",
                "Test `shape.rank is None` first.",
            )
        return list(self)

    def num_elements(self) -> int | None:
        """Returns the number of elements; None if a size is not known."""
        return math.prod(self) if self.is_fully_defined() else None

    def is_fully_defined(self) -> bool:
        """Tells whether all sizes are known."""
        return not self._is_unknown and None not in list(self)

    def is_compatible_with(self, other: Value) -> bool:
        """Tells whether one array could have both shapes."""
        other = TensorShape(other)
        if self._is_unknown or other._is_unknown:
            return True
        pairs = zip(self, other, strict=False)
        return len(self) == len(other) and all(a is None or b is None or a == b for a, b in pairs)

    def assert_is_compatible_with(self, other: Value) -> None:
        """Raises unless one array could have both shapes."""
        if not self.is_compatible_with(other):
            raise errors.InvalidArgumentError(
                f"Two shapes must be compatible, {self}",
                f"the other is {TensorShape(other)}",
                "Check the dimensions.",
            )

    def merge_with(self, other: Value) -> TensorShape:
        """Returns the shape with what is known from both."""
        other = TensorShape(other)
        self.assert_is_compatible_with(other)
        if self._is_unknown or other._is_unknown:
            return other if self._is_unknown else self
        return TensorShape([b if a is None else a for a, b in zip(self, other, strict=True)])

    def concatenate(self, other: Value) -> TensorShape:
        """Returns the shape with the dimensions of another one after its own."""
        other = TensorShape(other)
        if self._is_unknown or other._is_unknown:
            return TensorShape(None)
        return TensorShape([*self, *other])

    def with_rank(self, rank: int) -> TensorShape:
        """Returns the shape, or raises if it has another number of dimensions."""
        return self.merge_with([None] * rank)

    def assert_has_rank(self, rank: int) -> None:
        """Raises if the shape has another number of dimensions."""
        self.with_rank(rank)

    def __add__(self, other: Value) -> TensorShape:
        return self.concatenate(other)

    def __radd__(self, other: Value) -> TensorShape:
        return TensorShape(other).concatenate(self)

    def __getitem__(self, key: Value) -> Any:
        if self._is_unknown:
            return TensorShape(None) if isinstance(key, slice) else None
        found = super().__getitem__(key)
        return TensorShape(found) if isinstance(key, slice) else found

    def __eq__(self, other: object) -> bool:
        if other is None:
            return self._is_unknown
        if isinstance(other, TensorShape) and self._is_unknown != other._is_unknown:
            return False
        return isinstance(other, list | tuple) and tuple(self) == tuple(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __bool__(self) -> bool:
        return not self._is_unknown

    def __str__(self) -> str:
        if self._is_unknown:
            return "<unknown>"
        return f"({', '.join(map(str, self))}{',' if len(self) == 1 else ''})"

    def __repr__(self) -> str:
        return f"TensorShape({None if self._is_unknown else list(self)})"


def _sizes(dims: ShapeLike) -> Iterable[Any]:
    if isinstance(dims, Tensor):
        dims = dims.numpy()
    return np.atleast_1d(dims).tolist() if isinstance(dims, np.ndarray) else dims


def _size(size: Value) -> Any:
    if size is None or jax_compat.is_open_size(size):
        return size
    size = getattr(size, "value", size)
    return None if size is None or int(size) == -1 else int(size)


class Tensor:
    """An array with the methods and operators of a TensorFlow tensor.

    JAX and NumPy take it for the array that it holds. While a tape records it, only `tf` and Keras
    functions do, so that no gradient is lost.

    >>> from replicax.tf import dispatch
    >>> x = Tensor(jnp.asarray([1.0, 2.0]))
    >>> x + 1
    <tf.Tensor: shape=(2,), dtype=float32, numpy=array([2., 3.], dtype=float32)>
    >>> x.shape.as_list(), x.dtype, float(x[1])
    ([2], tf.float32, 2.0)
    """

    __slots__ = ("__weakref__", "_mask", "_raw")
    __array_priority__ = 100

    if TYPE_CHECKING:
        # dispatch.py adds it, with the operators: they are ops.
        def __getitem__(self, index: Value) -> Any: ...

    def __init__(self, raw_array: Value) -> None:
        self._raw = raw_array

    # Facts.

    @property
    def shape(self) -> TensorShape:
        """The sizes of all dimensions."""
        return TensorShape(np.shape(self._raw))

    def get_shape(self) -> TensorShape:
        """Returns the shape."""
        return self.shape

    def set_shape(self, shape: ShapeLike) -> None:
        """Checks the shape; that of an array is always known."""
        if not self.shape.is_compatible_with(shape):
            raise errors.InvalidArgumentError(
                f"`set_shape` must fit the tensor, whose shape is {self.shape}",
                f"{TensorShape(shape)} was given",
                "Reshape the tensor, or correct the shape.",
            )

    @property
    def dtype(self) -> DType:
        """The type of the elements."""
        found = self._raw.dtype
        return string if found.kind in "OSU" else as_dtype(found)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return np.ndim(self._raw)

    @property
    def device(self) -> str:
        """The name of the device that holds the array."""
        if isinstance(self._raw, jax.Array) and not jax_compat.is_traced(self._raw):
            return devices.name_of(min(self._raw.devices(), key=lambda device: device.id))
        return devices.name_of(devices.current())

    @property
    def name(self) -> str:
        """A name; all tensors have the same one."""
        return "Tensor:0"

    @property
    def op(self) -> Any:
        """Not offered: there is no graph."""
        raise errors.UnsupportedError(
            "`Tensor.op` needs a graph",
            "tensors here are arrays",
            "Keep a name beside the tensor.",
        )

    def ref(self) -> Reference[Any]:
        """Returns a hashable handle of the tensor; `deref()` gives it back."""
        return Reference(self)

    experimental_ref = ref

    @property
    def _keras_mask(self) -> Any:
        """The mask that Keras left; programs delete it, so that losses do not apply it."""
        found = getattr(self, "_mask", None)
        if found is None:
            raise AttributeError("Keras left no mask at this tensor")
        return found

    @_keras_mask.setter
    def _keras_mask(self, mask: Value) -> None:
        self._mask = mask

    @_keras_mask.deleter
    def _keras_mask(self) -> None:
        # Raises if there is none.
        _ = self._keras_mask
        self._mask = None

    @property
    def has_deleted_mask(self) -> bool:
        """Whether the mask that Keras left was taken away."""
        return getattr(self, "_mask", self) is None

    # Values.

    def numpy(self) -> Any:
        """Returns a NumPy copy of the value; a NumPy number for a scalar."""
        array = self._concrete("`.numpy()`")
        found = np.array(array)
        return found if found.shape else found[()]

    def eval(self, *_: Any, **__: Any) -> Any:
        """Not offered: there are no sessions."""
        raise errors.UnsupportedError(
            "`Tensor.eval` needs a session", "code here runs eagerly", "Use `.numpy()`."
        )

    def cpu(self) -> Tensor:
        """Returns the tensor; JAX moves arrays where they are used."""
        return self

    gpu = cpu

    def _concrete(self, use: str) -> Any:
        array = tape_recording.resolved(self._raw)
        if jax_compat.is_traced(array):
            raise traced_value_error(use)
        return array

    @property
    def __jax_array__(self) -> Callable[[], Any]:
        # Loud for functions of JAX, which the tape does not see. JAX asks whether there is such a
        # method, so `raw + tensor` goes on to `tensor.__radd__`.
        if tape_recording.is_tracked(self._raw):
            raise AttributeError(
                "A function of JAX was called with a tensor that a GradientTape records, which "
                "would lose its gradient. Use the function of `tf` or `keras.ops`, call it in "
                "`with tape.stop_recording():`, or take `rx.value_and_grad`."
            )
        return self._as_jax_array

    def _as_jax_array(self) -> Any:
        found = tape_recording.resolved(self._raw)
        return found if isinstance(found, jax.Array) else jnp.asarray(found)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if tape_recording.is_tracked(self._raw):
            raise errors.ContextError(
                "NumPy's functions need a tensor that no GradientTape records",
                "np.asarray was called inside the tape, and its gradient would be lost",
                "Use functions of `tf`, or take `tensor.numpy()` where no gradient is needed.",
            )
        return np.array(self._concrete("`np.asarray`"), dtype=dtype, copy=True)

    def __bool__(self) -> bool:
        return bool(self._concrete("`if`, `while`, `and`, `or`, `not` and `bool()`"))

    def __int__(self) -> int:
        return int(self._concrete("`int()`"))

    def __float__(self) -> float:
        return float(self._concrete("`float()`"))

    def __complex__(self) -> complex:
        return complex(self._concrete("`complex()`"))

    def __index__(self) -> int:
        found: SupportsIndex = np.asarray(self._concrete("a Python index"))
        return found.__index__()

    def __round__(self, ndigits: int | None = None) -> Any:
        number = self._concrete("`round()`").item()
        return round(number) if ndigits is None else round(number, ndigits)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a tensor without dimensions")
        return np.shape(self._raw)[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError("A tensor without dimensions cannot be iterated over")
        return iter([self[i] for i in range(len(self))])

    def __contains__(self, item: object) -> bool:
        if self.ndim != 1:
            raise TypeError("`in` searches vectors. Use tf.reduce_any(tensor == value).")
        return bool(np.any(np.asarray(self._concrete("`in`")) == raw(item)))

    __hash__ = None  # type: ignore[assignment]

    def __format__(self, spec: str) -> str:
        # As its value: `f"{loss}"` and `f"{loss:.3f}"` show a number.
        array = tape_recording.resolved(self._raw)
        return str(self) if jax_compat.is_traced(array) else format(self.numpy(), spec)

    def __str__(self) -> str:
        shown = self._shown()
        if shown is None:
            return f"Tensor(shape={self.shape}, dtype={self.dtype.name}, traced)"
        start = "\n" if "\n" in shown else ""
        return f"tf.Tensor({start}{shown}, shape={self.shape}, dtype={self.dtype.name})"

    def __repr__(self) -> str:
        shape, dtype = self.shape, self.dtype.name
        array = tape_recording.resolved(self._raw)
        if jax_compat.is_traced(array):
            return f"<tf.Tensor: shape={shape}, dtype={dtype}, traced>"
        return f"<tf.Tensor: shape={shape}, dtype={dtype}, numpy={printing.content(array)}>"

    def _shown(self) -> str | None:
        array = tape_recording.resolved(self._raw)
        return None if jax_compat.is_traced(array) else str(np.asarray(array))

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return self

    def __copy__(self) -> Tensor:
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return Tensor, (np.asarray(self._concrete("pickling")),)


def traced_value_error(use: str) -> errors.TracedValueError:
    """Returns the error for compiled code that needs the value of a tensor in Python."""
    where = frames.caller_location()
    return errors.TracedValueError(
        f"{use} needs a value that is known while the function is compiled",
        f"the tensor{f' at {where}' if where else ''} is computed by the compiled program",
        "Use `tf.cond(condition, lambda: a, lambda: b)` or `tf.where` for `if`, "
        "`tf.while_loop` for `while`, return the tensor and take its value outside of "
        "`tf.function`, or call `tf.config.run_functions_eagerly(True)` to debug.",
    )


def wrap(array: Value) -> Any:
    """Returns a tensor around an array; tensors and everything else stay as they are."""
    # JAX's class is asked last: it answers by a function of its own.
    if isinstance(array, np.ndarray | np.generic | jax.Array):
        return Tensor(np.asarray(array) if isinstance(array, np.generic) else array)
    return array


def raw(value: Value) -> Any:
    """Returns the array behind a tensor or variable, and everything else as it is.

    >>> raw(Tensor(np.float32(2.0))), raw(3)
    (np.float32(2.0), 3)
    """
    if isinstance(value, Tensor):
        return tape_recording.resolved(value._raw)
    if tape_recording.is_variable(value):
        return tape_recording.value_of(value)
    return value


def _flatten(tensor: Tensor) -> tuple[tuple[Any], None]:
    if tape_recording.is_tracked(tensor._raw):
        raise errors.ContextError(
            "A tensor that a GradientTape records must be used by functions of `tf` and Keras",
            "a transformation or tree function of JAX was called with it, and its gradient "
            "would be lost",
            "Use functions of `tf`, or call it after the tape, or in "
            "`with tape.stop_recording():`.",
        )
    return (tape_recording.resolved(tensor._raw),), None


def _unflatten(_: None, children: tuple[Any, ...]) -> Any:
    child = children[0]
    # What `strategy.run` merges is a value of all replicas; trees are mapped to tensors, too.
    # `extended.update(group=False)` makes tuples.
    if isinstance(child, Tensor | DistributedValues | tuple):
        return child
    return Tensor(child)


jax.tree_util.register_pytree_node(Tensor, _flatten, _unflatten)
tape_recording.register_tensor_type(Tensor)
