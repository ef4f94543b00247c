"""The shapes of outputs of layers that are written with `tf`, for inputs of unknown sizes.

Keras calls a layer with sizes that are symbols. TensorFlow programs compute with sizes
(`tf.shape(x)[0]`), which need numbers. So a layer of a user is called with two numbers instead, one
after the other: sizes of the outputs that differ are unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from replicax.foundation.replacements import Replace
from replicax.tf.dispatch import has_symbolic
from replicax.tf.keras import internals
from replicax.tf.keras.argument_types import KerasObject, Value

# Numbers with many divisors, which programs divide sizes by, and large enough for convolutions.
_SIZES = (720, 1440)


def install(replace: Replace) -> None:
    """Lets layers of users compute with sizes."""
    replace(internals.BACKEND, "compute_output_spec", _computing)


def _computing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute_output_spec(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _is_of_keras(fn) or not _has_unknown((args, kwargs)):
            return original(fn, *args, **kwargs)
        found = [original(fn, *_filled(args, size), **_filled(kwargs, size)) for size in _SIZES]
        return keras.tree.map_structure(_common, *found)

    return compute_output_spec


def _is_of_keras(fn: KerasObject) -> bool:
    owner = getattr(fn, "__self__", None)
    module = getattr(fn, "__module__", "") if owner is None else type(owner).__module__
    return str(module).startswith("keras.") and not isinstance(owner, keras.layers.Lambda)


def _has_unknown(structure: Value) -> bool:
    if not has_symbolic(structure):
        return False
    return any(
        isinstance(leaf, keras.KerasTensor) and None in leaf.shape
        for leaf in keras.tree.flatten(structure)
    )


def _filled(structure: Value, size: int) -> Any:
    def known(leaf: Value) -> Any:
        if not isinstance(leaf, keras.KerasTensor) or None not in leaf.shape:
            return leaf
        shape = tuple(size if n is None else n for n in leaf.shape)
        return keras.KerasTensor(shape, dtype=leaf.dtype, sparse=leaf.sparse, name=leaf.name)

    return keras.tree.map_structure(known, structure)


def _common(first: Value, second: Value) -> Any:
    if not isinstance(first, keras.KerasTensor):
        return first
    shape = tuple(n if n == m else None for n, m in zip(first.shape, second.shape, strict=True))
    return keras.KerasTensor(shape, dtype=first.dtype, sparse=first.sparse)
