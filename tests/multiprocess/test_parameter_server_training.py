"""Training with parameter servers: it gives what training on one machine gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import Desk, own_cluster, until_all_idle
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors

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


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["adam", *(pytest.param(n, marks=SLOW) for n in OPTIMIZERS if n != "adam")]
)
def test_S182_one_worker_trains_like_a_program_without_a_cluster(desk: Desk, name: str) -> None:
    expected = trained_alone(Perceptron, OPTIMIZERS[name](), 8)
    assert_same(trained_on_cluster(desk, Perceptron, OPTIMIZERS[name](), 8), expected)


@pytest.mark.slow
def test_S182_steps_that_are_not_compiled_train_the_same(desk: Desk) -> None:
    expected = trained_alone(Perceptron, optax.adam(0.02), 3)
    found = trained_on_cluster(desk, Perceptron, optax.adam(0.02), 3, compiled=False)
    assert_same(found, expected)


# Tables.

ROWS = 5000


class Recommender(rx.Module):
    """A table of which each step touches some rows, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = rx.Variable(
            lambda: jax.random.normal(jax.random.key(0), (ROWS, 4)), name="table"
        )
        self.w = rx.Variable(jnp.ones((4, 1)), name="w")

    @property
    def all(self) -> list[Any]:
        return [self.table, self.w]

    def loss(self, ids: Any, y: Any) -> Any:
        return jnp.mean((rx.nn.embedding_lookup(self.table, ids) @ self.w.read_value() - y) ** 2)


def table_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    ids = rng.integers(0, ROWS, 12)
    ids[3] = ids[7]
    return ids, rng.normal(size=(12, 1)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "sparse"),
    [
        ("adam", "rows"),
        pytest.param("momentum", "auto", marks=SLOW),
        pytest.param("sgd", "auto", marks=SLOW),
        pytest.param("adam", "auto", marks=SLOW),
        pytest.param("adam", "dense", marks=SLOW),
    ],
)
def test_S169_S182_tables_train_by_rows_like_without_a_cluster(
    desk: Desk, name: str, sparse: str
) -> None:
    def train(model: Any, run: Callable[..., Any]) -> Any:
        optimizer = rx.optimizers.Optimizer(OPTIMIZERS[name](), model.all, sparse=sparse)
        step = rx.function(make_step(model, optimizer))
        losses = [float(run(step, table_batch(i % 4))) for i in range(8)]
        return losses, [v.numpy() for v in model.all], [v.numpy() for v in optimizer.variables]

    expected = train(Recommender(), lambda step, args: step(*args))
    strategy = desk.strategy(2)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        found = train(
            Recommender(), lambda step, args: coordinator.schedule(step, args=args).fetch(60)
        )
    assert_same(found, expected)
    assert found[0][4] < found[0][0]


@pytest.mark.slow
def test_S182_the_learning_rate_and_accumulation_work_on_servers(desk: Desk) -> None:
    strategy = desk.strategy(2)
    coordinator = desk.coordinator(strategy)

    def train(run: Callable[..., Any]) -> Any:
        w, b = rx.Variable(jnp.ones((4, 2)), name="w"), rx.Variable(1.0, name="b")
        rate = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        tuned = rx.optimizers.Optimizer(rate, [w, b])
        summed = rx.optimizers.Optimizer(optax.adam(0.1), [w, b], gradient_accumulation_steps=2)

        @rx.function
        def tune() -> None:
            gradients = rx.grad(lambda: jnp.sum(w * w) * b, [w, b])()
            tuned.apply_gradients(zip(gradients, [w, b], strict=True))

        @rx.function
        def accumulate() -> None:
            gradients = rx.grad(lambda: jnp.sum(w * w) * b, [w, b])()
            summed.apply_gradients(zip(gradients, [w, b], strict=True))

        run(tune)
        tuned.learning_rate = 0.125
        run(tune)
        for _ in range(5):
            run(accumulate)
        counts = int(tuned.iterations), int(summed.iterations)
        return counts, float(tuned.learning_rate), w.numpy(), b.numpy()

    expected = train(lambda step: step())
    with strategy.scope():
        found = train(lambda step: coordinator.schedule(step).fetch(60))
    assert found[:2] == expected[:2] == ((2, 2), 0.125)
    for own, other in zip(found[2:], expected[2:], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)


