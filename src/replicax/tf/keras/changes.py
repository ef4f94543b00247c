"""What `tf.keras` changes in Keras: programs of earlier versions run, and may compute with `tf`.

Each change passes on to Keras what Keras takes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from replicax.tf import tape_keras, tape_keras_internals
from replicax.tf.keras import (
    callback_changes,
    files,
    layer_changes,
    model_changes,
    optimizer_changes,
    own_steps,
    shape_inference,
    user_functions,
)
from replicax.tf.keras.argument_types import KerasObject


class Replace(Protocol):
    """Replaces an attribute of a class or module by a wrapper of it."""

    def __call__(self, owner: KerasObject, name: str, wrap: Callable[[Any], Any]) -> None: ...


class _Changes:
    # The classes and modules that were changed, and what was there before.
    made: list[tuple[Any, str, Any]] = []


def is_inside_keras() -> bool:
    """Tells whether code of a layer, or of a step that Keras compiles, is running."""
    return tape_keras_internals.is_inside_call()


def install() -> None:
    """Makes the changes; idempotent."""
    if _Changes.made:
        return
    tape_keras.install()
    for module in (
        user_functions,
        layer_changes,
        optimizer_changes,
        model_changes,
        own_steps,
        callback_changes,
        files,
        shape_inference,
    ):
        module.install(_replace)


def uninstall() -> None:
    """Takes all changes back."""
    while _Changes.made:
        owner, name, before = _Changes.made.pop()
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _replace(owner: KerasObject, name: str, wrap: Callable[[Any], Any]) -> None:
    own = vars(owner).get(name)
    setattr(owner, name, wrap(own if isinstance(own, property) else getattr(owner, name, None)))
    _Changes.made.append((owner, name, own))
