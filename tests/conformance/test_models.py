"""Small models train on several replicas as on one device, in both executors (S16, S46)."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import replicax as rx

pytestmark = pytest.mark.one_strategy

FOUR = ("mirrored_2", "mirrored_4", "virtual_2", "central_2")
MEAN = rx.VariableAggregation.MEAN
ON_READ = rx.VariableSynchronization.ON_READ
STEPS = 3
RATE = 0.1
X = jax.random.normal(jax.random.key(1), (8, 3, 4))
Y = jax.random.normal(jax.random.key(2), (8, 2))


@pytest.fixture(params=["threaded", "compiled"])
def is_compiled(request: pytest.FixtureRequest) -> bool:
    return request.param == "compiled"


def split(strategy: Any, array: Any) -> Any:
    """Cuts a global batch into one part per replica."""
    size = array.shape[0] // strategy.num_replicas_in_sync
    return strategy.experimental_distribute_values_from_function(
        lambda c: array[c.replica_id_in_sync_group * size :][:size]
    )


def train(strategy: Any, params: Any, loss: Any, x: Any, is_compiled: bool) -> tuple[Any, list]:
    """Trains for a few steps of SGD; returns the trained parameters and the losses."""
    with strategy.scope():
        variables = rx.make_variables(params, aggregation=MEAN)
    size = x.shape[0]

    def fn(x: Any, y: Any) -> Any:
        def own_loss() -> Any:
            return jnp.sum(loss(rx.read_variables(variables), x, y)) / size

        # Variables only: the static leaves of a model are no parameters.
        leaves = jax.tree.leaves(variables, is_leaf=lambda v: isinstance(v, rx.Variable))
        own = [v for v in leaves if isinstance(v, rx.Variable)]
        assert own
        value, grads = rx.value_and_grad(own_loss, own)()
        grads = rx.get_replica_context().all_reduce("SUM", grads)
        for variable, grad in zip(own, grads, strict=True):
            variable.assign_sub(RATE * grad)
        return value

    step = rx.function(fn) if is_compiled else fn
    losses = []
    for _ in range(STEPS):
        per_replica = strategy.run(step, args=(split(strategy, x), split(strategy, Y)))
        losses.append(float(strategy.reduce("SUM", per_replica, axis=None)))
    return rx.read_variables(variables), losses


def train_alone(params: Any, loss: Any, x: Any) -> tuple[Any, list]:
    """Trains on the whole batch with plain JAX."""

    @jax.jit
    def step(arrays: Any) -> Any:
        def total(arrays: Any) -> Any:
            return jnp.mean(loss(eqx.combine(arrays, static), x, Y))

        value, grads = jax.value_and_grad(total)(arrays)
        return value, jax.tree.map(lambda p, g: p - RATE * g, arrays, grads)

    arrays, static = eqx.partition(params, eqx.is_array)
    losses = []
    for _ in range(STEPS):
        value, arrays = step(arrays)
        losses.append(float(value))
    return eqx.combine(arrays, static), losses


def check(strategy: Any, params: Any, loss: Any, x: Any, is_compiled: bool) -> None:
    if not isinstance(params, eqx.Module):
        # The model is pure: jit spares eager replicas an operation-by-operation run.
        loss = jax.jit(loss)
    expected, expected_losses = train_alone(params, loss, x)
    found, losses = train(strategy, params, loss, x, is_compiled)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    assert losses[-1] < losses[0]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(
        jax.tree.leaves(eqx.filter(found, eqx.is_array)),
        jax.tree.leaves(eqx.filter(expected, eqx.is_array)),
        strict=True,
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def rnn_loss(params: Any, x: Any, y: Any) -> Any:
    def cell(h: Any, x_t: Any) -> Any:
        h = jnp.tanh(x_t @ params["in"] + h @ params["hidden"])
        return h, None

    h, _ = jax.lax.scan(cell, jnp.zeros((x.shape[0], 4)), jnp.swapaxes(x, 0, 1))
    return jnp.sum((h @ params["out"] - y) ** 2, axis=-1)


@pytest.mark.strategies(*FOUR)
def test_rnn_with_scan(strategy: Any, is_compiled: bool) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (4, 4)) * 0.3,
        "hidden": jax.random.normal(keys[1], (4, 4)) * 0.3,
        "out": jax.random.normal(keys[2], (4, 2)) * 0.3,
    }
    check(strategy, params, rnn_loss, X, is_compiled)


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_rnn_whose_body_reads_the_variables(strategy: Any) -> None:
    """The cell reads its weights itself: only compiled code may do that."""
    start = jnp.eye(4) * 0.5
    with strategy.scope():
        w = rx.Variable(start, aggregation=MEAN)

    def fn(x: Any) -> None:
        def loss() -> Any:
            h, _ = jax.lax.scan(
                lambda h, x_t: (jnp.tanh(x_t + h @ w.value()), None),
                jnp.zeros((x.shape[0], 4)),
                jnp.swapaxes(x, 0, 1),
            )
            return jnp.sum(h**2)

        grad = rx.grad(loss, w)()
        w.assign_sub(0.01 * rx.get_replica_context().all_reduce("SUM", grad))

    def reference(w: Any) -> Any:
        h = jnp.zeros((8, 4))
        for t in range(3):
            h = jnp.tanh(X[:, t] + h @ w)
        return jnp.sum(h**2)

    step = rx.function(fn)
    expected = start
    for _ in range(STEPS):
        strategy.run(step, args=(split(strategy, X),))
        expected = expected - 0.01 * jax.grad(reference)(expected)
    np.testing.assert_allclose(np.asarray(w), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.strategies(*FOUR)
def test_equinox_mlp(strategy: Any, is_compiled: bool) -> None:
    model = eqx.nn.MLP(12, 2, 8, 1, key=jax.random.key(0))

    @eqx.filter_jit
    def loss(model: Any, x: Any, y: Any) -> Any:
        return jnp.sum((jax.vmap(model)(x) - y) ** 2, axis=-1)

    check(strategy, model, loss, X.reshape(8, 12), is_compiled)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_flax_linen_model(strategy: Any, is_compiled: bool) -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(2)(linen.tanh(linen.Dense(8)(x)))

    net = Net()
    x = X.reshape(8, 12)
    params = net.init(jax.random.key(0), x)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.sum((net.apply(params, x) - y) ** 2, axis=-1)

    check(strategy, params, loss, x, is_compiled)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_flax_nnx_model(strategy: Any, is_compiled: bool) -> None:
    model = nnx.Linear(12, 2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    pure = nnx.to_pure_dict(state)

    def loss(pure: Any, x: Any, y: Any) -> Any:
        own = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(own, pure)
        return jnp.sum((nnx.merge(graph, own)(x) - y) ** 2, axis=-1)

    check(strategy, pure, loss, X.reshape(8, 12), is_compiled)


@pytest.mark.strategies(*FOUR)
def test_batch_norm_with_sync_on_read_statistics(strategy: Any, is_compiled: bool) -> None:
    """Normalizes by the statistics of the global batch; keeps moving averages per replica."""
    n = strategy.num_replicas_in_sync
    x = X.reshape(8, 12)[:, :4] + jnp.arange(8.0)[:, None]
    with strategy.scope():
        gamma = rx.Variable(jnp.ones(4), aggregation=MEAN)
        moving = rx.Variable(
            jnp.zeros(4), synchronization=ON_READ, aggregation=MEAN, trainable=False
        )

    def fn(x: Any) -> Any:
        context = rx.get_replica_context()

        def loss() -> Any:
            mean = context.all_reduce("MEAN", jnp.mean(x, axis=0))
            square = context.all_reduce("MEAN", jnp.mean(x * x, axis=0))
            moving.assign(0.9 * moving + 0.1 * jnp.mean(x, axis=0))
            normal = (x - mean) / jnp.sqrt(square - mean * mean + 1e-3)
            return jnp.sum((normal * gamma - 0.5) ** 2) / 8

        value, grad = rx.value_and_grad(loss, gamma)()
        gamma.assign_sub(RATE * context.all_reduce("SUM", grad))
        return value

    def reference(gamma: Any) -> Any:
        normal = (x - x.mean(0)) / jnp.sqrt((x * x).mean(0) - x.mean(0) ** 2 + 1e-3)
        return jnp.sum((normal * gamma - 0.5) ** 2) / 8

    step = rx.function(fn) if is_compiled else fn
    expected, average = jnp.ones(4), jnp.zeros(4)
    for _ in range(STEPS):
        value = strategy.run(step, args=(split(strategy, x),))
        total = float(strategy.reduce("SUM", value, axis=None))
        np.testing.assert_allclose(total, float(reference(expected)), rtol=1e-3)
        expected = expected - RATE * jax.grad(reference)(expected)
        average = 0.9 * average + 0.1 * x.mean(0)
    np.testing.assert_allclose(np.asarray(gamma), expected, rtol=1e-3)
    np.testing.assert_allclose(np.asarray(moving), average, rtol=1e-4)
    copies = strategy.experimental_local_results(moving)
    assert len(copies) == n
    first = 0.1 * sum(0.9**k for k in range(STEPS)) * np.asarray(x[: 8 // n].mean(0))
    np.testing.assert_allclose(np.asarray(copies[0]), first, rtol=1e-4)