def test_S182_gradients_that_are_none_leave_their_variables(desk: Desk) -> None:
    """One of two servers gets nothing, and counts all the same."""
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)

    def train(run: Callable[..., Any]) -> Any:
        first, second = rx.Variable(1.0, name="first"), rx.Variable(2.0, name="second")
        optimizer = rx.optimizers.Optimizer(optax.adam(0.1), [first, second])

        def step(which: int) -> None:
            gradients = [None, None]
            gradients[which] = (first * second).astype(jnp.float32)
            optimizer.apply_gradients(zip(gradients, [first, second], strict=True))

        counts = []
        for which in (0, 1, 1, 0, 1):
            run(step, which)
            counts.append(int(optimizer.iterations))
        return counts, float(first), float(second)

    expected = train(lambda step, which: step(which))
    with strategy.scope():
        found = train(lambda step, which: coordinator.schedule(step, args=(which,)).fetch(60))
    assert found[0] == expected[0] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(found[1:], expected[1:], rtol=1e-6)


def test_transformations_that_mix_variables_are_refused(desk: Desk) -> None:
    with desk.strategy().scope():
        both = [rx.Variable(1.0, name="first"), rx.Variable(2.0, name="second")]
        with refused(errors.UnsupportedError, "'first' depends on the gradient of 'second'"):
            rx.optimizers.Optimizer(
                optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), both
            )


# Many at once.


def test_S185_every_step_counts_once(desk: Desk) -> None:
    strategy = desk.strategy(2)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        counter = rx.Variable(0.0, name="counter")
        table = rx.Variable(jnp.zeros((10, 2)), name="table")
        w = rx.Variable(jnp.ones((4, 2)), name="w")
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.001), [w])

    @rx.function
    def step(row: Any) -> Any:
        gradient = rx.grad(lambda: jnp.sum(w * w), w)()
        optimizer.apply_gradients([(gradient, w)])
        table.scatter_add(rx.IndexedSlices(jnp.ones((2, 2)), jnp.stack([row, 9 - row])))
        return counter.assign_add(1.0).read_value()

    until_all_idle(coordinator)
    seen = [coordinator.schedule(step, args=(i % 10,)) for i in range(300)]
    coordinator.join(timeout=100)
    assert int(optimizer.iterations) == 300 and float(counter) == 300.0
    np.testing.assert_array_equal(table.numpy(), np.full((10, 2), 60.0))
    assert coordinator.done() and 300.0 >= max(map(float, coordinator.fetch(seen))) > 150.0
    assert all(w.num_done for w in coordinator.status().workers)


# The same step under other strategies; several replicas on a worker.


def replica_step(strategy: Any, model: Any, optimizer: Any) -> Any:
    def replica(ids: Any, y: Any) -> Any:
        loss, gradients = rx.value_and_grad(lambda: model.loss(ids, y) / 2, model.all)()
        optimizer.apply_gradients(zip(gradients, model.all, strict=True))
        return loss

    @rx.function
    def step(ids: Any, y: Any) -> Any:
        half = ids.shape[0] // 2

        def own(value: Any) -> Any:
            return strategy.experimental_distribute_values_from_function(
                lambda ctx: value[
                    ctx.replica_id_in_sync_group * half : (ctx.replica_id_in_sync_group + 1) * half
                ]
            )

        losses = strategy.run(replica, args=(own(ids), own(y)))
        return strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)

    return step


@pytest.mark.slow
def test_limit_S189_several_replicas_on_a_worker_step_as_mirrored_ones() -> None:
    def train(strategy: Any, run: Callable[..., Any]) -> Any:
        with strategy.scope():
            model = Recommender()
            optimizer = rx.optimizers.Optimizer(optax.adam(0.05), model.all)
            mean = rx.metrics.Mean()
            counter = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM, name="counter")
        step = replica_step(strategy, model, optimizer)

        def count() -> Any:
            def replica() -> Any:
                number = rx.get_replica_context().replica_id_in_sync_group
                counter.assign_add(1.0 + number)
                mean.update_state(jnp.asarray(number, jnp.float32))
                return 10 * number + rx.get_replica_context().num_replicas_in_sync

            return strategy.experimental_local_results(strategy.run(replica))

        losses = [float(run(step, table_batch(i))) for i in range(4)]
        assert list(map(int, run(count, ()))) == [2, 12]
        counted = [counter.numpy(), np.asarray(mean.result())]
        return losses, [v.numpy() for v in model.all], counted

    mirrored = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    expected = train(mirrored, lambda step, args: step(*args))
    with own_cluster(workers=1, ps=1, devices_per_worker=2) as desk:
        strategy = desk.strategy(2, replicas_per_worker=2)
        coordinator = desk.coordinator(strategy)
        found = train(strategy, lambda step, args: coordinator.schedule(step, args=args).fetch(60))
        devices = coordinator.schedule(lambda: [d.id for d in jax.local_devices()]).fetch(20)
    assert len(devices) == 2
    assert_same(found, expected)
    assert expected[2][0] == 3.0


