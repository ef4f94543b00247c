"""Keras models, layers, optimizers, metrics and variables as objects of an `rx.train.Checkpoint`.

Names are those of Keras' own files of weights, which do not depend on the names of layers: the
place of a layer in its parent, and the index of a variable in its layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from replicax.keras import internals

Replace = Callable[[Any, str, Callable[[Any], Any]], None]


def install(replace: Replace) -> None:
    """Lets checkpoints list the parts of Keras objects, and read and write their variables."""
    for owner in (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric):
        replace(owner, "checkpoint_children", lambda _: _children)
    replace(keras.optimizers.Optimizer, "on_new_child", lambda _: None)
    replace(keras.optimizers.Optimizer, internals.TRACK_VARIABLE, _track)
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


def _array(variable: keras.Variable) -> jax.Array:
    return variable.value


def _restore(variable: keras.Variable, value: np.ndarray) -> None:
    variable.assign(value)


def _track(original: Callable[..., None]) -> Callable[..., None]:
    """Gives an optimizer the values that were restored before it had variables for them."""

    @functools.wraps(original)
    def track(self: Any, variable: keras.Variable) -> None:
        original(self, variable)
        if self.on_new_child is not None:
            self.on_new_child(f"vars/{len(internals.own_variables(self)) - 1}", variable)

    return track
