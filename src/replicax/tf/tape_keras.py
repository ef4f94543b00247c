"""Keras under tapes: layers, losses, metrics and optimizers that take and return tensors.

Each change passes on to Keras where neither a tensor nor a tape is involved. Code of Keras computes
with arrays; tensors are unwrapped where it is entered.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.foundation.replacements import Replace, Replacements
from replicax.tf import (
    dispatch,
    tape_keras_internals,
    tape_keras_optimizers,
    tape_recording,
    tape_regions,
)
from replicax.tf.arguments import Value, VariableLike
from replicax.tf.dispatch import has_symbolic, op, wrap_tree
from replicax.tf.tape_keras_scopes import RegionScope, adopt_if_compiled
from replicax.tf.tape_recording import map_leaves, recording_tapes, suspended
from replicax.tf.tensor import Tensor, raw

_MODULES = ("ops", "ops.numpy", "ops.nn", "ops.image", "ops.linalg", "activations", "losses")
# Functions that take functions or tensors of any kind as they are.
_UNCHANGED = frozenset({"custom_gradient", "get", "serialize", "deserialize", "is_tensor"})


def is_installed() -> bool:
    """Tells whether Keras takes and returns tensors."""
    return _replacements.are_installed


def install() -> None:
    """Lets Keras take and return tensors, and tapes record it; idempotent."""
    _replacements.install()


def uninstall() -> None:
    """Takes all changes back; idempotent."""
    _replacements.uninstall()


def _make(replace: Replace) -> None:
    replace(keras.layers.Layer, "__call__", _layer_call)
    replace(keras.layers.Layer, "add_loss", _unwrapping)
    replace(keras.layers.Layer, "losses", _losses)
    replace(keras.layers.Layer, "__init_subclass__", _noting_calls)
    replace(keras.Loss, "__init_subclass__", _noting_calls)
    replace(keras.Loss, "__call__", recorded)
    replace(keras.optimizers.LossScaleOptimizer, "scale_loss", recorded)
    _change_optimizers()
    replace(tape_keras_internals.loss_module, "scale_loss_for_distribution", _scale_loss)
    for cls in _classes_below(keras.Metric):
        _change_metric(cls)
    replace(keras.Metric, "__init_subclass__", _noting_metrics)
    # Keras' variables have a base class that all of its backends share.
    for cls in {*keras.Variable.__mro__[:-1], *_classes_below(keras.Variable)}:
        _change_variable(cls)
    _change_symbolic_tensors()
    for name in (*_MODULES, *(f"_tf_keras.keras.{module}" for module in _MODULES)):
        module = sys.modules.get(f"keras.{name}")
        if module is not None:
            _change_functions(module)


def _change_optimizers() -> None:
    for cls in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _replacements.replace(cls, "apply", tape_keras_optimizers.applying)
    optimizers = keras.optimizers.Optimizer
    for cls in {*optimizers.__mro__[:-1], *_classes_below(optimizers)}:
        if "build" in vars(cls):
            _replacements.replace(cls, "build", tape_keras_optimizers.building)


def _change_symbolic_tensors() -> None:
    for name in (*dispatch.BINARY, *dispatch.COMPARISONS):
        for method in (f"__{name}__", f"__r{name}__"):
            if method in vars(keras.KerasTensor):
                _replacements.replace(keras.KerasTensor, method, _symbolic_operator)


# Above those of strategies, whose functions take arrays.
_replacements = Replacements(1, _make)


def _classes_below(cls: type) -> list[type]:
    return [cls, *(other for child in cls.__subclasses__() for other in _classes_below(child))]


def _change_functions(module: types.ModuleType) -> None:
    for name, value in list(vars(module).items()):
        is_function = isinstance(value, types.FunctionType)
        if is_function and not name.startswith("_") and name not in _UNCHANGED:
            _replacements.replace(module, name, recorded)


# Structures.


def _leaves(value: Value) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _unwrapped(structure: Value) -> Any:
    """Returns arrays for tensors, with the masks that Keras left at them."""
    return map_leaves(_array, structure)


def _array(leaf: Value) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    array = tape_recording.resolved(leaf._raw)
    mask = getattr(leaf, "_keras_mask", None)
    if mask is not None or leaf.has_deleted_mask:
        tape_keras_internals.set_mask(array, raw(mask))
    return array


def gives_tensors(*arguments: Any) -> bool:
    """Tells whether the result of a call is a tensor: unless Keras or JAX code makes it."""
    if any(isinstance(leaf, Tensor) for leaf in _leaves(arguments)):
        return True
    if tape_keras_internals.is_inside_call() or frames.current().overlay is not None:
        return False
    return not any(isinstance(leaf, jax.Array) for leaf in _leaves(arguments))


# Calls.


def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function of Keras take tensors, as one node of the tapes that record."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = list(_leaves((args, kwargs)))
        if has_symbolic(leaves):
            return original(*_unwrapped(args), **_unwrapped(kwargs))
        if recording_tapes() and any(map(_is_recordable, leaves)):
            return wrap_tree(
                tape_regions.run(
                    lambda: original(*_unwrapped(args), **_unwrapped(kwargs)),
                    filter(_is_recordable, leaves),
                )
            )
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return original(*args, **kwargs)
        return wrap_tree(original(*_unwrapped(args), **_unwrapped(kwargs)))

    return call


def _is_recordable(leaf: Value) -> bool:
    # A function among the arguments may use recorded tensors.
    is_function = isinstance(leaf, types.FunctionType)
    return isinstance(leaf, Tensor) or tape_recording.is_variable(leaf) or is_function


def _unwrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a method take tensors, whose gradients it does not follow."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tape_recording.open_tapes() and not gives_tensors(args, kwargs):
            return original(self, *args, **kwargs)
        with suspended():
            return original(self, *_unwrapped(args), **_unwrapped(kwargs))

    return call


def _layer_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_symbolic((args, kwargs)):
            return original(self, *_unwrapped(args), **_unwrapped(kwargs))
        if recording_tapes():
            return _record_layer(original, self, args, kwargs)
        if not gives_tensors(args, kwargs):
            return original(self, *args, **kwargs)
        outputs = original(self, *_unwrapped(args), **_unwrapped(kwargs))
        return _with_masks(outputs, map_leaves(tape_keras_internals.mask_of, outputs))

    return __call__


def _record_layer(
    original: Callable[..., Any], layer: Value, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls the outermost layer as one node, with the losses and masks that it leaves."""
    tape_keras_internals.build(original, layer, _unwrapped(args), _unwrapped(kwargs))
    layers = tape_keras_internals.layers_of(layer)

    def body() -> Any:
        outputs = original(layer, *_unwrapped(args), **_unwrapped(kwargs))
        masks = map_leaves(tape_keras_internals.mask_of, outputs)
        return outputs, masks, tape_keras_internals.own_losses(layers)

    tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outputs, masks, losses = tape_regions.run(body, [*tensors, *layer.trainable_variables])
    tape_keras_internals.set_losses(layers, wrap_tree(losses))
    return _with_masks(outputs, masks)


