"""Programs that train Keras models on several workers, and on one device to compare with."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

import replicax as rx

ROWS, BATCH = 22, 8  # The last batch has six rows: two replicas divide it, four do not.
EPOCHS = 3
# How long callbacks wait for a better value.
ONE_EPOCH = {"patience": 1}  # codespell:ignore patience

Facts = dict[str, Any]


def scope_of(strategy: Any) -> Any:
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def new_model(strategy: Any, seed: int = 1, rate: float = 0.1, **options: Any) -> keras.Model:
    """Returns a small model with batch statistics, a regularizer and a metric."""
    keras.utils.set_random_seed(seed)
    with scope_of(strategy):
        model = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.Dense(5, "tanh", kernel_regularizer="l2"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(rate, momentum=0.5), "mse", metrics=["mae"], **options)
    return model


def new_data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    x = rng.randn(rows, 4).astype("float32")
    return x, (x.sum(1, keepdims=True) + rng.randn(rows, 1)).astype("float32")


def weights_of(model: keras.Model) -> list[np.ndarray]:
    return [np.array(variable.value) for variable in model.weights]


def train(model: keras.Model, rows: int = ROWS) -> Facts:
    """Trains, evaluates and predicts; batches of `evaluate` and `predict` leave one row over."""
    x, y = new_data(rows)
    fit = model.fit(x, y, BATCH, EPOCHS, shuffle=False, verbose=0, validation_data=(x[:9], y[:9]))
    found: Facts = {"history": fit.history, "weights": weights_of(model)}
    found["evaluate"] = model.evaluate(x[:9], y[:9], BATCH, verbose=0)
    found["predict"] = model.predict(x[:9], BATCH, verbose=0)
    found["train_on_batch"] = model.train_on_batch(x[:6], y[:6])
    found["test_on_batch"] = model.test_on_batch(x[:8], y[:8])
    found["predict_on_batch"] = model.predict_on_batch(x[:8])
    return found


class Recorder(keras.callbacks.Callback):
    """Notes what it is called with, predicts, saves and draws numbers by itself."""

    def __init__(self, path: Path | None, x: np.ndarray) -> None:
        super().__init__()
        self.path, self.x, self.calls = path, x, list[Any]()

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        own = keras.Variable(1.0)  # Of this process.
        np.random.rand(int(own.numpy()) + random.randrange(3))
        rows = self.model.predict(self.x, verbose=0)
        loss = self.model.evaluate(self.x, self.x[:, :1], verbose=0)[0]
        if self.path is not None:
            self.model.save(self.path)
        self.calls.append((epoch, sorted(logs), rows.shape, f"{loss:.3g}"))


def train_with_callbacks(model: keras.Model, strategy: Any, directory: str) -> Facts:
    """Stops early, changes the rate and restores weights; returns what the callbacks saw."""
    x, y = new_data()
    is_chief = strategy is None or strategy.extended.should_checkpoint
    # Other workers would shuffle in another order, and their callbacks would fail.
    np.random.seed(5 if is_chief else 6)
    random.seed(5 if is_chief else 6)
    recorder = Recorder(Path(directory) / "callback.keras" if is_chief else None, x[:8])
    stopping = keras.callbacks.EarlyStopping("loss", **ONE_EPOCH, restore_best_weights=True)
    callbacks = [
        recorder,
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.02 if epoch == 0 else 0.5),
        stopping,
    ]
    history = model.fit(x, y, BATCH, 5, shuffle=True, verbose=0, callbacks=callbacks)
    return {
        "history": history.history,
        "epochs": history.epoch,
        "weights": weights_of(model),
        "rate": float(model.optimizer.learning_rate.numpy()),
        "calls": recorder.calls,
        "next": (float(np.random.rand()), random.random()),
    }


class Failing(keras.callbacks.Callback):
    """Fails on the worker that runs it."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise LookupError("no such thing")


