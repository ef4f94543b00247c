"""Keras models under strategies: saving and loading, checkpoints, calls outside of `run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import keras_programs as programs
import numpy as np
import pytest
from keras_programs import STRATEGY_NAMES, UNEVEN, keras

import replicax as rx

X, Y = programs.data_of("sequential", UNEVEN)
SCOPES = (None, *STRATEGY_NAMES)
# Saved under the first and loaded under the second.
PAIRS = [
    pytest.param(
        saved,
        loaded,
        marks=()
        if (saved, loaded)
        in [("mirrored_2", None), (None, "mirrored_2"), ("virtual_2", "central_2")]
        else pytest.mark.slow,
    )
    for saved in SCOPES
    for loaded in SCOPES
]


def fit(model: keras.Model) -> dict[str, list[float]]:
    return model.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0).history


def new_model(name: str = "batch_norm") -> keras.Model:
    return programs.compiled(name, optimizer=keras.optimizers.SGD(0.05, momentum=0.9))


@pytest.mark.parametrize(("saved_under", "loaded_under"), PAIRS)
def test_a_saved_model_loads_under_any_strategy_and_trains_on(
    saved_under: str | None, loaded_under: str | None, tmp_path: Path
) -> None:
    """S208, S212: saved in or out of the scope; loaded inside of one to be distributed."""
    with programs.scope_of(saved_under):
        model = new_model()
    fit(model)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    with programs.scope_of(loaded_under):
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        other = programs.MODELS["batch_norm"]()
        other.load_weights(tmp_path / "model.weights.h5")
    for variable in loaded.trainable_variables:
        assert hasattr(variable, "twin") == (loaded_under is not None)
    programs.outcome(loaded).require_equal(programs.outcome(model))
    np.testing.assert_allclose(other.predict(X, verbose=0), model(X), rtol=1e-5)
    found = programs.outcome(loaded, fit(loaded))
    found.require_equal(programs.outcome(model, fit(model)))


@pytest.mark.parametrize(("saved_under", "loaded_under"), PAIRS)
def test_a_checkpoint_of_keras_objects_restores_under_any_strategy(
    saved_under: str | None, loaded_under: str | None, tmp_path: Path
) -> None:
    """S213: restoring before the optimizer has variables is as good as after."""
    with programs.scope_of(saved_under):
        model, metric = new_model("dropout"), keras.metrics.MeanSquaredError()
    fit(model)
    metric.update_state(Y, Y + 2)
    saved = rx.train.Checkpoint(model=model, optimizer=model.optimizer, metric=metric)
    manager = rx.train.CheckpointManager(saved, tmp_path, max_to_keep=2)
    manager.save()
    with programs.scope_of(loaded_under):
        # Further layers in this process have other names.
        other, own = new_model("dropout"), keras.metrics.MeanSquaredError()
    checkpoint = rx.train.Checkpoint(model=other, optimizer=other.optimizer, metric=own)
    status = rx.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    assert status.restore_or_initialize() is not None
    assert float(own.result()) == pytest.approx(4.0)
    history = fit(other)
    programs.outcome(other, history).require_equal(programs.outcome(model, fit(model)))


def test_a_checkpoint_holds_everything_and_says_what_is_missing(tmp_path: Path) -> None:
    with programs.scope_of("mirrored_2"):
        model = new_model("several")
        alone = keras.Variable(3.0)
    outside = keras.Variable(np.arange(3.0), dtype="float32")
    model.optimizer.build(model.trainable_variables)
    checkpoint = rx.train.Checkpoint(model=model, alone=alone, outside=outside)
    path = checkpoint.save(tmp_path / "all")
    before = programs.outcome(model)
    model.set_weights([weight * 0 for weight in model.get_weights()])
    alone.assign(0.0)
    outside.assign([7.0, 7.0, 7.0])
    checkpoint.restore(path).assert_consumed()
    programs.outcome(model).require_equal(before)
    assert float(alone.value) == 3.0
    np.testing.assert_array_equal(outside.value, [0, 1, 2])
    rx.train.Checkpoint(alone=rx.Variable(0.0)).restore(path).expect_partial()
    smaller = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(rx.errors.StructureError, match="alone"):
        rx.train.Checkpoint(model=smaller).restore(path).assert_consumed()


def test_a_checkpoint_in_a_callback_has_the_values_of_the_last_step(tmp_path: Path) -> None:
    with programs.scope_of("mirrored_2"):
        model = new_model()
    checkpoint = rx.train.Checkpoint(model=model)
    saved: list[Any] = []

    def save(batch: int, logs: Any) -> None:
        saved.append((checkpoint.save(tmp_path / f"at_{batch}"), model.get_weights()))

    saving = keras.callbacks.LambdaCallback(on_train_batch_end=save)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[saving])
    wanted = new_model()
    rx.train.Checkpoint(model=wanted).restore(saved[1][0])
    for found, weight in zip(wanted.get_weights(), saved[1][1], strict=True):
        np.testing.assert_array_equal(found, weight)
    reference = new_model()
    reference.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    for found, weight in zip(wanted.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(found, weight, rtol=1e-5, atol=1e-6)


def test_a_clone_belongs_to_the_scope_that_it_is_made_in() -> None:
    plain = programs.compiled("sequential")
    with programs.scope_of("mirrored_2") as strategy:
        clone = keras.models.clone_model(plain)
        clone.set_weights(plain.get_weights())
        clone.compile(keras.optimizers.SGD(0.05), "mse")
    assert clone.trainable_variables[0].strategy is strategy
    programs.outcome(clone, fit(clone)).require_equal(programs.outcome(plain, fit(plain)))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "mirrored_2" else pytest.mark.slow) for n in SCOPES]
)
def test_a_call_of_the_model_is_not_distributed(name: str | None) -> None:
    """S209: it works with arrays of any device, before and after `fit`."""
    with programs.scope_of(name):
        model = programs.compiled("batch_norm")
    committed = jax.device_put(X, jax.devices()[3])
    before = model(X)
    fit(model)
    found = model(X)
    assert not np.allclose(before, found)
    np.testing.assert_allclose(found, model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, model(committed), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, model(jax.device_put(X)), rtol=1e-5, atol=1e-6)


def test_two_strategies_take_turns_in_one_process() -> None:
    wanted = new_model()
    history = fit(wanted), fit(wanted)
    with programs.scope_of("mirrored_2"):
        first = new_model()
    with programs.scope_of("virtual_2"):
        second = new_model()
    found = [[fit(model) for model in (first, second)] for _ in range(2)]
    for model, own in zip((first, second), zip(*found, strict=True), strict=True):
        programs.outcome(model, own).require_equal(programs.outcome(wanted, history))


def test_the_scope_of_the_default_strategy_changes_nothing() -> None:
    """S9."""
    with rx.get_strategy().scope():
        model = new_model()
    wanted = new_model()
    for _ in range(2):
        history, own = fit(wanted), fit(model)
        assert model.train_on_batch(X, Y) == pytest.approx(wanted.train_on_batch(X, Y))
        programs.outcome(model, own).require_equal(programs.outcome(wanted, history))
    np.testing.assert_allclose(model(X), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def test_training_in_the_scope_of_another_strategy_is_an_error() -> None:
    """T1."""
    with programs.scope_of("mirrored_2"):
        model = new_model()
    plain = new_model()
    with programs.scope_of("virtual_2"):
        with pytest.raises(ValueError, match="made in a scope of it"):
            fit(model)
        with pytest.raises(ValueError, match="made in a scope of it"):
            fit(plain)
    fit(model)


def test_uninstalled_hooks_leave_keras_alone_until_they_are_installed_again() -> None:
    wanted = new_model()
    history = [fit(wanted), fit(wanted)]
    with programs.scope_of("mirrored_2"):
        model = new_model()
    found = [fit(model)]
    assert rx.keras.is_installed()
    rx.keras.uninstall()
    try:
        assert not rx.keras.is_installed()
        with programs.scope_of("mirrored_2"):
            assert type(keras.Variable(1.0)) is keras.Variable
        assert not hasattr(keras.Variable, "checkpoint_array")
        found.append(fit(model))
        programs.outcome(model, found).require_equal(programs.outcome(wanted, history))
        history.append(fit(wanted))
    finally:
        rx.keras.install()
        rx.keras.install()
    found.append(fit(model))
    programs.outcome(model, found).require_equal(programs.outcome(wanted, history))
    with programs.scope_of("mirrored_2") as strategy:
        assert keras.Variable(1.0).strategy is strategy


def test_loading_weights_and_building_by_hand_work_in_and_out_of_the_scope() -> None:
    with programs.scope_of("mirrored_2"):
        model = programs.compiled("lazy")
    model.build((None, 4))
    assert all(hasattr(v, "twin") for v in model.variables)
    wanted = programs.compiled("lazy")
    wanted.build((None, 4))
    programs.outcome(model, fit(model)).require_equal(programs.outcome(wanted, fit(wanted)))


def run_program(code: str, **env: str) -> str:
    given = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**given, **env},
        check=False,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_plain_keras_without_replicax_loads_what_a_strategy_saved_and_the_reverse(
    tmp_path: Path,
) -> None:
    with programs.scope_of("mirrored_2"):
        model = new_model()
    fit(model)
    model.save(tmp_path / "ours.keras")
    np.save(tmp_path / "x.npy", X)
    code = f"""
