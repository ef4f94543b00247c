"""Saving a model of several workers: all call it, the chief writes, and all return after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from replicax.bundle.writers import Writers
from replicax.foundation.replacements import Replace
from replicax.keras import alone, training


def install(replace: Replace) -> None:
    """Lets the chief write the files of models of several workers."""
    for name in ("save", "save_weights", "export"):
        replace(keras.Model, name, by_chief)
    # `keras.Model.save` calls the function behind these names, not the names.
    replace(keras.saving, "save_model", by_chief)
    replace(keras.models, "save_model", by_chief)


def by_chief(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the chief alone call a function that writes the files of a model."""

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        layout = training.layout_of(model) if isinstance(model, keras.Model) else None
        if model is None or layout is None or layout.peers is None or alone.is_alone():
            return original(*args, **kwargs)
        training.combine_variables(model)

        def write() -> None:
            with alone.entered():
                original(*args, **kwargs)

        name = f"`{original.__name__}` of {model.name!r}"
        return Writers(layout.peers).from_chief(name, write, None)

    return save
