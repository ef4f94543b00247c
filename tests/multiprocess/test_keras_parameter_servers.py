"""Keras models on parameter servers: `fit` gives what it gives on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from parameter_servers import Desk, kept_cluster, own_cluster, until_all_idle
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors
from replicax.protocol import messages

# They compute with several rows of a variable at once.
_COMBINING = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)
ROWS, BATCH = 1_500, 16
random = np.random.default_rng(0)
IDS = random.integers(0, ROWS, size=(100, 3)).astype("int32")
X = random.normal(size=(100, 8)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(scope="module")
def kept() -> Iterator[rx.testing.LocalCluster]:
    """A cluster with one worker, which trains as one device does."""
    with kept_cluster(workers=1, ps=2) as cluster:
        yield cluster


@pytest.fixture
def one_worker(kept: rx.testing.LocalCluster) -> Iterator[Desk]:
    """The cluster with one worker, free for this test."""
    desk = Desk(kept)
    yield desk
    desk.leave()


def strategy_on(desk: Desk, parts: Any = None, **options: Any) -> Any:
    strategy = desk.strategy(parts, **options)
    # `fit` uses the coordinator that there is.
    until_all_idle(desk.coordinator(strategy))
    return strategy


def with_table(optimizer: Any, embedding: Any = keras.layers.Embedding) -> keras.Model:
    """A model with a table, moving averages and a loss of its own weights."""
    keras.utils.set_random_seed(0)
    numbers, ids = keras.Input((8,)), keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(embedding(ROWS, 4)(ids))
    hidden = keras.layers.Concatenate()([numbers, rows])
    hidden = keras.layers.Dense(8, activation="relu", kernel_regularizer="l2")(hidden)
    hidden = keras.layers.BatchNormalization(momentum=0.9)(hidden)
    model = keras.Model([numbers, ids], keras.layers.Dense(2)(hidden))
    model.compile(optimizer, CROSS_ENTROPY, metrics=["accuracy"])
    return model


def small(optimizer: Any = "sgd", dropout: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dropout(dropout)]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    model.compile(optimizer, CROSS_ENTROPY)
    return model


def fitted(model: keras.Model, data: Any = None, **options: Any) -> dict[str, list[float]]:
    given = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model.fit([X, IDS] if data is None else data, Y, **given).history


def assert_same(ours: keras.Model, alone: keras.Model) -> None:
    for a, b in zip(ours.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    pairs = zip(ours.optimizer.variables, alone.optimizer.variables, strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def assert_close(ours: dict[str, Any], alone: dict[str, Any]) -> None:
    assert ours.keys() == alone.keys()
    for name in alone:
        np.testing.assert_allclose(ours[name], alone[name], rtol=1e-5, err_msg=name)


def counters(strategy: Any) -> dict[str, int]:
    """Adds the counters of all servers up."""
    cluster = strategy.extended.cluster
    found = [cluster.request(i, messages.Ping(0)).counters for i in range(len(cluster.servers))]
    return {name: sum(c[name] for c in found) for name in ("rows_read", "rows_written")}


# One cluster for all of these.


def test_one_worker_trains_as_one_device_does(one_worker: Desk, tmp_path: Path) -> None:
    strategy = strategy_on(one_worker, 2)
    alone = with_table(keras.optimizers.SGD(0.1))
    history = fitted(alone, validation_data=([X[:30], IDS[:30]], Y[:30]))
    with strategy.scope():
        model = with_table(keras.optimizers.SGD(0.1))
    seen: list[Any] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(sorted(logs)),
        on_epoch_end=lambda epoch, logs: seen.append(logs["val_loss"]),
    )
    before = counters(strategy)
    ours = fitted(model, validation_data=([X[:30], IDS[:30]], Y[:30]), callbacks=[note])
    assert_close(ours, history)
    assert_same(model, alone)
    assert int(model.optimizer.iterations.numpy()) == 14
    assert seen[:7] == [["accuracy", "loss"]] * 7
    assert seen[7::8] == ours["val_loss"]
    # Rows travel, not the table: each row of a batch once, and once more for its gradient.
    batches = [IDS[i : i + BATCH] for i in range(0, 100, BATCH)] * 2
    evaluated = len(np.unique(IDS[:16])) + len(np.unique(IDS[16:30]))
    num_rows = sum(len(np.unique(ids)) for ids in batches)
    rows = {name: count - before[name] for name, count in counters(strategy).items()}
    assert rows == {"rows_read": num_rows + 2 * evaluated, "rows_written": num_rows}
    # Every example counts once, in order.
    assert model.evaluate([X, IDS], Y, batch_size=9, verbose=0) == pytest.approx(
        alone.evaluate([X, IDS], Y, verbose=0), rel=1e-5
    )
    outputs = model.predict([X, IDS], batch_size=9, verbose=0)
    np.testing.assert_allclose(outputs, alone.predict([X, IDS], verbose=0), rtol=1e-4, atol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_same(loaded, alone)


def test_state_of_an_optimizer_is_saved_and_restored(one_worker: Desk, tmp_path: Path) -> None:
    strategy = strategy_on(one_worker, 2)
    path = tmp_path / "model.keras"
    alone = small(keras.optimizers.Adam(0.01))
    fitted(alone, X)
    alone.save(path)
    with strategy.scope():
        model = keras.saving.load_model(path)
    assert_close(fitted(model, X), fitted(alone, X))
    assert_same(model, alone)
    model.load_weights(path)
    assert int(model.optimizer.iterations.numpy()) == 14
    model.optimizer.learning_rate = 0.0
    weights = model.get_weights()
    fitted(model, X)
    assert all(map(np.array_equal, weights, model.get_weights()))


def test_sync_averages_what_all_workers_compute(one_worker: Desk) -> None:
    strategy = strategy_on(one_worker, consistency="sync")
    alone = small("adam")
    with strategy.scope():
        model = small("adam")
    assert_close(fitted(model, X), fitted(alone, X))
    assert_same(model, alone)


def test_workers_read_the_data_that_a_function_makes(one_worker: Desk) -> None:
    strategy = strategy_on(one_worker)

    def dataset_fn(context: rx.InputContext) -> Any:
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        return rx.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(20)

    alone = small()
    with strategy.scope():
        model = small()
    whole = rx.data.Dataset.from_tensor_slices((X, Y)).batch(20)
    options = {"epochs": 2, "verbose": 0}
    data = rx.keras.DatasetCreator(dataset_fn)
    ours = model.fit(data, steps_per_epoch=5, validation_data=whole, **options)
    history = alone.fit(
        X, Y, batch_size=20, shuffle=False, validation_data=(X, Y), **options
    ).history
    assert_close(ours.history, history)
    assert model.evaluate(dataset_fn, steps=5, verbose=0) == pytest.approx(
        alone.evaluate(X, Y, verbose=0), rel=1e-5
    )
    with refused(errors.InvalidArgumentError, "`steps_per_epoch` must be"):
        model.fit(dataset_fn)
    with refused(errors.UnsupportedError, "Pass arrays"):
        model.predict(dataset_fn, steps=1)


def test_each_step_has_its_own_random_numbers(one_worker: Desk) -> None:
    strategy = strategy_on(one_worker)
    with strategy.scope():
        model = small(keras.optimizers.SGD(0.0), dropout=0.5)
    losses = [model.train_on_batch(X, Y) for _ in range(4)]
    assert len(set(losses)) == 4
    assert model.test_on_batch(X, Y) == model.test_on_batch(X, Y)


def test_an_error_of_a_step_ends_fit_and_nothing_else(one_worker: Desk) -> None:
    strategy = strategy_on(one_worker)
    with strategy.scope():
        model = small()
    with pytest.raises(ValueError, match="same shape"):
        model.fit(X, np.ones((100, 5)), verbose=0)
    history = model.fit(X, Y, verbose=0).history
    assert np.isfinite(history["loss"]).all()


class OwnStep(keras.Model):
    """A model that updates its weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, data)


