"""Methods and arguments of models that earlier versions of Keras had, and tensors as their data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from replicax.foundation.replacements import Replace
from replicax.keras import training
from replicax.strategies import default
from replicax.tf import tape_keras
from replicax.tf.data import dataset as tf_dataset
from replicax.tf.keras import internals
from replicax.tf.keras.argument_types import KerasObject, Value
from replicax.tf.tape_recording import map_leaves
from replicax.tf.tensor import Tensor, raw

# Arguments without a meaning here.
_LOOP_UNUSED = ("use_multiprocessing", "workers", "max_queue_size")
_COMPILE_UNUSED = (
    "distribute",
    "experimental_run_tf_function",
    "sample_weight_mode",
    "target_tensors",
    "pss_evaluation_shards",
    "from_serialized",
)


def install(replace: Replace) -> None:
    """Lets models take what earlier versions took, and tensors and datasets of `tf`."""
    for name in ("fit", "evaluate", "predict"):
        replace(keras.Model, name, _loop)
        replace(keras.Model, f"{name}_generator", functools.partial(_generator_loop, name))
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        replace(keras.Model, name, _on_arrays)
    # In the class that defines it: `load_model` does not compile a model that overrides it.
    definer = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    replace(definer, "compile", _compile)
    replace(keras.Model, "compute_loss", tape_keras.recorded)
    replace(keras.Model, "reset_states", lambda _: _reset_states)
    replace(keras.Model, "compiled_loss", lambda _: property(CompiledLoss))
    replace(keras.Model, "compiled_metrics", lambda _: property(CompiledMetrics))
    replace(keras.Model, "distribute_strategy", lambda _: property(_strategy))
    replace(keras.Model, "state_updates", lambda _: property(lambda self: []))
    replace(keras.layers.Layer, "set_weights", _on_arrays)
    replace(internals.data_adapters, "get_data_adapter", _get_data_adapter)


def as_data(value: Value) -> Any:
    """Returns data of a loop as Keras takes it: NumPy arrays, and datasets of arrays."""
    if isinstance(value, tf_dataset.Dataset):
        return tf_dataset.plain(value)
    return map_leaves(_host_array, value)


def _host_array(leaf: Value) -> Any:
    return np.asarray(raw(leaf)) if isinstance(leaf, Tensor) else leaf


def _get_data_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_data_adapter(x: Value, *args: Any, **kwargs: Any) -> Any:
        if inspect.isgenerator(x):
            x = map(functools.partial(map_leaves, _host_array), x)
            x = (element for element in x)
        else:
            x = as_data(x)
        given = [as_data(value) for value in args]
        return original(x, *given, **{name: as_data(value) for name, value in kwargs.items()})

    return get_data_adapter


def _loop(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in _LOOP_UNUSED:
            kwargs.pop(name, None)
        given = [_argument(value) for value in args]
        return original(self, *given, **{name: _argument(v) for name, v in kwargs.items()})

    return loop


def _argument(value: Value) -> Any:
    """Unwraps tensors; a `validation_split` needs arrays, and sizes must be numbers."""
    if isinstance(value, tf_dataset.Count):
        return int(value)
    return (
        map_leaves(_host_array, value) if isinstance(value, Tensor | tuple | list | dict) else value
    )


def _generator_loop(name: str, original: KerasObject) -> Callable[..., Any]:
    del original

    def loop(self: Any, generator: Value, *args: Any, **kwargs: Any) -> Any:
        """Trains or predicts with a generator: the older name of a loop over any data."""
        names = ("steps_per_epoch", "epochs") if name == "fit" else ("steps",)
        kwargs.update(zip(names, args, strict=False))
        return getattr(self, name)(generator, **kwargs)

    return loop


def _on_arrays(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a method take tensors as arrays of the host."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_leaves(_host_array, (args, kwargs))
        return original(self, *args, **kwargs)

    return method


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in _COMPILE_UNUSED:
            kwargs.pop(name, None)
        steps = kwargs.pop("experimental_steps_per_execution", None)
        if steps is not None:
            kwargs["steps_per_execution"] = steps
        if kwargs.get("jit_compile", "auto") is None:
            del kwargs["jit_compile"]
        return original(self, *args, **kwargs)

    return compile


def _reset_states(self: Any) -> None:
    """Resets the states of recurrent layers."""
    for layer in self.layers:
        reset = getattr(layer, "reset_state", None) or getattr(layer, "reset_states", None)
        if reset is not None and getattr(layer, "stateful", isinstance(layer, keras.Model)):
            reset()


def _strategy(self: Any) -> Any:
    """The strategy in whose scope the model was made."""
    return training.strategy_of(self) or default.get_strategy()


class CompiledLoss:
    """The loss that was given to `compile`, as earlier versions call it in `train_step`."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    @property
    def metrics(self) -> list[Any]:
        """The mean of the losses of an epoch."""
        tracker = internals.loss_tracker(self._model)
        return [] if tracker is None else [tracker]

    def __call__(
        self,
        y_true: Value,
        y_pred: Value,
        sample_weight: Value = None,
        regularization_losses: Value = None,
    ) -> Any:
        """Returns the loss of a batch, with the losses of layers if they are given."""
        compute = tape_keras.recorded(internals.compiled_loss(self._model))
        value = compute(y_true, y_pred, sample_weight)
        for loss in regularization_losses or ():
            value = value + loss
        rows = keras.tree.flatten(y_pred)[0].shape[0]
        for tracker in self.metrics:
            tracker.update_state(value, sample_weight=rows)
        return value

    def reset_state(self) -> None:
        """Forgets the losses so far."""
        for tracker in self.metrics:
            tracker.reset_state()

    reset_states = reset_state


class CompiledMetrics:
    """The metrics that were given to `compile`, as earlier versions call them in `train_step`."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    @property
    def metrics(self) -> list[Any]:
        """All metrics."""
        found = internals.compiled_metrics(self._model)
        return [] if found is None else list(found.metrics)

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:
        """Adds a batch to all metrics."""
        found = internals.compiled_metrics(self._model)
        if found is not None:
            found.update_state(y_true, y_pred, sample_weight)

    def reset_state(self) -> None:
        """Forgets the batches so far."""
        found = internals.compiled_metrics(self._model)
        if found is not None:
            found.reset_state()

    reset_states = reset_state
