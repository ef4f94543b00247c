"""Steps that read what they have changed: they give what a program without a cluster gives."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import Desk, own_cluster

import replicax as rx

ROWS = 1200


class Model(rx.Module):
    """Two sets of variables, each with an optimizer, a table, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = rx.Variable(
            np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2),
            name="w",
            aggregation=rx.VariableAggregation.MEAN,
        )
        self.b = rx.Variable(jnp.zeros(2), name="b")
        self.g = rx.Variable(np.linspace(0.5, 1, 4, dtype=np.float32), name="g")
        self.table = rx.Variable(
            np.random.default_rng(3).normal(size=(ROWS, 2)).astype(np.float32), name="table"
        )
        self.seen = rx.Variable(
            0.0, name="seen", aggregation=rx.VariableAggregation.SUM, trainable=False
        )
        self.trained = [self.w, self.b]
        self.optimizer = rx.optimizers.Optimizer(optax.adam(0.05), self.trained)
        self.other = rx.optimizers.Optimizer(optax.sgd(0.1, momentum=0.9), [self.g])
        self.rows = rx.optimizers.Optimizer(optax.adagrad(0.3), [self.table])

    def loss(self, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ self.w.read_value() + self.b) ** 2) + jnp.sum(self.b**2)

    def state(self) -> list[Any]:
        found = [self.w, self.b, self.g, self.table, self.seen]
        found += [*self.optimizer.variables, *self.other.variables, *self.rows.variables]
        return [v.numpy() for v in found]


def train(model: Model, x: Any) -> Any:
    loss, gradients = rx.value_and_grad(lambda: model.loss(x), model.trained)()
    model.optimizer.apply_gradients(zip(gradients, model.trained, strict=True))
    return loss


def several_steps(model: Model, x: Any) -> Any:
    return [train(model, x * (i + 1)) for i in range(4)]


def two_steps_of_one_gradient(model: Model, x: Any) -> Any:
    gradients = rx.grad(lambda: model.loss(x), model.trained)()
    for _ in range(2):
        model.optimizer.apply_gradients(zip(gradients, model.trained, strict=True))
    return model.w.read_value(), model.optimizer.iterations.read_value()


def two_players(model: Model, x: Any) -> Any:
    def score() -> Any:
        return jnp.mean(jnp.tanh((x * model.g.read_value()) @ model.w.read_value()))

    losses = []
    for _ in range(2):
        first, gradient = rx.value_and_grad(score, model.g)()
        model.other.apply_gradients([(gradient, model.g)])
        second, gradients = rx.value_and_grad(lambda: -score() + model.loss(x), model.trained)()
        model.optimizer.apply_gradients(zip(gradients, model.trained, strict=True))
        losses += [first, second]
    return losses


def accumulated(model: Model, x: Any) -> Any:
    total = [jnp.zeros(v.shape) for v in model.trained]
    for i in range(3):
        gradients = rx.grad(lambda i=i: model.loss(x + i), model.trained)()
        total = [a + g / 3 for a, g in zip(total, gradients, strict=True)]
    model.optimizer.apply_gradients(zip(total, model.trained, strict=True))
    return model.loss(x)


def changed_read_and_applied(model: Model, x: Any) -> Any:
    model.seen.assign_add(2.0)
    before = model.seen.read_value()
    model.w.assign_add(jnp.ones((4, 2)) * before)
    train(model, x)
    model.w.assign_sub(jnp.ones((4, 2)))
    model.seen.assign_add(model.w.read_value().sum())
    after = train(model, x)
    return before, after, model.seen.read_value(), model.b.read_value()


def rows_of_a_table(model: Model, x: Any) -> Any:
    ids = jnp.asarray((jnp.abs(x[:, 0]) * 100).astype(jnp.int32))
    losses = []
    for i in range(3):
        found, gradient = rx.value_and_grad(
            lambda ids=ids: jnp.sum(rx.nn.embedding_lookup(model.table, ids) ** 2), model.table
        )()
        model.rows.apply_gradients([(gradient, model.table)])
        losses.append(found)
        # The next rows depend on what these have become, and are partly the same.
        rows = rx.nn.embedding_lookup(model.table, ids)
        ids = ids.at[0].set(jnp.argmax(jnp.abs(rows).sum(1)).astype(jnp.int32) + i)
    return losses, ids