class Largest(keras.metrics.Metric):
    """The largest prediction: steps of several workers do not add up to it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.largest.value


class Count(keras.metrics.Metric):
    """The number of predictions."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(keras.ops.cast(keras.ops.size(y_pred), "float32"))

    def result(self) -> Any:
        return self.count.value


def test_metrics_of_the_user_must_be_sums(one_worker: Desk) -> None:
    strategy = strategy_on(one_worker)
    with strategy.scope():
        model = small()
        model.compile("sgd", CROSS_ENTROPY, metrics=[Count()])
        assert model.fit(X, Y, verbose=0).history["count"] == [200.0]
        model.compile("sgd", CROSS_ENTROPY, metrics=[Largest()])
    with refused(errors.UnsupportedError, "must add to its variables"):
        model.fit(X, Y, verbose=0)


def test_a_callback_may_evaluate_in_the_middle_of_an_epoch(one_worker: Desk) -> None:
    strategy = strategy_on(one_worker)
    with strategy.scope():
        model = small(keras.optimizers.SGD(0.0))
    losses: list[float] = []

    def evaluate(batch: int, logs: dict[str, float]) -> None:
        assert logs["loss"] > 0
        if batch == 3:
            losses.append(model.evaluate(X, Y, verbose=0))
            assert int(model.optimizer.iterations.numpy()) == 4

    note = keras.callbacks.LambdaCallback(on_train_batch_end=evaluate)
    model.fit(X, Y, batch_size=10, verbose=0, callbacks=[note])
    assert int(model.optimizer.iterations.numpy()) == 10
    assert losses == [model.evaluate(X, Y, verbose=0)]


