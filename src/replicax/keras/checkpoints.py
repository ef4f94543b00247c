"""Keras models, layers, optimizers, metrics and variables as objects of an `rx.train.Checkpoint`.

Names are those of Keras' own files of weights, which do not depend on the names of layers: the
place of a layer in its parent, and the index of a variable in its layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from replicax.foundation.replacements import Replace
from replicax.keras import internals


def install(replace: Replace) -> None:
    """Lets checkpoints list the parts of Keras objects, and read and write their variables."""
    for owner in (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric):
        replace(owner, "checkpoint_children", lambda _: _children)
    for owner in (keras.layers.Layer, keras.metrics.Metric):
        replace(owner, "tensorflow_children", lambda _: _tensorflow_children)
    replace(keras.Model, "tensorflow_unsaved", lambda _: _UNSAVED)
    optimizer = keras.optimizers.Optimizer
    replace(optimizer, "tensorflow_children", lambda _: _tensorflow_parts)
    replace(optimizer, "tensorflow_slots", lambda _: _tensorflow_slots)
    replace(optimizer, "tensorflow_trained", lambda _: internals.trainable_variables_of)
    replace(keras.optimizers.Optimizer, "on_new_child", lambda _: None)
    replace(keras.optimizers.Optimizer, internals.TRACK_VARIABLE, _track)
    replace(keras.layers.Layer, "on_new_child", lambda _: None)
    replace(keras.layers.Layer, internals.AFTER_BUILD, _after_build)
    replace(keras.Variable, "checkpoint_array", lambda _: property(_array))
    replace(keras.Variable, "restore_array", lambda _: _restore)


def _children(owner: internals.KerasSaveable) -> dict[str, object]:
    """Returns the parts of a Keras object, by their paths below it."""
    if isinstance(owner, keras.Model):
        # In a callback: the last step has the values.
        owner.jax_state_sync()
    found: dict[str, object] = {}
    for i, variable in enumerate(internals.own_variables(owner)):
        found[f"vars/{i}"] = variable
    for i, generator in enumerate(internals.seed_generators(owner)):
        found[f"seeds/{i}"] = generator.state
    return {**found, **internals.saveable_children(owner)}


# What corresponds to Keras objects in a TensorFlow checkpoint of Keras 2 or 3.

# Variables that had another name in Keras 2.
_KERAS2_NAMES = {"kernel": "depthwise_kernel"}

# For the variables of an optimizer: the names of the same quantities in Keras 1 to 3.
_SLOTS = {
    "momentum": ("momentum", "m"),
    "velocity": ("velocity", "v", "rms"),
    "velocity_hat": ("velocity_hat", "vhat"),
    "norm": ("norm", "u"),
    "accumulator": ("accumulator",),
    "linear": ("linear",),
    "average_gradient": ("average_gradient", "mg"),
    "accumulated_grad": ("accumulated_grad", "accum_grad"),
    "accumulated_delta_var": ("accumulated_delta_var", "accum_var"),
}


# The metrics that `compile` makes, which TensorFlow does not track.
_UNSAVED = ("_loss_tracker", "_compile_metrics")


def _tensorflow_children(
    owner: internals.KerasSaveable, names: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yields the parts of a layer or metric by the names that TensorFlow has for them."""
    for variable in internals.own_variables(owner):
        yield variable.name, variable
        older = _KERAS2_NAMES.get(variable.name)
        if older is not None and older in names:
            yield older, variable
    for name, value in vars(owner).items():
        if isinstance(value, keras.Variable | internals.KerasSaveable | list | dict | tuple):
            yield name, value
    if isinstance(owner, keras.Model):
        yield from _layers(owner)
        if "variables" in names:
            # What `model.export` of Keras 3 wrote: a list of all of them, in their order.
            for index, variable in enumerate(owner.variables):
                yield f"variables/{index}", variable


def _layers(model: keras.Model) -> Iterator[tuple[str, object]]:
    """Yields the layers of a model by the names that Keras 2 gave them."""
    num_with_weights = 0
    for number, layer in enumerate(model.layers):
        yield f"layer-{number}", layer
        if layer.weights:
            yield f"layer_with_weights-{num_with_weights}", layer
            num_with_weights += 1


def _tensorflow_parts(
    optimizer: keras.optimizers.Optimizer, names: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yields the variables of an optimizer that belong to no other one."""
    del names
    for name in ("iterations", "iter"):
        yield name, optimizer.iterations
    rate = internals.learning_rate_of(optimizer)
    if isinstance(rate, keras.Variable):
        yield "learning_rate", rate


def _tensorflow_slots(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[tuple[object, object, Sequence[str]]]:
    """Yields the slots of an optimizer, each with its variable and its names."""
    by_name = {variable.name: variable for variable in internals.own_variables(optimizer)}
    for owner in internals.trainable_variables_of(optimizer):
        for role, names in _SLOTS.items():
            slot = by_name.get(f"{owner.path.replace('/', '_')}_{role}")
            if slot is not None:
                yield slot, owner, names


def _array(variable: keras.Variable) -> jax.Array:
    return variable.value


def _restore(variable: keras.Variable, value: np.ndarray) -> None:
    variable.assign(value)


def _after_build(original: Callable[..., None]) -> Callable[..., None]:
    """Gives a layer the values that were restored before it was built."""

    @functools.wraps(original)
    def lock_state(self: Any) -> None:
        original(self)
        if self.on_new_child is not None:
            for name, child in _children(self).items():
                self.on_new_child(name, child)

    return lock_state


def _track(original: Callable[..., None]) -> Callable[..., None]:
    """Gives an optimizer the values that were restored before it had variables for them."""

    @functools.wraps(original)
    def track(self: Any, variable: keras.Variable) -> None:
        original(self, variable)
        if self.on_new_child is not None:
            self.on_new_child(f"vars/{len(internals.own_variables(self)) - 1}", variable)

    return track