def fail_and_go_on(model: keras.Model) -> Facts:
    """Returns the error of a callback, and the history of the call after it."""
    x, y = new_data()
    try:
        model.fit(x, y, BATCH, 3, shuffle=False, verbose=0, callbacks=[Failing()])
    except Exception as error:
        found = type(error).__name__, str(error)
    else:
        found = "", ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        again = model.fit(x, y, BATCH, 1, shuffle=False, verbose=2)
    return {"error": found, "history": again.history, "printed": printed.getvalue()}


def save_and_load(model: keras.Model, strategy: Any, directory: str) -> Facts:
    """Saves on every worker, loads on every worker, and evaluates."""
    x, y = new_data()
    path = Path(directory) / f"saved-{'alone' if strategy is None else 'shared'}.keras"
    model.save(path)
    wrote = path.exists()
    try:
        model.save(path / "below" / "a" / "file.keras")
    except Exception as error:
        failure = type(error).__name__
    else:
        failure = ""
    model.save_weights(path.with_suffix(".weights.h5"))
    with scope_of(strategy):
        loaded: Any = keras.saving.load_model(path)
    loaded.load_weights(path.with_suffix(".weights.h5"))
    return {
        "wrote": wrote,
        "failure": failure,
        "evaluate": loaded.evaluate(x[:8], y[:8], BATCH, verbose=0),
        "optimizer": [np.array(variable.value) for variable in loaded.optimizer.variables],
        "weights": weights_of(loaded),
    }


def loop(strategy: Any, steps: int = 3) -> Facts:
    """Trains in a loop of the user's own; batch statistics would differ, so there are none."""
    x, y = new_data(16)
    keras.utils.set_random_seed(3)
    strategy = strategy or rx.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.MeanSquaredError()
        loss_of = keras.losses.MeanSquaredError(reduction="sum")

    def replica_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            return loss_of(y, model(x, training=True)) / 8

        loss, grads = rx.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        metric.update_state(y, model(x))
        return loss

    dataset = rx.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @rx.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    losses = [float(step(next(iterator))) for _ in range(steps)]
    return {"losses": losses, "weights": weights_of(model), "metric": float(metric.result())}


def quick_checks(directory: str, alone: bool = False) -> Facts:
    """Runs everything that one group of workers checks, on one model: compilation is dear."""
    strategy = None if alone else rx.MultiWorkerMirroredStrategy()
    model = new_model(strategy)
    return {
        "train": train(model),
        "failure": fail_and_go_on(model),
        "saving": save_and_load(model, strategy, directory),
        "callbacks": train_with_callbacks(model, strategy, directory),
        "loop": loop(strategy),
    }


# Programs of slow tests.


def train_on_workers(rows: int) -> Facts:
    """Trains on arrays, and again on a dataset of which each worker reads a part."""
    strategy = rx.MultiWorkerMirroredStrategy()
    found = train(new_model(strategy), rows)
    model = new_model(strategy)
    dataset = rx.data.Dataset.from_tensor_slices(new_data(rows)).batch(BATCH)
    model.fit(dataset, epochs=EPOCHS, verbose=0)
    return {**found, "weights by dataset": weights_of(model)}


class Batches(keras.utils.PyDataset):
    """Batches that are read one by one, with what a test wants to happen before some of them."""

    def __init__(self, before: Callable[[int, int], None] | None = None) -> None:
        super().__init__()
        self.x, self.y = new_data()
        self.epoch, self.before = 0, before

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index: int) -> Any:
        if self.before is not None:
            self.before(self.epoch, index)
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        self.epoch += 1


