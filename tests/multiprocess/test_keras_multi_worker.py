"""Keras models on several workers: real processes, compared with Keras on one device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras_workers
import numpy as np
import pytest
from keras_workers import Facts

from replicax.testing import LocalCluster

pytestmark = [
    pytest.mark.timeout(180),
    # Of `keras.Variable.numpy`.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def assert_close(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6), found, expected
    )


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


# One group of two workers, and the same program on one device.


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("keras")


@pytest.fixture(scope="module")
def workers(directory: Any) -> Iterator[list[Facts]]:
    with LocalCluster(workers=2, ps=0, timing="fast") as cluster:
        yield cluster.run(keras_workers.quick_checks, (str(directory),), timeout=120)


@pytest.fixture(scope="module")
def alone(directory: Any) -> Facts:
    return keras_workers.quick_checks(str(directory), alone=True)


def test_fit_evaluate_and_predict_are_those_of_one_device(
    workers: list[Facts], alone: Facts
) -> None:
    for worker in workers:
        assert_close(worker["train"], alone["train"])
        assert worker["train"]["predict"].shape == (9, 1)
    assert_same(workers[0]["train"], workers[1]["train"])


def test_callbacks_run_on_the_chief_and_change_all_workers(
    workers: list[Facts], alone: Facts
) -> None:
    chief, other = (worker["callbacks"] for worker in workers)
    assert other["calls"] == [] and chief["calls"] == alone["callbacks"]["calls"]
    assert chief["epochs"] == [0, 1]  # Stopped early.
    assert chief["history"]["learning_rate"] == pytest.approx([0.02, 0.5])
    for key in ("history", "epochs", "weights", "rate", "next"):
        assert_same(chief[key], other[key])
    # After the step that makes the loss jump, values are larger.
    assert_close(chief["weights"], alone["callbacks"]["weights"], rtol=1e-4)
    losses = chief["history"]["loss"][:1], alone["callbacks"]["history"]["loss"][:1]
    assert_close(*losses)


def test_an_error_in_a_callback_ends_the_call_on_all_workers(
    workers: list[Facts], alone: Facts
) -> None:
    chief, other = (worker["failure"] for worker in workers)
    assert chief["error"] == ("LookupError", "no such thing")
    name, text = other["error"]
    assert name == "CancelledError"
    assert "LookupError: no such thing on /job:worker/task:0, at `on_epoch_end`" in text
    for worker in (chief, other):
        assert_close(worker["history"], alone["failure"]["history"])
    assert "loss" in chief["printed"] and other["printed"] == ""


def test_the_chief_writes_what_all_workers_save(
    workers: list[Facts], alone: Facts, directory: Any
) -> None:
    chief, other = (worker["saving"] for worker in workers)
    assert chief["wrote"] and other["wrote"]
    assert (chief["failure"], other["failure"]) == ("NotADirectoryError", "UnavailableError")
    for worker in (chief, other):
        for key in ("evaluate", "weights", "optimizer"):
            assert_close(worker[key], alone["saving"][key])
    assert (directory / "callback.keras").exists()


def test_a_loop_of_the_user_is_that_of_one_device(workers: list[Facts], alone: Facts) -> None:
    for worker in workers:
        assert_close(worker["loop"], alone["loop"])
    assert_same(workers[0]["loop"], workers[1]["loop"])


# Other groups.


def run(program: Any, *args: Any, devices: int = 1, **options: Any) -> list[Any]:
    with LocalCluster(
        workers=options.pop("workers", 2),
        ps=0,
        devices_per_worker=devices,
        timing="fast",
        chief=options.pop("chief", False),
    ) as cluster:
        return cluster.run(program, args, timeout=150, **options)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [22, 24, 21])
def test_batches_of_any_size_on_two_by_two_devices(rows: int) -> None:
    expected = keras_workers.train(keras_workers.new_model(None), rows)
    expected["weights by dataset"] = expected["weights"]
    for worker in run(keras_workers.train_on_workers, rows, devices=2):
        assert_close(worker, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_data_of_every_kind() -> None:
    expected = keras_workers.train_on_all_data(alone=True)
    chief, other = run(keras_workers.train_on_all_data)
    for kind in keras_workers.KINDS:
        assert_same(chief[kind], other[kind])
        expected[kind].pop("unseeded", None), chief[kind].pop("unseeded", None)
        assert_close(chief[kind], expected[kind])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_models_of_every_kind() -> None:
    expected = keras_workers.train_models(alone=True)
    chief, other = run(keras_workers.train_models)
    for name, arrays in expected.items():
        assert_close(chief[name], arrays)
        assert_same(chief[name], other[name])


@pytest.mark.slow
def test_callbacks_between_steps_of_a_chief_task(tmp_path: Path) -> None:
    expected = keras_workers.change_between_steps(str(tmp_path), alone=True)
    chief, other = run(keras_workers.change_between_steps, str(tmp_path), workers=1, chief=True)
    assert len(expected["fit False"][0]["loss"]) < 3
    assert_close(chief, expected)
    assert_same(chief, other)
    written = {path.name.removeprefix("alone") for path in tmp_path.glob("alone*")}
    assert written == {path.name.removeprefix("shared") for path in tmp_path.glob("shared*")}


@pytest.mark.slow
def test_large_weights_that_a_callback_restores() -> None:
    expected = keras_workers.restore_large_weights(alone=True)
    chief, other = run(keras_workers.restore_large_weights)
    assert chief["epochs"] == expected["epochs"] == other["epochs"] == [0, 1]
    assert_close(chief["weights"], expected["weights"])
    assert_same(chief, other)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["callback", "data", "step", "data of worker 1"])
def test_an_error_of_one_worker_ends_the_call_on_all(where: str, tmp_path: Path) -> None:
    with LocalCluster(workers=2, ps=0, timing="fast") as cluster:
        launched = cluster.launch(keras_workers.be_interrupted, (str(tmp_path), where))
        failed, other = (outcome.value for outcome in launched.wait(60))
    if where == "data of worker 1":
        failed, other = other, failed
    expected = "LookupError" if where.startswith("data") else "KeyboardInterrupt"
    assert failed[0] == expected
    # In a step, the others cannot meet the one that has failed; in a callback they do.
    assert other[0] == ("CancelledError" if where == "callback" else "InvalidArgumentError")
    assert expected in other[1], other


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_backup_brings_back_a_run_that_was_killed(victim: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run(keras_workers.train_and_be_killed, str(tmp_path / "whole"), None)
    killed = run(keras_workers.train_and_be_killed, str(tmp_path), victim, max_restarts=1)
    assert (tmp_path / "killed").exists()
    assert whole[0]["seen"] == [0, 1, 2, 3, 4] and whole[1]["seen"] == []
    assert killed[0]["seen"] == killed[0]["epochs"] == killed[1]["epochs"]
    assert killed[0]["seen"] in ([2, 3, 4], [3, 4], [1, 2, 3, 4])
    for worker in killed:
        assert_same(worker["weights"], whole[0]["weights"])


@pytest.mark.slow
def test_a_backup_of_one_process_that_was_killed(tmp_path: Path) -> None:
    expected = keras_workers.train_and_be_killed(str(tmp_path / "whole"), None, "mirrored")
    program = (
        "import replicax, sys, keras_workers, numpy as np;"
        "found = keras_workers.train_and_be_killed(sys.argv[1], 0, 'mirrored');"
        "np.savez(sys.argv[1] + '/found.npz', *found['weights'])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    support = str(Path(keras_workers.__file__).parent)
    paths = [support, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    first = subprocess.run(command, env=env, timeout=120)
    assert first.returncode == -signal.SIGKILL
    second = subprocess.run(command, env=env, timeout=120)
    assert second.returncode == 0
    with np.load(tmp_path / "found.npz") as found:
        for one, other in zip(found.values(), expected["weights"], strict=True):
            np.testing.assert_array_equal(one, other)
