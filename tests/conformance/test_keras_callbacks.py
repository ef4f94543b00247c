"""Keras callbacks, failures in the middle of a fit, and saving, under a strategy as without."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras_programs as programs
import numpy as np
import pytest
from keras_programs import STRATEGY_NAMES, UNEVEN, keras
from peer_packages import import_peer

from replicax.observe import progress

callbacks = keras.callbacks
X, Y = programs.data_of("sequential", UNEVEN)


def fit(model: keras.Model, **options: Any) -> dict[str, list[float]]:
    given = {"x": X, "y": Y, "batch_size": 8, "epochs": 3, **options}
    return model.fit(**given, shuffle=False, verbose=0).history


def test_loss_of_the_last_batch_is_shown_to_observers() -> None:
    model = programs.compiled("sequential")
    history = fit(model, epochs=1, batch_size=len(X))
    values: Any = progress.snapshot()["values"]
    assert values["loss"]["value"] == pytest.approx(history["loss"][0])


class Rewriter(callbacks.Callback):
    """Reads and changes weights and the rate after batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # As Keras documents it for its JAX backend: the state is synchronized first.
        self.model.jax_state_sync()
        weights = self.model.get_weights()
        self.seen.append([*weights, dict(logs)])
        if batch == 1:
            self.model.set_weights([weight * 0.5 for weight in weights])
        if batch == 2:
            self.model.optimizer.learning_rate = 0.02
            self.model.layers[0].bias.assign(np.ones(3))


def _lambda_callback(found: list[Any]) -> Any:
    return callbacks.LambdaCallback(
        on_train_begin=lambda logs: found.append("begin"),
        on_epoch_end=lambda epoch, logs: found.append((epoch, logs["loss"])),
        on_train_batch_end=lambda batch, logs: found.append((batch, float(logs["loss"]))),
        on_train_end=lambda logs: found.append("end"),
    )


# For each callback, a function that fits with it and returns what it came to.
def _checkpoint(model: keras.Model, directory: Path) -> Any:
    path = directory / "best.weights.h5"
    saving = callbacks.ModelCheckpoint(path, save_best_only=True, save_weights_only=True)
    history = fit(model, callbacks=[saving], validation_data=(X, Y))
    trained = model.get_weights()
    model.set_weights([weight * 0 for weight in trained])
    model.load_weights(path)
    return history, trained


def _checkpoint_by_batch(model: keras.Model, directory: Path) -> Any:
    path = str(directory / "at_{epoch}_{batch}.keras")
    saving = callbacks.ModelCheckpoint(path, save_freq=2)
    fit(model, callbacks=[saving], epochs=2)
    found = sorted(directory.glob("*.keras"))
    weights = [keras.saving.load_model(path, compile=False).get_weights() for path in found]
    assert [path.stem for path in found] == ["at_1_2", "at_2_1", "at_2_3"]
    return weights


def _early_stopping(model: keras.Model, directory: Path) -> Any:
    # The loss falls, so it never gets better: the weights of the first epoch come back.
    stopping = callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    history = fit(model, callbacks=[stopping], epochs=6)
    assert stopping.stopped_epoch == 1
    return history


def _plateau(model: keras.Model, directory: Path) -> Any:
    plateau = callbacks.ReduceLROnPlateau("loss", 0.1, 1, mode="max")
    return fit(model, callbacks=[plateau], epochs=4)


def _scheduler(model: keras.Model, directory: Path) -> Any:
    return fit(model, callbacks=[callbacks.LearningRateScheduler(lambda e, lr: lr * 0.5)])


def _csv(model: keras.Model, directory: Path) -> Any:
    fit(model, callbacks=[callbacks.CSVLogger(directory / "log.csv")])
    return np.loadtxt(directory / "log.csv", delimiter=",", skiprows=1, usecols=(0, 1))


def _lambda(model: keras.Model, directory: Path) -> Any:
    found: list[Any] = []
    fit(model, callbacks=[_lambda_callback(found)])
    return [entry for entry in found if not isinstance(entry, str)], len(found)


def _terminate(model: keras.Model, directory: Path) -> Any:
    bad = np.where(np.arange(UNEVEN)[:, None] == 12, np.nan, Y)
    history = fit(model, y=bad, callbacks=[callbacks.TerminateOnNaN()])
    assert model.stop_training
    assert len(history["loss"]) == 1
    return history


def _rewriter(model: keras.Model, directory: Path) -> Any:
    rewriter = Rewriter()
    return fit(model, callbacks=[rewriter]), rewriter.seen


def _swap(model: keras.Model, directory: Path) -> Any:
    model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
    return fit(model, callbacks=[callbacks.SwapEMAWeights(swap_on_epoch=True)], epochs=2)