# Metrics.


def test_S185_metrics_count_what_all_workers_count(desk: Desk) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        metrics = {
            "sum": rx.metrics.Sum(),
            "mean": rx.metrics.Mean(),
            "error": rx.metrics.MeanSquaredError(),
            "accuracy": rx.metrics.SparseCategoricalAccuracy(),
            "auc": rx.metrics.AUC(),
        }

    def batch(number: int) -> Any:
        rng = np.random.default_rng(number)
        scores = rng.uniform(size=(8, 3)).astype(np.float32)
        return rng.integers(0, 3, 8), scores

    def count(found: Any, labels: Any, scores: Any) -> None:
        found["sum"].update_state(scores)
        found["mean"].update_state(scores[:, 0])
        found["error"].update_state(scores[:, 0], scores[:, 1])
        found["accuracy"].update_state(labels, scores)
        found["auc"].update_state(labels > 0, scores[:, 0])

    @rx.function
    def step(labels: Any, scores: Any) -> None:
        count(metrics, labels, scores)

    alone = {name: type(metric)() for name, metric in metrics.items()}
    for epoch in range(2):
        for i in range(60):
            coordinator.schedule(step, args=batch(100 * epoch + i))
            count(alone, *batch(100 * epoch + i))
        coordinator.join(timeout=60)
        for name, metric in metrics.items():
            np.testing.assert_allclose(
                metric.result(), alone[name].result(), rtol=1e-5, err_msg=name
            )
        for metric in (*metrics.values(), *alone.values()):
            metric.reset_state()
            assert float(metric.result()) == 0.0


def test_S182_pulling_ahead_never_hides_what_a_closure_changed_itself(desk: Desk) -> None:
    strategy = desk.strategy(pull_ahead=True)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        v = rx.Variable(0.0)

    def change_and_read() -> list[float]:
        before = float(v.read_value())
        v.assign_add(1.0)
        return [float(v.read_value()) - before for _ in range(2)]

    found = [coordinator.schedule(change_and_read) for _ in range(20)]
    coordinator.join()
    assert float(v.read_value()) == 20.0
    # Other workers may have added more.
    assert all(min(f.fetch()) >= 1.0 for f in found)


class Bags(rx.Module):
    """A table of which each example uses several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = rx.Variable(lambda: jnp.arange(40.0).reshape(20, 2) / 40, name="table")

    @property
    def all(self) -> list[Any]:
        return [self.table]

    def loss(self, x: Any, y: Any) -> Any:
        ids = jnp.abs(x * 10).astype(jnp.int32) % 20
        splits = jnp.arange(0, ids.size + 1, ids.shape[1])
        rows = rx.nn.safe_embedding_lookup_sparse(self.table, (ids.reshape(-1), splits))
        return jnp.mean((jnp.sum(rows, 1, keepdims=True) - y) ** 2)


@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=SLOW)])
def test_sparse_lookups_of_a_table_on_servers_train_the_same(desk: Desk, compiled: bool) -> None:
    expected = trained_alone(Bags, optax.sgd(0.01), 3)
    assert_same(trained_on_cluster(desk, Bags, optax.sgd(0.01), 3, compiled), expected)


def test_moving_averages_of_variables_on_servers(desk: Desk) -> None:
    strategy = desk.strategy(2)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        table, bias = rx.Variable(jnp.zeros((4, 2)), name="t"), rx.Variable(1.0, name="b")
    ema = rx.train.ExponentialMovingAverage(0.5)
    ema.apply([table, bias])
    table.assign(jnp.ones((4, 2)))
    bias.assign(3.0)
    ema.apply()
    coordinator.schedule(rx.function(lambda: ema.apply([table, bias]))).fetch(60)
    found = [ema.average(v) for v in (table, bias)]
    assert [v is not None and v.numpy().mean() for v in found] == [0.75, 2.5]