def rows_after_scatter(model: Model, x: Any) -> Any:
    delta = rx.IndexedSlices(jnp.ones((2, 2)), jnp.asarray([3, 700]), (ROWS, 2))
    model.table.scatter_add(delta)
    return rx.nn.embedding_lookup(model.table, jnp.asarray([700, 2, 3])) + x[0, 0]


BODIES: list[Callable[[Model, Any], Any]] = [
    several_steps,
    two_steps_of_one_gradient,
    two_players,
    accumulated,
    changed_read_and_applied,
    rows_of_a_table,
    rows_after_scatter,
]


def batch(i: int) -> np.ndarray:
    return np.random.default_rng(i).normal(size=(5, 4)).astype(np.float32)


def assert_close(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def alone(bodies: Any, steps: int = 2) -> Any:
    with rx.OneDeviceStrategy("CPU:0").scope():
        model = Model()
        functions = [rx.function(lambda x, body=body: body(model, x)) for body in bodies]
        results = [f(batch(i)) for i in range(steps) for f in functions]
        return jax.tree.map(np.asarray, results), model.state()


@pytest.mark.parametrize("parts", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_steps_that_read_what_they_changed_equal_those_of_one_device(
    desk: Desk, parts: Any
) -> None:
    expected, state = alone(BODIES)
    strategy = desk.strategy(parts)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        model = Model()
    functions = [rx.function(lambda x, body=body: body(model, x)) for body in BODIES]
    results = []
    for i in range(2):
        for f in functions:
            results.append(coordinator.schedule(f, args=(batch(i),)).fetch(60))
    assert_close(results, expected)
    assert_close(model.state(), state)


def test_steps_of_several_replicas_read_what_they_changed(desk: Desk) -> None:
    strategy = desk.strategy(replicas_per_worker=2)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        model = Model()
    bodies = [several_steps, changed_read_and_applied, rows_of_a_table]

    def replicated(body: Any) -> Any:
        @rx.function
        def step(x: Any) -> Any:
            result = strategy.run(lambda x: body(model, x), args=(x,))
            return jax.tree.map(lambda r: strategy.reduce("MEAN", r, axis=None) * 1.0, result)

        return step

    found = [coordinator.schedule(replicated(b), args=(batch(0),)).fetch(60) for b in bodies]
    with rx.MirroredStrategy(["CPU:0"], virtual_replicas=2).scope() as here:
        twin = Model()
        expected = [
            rx.function(
                lambda x, body=body: jax.tree.map(
                    lambda r: here.reduce("MEAN", r, axis=None) * 1.0,
                    here.run(lambda x: body(twin, x), args=(x,)),
                )
            )(batch(0))
            for body in bodies
        ]
        state = twin.state()
    assert_close(found, expected)
    assert_close(model.state(), state)


def test_steps_with_a_second_half_count_once_when_their_worker_is_killed_between(
    tmp_path: Path,
) -> None:
    mark = str(tmp_path / "killed")

    def die_once(x: Any) -> Any:
        # Only the second half of a step gets here.
        if not os.path.exists(mark):
            with open(mark, "w") as file:
                file.write("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def body(model: Model, x: Any, is_hit: bool) -> Any:
        train(model, x)
        model.seen.assign_add(1.0)
        value = model.w.read_value()
        if is_hit:
            value = jax.pure_callback(die_once, jax.ShapeDtypeStruct((4, 2), jnp.float32), value)
        model.seen.assign_add(value.sum())
        return train(model, x)

    with rx.OneDeviceStrategy("CPU:0").scope():
        twin = Model()
        for i in range(4):
            rx.function(lambda x: body(twin, x, False))(batch(i))
        expected = twin.state()
    with own_cluster(workers=2, ps=2) as desk:
        strategy = desk.strategy(2)
        coordinator = desk.coordinator(strategy)
        with strategy.scope():
            model = Model()
        for i in range(4):
            step = rx.function(lambda x, is_hit=i == 1: body(model, x, is_hit))
            coordinator.schedule(step, args=(batch(i),)).fetch(60)
        assert os.path.exists(mark)
        assert_close(model.state(), expected)
