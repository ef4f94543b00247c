"""Keras objects that were made outside of the scope, in compiled functions and replica code.

S91, S106: their variables are ordinary ones. Compiled functions read and write them as eager code
does, and replica code combines what replicas write, as in the scope.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras_programs as programs
import numpy as np
import pytest
from keras_programs import keras
from strategies_under_test import STRATEGIES

import replicax as rx

X, Y = programs.data_of("sequential", 16)
EXECUTORS: dict[str, Callable[[Any], Any]] = {"eager": lambda step: step, "compiled": rx.function}
executors = pytest.mark.parametrize("executor", EXECUTORS)


def new_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(1),
        ]
    )
    model.build((None, 4))
    return model


@executors
def test_a_function_reads_the_weights_that_a_model_of_no_scope_has_now(executor: str) -> None:
    model = new_model()
    predict = EXECUTORS[executor](lambda rows: model(rows, training=False))
    np.testing.assert_allclose(np.asarray(predict(X)), np.asarray(model(X)), rtol=1e-5)
    model.set_weights([np.zeros(weight.shape, np.float32) for weight in model.get_weights()])
    np.testing.assert_array_equal(np.asarray(predict(X)), np.zeros((16, 1)))
    # Also in replica code, and after Keras itself has trained it.
    strategy = STRATEGIES["mirrored_2"]()
    run = EXECUTORS[executor](lambda: strategy.run(lambda: model(X, training=False)))
    parts = strategy.experimental_local_results(run())
    model.compile("sgd", "mse")
    model.fit(X, Y, epochs=2, verbose=0)
    for part in strategy.experimental_local_results(run()):
        np.testing.assert_allclose(part, model.predict(X, verbose=0), rtol=1e-4, atol=1e-6)
        assert not np.allclose(part, parts[0])


@executors
def test_a_loop_without_a_strategy_trains_a_model_of_no_scope(executor: str) -> None:
    """The state that a step writes, moving averages, seeds and metrics, stays usable."""

    def train(scope: Any, execute: Callable[[Any], Any]) -> programs.Outcome:
        with scope:
            model = new_model()
            optimizer, mean = keras.optimizers.Adam(0.05), keras.metrics.Mean()

        def step(x: Any, y: Any) -> Any:
            def loss_fn() -> Any:
                return jnp.mean((model(x, training=True) - y) ** 2)

            loss, gradients = rx.value_and_grad(loss_fn, model.trainable_variables)()
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            mean.update_state(loss)
            return loss

        execute = execute(step)
        losses = [float(execute(X, Y)) for _ in range(3)]
        model.optimizer = optimizer
        return programs.outcome(model, losses, mean.result(), int(optimizer.iterations.numpy()))

    found = train(contextlib.nullcontext(), EXECUTORS[executor])
    found.require_equal(train(rx.OneDeviceStrategy("CPU:0").scope(), rx.function))


@pytest.mark.parametrize("make", [keras.optimizers.Adam, keras.optimizers.SGD])
@executors
def test_an_optimizer_made_outside_joins_the_strategy_of_the_variables_it_updates(
    executor: str, make: Callable[..., keras.optimizers.Optimizer]
) -> None:
    def train(is_outside: bool) -> programs.Outcome:
        strategy = STRATEGIES["mirrored_2"]()
        with strategy.scope():
            model = programs.compiled("sequential")
        with contextlib.nullcontext() if is_outside else strategy.scope():
            optimizer = keras.optimizers.LossScaleOptimizer(make(0.05))
            optimizer.build(model.trainable_variables)

        def replica_step() -> Any:
            def loss_fn() -> Any:
                return optimizer.scale_loss(jnp.mean((model(X) - Y) ** 2))

            loss, gradients = rx.value_and_grad(loss_fn, model.trainable_variables)()
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        step = EXECUTORS[executor](lambda: strategy.run(replica_step))
        losses = [np.asarray(strategy.experimental_local_results(step())) for _ in range(2)]
        for variable in optimizer.variables:
            assert strategy.extended.variable_created_in_scope(variable.replicax_variable)
        model.optimizer = optimizer
        return programs.outcome(model, losses)

    train(is_outside=True).require_equal(train(is_outside=False))


@executors
def test_replica_code_may_not_write_keras_variables_of_another_strategy(executor: str) -> None:
    strategy, other = STRATEGIES["mirrored_2"](), STRATEGIES["mirrored_2"]()
    with other.scope():
        metric, variable = keras.metrics.Mean(), keras.Variable(1.0)
    uses: list[Callable[[], Any]] = [
        lambda: variable + 1,
        lambda: variable.assign(2.0),
        lambda: metric.update_state(1.0),
    ]
    for use in uses:
        run = EXECUTORS[executor](lambda use=use: strategy.run(lambda: use() is None))
        with pytest.raises(rx.errors.ContextError, match="needs the strategy that owns it"):
            run()
    assert float(variable.numpy()) == 1.0
    assert float(metric.result()) == 0.0


@executors
def test_variables_of_no_scope_are_combined_as_those_of_a_scope(executor: str) -> None:
    def count(is_outside: bool) -> tuple[float, float, int]:
        strategy = STRATEGIES["mirrored_2"]()
        with contextlib.nullcontext() if is_outside else strategy.scope():
            total, mean = keras.metrics.Sum(), keras.metrics.Mean()
            steps = keras.Variable(0, dtype="int32", trainable=False)

        def replica_step() -> None:
            context = rx.get_replica_context()
            assert context is not None
            total.update_state(1.0)
            mean.update_state(context.replica_id_in_sync_group)
            steps.assign_add(1)

        step = EXECUTORS[executor](lambda: strategy.run(replica_step))
        for _ in range(3):
            step()
        return float(total.result()), float(mean.result()), int(steps.numpy())

    assert count(is_outside=True) == count(is_outside=False) == (6.0, 0.5, 3)
