"""Training with parameter servers: it gives what training on one machine gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import Desk, becomes, own_cluster

import replicax as rx

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.02),
    "adamw": lambda: optax.adamw(0.02, weight_decay=0.1),
    "clipped": lambda: optax.chain(optax.clip(0.5), optax.rmsprop(0.01)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.2, 0.0, 20)),
}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(size=(16, 6)).astype(np.float32)
    return x, (x.sum(1, keepdims=True) ** 2).astype(np.float32)


class Perceptron(rx.Module):
    """Two layers, of which a partitioner cuts the weights."""

    def __init__(self) -> None:
        super().__init__()
        key = jax.random.key(1)
        self.w1 = rx.Variable(lambda: jax.random.normal(key, (6, 8)) * 0.3, name="w1")
        self.b1 = rx.Variable(jnp.zeros(8), name="b1")
        self.w2 = rx.Variable(lambda: jax.random.normal(key, (8, 1)) * 0.3, name="w2")
        self.b2 = rx.Variable(jnp.zeros(1), name="b2")

    @property
    def all(self) -> list[Any]:
        return [self.w1, self.b1, self.w2, self.b2]

    def loss(self, x: Any, y: Any) -> Any:
        hidden = jnp.tanh(x @ self.w1.read_value() + self.b1)
        return jnp.mean((hidden @ self.w2.read_value() + self.b2 - y) ** 2)


def make_step(model: Any, optimizer: Any) -> Any:
    def step(x: Any, y: Any) -> Any:
        loss, gradients = rx.value_and_grad(lambda: model.loss(x, y), model.all)()
        optimizer.apply_gradients(zip(gradients, model.all, strict=True))
        return loss

    return step


def trained_alone(make: Callable[[], Any], transformation: Any, steps: int) -> Any:
    model = make()
    optimizer = rx.optimizers.Optimizer(transformation, model.all)
    step = rx.function(make_step(model, optimizer))
    losses = [float(step(*batch(i))) for i in range(steps)]
    return losses, [v.numpy() for v in model.all], [v.numpy() for v in optimizer.variables]


def trained_on_cluster(
    desk: Desk, make: Callable[[], Any], transformation: Any, steps: int, compiled: bool = True
) -> Any:
    """Trains one step after the other: each waits for the one before."""
    strategy = desk.strategy(2)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        model = make()
        optimizer = rx.optimizers.Optimizer(transformation, model.all)
    step = make_step(model, optimizer)
    run = rx.function(step) if compiled else step
    losses = []
    for i in range(steps):
        losses.append(float(coordinator.schedule(run, args=batch(i)).fetch(60)))
        # The result of a closure is there when its updates are.
    assert int(optimizer.iterations) == steps
    return losses, [v.numpy() for v in model.all], [v.numpy() for v in optimizer.variables]


def assert_same(found: Any, expected: Any, places: float = 2e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        for own, other in zip(a, b, strict=True):
            np.testing.assert_allclose(own, other, rtol=places, atol=places)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_S182_one_worker_trains_like_a_program_without_a_cluster(desk: Desk, name: str) -> None:
    expected = trained_alone(Perceptron, OPTIMIZERS[name](), 8)
    assert_same(trained_on_cluster(desk, Perceptron, OPTIMIZERS[name](), 8), expected)


def test_S182_steps_that_are_not_compiled_train_the_same(desk: Desk) -> None:
    expected = trained_alone(Perceptron, optax.adam(0.02), 3)
    found = trained_on_cluster(desk, Perceptron, optax.adam(0.02), 3, compiled=False)
    assert_same(found, expected)
