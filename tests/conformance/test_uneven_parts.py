"""Compiled functions whose replicas get arrays of different sizes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import TWO_REPLICAS
from vocabulary import copies, refused, replica_values, values

import replicax as rx

ON_READ = rx.VariableSynchronization.ON_READ
SUM, MEAN = rx.VariableAggregation.SUM, rx.VariableAggregation.MEAN


def uneven(strategy: Any) -> Any:
    """One row on replica 0, two on replica 1, and so on."""
    return values(strategy, lambda i: jnp.arange(1.0, i + 2.0))


@pytest.mark.strategies(*TWO_REPLICAS, "mirrored_4")
def test_T66_results_and_one_trace(strategy: Any) -> None:
    traces = []

    @rx.function
    def step(x: Any) -> Any:
        traces.append(1)
        total = strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(x,)), axis=None)
        return total, strategy.run(lambda x: x * 2, args=(x,))

    count = strategy.num_replicas_in_sync
    for _ in range(3):
        total, doubled = step(uneven(strategy))
        assert float(total) == sum(n * (n + 1) / 2 for n in range(1, count + 1))
        expected = [[2.0 * k for k in range(1, i + 2)] for i in range(count)]
        assert replica_values(strategy, doubled) == expected
    assert len(traces) == 1


@pytest.mark.strategies(*TWO_REPLICAS)
def test_S214_training_step_equals_the_eager_one(strategy: Any) -> None:
    def train(compiled: bool) -> Any:
        with strategy.scope():
            weight = rx.Variable(2.0, name="weight")
            mean = rx.Variable(0.0, aggregation=MEAN, trainable=False)
            seen = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
            parts = rx.Variable(jnp.zeros(2), synchronization=ON_READ, aggregation=MEAN)

        def replica_step(x: Any) -> Any:
            loss, gradient = rx.value_and_grad(lambda: jnp.sum(weight * x) * seen, weight)()
            seen.assign_add(jnp.float32(x.shape[0]))
            parts.assign(jnp.full(2, x.shape[0], jnp.float32))
            mean.assign(x.sum())
            context = rx.get_replica_context()
            total = context.all_reduce("SUM", {"g": gradient, "n": seen.read_value()})
            context.update(weight, lambda w, g: w.assign_sub(0.1 * g), args=(total["g"],))
            gathered = context.all_gather(x, axis=0)
            number = context.replica_id_in_sync_group
            return loss, total["n"], gathered.sum() + number + seen.read_value()

        def step(x: Any) -> Any:
            return strategy.run(replica_step, args=(x,))

        step = rx.function(step) if compiled else step
        found = [jax.tree.map(float, local_values_of(step(uneven(strategy)))) for _ in range(3)]
        state = [copies(strategy, v) for v in (weight, mean, seen, parts)]
        return found, state, float(seen.read_value())

    def local_values_of(result: Any) -> Any:
        return [replica_values(strategy, leaf) for leaf in result]

    eager, compiled = train(False), train(True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), eager, compiled)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_T9_errors_reach_the_caller_and_leave_no_mark(strategy: Any) -> None:
    with strategy.scope():
        count = rx.Variable(0.0, aggregation=SUM)

    @rx.function
    def fails(x: Any) -> Any:
        def replica_fn(x: Any) -> Any:
            count.assign_add(1.0)
            if x.shape[0] == 2:
                raise KeyError("two rows")

        return strategy.run(replica_fn, args=(x,))

    with pytest.raises(KeyError, match="two rows"):
        fails(uneven(strategy))
    assert float(count.read_value()) == 0.0

    @rx.function
    def unequal(x: Any) -> Any:
        def replica_fn(x: Any) -> Any:
            if x.shape[0] == 2:
                rx.get_replica_context().all_reduce("SUM", x.sum())

        return strategy.run(replica_fn, args=(x,))

    with refused(RuntimeError, "equally often"):
        unequal(uneven(strategy))


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_T41_collectives_inside_a_gradient_run_uncompiled(strategy: Any, caplog: Any) -> None:
    with strategy.scope():
        weight = rx.Variable(3.0)

    def replica_fn(x: Any) -> Any:
        def loss() -> Any:
            return rx.get_replica_context().all_reduce("SUM", jnp.sum(weight * x))

        return rx.grad(loss, weight)()

    step = rx.function(lambda x: strategy.run(replica_fn, args=(x,)))
    expected = replica_values(strategy, strategy.run(replica_fn, args=(uneven(strategy),)))
    assert replica_values(strategy, step(uneven(strategy))) == expected
    assert "one replica after the other" in caplog.text


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_T25_variables_created_by_uneven_replicas(strategy: Any) -> None:
    made: list[Any] = []

    def replica_fn(x: Any) -> Any:
        if len(made) < 2:
            made.append(rx.Variable(5.0, aggregation=SUM))
        made[0].assign_add(x.sum())
        return made[0].read_value()

    step = rx.function(lambda x: strategy.run(replica_fn, args=(x,)))
    assert replica_values(strategy, step(uneven(strategy))) == [9.0, 9.0]
    assert made[0] is made[1]


@pytest.mark.strategies("mirrored_2")
def test_loops_over_time_inside_uneven_replicas(strategy: Any) -> None:
    with strategy.scope():
        weight = rx.Variable(2.0)
        seen = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def replica_fn(x: Any) -> Any:
        total, _ = jax.lax.scan(lambda c, row: (c * weight.value() + row, None), 0.0, x)
        seen.assign_add(total)
        return total

    step = rx.function(lambda x: strategy.run(replica_fn, args=(x,)))
    for _ in range(2):
        assert replica_values(strategy, step(uneven(strategy))) == [1.0, 4.0]
    assert float(seen.read_value()) == 10.0
    with strategy.scope():
        weight.assign(3.0)
    assert replica_values(strategy, step(uneven(strategy))) == [1.0, 5.0]
