"""What a worker computes for one batch, as parts of one compiled program.

Every step returns what it adds to the variables of the metrics: they start from their first
state, so that the sum over all steps is exact, in whichever order and on whichever worker.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from replicax.contexts import frames
from replicax.foundation.types import Tree
from replicax.keras import internals
from replicax.keras.parameter_servers.clipping import Clipping
from replicax.keras.parameter_servers.step_values import StepScope
from replicax.keras.parameter_servers.worker_model import WorkerModel
from replicax.tracing.gradients import value_and_grad
from replicax.training.optimizer.remote import RemoteOptimizer
from replicax.variables.variable import Variable


def train(
    worker_model: WorkerModel,
    optimizer: RemoteOptimizer,
    clipping: Clipping,
    step: jax.Array,
    batch: Tree,
) -> list[jax.Array]:
    """Computes gradients and pushes them to the servers.

    Args:
      worker_model: The model.
      optimizer: The optimizer on the servers.
      clipping: What is done to the gradients here, where all of them are.
      step: The number of the step, from which its random numbers derive.
      batch: Inputs, targets and weights.

    Returns:
      What is added to each variable of the metrics.
    """
    worker_model.prepare(batch)
    model, tables, trained = worker_model.model, worker_model.tables, worker_model.trained
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    frozen = worker_model.frozen
    state = {i: twin.read_value() for i, twin in frozen.items()} | worker_model.seeds_of(step)

    def loss_fn() -> tuple[jax.Array, tuple[jax.Array, Tree, list[Any], list[Any], list[Any]]]:
        # Here: values that are read inside a loop of a layer would belong to the loop.
        values = {i: twin.read_value() for i, twin in trained.items()}
        with StepScope(state | values, tables) as scope:
            model.reset_metrics()
            first = scope.values_of(model.metrics_variables)
            y_pred = internals.call(model, x, training=True)
            loss = internals.compute_loss(model, x, y, y_pred, weights, training=True)
            found = scope.values_of(model.metrics_variables)
            new = scope.values_of(model.non_trainable_variables)
        return clipping.scaled(loss), (loss, y_pred, new, first, found)

    (_, aux), gradients = value_and_grad(loss_fn, list(optimizer.trained), has_aux=True)()
    loss, y_pred, new, first, found = aux
    optimizer.apply(frames.current(), clipping.clipped(gradients))
    for variable, value in zip(model.non_trainable_variables, new, strict=True):
        if value is not None and id(variable) in frozen:
            _push(frozen[id(variable)], state[id(variable)], value)
    return _added(model, (state, tables, trained), first, found, (x, y, weights), loss, y_pred)


def test(worker_model: WorkerModel, step: jax.Array, batch: Tree) -> list[jax.Array]:
    """Computes what a batch adds to each variable of the metrics."""
    worker_model.prepare(batch)
    model = worker_model.model
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    tables, trained = worker_model.tables, worker_model.trained
    state = {i: twin.read_value() for i, twin in worker_model.frozen.items()}
    state |= worker_model.seeds_of(step)
    state |= {i: twin.read_value() for i, twin in trained.items()}
    with StepScope(state, tables) as scope:
        model.reset_metrics()
        first = scope.values_of(model.metrics_variables)
        y_pred = internals.call(model, x, training=False)
        loss = internals.compute_loss(model, x, y, y_pred, weights, training=False)
        found = scope.values_of(model.metrics_variables)
    return _added(model, (state, tables, {}), first, found, (x, y, weights), loss, y_pred)


def predict(worker_model: WorkerModel, step: jax.Array, batch: Tree) -> Tree:
    """Computes the outputs of a batch."""
    worker_model.prepare(batch, has_targets=False)
    model = worker_model.model
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    state = {i: twin.read_value() for i, twin in worker_model.frozen.items()}
    state |= worker_model.seeds_of(step)
    state |= {i: twin.read_value() for i, twin in worker_model.trained.items()}
    with StepScope(state, worker_model.tables):
        return internals.call(model, x, training=False)


def _push(twin: Variable, old: jax.Array, new: jax.Array) -> None:
    """Adds the change of a state to it on its server, so that the changes of all workers count."""
    if new is old:
        return
    if jnp.issubdtype(twin.dtype, jnp.number):
        twin.assign_add(new - old)
    else:
        twin.assign(new)


def _added(
    model: keras.Model,
    state: tuple[dict[int, jax.Array], dict[int, Variable], dict[int, Variable]],
    first: list[Any],
    found: list[Any],
    batch: tuple[Tree, Tree, Tree],
    loss: jax.Array,
    y_pred: Tree,
) -> list[jax.Array]:
    """Returns what a batch adds to the variables of the metrics."""
    values, tables, trained = state
    # A metric may read weights, as they were before the step.
    with StepScope(values, tables | trained):
        new = internals.update_metrics(model, found, loss, batch, y_pred)
    return [a - b for a, b in zip(new, first, strict=True)]
