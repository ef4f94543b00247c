"""Callbacks: TensorBoard without TensorFlow, and arguments that earlier versions had."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from replicax.foundation.replacements import Replace
from replicax.tf import summary
from replicax.tf.keras import internals
from replicax.tf.keras.argument_types import FilePath, Value
from replicax.tf.tensor import Tensor, raw

_UNUSED = ("batch_size", "write_grads", "embeddings_layer_names", "embeddings_data", "options")


def install(replace: Replace) -> None:
    """Lets callbacks take what earlier versions took."""
    tensorboard = keras.callbacks.TensorBoard
    replace(tensorboard, "__init__", _tensorboard_init)
    replace(tensorboard, "summary", lambda _: property(lambda self: summary))
    replace(tensorboard, internals.WRITE_MODEL_SUMMARY, lambda _: _write_model)
    checkpoint = keras.callbacks.ModelCheckpoint
    replace(checkpoint, "__init__", _checkpoint_init)
    replace(checkpoint, "on_epoch_end", _every_period)
    replace(keras.callbacks.LearningRateScheduler, "__init__", _scheduler_init)


def _tensorboard_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in _UNUSED:
            kwargs.pop(name, None)
        # Batches are not profiled here: `tf.profiler.experimental` does it for any part of a run.
        kwargs["profile_batch"] = 0
        original(self, *args, **kwargs)

    return __init__


def _write_model(self: Any) -> None:
    """Writes the configuration of a model as a text, where it has one."""
    if type(self.model) in (keras.Sequential, *_functional()):
        with internals.summary_writer(self).as_default():
            summary.text("keras", self.model.to_json(), step=0)


def _functional() -> tuple[type, ...]:
    inputs = keras.Input((1,))
    return (type(keras.Model(inputs, inputs)),)


def _checkpoint_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, filepath: FilePath, *args: Any, **kwargs: Any) -> None:
        for name in _UNUSED:
            kwargs.pop(name, None)
        period = kwargs.pop("period", None) or 1
        path = str(filepath)
        # Keras compares the end of the path with those of its own formats.
        weights_only = kwargs.get("save_weights_only", args[3] if len(args) > 3 else False)
        suffix = ".weights.h5" if weights_only else ".keras"
        ends = suffix if weights_only else (".keras", ".h5")
        original(self, path if path.endswith(ends) else f"{path}{suffix}", *args, **kwargs)
        self.filepath = path
        self.period = period

    return __init__


def _every_period(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_epoch_end(self: Any, epoch: int, logs: Value = None) -> None:
        if (epoch + 1) % getattr(self, "period", 1) == 0:
            original(self, epoch, logs)

    return on_epoch_end


def _scheduler_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        @functools.wraps(schedule)
        def rate(*given: Any) -> Any:
            found = schedule(*given)
            is_number = isinstance(found, Tensor | int | np.ndarray | np.generic)
            return float(raw(found)) if is_number or hasattr(found, "__jax_array__") else found

        original(self, rate, *args, **kwargs)

    return __init__
