"""`rx.train`: moving averages, warm starts, and waiting for checkpoints."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import copies, refused

import replicax as rx


def averaged(values: list[float], decay: float, first: float) -> float:
    shadow = first
    for value in values:
        shadow -= (1 - decay) * (shadow - value)
    return shadow


@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device", "central_2", "default")
def test_moving_averages_follow_in_every_context(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable([1.0, 2.0], name="w", aggregation=rx.VariableAggregation.MEAN)
    ema = rx.train.ExponentialMovingAverage(decay=0.9)

    def step(x: Any) -> None:
        w.assign_add(jnp.ones(2) * x)
        ema.apply([w])

    # The first call makes the shadow variable, wherever it is.
    for x in (1.0, 2.0):
        run(strategy, step, (x,))
    # The shadow starts with the value that the variable has in the first call.
    expected = [averaged([2.0, 4.0], 0.9, 2.0), averaged([3.0, 5.0], 0.9, 3.0)]
    shadow = ema.average(w)
    assert shadow is not None
    for copy in copies(strategy, shadow):
        np.testing.assert_allclose(copy, expected, rtol=1e-6)
    assert type(shadow) is type(w)
    assert not shadow.trainable
    # Outside of every scope, eagerly and compiled.
    ema.apply([w])
    rx.function(ema.apply)()
    expected = [averaged([2.0, 4.0, 4.0, 4.0], 0.9, 2.0), averaged([3.0, 5.0, 5.0, 5.0], 0.9, 3.0)]
    np.testing.assert_allclose(shadow.read_value(), expected, rtol=1e-6)


@pytest.mark.strategies("mirrored_2")
def test_values_of_replicas_are_averaged_first(strategy: Any, run: Any) -> None:
    with strategy.scope():
        on_read = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.MEAN,
        )
    ema = rx.train.ExponentialMovingAverage(0.5)
    ema.apply([on_read])

    def step() -> None:
        on_read.assign(2.0 * rx.get_replica_context().replica_id_in_sync_group)
        ema.apply([on_read])

    run(strategy, step)
    shadow = ema.average(on_read)
    assert shadow is not None
    assert float(shadow.read_value()) == 0.5


def test_moving_averages_with_a_count_of_updates() -> None:
    count = rx.Variable(0, name="count")
    w = rx.Variable(0.0, name="w")
    ema = rx.train.ExponentialMovingAverage(0.9, num_updates=count)
    ema.apply([w])
    expected = 0.0
    for step in range(1, 4):
        count.assign_add(1)
        w.assign(10.0)
        rx.function(ema.apply)([w])
        expected -= (1 - min(0.9, (1 + step) / (10 + step))) * (expected - 10)
    found = ema.average(w)
    assert found is not None
    np.testing.assert_allclose(found.read_value(), expected, rtol=1e-6)
    half = rx.Variable(jnp.ones(2, jnp.bfloat16), name="half")
    ema.apply([half])
    shadow = ema.average(half)
    assert shadow is not None
    assert shadow.dtype == jnp.bfloat16


def test_names_of_averages_and_what_is_refused() -> None:
    w, b = rx.Variable(0.0, name="w"), rx.Variable(0.0, name="b")
    ema = rx.train.ExponentialMovingAverage(0.9, name="slow")
    assert ema.average(w) is None
    assert (ema.average_name(w), ema.name) == ("w/slow", "slow")
    with refused(rx.errors.InvalidArgumentError, "first call"):
        ema.apply()
    ema.apply([w])
    ema.apply()
    shadow = ema.average(w)
    assert shadow is not None
    assert shadow.name == "w/slow"
    assert ema.variables_to_restore() == {"w/slow": w}
    assert list(ema.variables_to_restore([w, b])) == ["w/slow", "b/slow"]
    with refused(rx.errors.ArgumentTypeError, "floating-point"):
        ema.apply([rx.Variable(1)])
    with refused(rx.errors.ArgumentTypeError, "averages variables"):
        ema.apply([jnp.ones(1)])  # type: ignore[list-item]


@pytest.mark.strategies("mirrored_2")
def test_checkpoints_keep_moving_averages(strategy: Any, tmp_path: Path) -> None:
    def made() -> Any:
        with strategy.scope():
            w = rx.Variable(1.0, name="w")
        ema = rx.train.ExponentialMovingAverage(0.5)
        ema.apply([w])
        return w, ema

    w, ema = made()
    w.assign(3.0)
    ema.apply()
    path = rx.train.Checkpoint(w=w, ema=ema).write(tmp_path / "a")
    other, restored = made()
    rx.train.Checkpoint(w=other, ema=restored).restore(path).assert_consumed()
    assert float(restored.average(other).read_value()) == 2.0
    # The averages themselves, as values for evaluation.
    names = {v.name: f"ema/{v.name}" for v in [other]}
    rx.train.warm_start(path, [other], names)
    assert copies(strategy, other) == [2.0, 2.0]


# Warm starts.


class Model(rx.Module):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.encoder = rx.Variable(jnp.ones(size), name="encoder")
        self.head = rx.Variable(jnp.ones(size), name="head")


def saved(tmp_path: Path) -> str:
    model = Model()
    model.encoder.assign([2.0, 3.0])
    model.head.assign([4.0, 5.0])
    return rx.train.Checkpoint(model=model, old=rx.Variable([9.0, 9.0])).save(tmp_path / "ckpt")


@pytest.mark.strategies("mirrored_2", "one_device")
def test_warm_start_takes_what_the_expression_names(strategy: Any, tmp_path: Path) -> None:
    path = saved(tmp_path)
    with strategy.scope():
        model = Model()
    rx.train.warm_start(path, "model/enc.*", objects={"model": model})
    for copy in copies(strategy, model.encoder):
        assert copy == [2.0, 3.0]
    assert model.head.numpy().tolist() == [1.0, 1.0]
    # A directory means its newest checkpoint; names may differ.
    rx.train.warm_start(tmp_path, [".*/head"], {"model/head": "old"}, objects={"model": model})
    assert model.head.numpy().tolist() == [9.0, 9.0]
    rx.train.warm_start(tmp_path, objects={"model": model})
    assert model.head.numpy().tolist() == [4.0, 5.0]
    rx.train.warm_start(tmp_path, None)


def test_warm_start_changes_all_or_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model, large = Model(), Model(3)
    with refused(rx.errors.InvalidArgumentError, "shape"):
        rx.train.warm_start(path, objects={"model": large})
    names = {"encoder": "model/encoder", "head": "nowhere"}
    with refused(rx.errors.NotFoundError, "nowhere"):
        rx.train.warm_start(path, [model.encoder, model.head], names)
    assert model.encoder.numpy().tolist() == [1.0, 1.0]
    with refused(rx.errors.InvalidArgumentError, "are not among them"):
        rx.train.warm_start(path, [model.encoder], {"hed": "old"})
    with refused(rx.errors.InvalidArgumentError, "must match"):
        rx.train.warm_start(path, "x", objects={"model": model})
    with refused(rx.errors.InvalidArgumentError, "objects"):
        rx.train.warm_start(path)
    with refused(rx.errors.ArgumentTypeError, "one kind"):
        rx.train.warm_start(path, [3])  # type: ignore[list-item]
    with refused(rx.errors.NotFoundError, "there is none"):
        rx.train.warm_start(tmp_path / "empty", [model.encoder])


# Waiting for checkpoints.


def test_checkpoints_iterator_yields_each_new_one(tmp_path: Path) -> None:
    checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
    assert list(rx.train.checkpoints_iterator(tmp_path / "not yet", timeout=0)) == []
    found, paths = [], [checkpoint.save(tmp_path / "ckpt")]
    for path in rx.train.checkpoints_iterator(tmp_path, timeout=0):
        found.append(path)
        if len(paths) < 3:
            paths.append(checkpoint.save(tmp_path / "ckpt"))
    assert found == paths
    # Those that appear in between are passed over.
    assert list(rx.train.checkpoints_iterator(tmp_path, timeout=0)) == paths[-1:]


def test_checkpoints_iterator_asks_when_the_time_is_over(tmp_path: Path) -> None:
    answers = [False, False, True]
    iterator = rx.train.checkpoints_iterator(tmp_path, timeout=0, timeout_fn=lambda: answers.pop(0))
    assert list(iterator) == []
    assert answers == []


def test_checkpoints_iterator_waits_for_another_thread(tmp_path: Path) -> None:
    checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
    saved: list[str] = []
    timer = threading.Timer(0.2, lambda: saved.append(checkpoint.save(tmp_path / "ckpt")))
    timer.start()
    try:
        iterator = rx.train.checkpoints_iterator(tmp_path, timeout=60)
        assert next(iterator).endswith("ckpt-1")
    finally:
        timer.join(60)
    assert len(saved) == 1
