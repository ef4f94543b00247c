"""Keras optimizers with gradients of tapes, and with variables that are not Keras'."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from replicax.keras.variables import DistributedVariable, default_strategy
from replicax.tf.arguments import Value, VariableLike
from replicax.tf.tape_recording import map_leaves, suspended
from replicax.tf.tensor import raw
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables.variable import Variable

# The Keras variable that stands for a variable of replicax, by its identity. It keeps the variable
# alive, and optimizers keep it.
_adapters: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def applying(original: Callable[..., None]) -> Callable[..., None]:
    """Lets `apply` take tensors, and variables of replicax."""

    @functools.wraps(original)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Value = None) -> None:
        with suspended():
            plain = [_gradient(gradient) for gradient in grads]
            if trainable_variables is None:
                original(self, plain)
                return
            original(self, plain, [keras_variable(v) for v in trainable_variables])

    return apply


def building(original: Callable[..., None]) -> Callable[..., None]:
    """Lets `build` take variables of replicax."""

    @functools.wraps(original)
    def build(self: Any, variables: Value) -> None:
        with suspended():
            original(self, [keras_variable(variable) for variable in variables])

    return build


def _gradient(gradient: Value) -> Any:
    if isinstance(gradient, IndexedSlices):
        return gradient.map_arrays(raw)
    return map_leaves(raw, gradient)


def keras_variable(variable: VariableLike) -> Any:
    """Returns a Keras variable whose value is that of a variable of replicax."""
    if not isinstance(variable, Variable):
        return variable
    known = _adapters.get(id(variable))
    if known is not None:
        return known
    strategy = variable.distribute_strategy or default_strategy()
    # Made for its attributes; its own value is dropped.
    adapter = keras.Variable(
        np.zeros(variable.shape, variable.dtype.name),
        dtype=str(variable.dtype.name),
        trainable=variable.trainable,
        name=variable.name.replace("/", "_"),
    )
    if isinstance(adapter, DistributedVariable):
        adapter.twin = variable
    else:
        adapter.__dict__.pop("_value", None)
        adapter.__class__ = DistributedVariable
        adapter.twin, adapter._global, adapter._combined = variable, None, None
    adapter.strategy = strategy
    adapter._policy = (variable.synchronization, variable.aggregation)
    _adapters[id(variable)] = adapter
    return adapter
