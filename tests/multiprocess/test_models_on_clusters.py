"""An nnx model with BatchNorm and dropout trains on parameter servers and on several workers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx

STEPS = 20
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def make(strategy: Any) -> tuple[Any, Any]:
    """Returns the model and a replica step that trains it."""
    with strategy.scope():
        model = rx.models.from_nnx(Net(nnx.Rngs(0)))
        weights = model.trainable_variables
        optimizer = rx.optimizers.Optimizer(optax.adam(0.05), weights)

    def step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(model(x), y)
            return jnp.sum(losses) / len(X)

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    return model, step


def train_in_lock_step() -> tuple[float, float, list[float], list[float]]:
    """Returns the first and the last loss, own statistics, and those that all workers read."""
    strategy = rx.MultiWorkerMirroredStrategy()
    model, step = make(strategy)
    dataset = rx.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(len(X))
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    compiled = rx.function(lambda batch: strategy.run(step, args=batch))
    losses = [strategy.reduce("SUM", compiled(next(iterator)), axis=None) for _ in range(STEPS)]
    iterator.close()
    mean = model.state["norm"]["mean"]
    (own,) = strategy.experimental_local_results(mean)
    with strategy.scope():
        read = mean.read_value()
    return float(losses[0]), float(losses[-1]), np.asarray(own).tolist(), np.asarray(read).tolist()


@pytest.mark.slow
def test_workers_keep_their_own_statistics_and_read_the_mean() -> None:
    with rx.testing.LocalCluster(workers=2, ps=0) as cluster:
        (first, last, own_0, read_0), (_, same, own_1, read_1) = cluster.run(train_in_lock_step)
    assert last == same < 0.6 * first
    assert own_0 != own_1
    assert read_0 == read_1
    np.testing.assert_allclose(read_0, np.mean([own_0, own_1], axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_parameter_servers_keep_all_state_of_a_model() -> None:
    with rx.testing.LocalCluster(workers=2, ps=1) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        coordinator = rx.coordinator.ClusterCoordinator(strategy)
        model, step = make(strategy)
        compiled = rx.function(lambda x, y: strategy.run(step, args=(x, y)))
        results = [coordinator.schedule(compiled, args=(X, Y)) for _ in range(STEPS)]
        coordinator.join()
        losses = [float(result.fetch()) for result in results]
        serving = rx.function(model.view(deterministic=True, use_running_average=True))
        answers = np.asarray(coordinator.schedule(serving, args=(X,)).fetch())
        mean = model.state["norm"]["mean"].numpy()
        coordinator.close()
        strategy.close()
    assert min(losses[-4:]) < 0.6 * losses[0]
    assert np.mean(np.argmax(answers, axis=1) == Y) > 0.8
    assert np.abs(mean).max() > 0.01
