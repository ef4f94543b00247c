"""Keras optimizers, losses and layers inside replica code, as tf.distribute defines them there."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.foundation import errors
from replicax.foundation.options import ReduceOp
from replicax.foundation.replacements import Replace
from replicax.keras import internals
from replicax.keras.variables import DistributedVariable, adopt, creation
from replicax.strategies.base import Strategy
from replicax.tracing.function import Function
from replicax.tracing.gradients import Gradient
from replicax.values.indexed_slices import IndexedSlices


def install(replace: Replace) -> None:
    """Makes the changes that replica code needs."""
    replace(keras.optimizers.Optimizer, "apply", _apply)
    replace(keras.optimizers.LossScaleOptimizer, "apply", _apply)
    replace(keras.optimizers.LossScaleOptimizer, "scale_loss", _scale_loss_of_optimizer)
    replace(keras.layers.BatchNormalization, "__init__", _batch_norm_init)
    replace(keras.layers.BatchNormalization, "_moments", _moments)
    replace(internals.loss_module, "scale_loss_for_distribution", _scale_loss)


def _in_replica_code() -> bool:
    """Tells whether code of one of several replicas, or of a strategy's only one, is running."""
    frame = frames.current()
    return frame.mode is Mode.REPLICA and not frame.is_default


def _apply(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def apply(
        self: Any,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        given = None if trainable_variables is None else list(trainable_variables)
        known = internals.trainable_variables_of(self) if given is None else given
        if internals.in_stateless_scope() or not _are_distributed(known):
            original(self, grads, trainable_variables)
            return
        _join(self, known)
        indices = [i for i, gradient in enumerate(grads) if gradient is not None]
        variables, values = [known[i] for i in indices], [grads[i] for i in indices]
        frame = frames.current()
        if frame.mode is Mode.REPLICA:
            assert frame.replica_context is not None
            frame.replica_context.merge_call(_sum_and_apply, args=(self, variables, values))
        else:
            _apply_once(self, variables, values)

    return apply


def _join(optimizer: keras.optimizers.Optimizer, known: Sequence[Any]) -> None:
    """Gives the state of an optimizer, wherever it was made, to the strategy of its variables."""
    strategy = next(v.strategy for v in known if isinstance(v, DistributedVariable))
    if not optimizer.built:
        with creation(strategy):
            optimizer.build(list(known))
    for variable in optimizer.variables:
        adopt(variable, strategy)


def _scale_loss_of_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale_loss(self: Any, loss: jax.Array) -> Any:
        # Keras would use the initial scale, which stays in the compiled program.
        is_traced = frames.current().overlay is not None
        if is_traced and not self.built and not internals.in_stateless_scope():
            raise errors.ContextError(
                "A LossScaleOptimizer that scales a loss in a gradient or compiled function must "
                "have its variables",
                "it was not built",
                "Call `optimizer.build(model.trainable_variables)` in the scope, before the first "
                "step.",
            )
        return original(self, loss)

    return scale_loss


def _are_distributed(variables: Sequence[keras.Variable]) -> bool:
    return any(isinstance(variable, DistributedVariable) for variable in variables)


def _sum_and_apply(
    strategy: Strategy,
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    grads: Sequence[Gradient | None],
) -> None:
    """Sums the gradients of all replicas, and updates every copy of the variables alike."""
    twins = [variable.replicax_variable for variable in variables]
    pairs = list(zip(grads, twins, strict=True))
    _apply_once(optimizer, variables, strategy.extended.batch_reduce_to(ReduceOp.SUM, pairs))


def _apply_once(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    grads: Sequence[Gradient | None],
) -> None:
    """Updates variables with gradients that are the same for all replicas."""
    known = internals.trainable_variables_of(optimizer)
    position = {id(variable): i for i, variable in enumerate(known)}
    full: list[Any] = [None] * len(known)
    for variable, gradient in zip(variables, grads, strict=True):
        full[position[id(variable)]] = None if gradient is None else _dense(gradient)
    _compiled_update(optimizer)(full)


def _update(
    optimizer: keras.optimizers.Optimizer, known: list[Any], grads: Sequence[Gradient | None]
) -> None:
    """Runs the optimizer as `fit` does: as a function of values.

    Optimizers branch on traced values (loss scaling, gradient accumulation), and JAX's branches
    write no variables.
    """
    state = optimizer.variables
    old_state, old = [v.value for v in state], [v.value for v in known]
    new, new_state = optimizer.stateless_apply(old_state, grads, old)
    for variable, before, after in zip(
        [*known, *state], [*old, *old_state], [*new, *new_state], strict=True
    ):
        if after is not before:
            variable.assign(after)


# The compiled update of each optimizer, for replica code that is not compiled as a whole.
_compiled: weakref.WeakKeyDictionary[Any, Function[..., None]] = weakref.WeakKeyDictionary()


def _compiled_update(optimizer: keras.optimizers.Optimizer) -> Function[..., None]:
    found = _compiled.get(optimizer)
    if found is None:
        # Weak, or the entry would keep its own key alive.
        owner = weakref.ref(optimizer)

        def update(grads: Sequence[Gradient | None]) -> None:
            optimizer = owner()
            assert optimizer is not None
            _update(optimizer, internals.trainable_variables_of(optimizer), grads)

        found = Function(update, name=f"{type(optimizer).__name__}.apply")
        _compiled[optimizer] = found
    return found


def _dense(gradient: Gradient) -> Any:
    if not isinstance(gradient, IndexedSlices):
        return gradient
    zeros = jnp.zeros(gradient.dense_shape, gradient.values.dtype)
    return zeros.at[gradient.indices].add(gradient.values)


def _batch_norm_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        # Keras refuses the argument for this backend.
        original(self, *args, **kwargs)
        self.synchronized = synchronized

    # Keras makes the configuration of a layer from the arguments that it finds here.
    __init__.__dict__["__signature__"] = inspect.signature(original)
    return __init__


def _moments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _moments(self: Any, inputs: jax.Array, mask: jax.Array | None) -> Any:
        if not self.synchronized:
            return original(self, inputs, mask)
        # Outside of replica code the batch is whole.
        self.synchronized = False
        try:
            mean, variance = original(self, inputs, mask)
        finally:
            self.synchronized = True
        if not _in_replica_code():
            return mean, variance
        count = jnp.asarray(_num_values(self, inputs, mask), mean.dtype)
        context = frames.current().replica_context
        assert context is not None
        total, first, second = context.all_reduce(
            ReduceOp.SUM, [count, count * mean, count * (variance + jnp.square(mean))]
        )
        mean = first / total
        return mean, second / total - jnp.square(mean)

    return _moments


def _num_values(
    layer: keras.layers.BatchNormalization, inputs: jax.Array, mask: jax.Array | None
) -> Any:
    """Returns how many values each mean is computed from."""
    if mask is not None:
        return jnp.sum(jnp.asarray(mask, inputs.dtype))
    axis = layer.axis % inputs.ndim
    return inputs.size // inputs.shape[axis]


def _scale_loss(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def scale_loss_for_distribution(value: jax.Array) -> Any:
        if not _in_replica_code() or internals.in_stateless_scope():
            return original(value)
        return value / frames.current().strategy.num_replicas_in_sync

    return scale_loss_for_distribution
