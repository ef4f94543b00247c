"""Layers, losses and metrics: arguments of earlier versions of Keras, and variables of `tf`.

A `tf.Variable` that becomes an attribute of a layer, metric or model becomes a Keras variable, so
that it is trained, saved and distributed with the others.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from replicax.foundation import jax_compat, lazy
from replicax.foundation.options import VariableAggregation
from replicax.foundation.replacements import Replace
from replicax.tf import tape_keras
from replicax.tf.dispatch import wrap_tree
from replicax.tf.function import TensorFunction
from replicax.tf.keras import internals
from replicax.tf.keras.argument_types import KerasObject, Value
from replicax.tf.keras.user_functions import with_tensors
from replicax.tf.tape_recording import is_variable, map_leaves
from replicax.tf.variable import value_of
from replicax.variables.variable import Variable

_tf = lazy.module("replicax.tf")

# The arguments of `add_weight` in Keras 2, in their order.
_WEIGHT = (
    "name shape dtype initializer regularizer trainable constraint use_resource synchronization "
    "aggregation"
).split()
# Arguments without a meaning here.
_WEIGHT_UNUSED = ("use_resource", "partitioner", "collections", "getter", "experimental_autocast")
_LAYER_UNUSED = (
    "adjustment",
    "dynamic",
    "experimental_autocast",
    "fused",
    "time_major",
    "virtual_batch_size",
)
_AGGREGATIONS = {
    VariableAggregation.NONE: "none",
    VariableAggregation.SUM: "sum",
    VariableAggregation.MEAN: "mean",
    VariableAggregation.ONLY_FIRST_REPLICA: "only_first_replica",
}
_REDUCTIONS = ("auto", "none", "sum", "sum_over_batch_size")


def install(replace: Replace) -> None:
    """Lets layers, losses and metrics take what earlier versions took."""
    replace(keras.layers.Layer, "add_weight", _add_weight)
    replace(keras.layers.Layer, "__init__", _without_old_arguments)
    replace(keras.layers.Layer, "__init_subclass__", _noting_builds)
    replace(keras.layers.Layer, "add_variable", lambda _: _add_variable)
    replace(keras.layers.Layer, "add_update", lambda _: _add_update)
    replace(keras.layers.Layer, "add_metric", lambda _: _add_metric)
    replace(keras.layers.Layer, "get_updates_for", lambda _: _no_updates)
    for name in ("mean", "variance"):
        replace(keras.layers.Normalization, name, lambda _, name=name: _tensor_attribute(name))
    replace(internals.Tracker, "track", _track)
    replace(keras.Metric, "reset_states", lambda _: _reset_states)
    replace(keras.Metric, "__init_subclass__", _noting_resets)
    replace(keras.Metric, "add_weight", _metric_weight)
    replace(keras.Loss, "__init__", _loss_init)
    replace(keras.Loss, "__call__", _giving_tensors)
    # Legacy functions of Keras, such as those of its backend, are written with TensorFlow.
    for module in internals.LEGACY_MODULES:
        replace(module, "tf", lambda _: _TensorFlow())


class _TensorFlow:
    """What the legacy functions of Keras have as `tf`."""

    class RaggedTensor:
        """A kind of tensors that does not exist here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_tf, name)


def _add_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, **_new_arguments(args, kwargs))

    return add_weight


def _new_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a weight by the names of Keras 3."""
    if args and not isinstance(args[0], str | None):
        order = ("shape", "initializer", "dtype", "trainable")
    else:
        order = tuple(_WEIGHT)
    given = {**dict(zip(order, args, strict=False)), **kwargs}
    synchronization = str(getattr(given.pop("synchronization", ""), "name", ""))
    for name in _WEIGHT_UNUSED:
        given.pop(name, None)
    if given.get("trainable", True) is None:
        given["trainable"] = synchronization != "ON_READ"
    elif "trainable" not in given and synchronization == "ON_READ":
        given["trainable"] = False
    if "aggregation" in given:
        given["aggregation"] = _AGGREGATIONS.get(given["aggregation"], given["aggregation"])
    shape = given.get("shape")
    if shape is not None and not isinstance(shape, tuple):
        given["shape"] = tuple(shape) if np.iterable(shape) else (shape,)
    if given.get("shape", ()) is None:
        given["shape"] = ()
    if "dtype" in given and given["dtype"] is not None:
        given["dtype"] = keras.backend.standardize_dtype(
            getattr(given["dtype"], "name", given["dtype"])
        )
    return given


def _without_old_arguments(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, **kwargs: Any) -> None:
        # Without `*args`: Keras reads the signature, to save the arguments of a layer.
        for name in _LAYER_UNUSED:
            kwargs.pop(name, None)
        shape = kwargs.pop("batch_input_shape", None)
        if shape is not None and not isinstance(self, keras.layers.InputLayer):
            kwargs["input_shape"] = tuple(shape)[1:]
        dtype = kwargs.get("dtype")
        if dtype is not None and hasattr(dtype, "as_numpy_dtype"):
            kwargs["dtype"] = dtype.name
        original(self, **kwargs)

    return __init__


def _noting_builds(original: Callable[..., None]) -> Any:
    """Lets `build` of a user's layer compute values while Keras infers shapes."""

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        _take_functions(cls, "call")
        getattr(original, "__func__", original)(cls, **kwargs)
        own = vars(cls).get("build")
        if isinstance(own, types.FunctionType):
            setattr(cls, "build", _with_values(own))

    return classmethod(__init_subclass__)


