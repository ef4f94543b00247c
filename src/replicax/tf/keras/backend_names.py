"""Functions of `tf.keras.backend` about variables, shapes and phases.

The functions that compute are those of Keras, which call `replicax.tf`.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from replicax.foundation import errors
from replicax.tf.dtypes import as_dtype
from replicax.tf.keras.argument_types import ElementType, KerasObject, Value
from replicax.tf.ops import activations, creation, indexing, maths, reductions, sorting
from replicax.tf.tape_recording import is_variable
from replicax.tf.tensor import Tensor, raw

__all__ = [
    "batch_get_value",
    "batch_set_value",
    "conv1d",
    "conv2d",
    "conv3d",
    "count_params",
    "ctc_batch_cost",
    "dtype",
    "eval",
    "get_uid",
    "get_value",
    "in_test_phase",
    "in_top_k",
    "in_train_phase",
    "int_shape",
    "is_sparse",
    "is_tensor",
    "learning_phase",
    "learning_phase_scope",
    "logsumexp",
    "manual_variable_initialization",
    "moving_average_update",
    "ndim",
    "ones",
    "placeholder",
    "reset_uids",
    "set_learning_phase",
    "set_value",
    "shape",
    "sigmoid",
    "softmax",
    "track_variable",
    "update",
    "update_add",
    "update_sub",
    "variable",
    "where",
    "zeros",
]


class _State:
    phase = 0
    uids: collections.Counter[str] = collections.Counter()


# Variables and values.


def variable(
    value: Value, dtype: ElementType = None, name: str | None = None, constraint: KerasObject = None
) -> Any:
    """Makes a Keras variable.

    >>> variable([1.0, 2.0]).numpy()
    array([1., 2.], dtype=float32)
    """
    kind = keras.backend.floatx() if dtype is None else as_dtype(dtype).name
    made = keras.Variable(np.asarray(raw(value)), dtype=kind, name=name)
    if constraint is not None:
        made.constraint = keras.constraints.get(constraint)
    return made


def get_value(x: Value) -> Any:
    """Returns the value of a variable or tensor as a NumPy array.

    >>> get_value(variable(2.0))
    array(2., dtype=float32)
    """
    return np.asarray(raw(x))


def eval(x: Value) -> Any:
    """Returns the value of a variable or tensor as a NumPy array.

    >>> eval(2.0)
    array(2.)
    """
    return get_value(x)


def set_value(x: Value, value: Value) -> None:
    """Assigns a variable.

    >>> v = variable(2.0)
    >>> set_value(v, 3.0)
    >>> float(v.numpy())
    3.0
    """
    if not hasattr(x, "assign"):
        raise errors.ArgumentTypeError(
            "`set_value` needs a variable",
            f"{x!r} was given",
            "For a learning rate, make the optimizer with a number instead of a schedule.",
        )
    x.assign(np.asarray(raw(value)))


def batch_get_value(tensors: Iterable[Any]) -> list[Any]:
    """Returns the values of variables.

    >>> batch_get_value([variable(1.0)])
    [array(1., dtype=float32)]
    """
    return [get_value(tensor) for tensor in tensors]


def batch_set_value(tuples: Iterable[tuple[Any, Any]]) -> None:
    """Assigns variables.

    >>> v = variable(1.0)
    >>> batch_set_value([(v, 4.0)])
    >>> float(v.numpy())
    4.0
    """
    for x, value in tuples:
        set_value(x, value)


def moving_average_update(x: Value, value: Value, momentum: float) -> Any:
    """Moves a variable towards a value.

    >>> v = variable(1.0)
    >>> float(moving_average_update(v, 3.0, 0.5).numpy())
    2.0
    """
    x.assign(raw(x) * momentum + jnp.asarray(raw(value)) * (1 - momentum))
    return x


def update(x: Value, new_x: Value) -> Any:
    """Assigns a variable.

    >>> float(update(variable(1.0), 3.0).numpy())
    3.0
    """
    x.assign(jnp.asarray(raw(new_x)))
    return x


def update_add(x: Value, increment: Value) -> Any:
    """Adds to a variable.

    >>> float(update_add(variable(1.0), 3.0).numpy())
    4.0
    """
    x.assign_add(jnp.asarray(raw(increment)))
    return x


def update_sub(x: Value, decrement: Value) -> Any:
    """Subtracts from a variable.

    >>> float(update_sub(variable(1.0), 3.0).numpy())
    -2.0
    """
    x.assign_sub(jnp.asarray(raw(decrement)))
    return x


def track_variable(v: Value) -> None:
    """Does nothing: variables are kept by the objects that use them."""


def manual_variable_initialization(value: bool) -> None:
    """Does nothing: variables have their values when they are made."""


# Shapes and types.


def shape(x: Value) -> Any:
    """Returns the shape as a tensor.

    >>> shape(Tensor(jnp.ones((2, 3)))).numpy()
    array([2, 3], dtype=int32)
    """
    return (
        keras.ops.shape(x)
        if keras.backend.is_keras_tensor(x)
        else creation.constant(list(np.shape(raw(x))))
    )


def int_shape(x: Value) -> tuple[int | None, ...] | None:
    """Returns the sizes of all dimensions.

    >>> int_shape(Tensor(jnp.ones((2, 3))))
    (2, 3)
    """
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def ndim(x: Value) -> int:
    """Returns the number of dimensions.

    >>> ndim(Tensor(jnp.ones((2, 3))))
    2
    """
    return len(x.shape) if hasattr(x, "shape") else np.ndim(x)


def dtype(x: Value) -> str:
    """Returns the name of the dtype.

    >>> dtype(Tensor(jnp.ones((2, 3))))
    'float32'
    """
    return str(getattr(x.dtype, "name", x.dtype))


def count_params(x: Value) -> int:
    """Returns the number of elements.

    >>> count_params(variable([1.0, 2.0]))
    2
    """
    return int(np.prod(x.shape))


def is_tensor(x: Value) -> bool:
    """Tells whether a value is a tensor, a variable or a symbolic input.

    >>> is_tensor(1.0)
    False
    """
    return isinstance(x, Tensor) or is_variable(x) or keras.ops.is_tensor(x)


def is_sparse(tensor: Value) -> bool:
    """Returns False: all tensors are dense.

    >>> is_sparse(1.0)
    False
    """
    return False


def zeros(shape: Sequence[int], dtype: ElementType = None, name: str | None = None) -> Any:
    """Makes a variable of zeros.

    >>> zeros((2,)).numpy()
    array([0., 0.], dtype=float32)
    """
    return variable(np.zeros(tuple(shape)), dtype, name)


def ones(shape: Sequence[int], dtype: ElementType = None, name: str | None = None) -> Any:
    """Makes a variable of ones.

    >>> ones((2,)).numpy()
    array([1., 1.], dtype=float32)
    """
    return variable(np.ones(tuple(shape)), dtype, name)


def placeholder(
    shape: Sequence[int | None] | None = None,
    ndim: int | None = None,
    dtype: ElementType = None,
    sparse: bool = False,
    name: str | None = None,
    ragged: bool = False,
) -> Any:
    """Makes a symbolic input of a model.

    >>> placeholder((None, 3)).shape
    (None, 3)
    """
    del sparse, ragged
    sizes = tuple(shape) if shape is not None else (None,) * (ndim or 0)
    kind = None if dtype is None else as_dtype(dtype).name
    return keras.Input(batch_shape=sizes, dtype=kind, name=name)


# Ops that Keras' own list lacks, or leaves notes of its own at.


def softmax(x: Value, axis: int = -1) -> Any:
    """Returns probabilities.

    >>> softmax(Tensor(jnp.zeros(2))).numpy()
    array([0.5, 0.5], dtype=float32)
    """
    return activations.softmax(x, axis)


def sigmoid(x: Value) -> Any:
    """Returns probabilities.

    >>> float(sigmoid(Tensor(jnp.zeros(()))))
    0.5
    """
    return maths.sigmoid(x)


def where(condition: Value, x: Value = None, y: Value = None) -> Any:
    """Chooses between two tensors.

    >>> where(Tensor(jnp.asarray([True, False])), 1.0, 2.0).numpy()
    array([1., 2.], dtype=float32)
    """
    return indexing.where(condition, x, y)


def logsumexp(x: Value, axis: Value = None, keepdims: bool = False) -> Any:
    """Returns the logarithm of the sum of exponentials.

    >>> float(logsumexp(Tensor(jnp.zeros(1))))
    0.0
    """
    return reductions.reduce_logsumexp(x, axis, keepdims)


def in_top_k(predictions: Value, targets: Value, k: int) -> Any:
    """Tells for each example whether its class is among the `k` best predictions.

    >>> in_top_k(Tensor(jnp.asarray([[0.3, 0.7]])), Tensor(jnp.asarray([1])), 1).numpy()
    array([ True])
    """
    return sorting.in_top_k(targets, predictions, k)


def conv1d(
    x: Value,
    kernel: Value,
    strides: Value = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Value = 1,
) -> Any:
    """Convolves sequences.

    >>> conv1d(Tensor(jnp.ones((1, 4, 1))), Tensor(jnp.ones((2, 1, 1)))).shape
    TensorShape([1, 3, 1])
    """
    return keras.ops.conv(x, kernel, strides, padding, data_format, dilation_rate)


def conv2d(
    x: Value,
    kernel: Value,
    strides: Value = (1, 1),
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Value = (1, 1),
) -> Any:
    """Convolves images.

    >>> conv2d(Tensor(jnp.ones((1, 4, 4, 1))), Tensor(jnp.ones((2, 2, 1, 1)))).shape
    TensorShape([1, 3, 3, 1])
    """
    return keras.ops.conv(x, kernel, strides, padding, data_format, dilation_rate)


def conv3d(
    x: Value,
    kernel: Value,
    strides: Value = (1, 1, 1),
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Value = (1, 1, 1),
) -> Any:
    """Convolves volumes.

    >>> conv3d(Tensor(jnp.ones((1, 4, 4, 4, 1))), Tensor(jnp.ones((2, 2, 2, 1, 1)))).shape
    TensorShape([1, 3, 3, 3, 1])
    """
    return keras.ops.conv(x, kernel, strides, padding, data_format, dilation_rate)


def ctc_batch_cost(y_true: Value, y_pred: Value, input_length: Value, label_length: Value) -> Any:
    """Returns the CTC loss of each sequence; the last class is the blank.

    >>> probabilities = Tensor(jnp.full((1, 4, 3), 1 / 3))
    >>> lengths = [Tensor(jnp.asarray([[n]])) for n in (4, 2)]
    >>> ctc_batch_cost(Tensor(jnp.asarray([[0, 1]])), probabilities, *lengths).shape
    TensorShape([1, 1])
    """
    losses = keras.ops.ctc_loss(
        keras.ops.cast(y_true, "int32"),
        keras.ops.log(y_pred + keras.backend.epsilon()),
        keras.ops.cast(keras.ops.squeeze(label_length, -1), "int32"),
        keras.ops.cast(keras.ops.squeeze(input_length, -1), "int32"),
        mask_index=y_pred.shape[-1] - 1,
    )
    return keras.ops.expand_dims(losses, 1)


# Phases.


def learning_phase() -> int:
    """Returns what `set_learning_phase` was called with; 0 by default.

    >>> learning_phase()
    0
    """
    return _State.phase


def set_learning_phase(value: Value) -> None:
    """Sets what `learning_phase()` returns; layers look at their argument `training` alone.

    >>> set_learning_phase(0)
    """
    _State.phase = int(value)


@contextlib.contextmanager
def learning_phase_scope(value: Value) -> Iterator[None]:
    """Sets what `learning_phase()` returns for a while.

    >>> with learning_phase_scope(1):
    ...     learning_phase()
    1
    """
    before = _State.phase
    set_learning_phase(value)
    try:
        yield
    finally:
        _State.phase = before


def in_train_phase(x: Value, alt: Value, training: Value = None) -> Any:
    """Returns `x` in training, else `alt`; functions are called.

    >>> in_train_phase(1, 2, training=True)
    1
    """
    found = x if (learning_phase() if training is None else training) else alt
    return found() if callable(found) else found


def in_test_phase(x: Value, alt: Value, training: Value = None) -> Any:
    """Returns `alt` in training, else `x`; functions are called.

    >>> in_test_phase(1, 2, training=True)
    2
    """
    return in_train_phase(alt, x, training)


# Names.


def get_uid(prefix: str = "") -> int:
    """Returns how often it was called with a prefix.

    >>> get_uid("doc"), get_uid("doc")
    (1, 2)
    """
    _State.uids[prefix] += 1
    return _State.uids[prefix]


def reset_uids() -> None:
    """Starts the numbers of `get_uid` again."""
    _State.uids.clear()
