"""What `tf.keras` changes in Keras: programs of earlier versions run, and may compute with `tf`.

Each change passes on to Keras what Keras takes itself.
"""

from __future__ import annotations

from replicax.foundation.replacements import Replace, Replacements
from replicax.tf import tape_keras, tape_keras_internals
from replicax.tf.keras import (
    callback_changes,
    dataset_functions,
    files,
    layer_changes,
    model_changes,
    optimizer_changes,
    own_steps,
    shape_inference,
    user_functions,
)


def is_inside_keras() -> bool:
    """Tells whether code of a layer, or of a step that Keras compiles, is running."""
    return tape_keras_internals.is_inside_call()


def install() -> None:
    """Makes the changes; idempotent."""
    tape_keras.install()
    _replacements.install()


def uninstall() -> None:
    """Takes the changes back; idempotent. Keras still takes tensors."""
    _replacements.uninstall()


def _make(replace: Replace) -> None:
    for module in (
        user_functions,
        layer_changes,
        optimizer_changes,
        model_changes,
        own_steps,
        callback_changes,
        dataset_functions,
        files,
        shape_inference,
    ):
        module.install(replace)


# Above those that let Keras take tensors.
_replacements = Replacements(2, _make)