def test_what_servers_cannot_compute_is_refused(one_worker: Desk) -> None:
    strategy = strategy_on(one_worker, 2)
    with strategy.scope():
        own = OwnStep()
        own.compile("sgd", CROSS_ENTROPY)
        others = [small(make()) for make in _COMBINING]
        scaled = small(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with refused(errors.UnsupportedError, "overrides `train_step`"):
        own.fit(X, Y, verbose=0)
    for model in others:
        with refused(errors.UnsupportedError, "is in 2 parts"):
            model.fit(X, Y, verbose=0)
    with refused(errors.UnsupportedError, "mixed_bfloat16"):
        scaled.fit(X, Y, verbose=0)


# Slow: more optimizers, more workers.

_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "average": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizers_compute_on_servers_what_they_compute_here(
    one_worker: Desk, name: str, parts: int | None
) -> None:
    strategy = strategy_on(one_worker, parts)
    alone = with_table(_OPTIMIZERS[name]())
    with strategy.scope():
        model = with_table(_OPTIMIZERS[name](), rx.keras.layers.Embedding)
    assert_close(fitted(model), fitted(alone))
    assert_same(model, alone)


@pytest.mark.slow
def test_optimizers_that_combine_rows_train_whole_variables(one_worker: Desk) -> None:
    strategy = strategy_on(one_worker)
    for make in _COMBINING:
        alone = small(make())
        with strategy.scope():
            model = small(make())
        assert_close(fitted(model, X), fitted(alone, X))
        assert_same(model, alone)


@keras.saving.register_keras_serializable("tests")
class Recurrent(keras.Model):
    """A model of the user's own classes, whose variables are created when it is first called."""

    def __init__(self, units: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.lstm, self.out = keras.layers.LSTM(units), keras.layers.Dense(2)

    def call(self, inputs: Any, training: bool = False) -> Any:
        state = self.lstm(inputs[..., None], training=training)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(state)))
        return self.out(state)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def hinge(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, True))


@pytest.mark.slow
def test_classes_and_functions_of_the_user_reach_the_workers(one_worker: Desk) -> None:
    strategy = strategy_on(one_worker)

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = Recurrent(6)
        model.compile("adam", hinge, weighted_metrics=["accuracy"])
        return model

    alone = make()
    with strategy.scope():
        model = make()
    weights = np.linspace(0, 1, 100, dtype="float32")
    ours = fitted(model, X, sample_weight=weights)
    assert_close(ours, fitted(alone, X, sample_weight=weights))
    assert_same(model, alone)


@pytest.mark.slow
def test_two_workers_in_sync_train_as_one_device_with_twice_the_batch() -> None:
    alone = small("adam")
    history = alone.fit(X[:96], Y[:96], batch_size=32, epochs=3, shuffle=False, verbose=0).history
    with own_cluster(workers=2, ps=2) as desk:
        strategy = strategy_on(desk, 2, consistency="sync")
        with strategy.scope():
            model = small("adam")
        options: dict[str, Any] = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
        assert_close(model.fit(X[:96], Y[:96], **options).history, history)
        assert_same(model, alone)
        assert int(model.optimizer.iterations.numpy()) == 9


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["async", rx.Staleness(4)])
def test_a_worker_that_is_killed_twice_costs_no_step(consistency: Any) -> None:
    centers = 0.6 * random.normal(size=(10, 32))
    labels = random.integers(0, 10, 6_000).astype("int32")
    points = (centers[labels] + random.normal(size=(6_000, 32))).astype("float32")
    train, tested = (points[:5_000], labels[:5_000]), (points[5_000:], labels[5_000:])

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((32,)), *layers])
        model.compile(keras.optimizers.SGD(0.05), CROSS_ENTROPY, metrics=["accuracy"])
        return model

    alone = make()
    alone.fit(*train, batch_size=20, epochs=4, verbose=0)
    with own_cluster(workers=3, ps=2) as desk:
        strategy = strategy_on(desk, 2, consistency=consistency)
        with strategy.scope():
            model = make()
        steps = iter(range(1_000))

        def disturb(batch: int, logs: Any) -> None:
            step = next(steps)
            if step in (300, 700):
                desk.cluster.kill("worker", 1)
            elif step in (450, 800):
                desk.cluster.restart("worker", 1, wait=False)

        note = keras.callbacks.LambdaCallback(on_train_batch_end=disturb)
        model.fit(*train, batch_size=20, epochs=4, verbose=0, callbacks=[note])
        assert int(model.optimizer.iterations.numpy()) == 1_000
        # Every example of the last epoch was counted once.
        assert float(model.metrics[0].count.numpy()) == 5_000
        expected = alone.evaluate(*tested, verbose=0)[1]
        assert model.evaluate(*tested, verbose=0)[1] == pytest.approx(expected, abs=0.01)