def train_and_be_killed(directory: str, victim: int | None, kind: str = "group") -> Facts:
    """Trains with backups; a worker is killed in the middle of an epoch of the first run."""
    if kind == "group":
        strategy: Any = rx.MultiWorkerMirroredStrategy()
        index = strategy.cluster_resolver.task_id
    else:
        strategy, index = rx.MirroredStrategy(["CPU:0", "CPU:1"]), 0
    marker = Path(directory) / "killed"

    def kill(epoch: int, batch: int) -> None:
        # The first epoch of the count is the call of Keras before the first one.
        if index == victim and (epoch, batch) == (3, 1) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    seen: list[int] = []
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    backup = keras.callbacks.BackupAndRestore(str(Path(directory) / "backup"))
    model = new_model(strategy)
    fit = model.fit(Batches(kill), epochs=5, shuffle=False, verbose=0, callbacks=[backup, note])
    return {"epochs": fit.epoch, "seen": seen, "weights": weights_of(model)}


def train_on_data(strategy: Any, kind: str) -> Facts:
    """Trains on data of one kind, with weights of samples where it can have them."""
    x, y = new_data()
    weights = np.linspace(0.5, 1.5, len(x), dtype="float32")
    inputs = {"a": x[:, :1], "b": [x[:, 1:3], x[:, 3:]]}
    keras.utils.set_random_seed(1)
    np.random.seed(0)
    with scope_of(strategy):
        a, b, c = (
            keras.layers.Input((n,), name=name) for n, name in ((1, "a"), (2, "b"), (1, "c"))
        )
        joined = keras.layers.Concatenate()([a, b, c])
        outputs = keras.layers.Dense(1)(keras.layers.Dropout(0.2, seed=3)(joined))
        model = keras.Model({"a": a, "b": [b, c]}, outputs)
        model.compile("adam", "mse", weighted_metrics=["mae"])

    def batch(rows: slice) -> Any:
        return jax.tree.map(lambda array: array[rows], (inputs, y, weights))

    slices = [slice(start, start + BATCH) for start in range(0, len(x), BATCH)]

    class Listed(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(slices)

        def __getitem__(self, index: int) -> Any:
            return batch(slices[index])

    def generated() -> Any:
        while True:
            yield from map(batch, slices)

    options: dict[str, Any] = {"epochs": 2, "verbose": 0}
    if kind == "arrays":
        fit = model.fit(inputs, y, BATCH, sample_weight=weights, validation_split=0.2, **options)
    elif kind == "classes":
        classes = (y > 0).astype("int32")
        fit = model.fit(inputs, classes, BATCH, class_weight={0: 1.0, 1: 2.0}, **options)
    elif kind == "dataset":
        fit = model.fit(Listed(), shuffle=True, **options)
    elif kind == "generator":
        fit = model.fit(generated(), steps_per_epoch=3, shuffle=False, **options)
    elif kind == "rx.data":
        model, inputs = new_model(strategy), x  # type: ignore[assignment]
        dataset = rx.data.Dataset.from_tensor_slices((x, y, weights)).shuffle(4, seed=7)
        fit = model.fit(dataset.batch(BATCH), validation_data=dataset.batch(5), **options)
    else:
        import grain  # Slow to import.

        source = grain.MapDataset.source(list(zip(x, y, strict=True))).batch(BATCH)
        reading = grain.ReadOptions(num_threads=0)
        model = new_model(strategy)
        fit = model.fit(source.to_iter_dataset(reading), shuffle=False, **options)
        inputs = x  # type: ignore[assignment]
    rows = model.predict(inputs, 5, verbose=0)
    found = {"history": fit.history, "weights": weights_of(model), "predict": rows}
    if kind == "rx.data":
        # Without a seed the order is that of the chief: each row counts once.
        unordered = rx.data.Dataset.from_tensor_slices((x, y, weights)).shuffle(22)
        found["evaluate"] = model.evaluate(unordered.batch(5), verbose=0)
        model.fit(unordered.batch(BATCH), verbose=0)
        unseeded = weights_of(model)
        found["is finite"] = all(np.isfinite(value).all() for value in unseeded)
        found["unseeded"] = unseeded if strategy is not None else None
    return found


KINDS = ("arrays", "classes", "dataset", "generator", "grain", "rx.data")


def train_on_all_data(alone: bool = False) -> Facts:
    strategy = None if alone else rx.MultiWorkerMirroredStrategy()
    return {kind: train_on_data(strategy, kind) for kind in KINDS}


class Changing(keras.callbacks.Callback):
    """Changes the rate and weights between steps, and stops in the middle of an epoch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.optimizer.learning_rate.assign(0.03)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            layer = self.model.layers[0]
            layer.kernel.assign(layer.kernel * 0.5)
            self.model.layers[1].moving_mean.assign(np.ones(layer.units))
        self.model.stop_training = self.params["epochs"] == 3 and logs["loss"] < 6.5

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_evaluating = True

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs["outputs"].shape == (8, 1) and float(logs["outputs"].sum()) != 0
        self.model.stop_predicting = True


def change_between_steps(directory: str, alone: bool = False) -> Facts:
    strategy = None if alone else rx.MultiWorkerMirroredStrategy()
    x, y = new_data()
    found: Facts = {}
    for eager in (False, True):
        model = new_model(strategy, run_eagerly=eager)
        path = Path(directory) / f"{'alone' if alone else 'shared'}-{eager}-{{epoch}}.weights.h5"
        callbacks = [
            Changing(),
            keras.callbacks.ReduceLROnPlateau("val_loss", **ONE_EPOCH, min_delta=10.0),
            keras.callbacks.ModelCheckpoint(path, save_freq=2, save_weights_only=True),
        ]
        options: dict[str, Any] = {"verbose": 0, "callbacks": callbacks}
        fit = model.fit(x, y, BATCH, 3, shuffle=False, validation_data=(x, y), **options)
        found[f"fit {eager}"] = fit.history, weights_of(model)
        found[f"evaluate {eager}"] = model.evaluate(x, y, BATCH, **options)
        found[f"predict {eager}"] = model.predict(x, BATCH, **options)
    return found


def restore_large_weights(alone: bool = False) -> Facts:
    """Restores weights that are too large for the control channel."""
    strategy = None if alone else rx.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with scope_of(strategy):
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(9000)])
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    x, y = new_data()
    callbacks = [
        # The loss falls: the first epoch is the best.
        keras.callbacks.EarlyStopping("loss", **ONE_EPOCH, mode="max", restore_best_weights=True)
    ]
    fit = model.fit(x, y, BATCH, 4, shuffle=False, verbose=0, callbacks=callbacks)
    return {"epochs": fit.epoch, "weights": weights_of(model)}


def be_interrupted(directory: str, where: str) -> tuple[str, str]:
    """Returns the error that a worker gets when one of them is interrupted, or its data fails."""
    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    victim = 1 if where == "data of worker 1" else 0

    def fail(epoch: int, batch: int) -> None:
        if index == victim and (epoch, batch) == (2, 1):
            if where.startswith("data"):
                raise LookupError("no such row")
            os.kill(os.getpid(), signal.SIGINT)

    class Interrupted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                os.kill(os.getpid(), signal.SIGINT)

    callbacks = [Interrupted()] if where == "callback" else []
    try:
        batches = Batches(None if where == "callback" else fail)
        new_model(strategy).fit(batches, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


def train_models(alone: bool = False) -> Facts:
    """Trains the models and the sources of data that tests of one process have."""
    import keras_programs as programs  # Imports Grain, which is slow.
    from strategies_under_test import STRATEGIES

    name = None
    if not alone:
        strategy = rx.MultiWorkerMirroredStrategy()
        name, STRATEGIES["workers"] = "workers", lambda: strategy
    pairs = [(model, "numpy") for model in programs.MODELS]
    pairs += [("sequential", source) for source in programs.SOURCES[1:]]
    rows = programs.UNEVEN
    return {
        f"{model}, {source}": programs.run_whole(name, model, source, rows).arrays
        for model, source in pairs
    }
