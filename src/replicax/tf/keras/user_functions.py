"""Functions of users that Keras calls: they get tensors and may return them.

Keras computes with arrays. Losses, metrics, activations, regularizers, constraints, initializers,
schedules and Lambda layers that are written with `tf` take arrays as tensors, and Keras gets the
arrays of what they return.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import keras

from replicax.foundation.replacements import Replace
from replicax.tf.dispatch import Op, has_symbolic, wrap_tree
from replicax.tf.keras import internals
from replicax.tf.keras.argument_types import KerasObject, Value
from replicax.tf.tape_recording import is_variable, map_leaves
from replicax.tf.tensor import Tensor, raw

# Functions of `tf.nn` whose names, in the files of a model, are those of activations.
_ACTIVATIONS = frozenset(
    "relu relu6 elu selu softmax log_softmax sigmoid tanh softplus softsign gelu silu swish "
    "leaky_relu".split()
)


def install(replace: Replace) -> None:
    """Lets Keras call functions that are written with `tf`."""
    replace(internals.LossFunctionWrapper, "__init__", _wrapping)
    replace(internals.MeanMetricWrapper, "__init__", _wrapping)
    replace(keras.layers.Lambda, "call", with_tensors)
    for module in (internals.INITIALIZERS, internals.REGULARIZERS, internals.CONSTRAINTS):
        replace(module, "get", _getting)
    replace(internals.ACTIVATIONS, "get", _getting_activation)
    replace(keras.activations, "get", _getting_activation)
    for cls in (
        keras.Initializer,
        keras.regularizers.Regularizer,
        keras.constraints.Constraint,
    ):
        replace(cls, "__init_subclass__", functools.partial(_noting, cls, with_tensors))
    schedule = keras.optimizers.schedules.LearningRateSchedule
    replace(schedule, "__init_subclass__", functools.partial(_noting, schedule, _schedule_call))
    for cls in schedule.__subclasses__():
        replace(cls, "__call__", _schedule_call)


def is_of_users(function: object) -> bool:
    """Tells whether Keras did not define a function."""
    is_function = isinstance(
        function, types.FunctionType | types.MethodType | functools.partial | Op
    )
    inner = function.func if isinstance(function, functools.partial) else function
    return is_function and not str(getattr(inner, "__module__", "")).startswith("keras.")


def with_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets Keras call a function of tensors with arrays."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if has_symbolic((args, kwargs)):
            return function(*args, **kwargs)
        has_tensors = False

        def tensor(leaf: Value) -> Any:
            nonlocal has_tensors
            has_tensors = has_tensors or isinstance(leaf, Tensor)
            return Tensor(leaf) if isinstance(leaf, jax.Array) else leaf

        args, kwargs = map_leaves(tensor, (args, kwargs))
        found = function(*args, **kwargs)
        return found if has_tensors else map_leaves(_array, found)

    return call


def _array(leaf: Value) -> Any:
    return raw(leaf) if isinstance(leaf, Tensor) or is_variable(leaf) else leaf


def _wrapping(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        function = internals.wrapped_function(self)
        if is_of_users(function):
            internals.set_wrapped_function(self, with_tensors(function))

    return __init__


def _getting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def get(identifier: KerasObject) -> Any:
        return with_tensors(identifier) if is_of_users(identifier) else original(identifier)

    return get


def _getting_activation(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def get(identifier: KerasObject) -> Any:
        if isinstance(identifier, Op) and identifier.__name__ in _ACTIVATIONS:
            return original(identifier.__name__)
        return with_tensors(identifier) if is_of_users(identifier) else original(identifier)

    return get


def _noting(owner: type, wrap: Callable[[Any], Any], original: KerasObject) -> Any:
    """Wraps `__call__` of classes that users derive from a class of Keras."""
    del original

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        super(owner, cls).__init_subclass__(**kwargs)
        own = vars(cls).get("__call__")
        if isinstance(own, types.FunctionType):
            setattr(cls, "__call__", wrap(own))

    return classmethod(__init_subclass__)


def _schedule_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a schedule take a step of any kind, and gives users a tensor."""

    @functools.wraps(original)
    def __call__(self: Any, step: KerasObject) -> Any:
        if is_variable(step):
            step = raw(step)
        is_own = not type(self).__module__.startswith("keras.")
        step = wrap_tree(step) if is_own else raw(step)
        return wrap_tree(original(self, step))

    return __call__
