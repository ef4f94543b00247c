"""The names of Keras that are not public and that tapes need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.losses import loss as loss_module

from replicax.tf.arguments import Value
from replicax.tf.tape_recording import map_leaves, suspended
from replicax.tf.tensor import raw

__all__ = ["loss_module"]


def stateless_scope() -> Any:
    """Returns the scope that holds the values of variables, or None."""
    return get_stateless_scope()


def output_spec(call: Callable[..., Any], *tensors: keras.KerasTensor) -> Any:
    """Returns the shapes and types of what a function of arrays returns."""
    return backend.compute_output_spec(call, *tensors)


def is_stateless() -> bool:
    """Tells whether a scope holds the values of variables."""
    return get_stateless_scope() is not None


def is_inside_call() -> bool:
    """Tells whether code of a layer, or of a step that Keras compiles, is running."""
    return is_stateless() or global_state.get_global_attribute("current_call_ctx") is not None


def mask_of(array: Value) -> Any:
    """Returns the mask that Keras left at an output."""
    return backend.get_keras_mask(array) if isinstance(array, jax.Array) else None


def set_mask(array: Value, mask: Value) -> None:
    """Leaves a mask at an input."""
    backend.set_keras_mask(array, mask)


def layers_of(layer: Value) -> list[Any]:
    """Returns a layer and all layers below it."""
    return list(layer._flatten_layers())


def own_losses(layers: Sequence[Any]) -> list[list[Any]]:
    """Returns the losses that each layer has added."""
    return [layer._get_own_losses() for layer in layers]


def set_losses(layers: Sequence[Any], losses: Sequence[Sequence[Any]]) -> None:
    """Replaces the losses that each layer has added."""
    scope = get_stateless_scope()
    for layer, own in zip(layers, losses, strict=True):
        layer._loss_ids.clear()
        layer._losses[:] = own
        # In a step that Keras compiles, code after the tape finds losses by the scope.
        if scope is not None:
            for array in map(raw, own):
                scope.add_loss(array)
                layer._loss_ids.add(id(array))


def build(
    call: Callable[..., Any], layer: Value, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Makes the variables of a layer and of all layers below it, before it is differentiated."""
    if all(own.built for own in layer._flatten_layers()):
        return

    def symbolic(leaf: Value) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        return keras.KerasTensor(leaf.shape, dtype=backend.standardize_dtype(leaf.dtype))

    with suspended():
        own_args, own_kwargs = map_leaves(symbolic, (args, kwargs))
        call(layer, *own_args, **own_kwargs)
