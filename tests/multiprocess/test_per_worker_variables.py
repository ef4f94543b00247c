"""Variables with a copy on each worker: changed by its own closures only, read together."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from parameter_servers import Desk, own_cluster, until_all_idle
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors


@pytest.mark.parametrize("parts", [None, 2])
def test_closures_change_the_copy_of_their_worker(desk: Desk, parts: Any) -> None:
    strategy = desk.strategy(parts)
    with strategy.scope():
        # Before there is a coordinator, and after.
        steps = rx.Variable(0.0, name="steps", per_worker_variable=True)
    with refused(errors.ContextError, "ClusterCoordinator"):
        steps.read_all()
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        table = rx.Variable(lambda: jnp.ones((4, 2)), name="table", per_worker_variable=True)
        total = rx.Variable(0.0, name="total")
    assert not isinstance(table, rx.ShardedVariable) and table.shape == (4, 2)

    @rx.function
    def compiled(amount: Any) -> Any:
        steps.assign_add(amount)
        table.scatter_add(rx.IndexedSlices(jnp.ones((1, 2)), jnp.asarray([1])))
        total.assign_add(amount)
        return steps.read_value()

    def plain(amount: float) -> None:
        steps.assign_add(amount)
        total.assign_add(amount)

    for _ in range(10):
        coordinator.schedule(compiled, args=(2.0,))
        coordinator.schedule(plain, args=(1.0,))
    coordinator.join(60)
    found = steps.read_all()
    assert len(found) == 2 and sum(map(float, found)) == float(total) == 30.0
    rows = [np.asarray(value) for value in table.read_all()]
    assert sum(r[1, 0] for r in rows) == 12.0 and all(r[0, 0] == 1.0 for r in rows)
    # Read again, they are as they are then.
    coordinator.schedule(plain, args=(5.0,)).fetch(60)
    assert sum(map(float, steps.read_all())) == 35.0
    assert "a copy on each worker" in repr(steps)


def test_copies_are_not_at_the_coordinator(desk: Desk) -> None:
    strategy = desk.strategy()
    desk.coordinator(strategy)
    with strategy.scope():
        v = rx.Variable(1.0, name="v", per_worker_variable=True)
    for use in (v.read_value, lambda: v.assign(2.0), lambda: v + 1, v.numpy):
        with refused(errors.ContextError, "'v' are on the workers"):
            use()


def test_a_worker_that_comes_back_starts_from_the_initial_value(tmp_path: Path) -> None:
    mark = str(tmp_path / "killed")
    with own_cluster(workers=2, ps=1) as desk:
        strategy = desk.strategy()
        coordinator = desk.coordinator(strategy)
        with strategy.scope():
            v = rx.Variable(lambda: np.full(2, 7.0, np.float32), per_worker_variable=True)
        until_all_idle(coordinator)

        def change() -> int:
            v.assign_add(jnp.ones(2))
            return rx.coordinator.experimental_get_current_worker_index()

        def die_once() -> int:
            v.assign(jnp.zeros(2))
            if not os.path.exists(mark):
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return rx.coordinator.experimental_get_current_worker_index()

        before = [coordinator.schedule(change) for _ in range(8)]
        counts = np.bincount(coordinator.fetch(before), minlength=2)
        np.testing.assert_array_equal(v.read_all(), 7 + counts[:, None] * np.ones((1, 2)))
        survivor = coordinator.schedule(die_once).fetch(60)
        desk.cluster.restart("worker", 1 - survivor)
        found = v.read_all()
        np.testing.assert_array_equal(found[survivor], [0.0, 0.0])
        np.testing.assert_array_equal(found[1 - survivor], [7.0, 7.0])


@pytest.mark.strategies("mirrored_2", "one_device")
def test_strategies_with_one_worker_make_their_own_variables(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, per_worker_variable=True)
    assert float(v.assign_add(1.0)) == 2.0
    assert strategy.extended.variable_created_in_scope(v)


# Datasets.


@pytest.mark.parametrize("replicas", [1, 2])
def test_per_worker_datasets_tell_what_their_elements_look_like(desk: Desk, replicas: int) -> None:
    def dataset() -> Any:
        elements = {"x": np.zeros((10, 3)), "y": (np.arange(10), np.zeros((10, 2), np.float16))}
        return rx.data.Dataset.from_tensor_slices(elements)

    strategy = desk.strategy(replicas_per_worker=replicas)
    coordinator = desk.coordinator(strategy)
    twin = rx.MirroredStrategy(["CPU:0"], virtual_replicas=replicas)
    global_batches = strategy.experimental_distribute_dataset(
        dataset().batch(4, drop_remainder=True)
    )
    for source, expected in (
        (
            lambda: dataset().batch(4),
            twin.distribute_datasets_from_function(lambda _: dataset().batch(4)),
        ),
        (
            dataset().batch(5, drop_remainder=True),
            twin.distribute_datasets_from_function(
                lambda _: dataset().batch(5, drop_remainder=True)
            ),
        ),
        (
            global_batches,
            twin.experimental_distribute_dataset(dataset().batch(4, drop_remainder=True)),
        ),
    ):
        found = coordinator.create_per_worker_dataset(source)
        assert found.element_spec == expected.element_spec
        assert iter(found).element_spec == iter(expected).element_spec == found.element_spec


def test_the_spec_of_a_dataset_that_cannot_be_made_says_why(desk: Desk) -> None:
    def fails() -> Any:
        raise KeyError("no such file")

    dataset = desk.coordinator().create_per_worker_dataset(fails)
    with pytest.raises(errors.ClosureInputError, match="no such file"):
        _ = dataset.element_spec
