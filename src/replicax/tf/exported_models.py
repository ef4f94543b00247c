"""Keras models as modules that `rx.saved_model` can export."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import replicax as rx
from replicax.foundation import errors
from replicax.tf import tape_recording
from replicax.tf.arguments import DTypeLike, KerasObject, Value
from replicax.tracing.function import Function
from replicax.tracing.signature import TensorSpec
from replicax.variables.module import Module

SIGNATURE = "serving_default"


def is_model(obj: Value) -> bool:
    """Tells whether an object is a Keras model or layer."""
    return isinstance(obj, keras.layers.Layer)


class _Exported(Module):
    """The call of a Keras model in inference, with copies of its weights."""

    def __init__(self, model: KerasObject) -> None:
        super().__init__()
        # TensorFlow's attribute names of what a loaded model has.
        self.trainable = [_copy(v, True) for v in model.trainable_variables]
        self.non_trainable = [_copy(v, False) for v in model.non_trainable_variables]


def _copy(variable: Value, is_trainable: bool) -> Any:
    value = np.asarray(jax.device_get(tape_recording.value_of(variable)))
    return rx.Variable(value, is_trainable, name=variable.path)


def module_of(model: KerasObject) -> tuple[Module, dict[str, Any]]:
    """Returns a module with the weights and the call of a model, and its signatures.

    Args:
      model: A Keras model that was built; its inputs must be known.
    """
    spec = _spec_of(model)
    exported = _Exported(model)

    def call(inputs: Value) -> Any:
        trainable = [v.read_value() for v in exported.trainable]
        non_trainable = [v.read_value() for v in exported.non_trainable]
        kwargs = {"training": False} if model._call_has_training_arg else {}
        result, _ = model.stateless_call(trainable, non_trainable, inputs, **kwargs)
        return result

    function = Function(call, (spec,), "call")
    vars(exported)["__call__"] = function
    return exported, {SIGNATURE: function}


def _spec_of(model: KerasObject) -> Any:
    """Returns the specs of the inputs of a model, in their structure."""
    symbolic = getattr(model, "_inputs_struct", None)
    if isinstance(model, keras.Sequential) and model.built and model.inputs:
        symbolic = model.inputs[0]
    if symbolic is not None:
        return jax.tree.map(
            lambda leaf: _spec(leaf.shape, leaf.dtype),
            symbolic,
            is_leaf=lambda leaf: hasattr(leaf, "dtype"),
        )
    shapes = getattr(model, "_build_shapes_dict", None)
    if not shapes:
        raise errors.InvalidArgumentError(
            "`tf.saved_model.save` needs a model whose inputs are known",
            f"{model.name!r} was not built",
            "Call the model once with a batch, or pass its input shape.",
        )
    given = next(iter(shapes.values())) if len(shapes) == 1 else shapes
    return jax.tree.map(lambda shape: _spec(shape, model.compute_dtype), given, is_leaf=_is_shape)


def _is_shape(value: Value) -> bool:
    return isinstance(value, tuple | list) and all(x is None or isinstance(x, int) for x in value)


def _spec(shape: Value, dtype: DTypeLike) -> TensorSpec:
    return TensorSpec((None, *tuple(shape)[1:]), jnp.dtype(dtype))