def _with_masks(outputs: Value, masks: Value) -> Any:
    found = iter(_leaves(masks))

    def wrapped(leaf: Value) -> Any:
        mask, tensor = next(found), dispatch.wrap_tree(leaf)
        if mask is not None and isinstance(tensor, Tensor):
            tensor._keras_mask = mask
        return tensor

    return map_leaves(wrapped, outputs)


def _losses(original: property) -> property:
    def losses(self: Any) -> list[Any]:
        tapes = recording_tapes()
        if not tapes:
            assert original.fget is not None
            return original.fget(self)
        own = [loss for layer in tape_keras_internals.layers_of(self) for loss in layer._losses]
        weights = [v for v in self.trainable_variables if v.regularizer is not None]
        if not weights:
            return own
        terms = tape_regions.run(self._get_regularization_losses, weights)
        return [*own, *wrap_tree(terms)]

    return property(losses)


def _noting_calls(original: Callable[..., None]) -> Any:
    """Lets classes of users compute with tensors in their `call`."""

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        original(**kwargs)
        own = vars(cls).get("call")
        if isinstance(own, types.FunctionType) and not cls.__module__.startswith("keras."):
            setattr(cls, "call", _with_tensors(own))

    return classmethod(__init_subclass__)


def _with_tensors(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def with_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_symbolic((args, kwargs)) or not is_installed():
            return call(self, *args, **kwargs)
        is_inner = any(isinstance(leaf, Tensor) for leaf in _leaves((args, kwargs)))
        given, named = map_leaves(_as_tensor, (args, kwargs))
        result = call(self, *given, **named)
        # Keras goes on with arrays; a subclass that calls `super().call` with tensors.
        return result if is_inner else _unwrapped(result)

    return with_tensors


def _as_tensor(leaf: Value) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    tensor = Tensor(leaf)
    mask = tape_keras_internals.mask_of(leaf)
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


# Metrics.


def _change_metric(cls: type) -> None:
    for name, wrap in (("update_state", _unwrapping), ("result", _metric_result)):
        if isinstance(vars(cls).get(name), types.FunctionType):
            _replacements.replace(cls, name, wrap)


def _noting_metrics(original: Callable[..., None]) -> Any:
    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        original(**kwargs)
        if is_installed():
            _change_metric(cls)

    return classmethod(__init_subclass__)


def _metric_result(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def result(self: Any) -> Any:
        if tape_keras_internals.is_stateless():
            return original(self)
        with suspended():
            return wrap_tree(original(self))

    return result


def _scale_loss(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def scale_loss_for_distribution(value: Value) -> Any:
        scope, frame = tape_keras_internals.stateless_scope(), frames.current()
        is_region = isinstance(scope, RegionScope) and not scope.is_inside_another()
        if is_region and frame.mode is Mode.REPLICA and not frame.is_default:
            return value / frame.strategy.num_replicas_in_sync
        return original(value)

    return scale_loss_for_distribution


# Variables.


def _change_variable(cls: type) -> None:
    for name in ("numpy", "__array__", "__repr__", "assign", "assign_add", "assign_sub"):
        if isinstance(vars(cls).get(name), types.FunctionType):
            _replacements.replace(cls, name, _variable_method)
    if isinstance(vars(cls).get("value"), property):
        _replacements.replace(cls, "value", _variable_value)
    for name in dispatch.BINARY:
        for prefix in ("", "r"):
            method = f"__{prefix}{name}__"
            if isinstance(vars(cls).get(method), types.FunctionType):
                _replacements.replace(cls, method, functools.partial(_operator, name, bool(prefix)))


def _variable_method(original: Callable[..., Any]) -> Callable[..., Any]:
    unwrapping = _unwrapping(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _adopted(self):
            return getattr(self, original.__name__)(*args, **kwargs)
        return unwrapping(self, *args, **kwargs)

    return call


def _adopted(variable: VariableLike) -> bool:
    return not tape_keras_internals.is_stateless() and adopt_if_compiled(variable)


@op(name="read_value")
def _read(variable: VariableLike) -> Any:
    return variable


def _variable_value(original: property) -> property:
    def value(self: Any) -> Any:
        tapes = recording_tapes()
        # Read by a user: code of Keras runs in a node, or is not recorded.
        if tapes and tape_recording.is_watched(self, tapes):
            return _read(self)
        if _adopted(self):
            return self.value
        assert original.fget is not None
        return original.fget(self)

    return property(value)


def _operator(name: str, is_reversed: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def operate(self: Any, other: Value) -> Any:
        if not isinstance(other, Tensor) and not recording_tapes():
            return original(self, other)
        operator = getattr(dispatch.OPERATORS, name)
        return operator(other, self) if is_reversed else operator(self, other)

    return operate


def _symbolic_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets Keras save a model with a tensor as a constant."""

    @functools.wraps(original)
    def operate(self: Any, other: Value) -> Any:
        return original(self, np.asarray(raw(other)) if isinstance(other, Tensor) else other)

    return operate


def import_module(name: str) -> types.ModuleType:
    """Imports a module of Keras, and lets its functions take tensors."""
    module = importlib.import_module(name)
    if is_installed():
        _change_functions(module)
    return module


def as_numpy(value: Value) -> Any:
    """Returns NumPy arrays for tensors, for functions that compute on the host."""
    return map_leaves(
        lambda leaf: np.asarray(raw(leaf)) if isinstance(leaf, Tensor) else leaf, value
    )