def _backup(model: keras.Model, directory: Path) -> Any:
    class Stop(Exception):
        pass

    def stop(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise Stop

    backup = callbacks.BackupAndRestore(directory / "backup")
    with pytest.raises(Stop):
        fit(model, callbacks=[backup, callbacks.LambdaCallback(on_epoch_begin=stop)])
    model.set_weights([weight * 0 for weight in model.get_weights()])
    history = fit(model, callbacks=[callbacks.BackupAndRestore(directory / "backup")])
    assert len(history["loss"]) == 2
    return history


CALLBACKS: dict[str, Callable[[keras.Model, Path], Any]] = {
    "checkpoint": _checkpoint,
    "checkpoint_by_batch": _checkpoint_by_batch,
    "early_stopping": _early_stopping,
    "plateau": _plateau,
    "scheduler": _scheduler,
    "csv": _csv,
    "lambda": _lambda,
    "terminate": _terminate,
    "rewriter": _rewriter,
    "swap": _swap,
    "backup": _backup,
}
# Callbacks that read logs only, as History does.
SLOW_CALLBACKS = ("csv", "lambda", "plateau", "swap", "checkpoint_by_batch")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW_CALLBACKS else ()) for n in CALLBACKS],
)
def test_a_callback_does_what_it_does_with_keras_alone(name: str, tmp_path: Path) -> None:
    _require_same(name, "mirrored_2", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy_name", STRATEGY_NAMES)
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_does_the_same_under_every_strategy(
    name: str, strategy_name: str, tmp_path: Path
) -> None:
    _require_same(name, strategy_name, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the environment may have to be installed
@pytest.mark.parametrize("strategy_name", [None, *STRATEGY_NAMES])
def test_tensorboard_writes_the_losses_of_the_history(
    strategy_name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tf = import_peer(monkeypatch, "tensorflow")
    with programs.scope_of(strategy_name):
        model = programs.compiled("sequential")
    board = callbacks.TensorBoard(tmp_path, histogram_freq=1, update_freq=1)
    history = fit(model, callbacks=[board])
    (path,) = (tmp_path / "train").glob("events*")
    written = [
        float(tf.make_ndarray(value.tensor))
        for record in tf.data.TFRecordDataset(str(path))
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value
        if value.tag == "epoch_loss"
    ]
    np.testing.assert_allclose(written, history["loss"], rtol=1e-6)


def _require_same(name: str, strategy_name: str, directory: Path) -> None:
    found: list[programs.Outcome] = []
    for used in (None, strategy_name):
        own = directory / str(used)
        own.mkdir()
        with programs.scope_of(used):
            model = programs.compiled("sequential")
        found.append(programs.outcome(model, CALLBACKS[name](model, own)))
    found[1].require_equal(found[0])


# Failures: the model keeps its last values, and the next fit works.


class Breaking(keras.layers.Layer):
    """Fails while it is traced, if it is told to."""

    fails = False

    def call(self, x: Any) -> Any:
        if self.fails:
            raise ZeroDivisionError("the layer")
        return x * 1.0


class _Stop(Exception):
    pass


def _broken_layer(model: keras.Model) -> Any:
    model.layers[0].fails = True
    model.make_train_function(force=True)
    try:
        with pytest.raises(ZeroDivisionError):
            fit(model)
    finally:
        model.layers[0].fails = False
    return 0


def _bad_shapes(model: keras.Model) -> Any:
    with pytest.raises(ValueError, match="shape"):
        fit(model, x=X[:, :3])
    return 0


def _data_source_fails(model: keras.Model) -> Any:
    def batches() -> Iterator[Any]:
        yield X[:8], Y[:8]
        yield X[8:16], Y[8:16]
        raise _Stop

    with pytest.raises(_Stop):
        model.fit(batches(), shuffle=False, verbose=0)
    return 2


def _interrupted(model: keras.Model) -> Any:
    def interrupt(batch: int, logs: Any) -> None:
        if batch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[callbacks.LambdaCallback(on_train_batch_end=interrupt)])
    return 2


def _interrupted_evaluation(model: keras.Model) -> Any:
    def interrupt(batch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    stop = callbacks.LambdaCallback()
    stop.on_test_batch_end = interrupt
    with pytest.raises(KeyboardInterrupt):
        model.evaluate(X, Y, batch_size=8, verbose=0, callbacks=[stop])
    return 0


FAILURES = (_broken_layer, _bad_shapes, _data_source_fails, _interrupted, _interrupted_evaluation)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: f.__name__.strip("_"))
def test_a_failed_fit_leaves_the_last_values_and_the_next_fit_works(failure: Any) -> None:
    """T9: an error reaches the caller, and everything stays usable."""

    def new_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [Breaking(), keras.layers.Dense(3), keras.layers.BatchNormalization()]
        )
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        return model

    with programs.scope_of("mirrored_2"):
        model = new_model()
    fit(model, epochs=1)
    steps = failure(model)
    wanted = new_model()
    fit(wanted, epochs=1)
    if steps:
        wanted.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    programs.outcome(model, model(X)).require_equal(programs.outcome(wanted, wanted(X)))
    history = fit(model, epochs=1)
    programs.outcome(model, history).require_equal(programs.outcome(wanted, fit(wanted, epochs=1)))


def test_a_model_that_was_never_built_survives_a_failed_fit() -> None:
    with programs.scope_of("mirrored_2"):
        model = programs.compiled("lazy")
    with pytest.raises(ZeroDivisionError):
        model.fit((1 / 0 for _ in itertools.count()), shuffle=False, verbose=0)
    history = fit(model)
    wanted = programs.compiled("lazy")
    programs.outcome(model, history).require_equal(programs.outcome(wanted, fit(wanted)))
