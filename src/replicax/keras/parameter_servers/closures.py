"""Keras models, optimizers and metrics in closures: programs with training loops of their own.

A closure that uses a model is sent to workers with the configuration of the model and handles of
its variables, which are on the servers. On a worker, its variables read from the servers, and add
their changes there, so that no worker overwrites another. Optimizers update variables on the
servers, as `fit` lets them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike
from typing_extensions import override

from replicax.contexts import frames, worker_index
from replicax.coordinator.shipping import pickling
from replicax.foundation import errors, jax_compat
from replicax.foundation.replacements import Replace
from replicax.foundation.types import Tree
from replicax.keras import training
from replicax.keras.parameter_servers import optimizer as optimizers
from replicax.keras.parameter_servers import step_values
from replicax.keras.parameter_servers.clipping import Clipping
from replicax.keras.parameter_servers.trainer import is_for
from replicax.keras.parameter_servers.worker_model import WorkerModel, custom_objects_of
from replicax.keras.variables import (
    DistributedVariable,
    adopt,
    creation,
    is_seed,
    outside_scopes,
)
from replicax.strategies.base import Strategy
from replicax.tracing.gradients import Gradient
from replicax.training.optimizer.remote import RemoteOptimizer
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables.variable import Variable

# The distance of the seeds of neighbouring workers: far apart, and odd, so that all differ.
_SEED_STRIDE = 0x9E3779B1


def install(replace: Replace) -> None:
    """Lets closures use Keras objects."""
    replace(keras.Model, "__reduce__", _shipping(_reduced_model))
    replace(keras.optimizers.Optimizer, "__reduce__", _shipping(_reduced_optimizer))
    replace(keras.metrics.Metric, "__reduce__", _shipping(_reduced_metric))


def _shipping(reduced: Callable[[Any, Strategy], Any]) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __reduce__(self: keras.Model) -> Any:
            strategy = pickling.destination()
            if strategy is None or not is_for(strategy):
                return original(self)
            return reduced(self, strategy)

        return __reduce__

    return wrap


# Coordinator.


def _reduced_model(model: keras.Model, strategy: Strategy) -> Any:
    if training.strategy_of(model) is not strategy:
        raise errors.InvalidArgumentError(
            "A closure may use models that were made in the scope of its strategy",
            f"the model {model.name!r} was made outside of it",
            "Make the model in `with strategy.scope():`.",
        )
    if not model.built:
        raise errors.InvalidArgumentError(
            "A model must have its variables before a closure uses it",
            f"the model {model.name!r} is not built",
            "Call `model.build(input_shape)` in the scope, or start it with a `keras.Input`.",
        )
    return _worker_model, (strategy, WorkerModel.of(model), _twins(model.variables, strategy))


def _reduced_metric(metric: keras.Metric, strategy: Strategy) -> Any:
    config = keras.saving.serialize_keras_object(metric)
    twins = _twins(metric.variables, strategy)
    return _worker_metric, (strategy, config, custom_objects_of(metric, config), twins)


def _reduced_optimizer(optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> Any:
    if not optimizer.built:
        with creation(strategy):
            optimizer.build(_trained_by(optimizer, strategy))
    remote = optimizers.on_servers(optimizer, strategy)
    twins = _twins(optimizer.variables, strategy)
    index = [id(v) for v in optimizer.variables].index(id(optimizer.iterations))
    name = type(optimizer).__name__
    return WorkerOptimizer, (name, remote, Clipping.of(optimizer), twins[index])


def _trained_by(optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> list[keras.Variable]:
    """Returns what an optimizer without variables must be for: those of the only model."""
    found = [m.trainable_variables for m in training.models_of(strategy) if m.built]
    ids = [frozenset(map(id, variables)) for variables in found]
    # Models may be parts of others.
    whole = list({own for own in ids if own and not any(own < other for other in ids)})
    if len(whole) != 1:
        raise errors.InvalidArgumentError(
            "An optimizer must know its variables before a closure uses it",
            f"{type(optimizer).__name__} was not built, and the scope has {len(whole)} models "
            "with variables",
            "Call `optimizer.build(model.trainable_variables)` in the scope.",
        )
    return found[ids.index(whole[0])]


def _twins(variables: Iterable[keras.Variable], strategy: Strategy) -> list[Variable]:
    """Returns the variables on the servers; moves metrics and seeds there."""
    found: list[Variable] = []
    for variable in variables:
        if not isinstance(variable, DistributedVariable):
            with creation(strategy):
                adopt(variable, strategy)
        assert isinstance(variable, DistributedVariable) and variable.twin is not None
        found.append(variable.twin)
    return found


# Worker.


class ClosureVariable(DistributedVariable):
    """A variable of a model on a worker: its value is on the servers."""

    @override
    def _direct_assign(self, value: ArrayLike) -> None:
        assert self.twin is not None
        twin = self.twin
        if not jnp.issubdtype(twin.dtype, jnp.number):
            twin.assign(value)
            return
        # The change, so that those of all workers count.
        twin.assign_add(jnp.asarray(value, twin.dtype) - self._read(twin))

    @override
    def _with_offset(self, value: jax.Array) -> jax.Array:
        if not is_seed(self):
            return value
        number = worker_index.experimental_get_current_worker_index()
        distance = jnp.uint32(number * _SEED_STRIDE % 2**32).astype(value.dtype)
        return value + jnp.stack([distance, jnp.zeros((), value.dtype)])


def _adopt(variables: Sequence[Any], twins: Sequence[Variable], strategy: Strategy) -> None:
    for variable, twin in zip(variables, twins, strict=True):
        variable.__dict__.pop("_value", None)
        variable.__class__ = ClosureVariable
        variable.strategy, variable.twin = strategy, twin
        variable._global = variable._combined = None


def _worker_model(strategy: Strategy, described: WorkerModel, twins: list[Variable]) -> keras.Model:
    model = described.model
    described.require_same_variables(model)
    _adopt(model.variables, twins, strategy)
    training.remember(model, strategy)
    return model


def _worker_metric(
    strategy: Strategy, config: Tree, custom_objects: dict[str, Any], twins: list[Variable]
) -> keras.Metric:
    with (
        outside_scopes(),
        jax_compat.eagerly(),
        keras.saving.custom_object_scope(custom_objects),
        step_values.construction(),
    ):
        metric: Any = keras.saving.deserialize_keras_object(config, safe_mode=False)
    _adopt(metric.variables, twins, strategy)
    return metric


class WorkerOptimizer:
    """The optimizer of a closure on a worker: its updates are computed on the servers.

    Args:
      name: The class of the optimizer.
      remote: The optimizer on the servers.
      clipping: What is done to gradients before.
      iterations: The number of steps, on the servers.
    """

    built = True

    def __init__(
        self, name: str, remote: RemoteOptimizer, clipping: Clipping, iterations: Variable
    ) -> None:
        self.name = name
        self.iterations = iterations
        self._remote = remote
        self._clipping = clipping

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], **_: object) -> None:
        """Applies gradients to variables, on the servers."""
        pairs = list(grads_and_vars)
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Applies one gradient per variable, on the servers."""
        trained = self._remote.trained
        found: list[Gradient | None] = [None] * len(trained)
        if trainable_variables is None:
            found = [_plain(gradient) for gradient in grads]
        else:
            position = {_key(variable): i for i, variable in enumerate(trained)}
            for gradient, variable in zip(grads, trainable_variables, strict=True):
                index = position.get(_key(getattr(variable, "replicax_variable", variable)))
                if index is None:
                    raise errors.InvalidArgumentError(
                        "An optimizer of a closure applies gradients to the variables that it was "
                        "built with",
                        f"{self.name} was built without {variable.name!r}",
                        "Call `optimizer.build(variables)` with all of them, in the scope.",
                    )
                found[index] = _plain(gradient)
        given = [gradient for gradient in found if gradient is not None]
        clipped = iter(self._clipping.clipped(given))
        self._remote.apply(frames.current(), [None if g is None else next(clipped) for g in found])

    def scale_loss(self, loss: jax.Array) -> jax.Array:
        """Returns the loss whose gradients are computed."""
        return self._clipping.scaled(loss)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"An optimizer in a closure has `apply_gradients`, `apply` and `iterations`; "
            f"{name!r} of {self.__dict__.get('name')} is known to the coordinator."
        )


def _key(variable: object) -> object:
    key = getattr(variable, "shipping_key", None)
    return id(variable) if key is None else key()


def _plain(gradient: Gradient | None) -> Gradient | None:
    if isinstance(gradient, IndexedSlices):
        return gradient.map_arrays(jnp.asarray)
    return None if gradient is None else jnp.asarray(gradient)
