"""Keras models, optimizers and metrics in closures of a coordinator."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from parameter_servers import Desk
from vocabulary import refused

import replicax as rx

STEPS = 6


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(8, 4)).astype("float32")
    return x, x.sum(1, keepdims=True) + 1.0


def made(*, dropout: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(1),
        ]
    )


def alone(optimizer: Any) -> keras.Model:
    model = made()
    model.compile(optimizer, "mse")
    for _ in range(STEPS):
        model.train_on_batch(*batch())
    return model


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: keras.optimizers.SGD(0.1), None),
        (lambda: keras.optimizers.Adam(0.05, global_clipnorm=1.0), 2),
    ],
    ids=["sgd", "adam_clipped_in_parts"],
)
def test_a_training_loop_of_closures_equals_fit_on_one_device(
    desk: Desk, make: Any, parts: int | None
) -> None:
    strategy = desk.strategy(parts)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        model, optimizer = made(), make()
        loss_metric = keras.metrics.Mean(name="loss")

    @rx.function
    def step(x: Any, y: Any) -> Any:
        def replica_fn() -> Any:
            def loss_fn() -> Any:
                return jnp.mean((model(x, training=True) - y) ** 2)

            loss, gradients = rx.value_and_grad(loss_fn, model.trainable_variables)()
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            loss_metric.update_state(loss)
            return loss

        return strategy.run(replica_fn)

    losses = []
    for _ in range(STEPS):
        # One after the other: in which order workers finish is not defined.
        losses.append(float(coordinator.schedule(step, args=batch()).fetch()))
    coordinator.join()
    expected = alone(make())
    for found, wanted in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-6)
    assert int(optimizer.iterations) == STEPS
    np.testing.assert_allclose(float(loss_metric.result()), np.mean(losses), rtol=1e-5)
    loss_metric.reset_state()
    assert float(loss_metric.result()) == 0.0


def test_metrics_of_all_workers_add_up_and_workers_draw_different_numbers(desk: Desk) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        model = made(dropout=0.5)
        count = keras.metrics.Sum()

    @rx.function
    def step(x: Any) -> Any:
        def replica_fn() -> Any:
            count.update_state(1.0)
            return model(x, training=True)

        return strategy.run(replica_fn)

    x, _ = batch()
    results = [coordinator.schedule(step, args=(x,)) for _ in range(20)]
    coordinator.join()
    assert float(count.result()) == 20.0
    outputs = {np.asarray(result.fetch()).tobytes() for result in results}
    assert len(outputs) > 10


def test_mistakes_are_explained(desk: Desk) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    outside = made()
    with strategy.scope():
        unbuilt = keras.Sequential([keras.layers.Dense(1)])
        first, second = made(), made()
        optimizer = keras.optimizers.SGD()
    x, _ = batch()
    with refused(ValueError, r"made outside of it"):
        coordinator.schedule(lambda: outside(x))
    with refused(ValueError, r"is not built.*model.build"):
        coordinator.schedule(lambda: unbuilt(x))
    with refused(ValueError, r"SGD was not built.*2 models.*optimizer.build"):
        coordinator.schedule(lambda: optimizer.apply_gradients([]))
    with strategy.scope():
        optimizer.build(first.trainable_variables)

    def wrong() -> None:
        optimizer.apply_gradients([(jnp.zeros((4, 8)), second.trainable_variables[0])])

    coordinator.schedule(wrong)
    with refused(ValueError, "was built without"):
        coordinator.join()