import sys, numpy as np, keras
model = keras.saving.load_model({str(tmp_path / "ours.keras")!r})
x = np.load({str(tmp_path / "x.npy")!r})
model.fit(x, x.sum(1, keepdims=True), batch_size=8, shuffle=False, verbose=0)
model.save({str(tmp_path / "theirs.keras")!r})
assert "replicax" not in sys.modules
"""
    run_program(code, KERAS_BACKEND="jax")
    fit(model)
    with programs.scope_of("virtual_2"):
        theirs = keras.saving.load_model(tmp_path / "theirs.keras")
    programs.outcome(theirs).require_equal(programs.outcome(model))


IN_SCOPE = """
import numpy as np
strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
with strategy.scope():
    {inside}
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
print(keras.backend.backend(), type(model.variables[0]).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "inside"),
    [
        ("import keras; import replicax as rx", "pass"),
        ("import replicax as rx; import keras", "pass"),
        ("import replicax as rx", "import keras"),
    ],
)
def test_keras_and_replicax_are_imported_in_any_order(first: str, inside: str) -> None:
    # Keras alone would choose TensorFlow, which is not installed.
    env = {"KERAS_BACKEND": "jax"} if first.startswith("import keras") else {}
    found = run_program(first + IN_SCOPE.format(inside=inside), **env)
    assert found == "jax DistributedVariable\n"


@pytest.mark.slow
def test_another_backend_is_an_error_in_a_scope_only() -> None:
    code = """
import replicax as rx
import keras
keras.layers.Dense(1).build((None, 2))
try:
    with rx.MirroredStrategy(["CPU:0"]).scope():
        keras.layers.Dense(1).build((None, 2))
except rx.errors.UnsupportedError as error:
    print(error)
"""
    assert "KERAS_BACKEND=jax" in run_program(code, KERAS_BACKEND="numpy")


def test_a_model_that_is_built_later_gets_the_values_that_were_restored(tmp_path: Path) -> None:
    def make() -> keras.Model:
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        return keras.Sequential(layers)

    x = np.ones((4, 5), np.float32)
    saved = make()
    expected = saved(x)
    path = rx.train.Checkpoint(model=saved).save(tmp_path / "ckpt")
    later = make()
    status = rx.train.Checkpoint(model=later).restore(path)
    assert not later.built
    np.testing.assert_allclose(later(x), expected, rtol=1e-6)
    status.assert_consumed()
