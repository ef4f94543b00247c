"""Central variables between compiled steps: copies on the replicas' devices serve until a write."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

HOMES = ("CPU:0", "CPU:1", "CPU:5")


def made(home: str) -> tuple[Any, Any, Any, Any]:
    """A strategy, a variable, a step that adds 1 to it, and a function that reads it."""
    strategy = rx.CentralStorageStrategy(["CPU:0", "CPU:1"], parameter_device=home)
    with strategy.scope():
        v = rx.Variable(np.zeros(8, np.float32), aggregation=rx.VariableAggregation.MEAN)

    @rx.function
    def step() -> None:
        strategy.run(lambda: v.assign_add(jnp.ones(8)))

    @rx.function
    def read() -> Any:
        return strategy.reduce("MEAN", strategy.run(lambda: v.value() * 1.0), axis=None)

    return strategy, v, step, read


@pytest.mark.parametrize("home", HOMES)
def test_writes_from_outside_reach_the_next_step(home: str) -> None:
    _, v, step, read = made(home)
    for written in (5.0, -3.0):
        step()
        v.assign(np.full(8, written, np.float32))
        assert np.asarray(read()).tolist() == [written] * 8
        step()
        step()
        assert v.numpy().tolist() == [written + 2] * 8
        assert np.asarray(read()).tolist() == [written + 2] * 8


@pytest.mark.parametrize("home", HOMES)
def test_values_that_somebody_holds_outlive_the_steps(home: str) -> None:
    _, v, step, read = made(home)
    step()
    held = [v.value(), read(), v.value()]
    for _ in range(3):
        step()
    assert [float(h[0]) for h in held] == [1.0, 1.0, 1.0]
    assert float(v[0]) == 4.0


@pytest.mark.parametrize("home", HOMES)
def test_the_variable_stays_on_its_device(home: str) -> None:
    _, v, step, _ = made(home)
    place = v.device
    step()
    step()
    assert v.device == place
    assert {d.id for d in v.value().devices()} == {int(home[-1])}


def test_two_strategies_may_read_one_variable_that_belongs_to_none() -> None:
    v = rx.Variable(2.0)
    strategies = [rx.MirroredStrategy(["CPU:0", "CPU:1"]), rx.MirroredStrategy(["CPU:2", "CPU:3"])]
    functions = [
        rx.function(lambda s=s: s.reduce("SUM", s.run(lambda: v.value() * 1.0), axis=None))
        for s in strategies
    ]
    for number in (2.0, 7.0):
        v.assign(number)
        for _ in range(2):
            assert [float(f()) for f in functions] == [2 * number, 2 * number]