def _take_functions(cls: type, *names: str) -> None:
    """Replaces methods that `tf.function` compiles by what it was called with.

    Keras traces them in the states of its own, and compiles whole steps.
    """
    for name in names:
        own = vars(cls).get(name)
        if isinstance(own, TensorFunction):
            setattr(cls, name, inspect.unwrap(own))


def _with_values(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        with jax_compat.eagerly():
            original(self, *args, **kwargs)

    return build


def _add_variable(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a weight: the older name of `add_weight`."""
    return self.add_weight(*args, **kwargs)


def _add_update(self: Any, updates: Value = None, inputs: Value = None) -> None:
    """Does nothing: assignments in `call` take effect at once."""


def _no_updates(self: Any, inputs: Value = None) -> list[Any]:
    """Returns nothing: assignments in `call` take effect at once."""
    return []


def _add_metric(
    self: Any, value: Value, name: str | None = None, aggregation: str | None = None
) -> None:
    """Adds a value to a mean that the layer keeps; `fit` shows it."""
    del aggregation
    known = self.__dict__.setdefault("_rx_added_metrics", {})
    metric = known.get(name)
    if metric is None:
        metric = known[name] = keras.metrics.Mean(name=name or "metric")
        internals.add_metric(self, metric)
    metric.update_state(value)


def _track(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def track(self: Any, attr: KerasObject) -> Any:
        return original(self, _keras_variable(attr) if isinstance(attr, Variable) else attr)

    return track


# The Keras variable that took the place of a variable of `tf`.
_replaced: weakref.WeakKeyDictionary[Variable, Any] = weakref.WeakKeyDictionary()


def _keras_variable(variable: Variable) -> Any:
    """Makes a Keras variable with the value of another one; the same one each time."""
    found = _replaced.get(variable)
    if found is None:
        value = np.asarray(variable.numpy())
        # A function: layers may be built while Keras infers shapes, when it does not take values.
        found = _replaced[variable] = keras.Variable(
            lambda shape, dtype: jnp.asarray(value, dtype),
            shape=value.shape,
            dtype=value.dtype.name,
            trainable=variable.trainable,
            name=(variable.name or "variable").removesuffix(":0").replace("/", "_"),
        )
    return found


def _tensor_attribute(name: str) -> Any:
    """Returns a property that gives programs a tensor, and Keras the array that it has stored."""

    def get(self: Any) -> Any:
        if name not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")
        value = self.__dict__[name]
        is_keras = sys._getframe(1).f_globals.get("__name__", "").startswith("keras.")
        return value if is_keras else wrap_tree(value)

    def store(self: Any, value: Value) -> None:
        self.__dict__[name] = value

    return property(get, store)


# Metrics and losses.


def _reset_states(self: Any) -> None:
    """Resets the metric: the older name of `reset_state`."""
    self.reset_state()


def _noting_resets(original: Callable[..., None]) -> Any:
    """Lets Keras call a `reset_states` that a user has defined, and `update_state` with tensors."""

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        _take_functions(cls, "update_state", "result", "reset_state", "reset_states")
        update = vars(cls).get("update_state")
        if isinstance(update, types.FunctionType) and not cls.__module__.startswith("keras."):
            setattr(cls, "update_state", with_tensors(update))
        result = vars(cls).get("result")
        if isinstance(result, types.FunctionType) and not cls.__module__.startswith("keras."):
            setattr(cls, "result", _with_values_of_variables(result))
        getattr(original, "__func__", original)(cls, **kwargs)
        own = vars(cls).get("reset_states")
        if isinstance(own, types.FunctionType) and "reset_state" not in vars(cls):
            setattr(cls, "reset_state", own)

    return classmethod(__init_subclass__)


def _with_values_of_variables(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the result of a metric be one of its variables."""

    @functools.wraps(original)
    def result(self: Any) -> Any:
        return map_leaves(
            lambda leaf: value_of(leaf) if is_variable(leaf) else leaf, original(self)
        )

    return result


def _metric_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = _new_arguments(args, kwargs)
        names = ("shape", "initializer", "dtype", "name")
        return original(self, **{name: given[name] for name in names if name in given})

    return add_weight


def _giving_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives users a tensor, also for NumPy arrays; code with arrays of JAX gets those."""

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return wrap_tree(found) if tape_keras.gives_tensors(args, kwargs) else found

    return __call__


def _loss_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and args[0] in _REDUCTIONS:
            # Keras 2 has the reduction first.
            args, kwargs = (), {**dict(zip(("reduction", "name"), args, strict=False)), **kwargs}
        if kwargs.get("reduction") == "auto":
            kwargs["reduction"] = "sum_over_batch_size"
        if len(args) > 1 and args[1] == "auto":
            args = (args[0], "sum_over_batch_size", *args[2:])
        original(self, *args, **kwargs)

    return __init__
