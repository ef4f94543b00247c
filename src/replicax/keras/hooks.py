"""What replicax changes in Keras: each change passes on to Keras where no strategy is involved."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.foundation import errors, thread_states
from replicax.foundation.replacements import Replace, Replacements
from replicax.keras import (
    alone,
    checkpoints,
    custom_loops,
    data,
    internals,
    saving,
    training,
    workers,
)
from replicax.keras.parameter_servers import closures, embedding
from replicax.keras.parameter_servers import trainer as ps_trainer
from replicax.keras.variables import (
    DistributedVariable,
    adopt,
    creation,
    default_strategy,
    is_compiled,
    is_in_scope,
    is_metric,
    is_seed,
    made_by,
)
from replicax.observe import progress
from replicax.strategies.base import Strategy
from replicax.variables.variable import Variable


def is_installed() -> bool:
    """Tells whether Keras models are distributed by the scope that they are made in.

    >>> import replicax as rx
    >>> rx.keras.is_installed()
    True
    """
    return _replacements.are_installed


def uninstall() -> None:
    """Takes all changes back: Keras ignores strategies from now on.

    Models that were made in a scope keep their variables, and Keras trains them by itself.

    >>> import replicax as rx
    >>> rx.keras.uninstall()
    >>> rx.keras.is_installed()
    False
    >>> rx.keras.install()
    """
    _replacements.uninstall()
    training.forget_steps()


def install() -> None:
    """Lets the scope of a strategy distribute Keras models; idempotent.

    `import replicax` does so when Keras is imported, before or after it.

    >>> import keras
    >>> import numpy as np
    >>> import replicax as rx
    >>> rx.keras.install()
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
    ...     model.compile("sgd", "mse")
    >>> float(model.train_on_batch(np.ones((3, 1)), np.full((3, 1), 2.0)))
    4.0
    """
    if not is_installed():
        _replacements.install()
        training.forget_steps()


def _make(replace: Replace) -> None:
    if keras.backend.backend() != "jax":
        replace(keras.Variable, "__init__", _refuse_backend)
        return
    replace(keras.Variable, "__init__", _variable_init)
    replace(keras.Variable, "value", _value_of_no_scope)
    replace(keras.Variable, "_direct_assign", _assign_of_no_scope)
    replace(keras.Variable, "replicax_variable", lambda _: property(_twin_of_no_scope))
    replace(keras.layers.Layer, "add_weight", _add_weight)
    replace(keras.layers.Layer, "__new__", _layer_new)
    replace(internals.Trainer, "compile", _in_scope_of_model)
    for name in ("fit", "evaluate", "predict"):
        replace(keras.Model, name, _in_scope_of_model)
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        replace(keras.Model, name, _in_scope_of_model)
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        replace(keras.Model, name, _make_function)
    replace(keras.Model, "__setattr__", _set_attribute)
    replace(keras.Model, "_get_jax_state", _get_state)
    replace(keras.Model, "jax_state_sync", _sync_state)
    replace(internals.data_adapters_module, "get_data_adapter", data.get_data_adapter)
    replace(keras.callbacks.CallbackList, "on_train_batch_end", _log_values)
    checkpoints.install(replace)
    replace(keras.layers.Embedding, "call", embedding.looking_up)
    custom_loops.install(replace)
    closures.install(replace)
    saving.install(replace)


_replacements = Replacements(0, _make)
thread_states.register(internals.thread_state)


def _log_values(original: Callable[..., None]) -> Callable[..., None]:
    """Shows the loss and the metrics of each batch to those who observe this process."""

    @functools.wraps(original)
    def on_train_batch_end(self: Any, batch: int, logs: dict[str, Any] | None = None) -> None:
        for name, value in (logs or {}).items():
            progress.log(name, value, batch)
        original(self, batch, logs)

    return on_train_batch_end


def _refuse_backend(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_in_scope() and not frames.current().is_default:
            raise errors.UnsupportedError(
                "Keras under a strategy of replicax needs its JAX backend",
                f"keras uses {keras.backend.backend()!r}",
                "Set KERAS_BACKEND=jax before Keras is first imported.",
            )
        original(self, *args, **kwargs)

    return __init__


def _variable_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # A compiled function that builds a model would leave traced values in it.
        is_own = not is_in_scope()
        if is_own and not is_compiled():
            original(self, *args, **kwargs)
            return
        internals.require_known()
        strategy = default_strategy() if is_own else _current_strategy()
        with creation(strategy):
            original(self, *args, **kwargs)
            # Metrics and seeds of models on parameter servers stay with the coordinator.
            if not (ps_trainer.is_for(strategy) and (is_metric(self) or is_seed(self))):
                adopt(self, strategy)

    return __init__


def _value_of_no_scope(original: property) -> property:
    """Lets traces and replica code read the variables of no scope."""
    read = original.fget
    assert read is not None

    @functools.wraps(read)
    def value(self: Any) -> Any:
        return self.value if _joins_default_strategy(self) else read(self)

    return property(value)


def _assign_of_no_scope(original: Callable[..., None]) -> Callable[..., None]:
    """Lets traces and replica code assign the variables of no scope."""

    @functools.wraps(original)
    def _direct_assign(self: Any, value: Any) -> None:
        if _joins_default_strategy(self):
            self._direct_assign(value)
        else:
            original(self, value)

    return _direct_assign


def _joins_default_strategy(variable: keras.Variable) -> bool:
    """Gives a variable of no scope to the default strategy, where Keras would use it wrongly.

    A trace would keep its value for ever, and leave a traced one in it. In eager replica code
    the result would be another one than in compiled replica code.
    """
    frame = frames.current()
    is_replica = frame.mode is Mode.REPLICA and not frame.is_default
    if frame.overlay is None and not is_replica:
        return False
    if internals.in_stateless_scope() or not _has_value_of_its_own(variable):
        return False
    adopt(variable, default_strategy())
    return True


def _twin_of_no_scope(variable: keras.Variable) -> Variable | None:
    """Returns the variable of replicax that has the value of a Keras variable from now on."""
    if internals.in_stateless_scope() or not _has_value_of_its_own(variable):
        raise AttributeError(f"{variable.name!r} is not a variable of replicax.")
    adopt(variable, default_strategy())
    assert isinstance(variable, DistributedVariable)
    return variable.replicax_variable


def _has_value_of_its_own(variable: keras.Variable) -> bool:
    return type(variable) is keras.Variable and variable.__dict__.get("_value") is not None


def _add_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = training.maker_of(self)
        # A layer may be built later, outside of the scope that it was made in.
        is_late = strategy is not None and not is_in_scope()
        late = creation(strategy) if strategy and is_late else contextlib.nullcontext()
        with late, made_by("layer"):
            return original(self, *args, **kwargs)

    return add_weight


def _layer_new(original: Callable[..., Any]) -> Any:
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        layer = original(cls, *args, **kwargs)
        if is_in_scope():
            training.remember(layer, _current_strategy())
        return layer

    return staticmethod(__new__)


def _in_scope_of_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = training.strategy_of(self)
        frame = frames.current()
        if strategy is not frame.strategy and not frame.is_default and is_in_scope():
            training.require_own_scope(self, original.__name__, _current_strategy())
        if strategy is None:
            return original(self, *args, **kwargs)
        if alone.is_alone():
            with alone.own_functions(self):
                return original(self, *args, **kwargs)
        # Optimizers, metrics and lazy layers make their variables in here.
        with strategy.scope(), made_by("fit"):
            if ps_trainer.is_for(strategy):
                return ps_trainer.call(original, self, strategy, args, kwargs)
            try:
                return workers.together(original, self, *args, **kwargs)
            except BaseException:
                # Keras does so in `fit` alone: the last step has taken the old values over.
                self.jax_state_sync()
                raise

    return call


def _make_function(original: Callable[..., Any]) -> Callable[..., Any]:
    ours = getattr(training, original.__name__)

    @functools.wraps(original)
    def make_function(self: Any, force: bool = False) -> Any:
        strategy = training.strategy_of(self)
        if strategy is not None and ps_trainer.is_for(strategy):
            return ps_trainer.make_function(self, strategy, original.__name__, force)
        is_ours = training.layout_of(self) is not None and not alone.is_alone()
        return (ours if is_ours else original)(self, force=force)

    return make_function


def _set_attribute(original: Callable[..., None]) -> Callable[..., None]:
    """Leaves out Keras' search for layers among the arrays of each step: 0.1 ms and more."""

    @functools.wraps(original)
    def __setattr__(self: Any, name: str, value: object) -> None:
        if name == internals.STATE and training.layout_of(self) is not None:
            self.__dict__[name] = value
        else:
            original(self, name, value)

    return __setattr__


def _get_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_jax_state(self: Any, **kinds: bool) -> Any:
        strategy = training.strategy_of(self)
        if strategy is not None and ps_trainer.is_for(strategy):
            ps_trainer.take_state(self, strategy)
            return tuple([] for kind in training.KINDS if kinds.get(kind))
        if training.layout_of(self) is None:
            return original(self, **kinds)
        return training.take_state(self, [kind for kind in training.KINDS if kinds.get(kind)])

    return _get_jax_state


def _sync_state(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def jax_state_sync(self: Any) -> None:
        strategy = training.strategy_of(self)
        if strategy is not None and ps_trainer.is_for(strategy):
            ps_trainer.sync_state(self, strategy)
            return
        if training.layout_of(self) is None:
            original(self)
            return
        state = internals.state_of(self)
        if state and not internals.is_state_synced(self):
            training.give_state(self, state)
            internals.set_state_synced(self)

    return jax_state_sync


def _current_strategy() -> Strategy:
    strategy = frames.current().strategy
    assert isinstance(strategy, Strategy)
    return strategy
