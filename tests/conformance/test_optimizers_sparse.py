"""Sparse gradients: only the rows that have one are touched, where that is exact."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies_under_test import STRATEGIES
from vocabulary import copies, refused, values

import replicax as rx

ROWS = 7
IDS = [[1, 4, 1, 6], [4, 4, 0, 2]]


def table_values() -> Any:
    return jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 3)), jnp.float32)


def loss_of(rows: Any, dense: Any) -> Any:
    return jnp.sum(jnp.sin(rows) * dense)


def train(strategy: Any, run: Any, transformation: Any, steps: int = 4, **options: Any) -> Any:
    """Trains a table, looked up by rows, and a dense vector; returns both and the optimizer."""
    with strategy.scope():
        table = rx.Variable(table_values(), name="table")
        dense = rx.Variable([1.0, 2.0, -1.0], name="dense")
        optimizer = rx.optimizers.Optimizer(transformation, [table, dense], **options)

    def step(ids: Any) -> None:
        def loss() -> Any:
            return loss_of(rx.nn.embedding_lookup(table, ids), dense)

        optimizer.apply_gradients(rx.grad(loss, [table, dense])())

    batches = [values(strategy, lambda r, i=i: jnp.array(IDS[(r + i) % 2])) for i in range(steps)]
    run(strategy, lambda *all_ids: [step(ids) for ids in all_ids] and None, batches)
    return table, dense, optimizer


def by_hand(count: int, transformation: Any, steps: int = 4) -> Any:
    """The same with dense gradients, on one device."""
    params = [table_values(), jnp.array([1.0, 2.0, -1.0])]
    state = transformation.init(params)

    def loss(params: Any, ids: Any) -> Any:
        return loss_of(params[0][ids], params[1])

    @jax.jit
    def step(params: Any, state: Any, ids: Any) -> Any:
        updates, state = transformation.update(jax.grad(loss)(params, ids), state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        ids = np.concatenate([IDS[(r + i) % 2] for r in range(count)])
        params, state = step(params, state, ids)
    return params


def require_equal(strategy: Any, variables: Any, expected: Any) -> None:
    for variable, value in zip(variables, expected, strict=True):
        for copy in copies(strategy, variable):
            np.testing.assert_allclose(copy, value, rtol=1e-4, atol=1e-5)


ROW_WISE = {
    "sgd": optax.sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1)),
    "elementwise_clip": optax.chain(optax.clip(0.1), optax.sgd(0.5)),
    "scheduled": optax.sgd(optax.linear_schedule(0.0, 0.1, 3)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "sign": optax.sign_sgd(0.01),
    "partitioned": optax.partition(
        {"table": optax.adagrad(0.1), "other": optax.adam(0.1)}, ["table", "other"]
    ),
}
NOT_ROW_WISE = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "decay_after_a_warm_up": optax.chain(
        optax.add_decayed_weights(1e-4), optax.sgd(optax.linear_schedule(0.0, 0.1, 1000, 50))
    ),
    "decay_that_may_be_switched_on": optax.inject_hyperparams(
        lambda decay: optax.chain(optax.add_decayed_weights(decay), optax.sgd(0.1))
    )(decay=0.0),
    "block_clip": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "layer_norms": optax.lamb(0.1),
    "one_number_per_layer": optax.novograd(0.1),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(0.1)),
    "accumulated": optax.MultiSteps(optax.sgd(0.1), 3),
    "sometimes": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
}


QUICK = ("clipped", "partitioned", "adam", "decay_after_a_warm_up", "accumulated")


def names(transformations: Any) -> list[Any]:
    """All names; those that say little that the others do not are left to `make test-all`."""
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in transformations]


def on_replicas(strategy: Any, fn: Any, args: Any) -> Any:
    return strategy.run(rx.function(fn), args=args)


@pytest.mark.strategies("virtual_2")
@pytest.mark.parametrize("name", names(ROW_WISE))
def test_row_wise_transformations_are_found_and_exact(strategy: Any, name: str) -> None:
    *variables, optimizer = train(strategy, on_replicas, ROW_WISE[name])
    assert set(optimizer._is_row_wise.values()) == {True}
    require_equal(strategy, variables, by_hand(2, ROW_WISE[name]))


@pytest.mark.strategies("virtual_2")
@pytest.mark.parametrize("name", names(NOT_ROW_WISE))
def test_other_transformations_become_dense_and_exact(strategy: Any, name: str) -> None:
    *variables, optimizer = train(strategy, on_replicas, NOT_ROW_WISE[name])
    # A slot without a row per row decides it before any trial.
    tried = name not in ("one_number_per_layer", "factored")
    assert set(optimizer._is_row_wise.values()) == ({False} if tried else set())
    require_equal(strategy, variables, by_hand(2, NOT_ROW_WISE[name]))


@pytest.mark.strategies("mirrored_2")
def test_rows_are_exact(strategy: Any, run: Any) -> None:
    require_exact_rows(strategy, run)


@pytest.mark.slow
@pytest.mark.strategies(*(name for name in STRATEGIES if name != "mirrored_2"))
def test_rows_are_exact_on_other_strategies(strategy: Any, run: Any) -> None:
    require_exact_rows(strategy, run)


def require_exact_rows(strategy: Any, run: Any) -> None:
    transformation = ROW_WISE["clipped"]
    *variables, optimizer = train(strategy, run, transformation, steps=2)
    assert set(optimizer._is_row_wise.values()) == {True}
    expected = by_hand(strategy.num_replicas_in_sync, transformation, steps=2)
    require_equal(strategy, variables, expected)


@pytest.mark.strategies("mirrored_2")
def test_dense_is_exact_too(strategy: Any, run: Any) -> None:
    *variables, optimizer = train(strategy, run, ROW_WISE["clipped"], steps=2, sparse="dense")
    assert optimizer._is_row_wise == {}
    require_equal(strategy, variables, by_hand(2, ROW_WISE["clipped"], steps=2))


@pytest.mark.strategies("mirrored_2")
def test_rows_only_makes_adam_lazy(strategy: Any, run: Any) -> None:
    adam = optax.adam(0.1)
    with strategy.scope():
        table = rx.Variable(table_values(), name="table")
        optimizer = rx.optimizers.Optimizer(adam, [table], sparse="rows")
    all_ids = [[1, 4], [4, 5], [1, 1]]
    gradients = [
        rx.IndexedSlices(jnp.full((2, 3), 1.0 + step), jnp.array(ids))
        for step, ids in enumerate(all_ids)
    ]
    run(strategy, lambda *gs: [optimizer.apply_gradients([g]) for g in gs] and None, gradients)
    params: dict[int, Any] = {}
    state: dict[int, Any] = {}
    for step, ids in enumerate(all_ids):
        for row in dict.fromkeys(ids):
            if row not in params:
                params[row] = table_values()[row]
                state[row] = adam.init(params[row])
            # The count of steps is one for all rows.
            state[row] = (state[row][0]._replace(count=jnp.array(step)), *state[row][1:])
            times = strategy.num_replicas_in_sync * ids.count(row)
            updates, state[row] = adam.update(
                jnp.full(3, (1.0 + step) * times), state[row], params[row]
            )
            params[row] = params[row] + updates
    expected = table_values()
    for row, value in params.items():
        expected = expected.at[row].set(value)
    require_equal(strategy, [table], [expected])
    for name in ("mu", "nu"):
        slot = optimizer.get_slot(table, name).numpy()
        assert not slot[[0, 2, 3, 6]].any()
        np.testing.assert_allclose(slot[5], getattr(state[5][0], name), rtol=1e-5)


def test_rows_only_needs_slots_by_row() -> None:
    table = rx.Variable(table_values(), name="table")
    optimizer = rx.optimizers.Optimizer(optax.novograd(0.1), [table], sparse="rows")
    with refused(rx.errors.InvalidArgumentError, "'table/nu' has shape"):
        optimizer.apply_gradients([rx.IndexedSlices(jnp.ones((1, 3)), jnp.array([0]))])


@pytest.mark.strategies("mirrored_2")
@pytest.mark.parametrize("sparse", ["rows", "dense"])
def test_ids_outside_of_the_table_are_dropped(strategy: Any, run: Any, sparse: str) -> None:
    with strategy.scope():
        table = rx.Variable(jnp.zeros((3, 1)))
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [table], sparse=sparse)
    gradient = rx.IndexedSlices(jnp.ones((6, 1)), jnp.array([-1, 2, 3, 2, 99, -3]))
    run(strategy, lambda g: optimizer.apply_gradients([g]), (gradient,))
    expected = [[0.0], [0.0], [-2.0 * strategy.num_replicas_in_sync]]
    require_equal(strategy, [table], [expected])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int16, jnp.uint32])
def test_ids_may_have_any_integer_type(dtype: Any) -> None:
    table = rx.Variable(jnp.zeros((200, 2)))
    optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [table])
    ids = jnp.array([100, 5, 100], dtype)
    optimizer.apply_gradients([rx.IndexedSlices(jnp.ones((3, 2)), ids)])
    assert table.numpy()[[5, 100], 0].tolist() == [-1.0, -2.0]
    assert table.numpy().sum() == -6.0


def test_no_rows_change_nothing() -> None:
    table = rx.Variable(table_values())
    optimizer = rx.optimizers.Optimizer(optax.adagrad(1.0), [table])
    optimizer.apply_gradients([rx.IndexedSlices(jnp.ones((0, 3)), jnp.zeros(0, jnp.int32))])
    np.testing.assert_array_equal(table.numpy(), table_values())
    assert int(optimizer.iterations) == 1


@pytest.mark.strategies("virtual_2")
def test_constraints_see_the_whole_table(strategy: Any, run: Any) -> None:
    with strategy.scope():
        table = rx.Variable([[1.0], [-5.0], [2.0]], constraint=lambda t: jnp.maximum(t, -2.0))
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [table])
    gradient = rx.IndexedSlices(jnp.ones((1, 1)), jnp.array([0]))
    run(strategy, lambda g: optimizer.apply_gradients([g]), (gradient,))
    require_equal(strategy, [table], [[[1.0 - strategy.num_replicas_in_sync], [-2.0], [2.0]]])


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_rows_of_different_number_per_replica_are_summed(strategy: Any, run: Any) -> None:
    with strategy.scope():
        table = rx.Variable(jnp.zeros((4, 1)))
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [table])
    slices = values(
        strategy, lambda i: rx.IndexedSlices(jnp.ones((i + 1, 1)), jnp.arange(i + 1), (4, 1))
    )
    run(strategy, lambda g: optimizer.apply_gradients([g]), (slices,))
    require_equal(strategy, [table], [[[-2.0], [-1.0], [0.0], [0.0]]])


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_a_last_batch_of_uneven_parts_updates_its_rows(strategy: Any, run: Any) -> None:
    with strategy.scope():
        table = rx.Variable(jnp.zeros((4, 1)))
        dense = rx.Variable(1.0)
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [table, dense])

    def step(ids: Any) -> Any:
        def loss() -> Any:
            return jnp.sum(rx.nn.embedding_lookup(table, ids)) + dense.value()

        gradients = rx.value_and_grad(loss, [table, dense])()[1]
        optimizer.apply_gradients(gradients)
        return rx.get_replica_context().all_reduce("MEAN", gradients[0]).to_dense()

    means = run(strategy, step, (values(strategy, lambda i: jnp.arange(3 - i)),))
    require_equal(strategy, [table], [[[-2.0], [-2.0], [-1.0], [0.0]]])
    require_equal(strategy, [dense], [-1.0])
    for mean in strategy.experimental_local_results(means):
        np.testing.assert_allclose(mean, [[1.0], [1.0], [0.5], [0.0]])


@pytest.mark.strategies("mirrored_2", "central_2")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_cross_replica_code_sums_rows(strategy: Any, is_compiled: bool) -> None:
    with strategy.scope():
        table = rx.Variable(jnp.zeros((4, 1)))
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [table])
    slices = values(
        strategy, lambda i: rx.IndexedSlices(jnp.ones((2, 1)), jnp.array([i, 3]), (4, 1))
    )

    def apply(gradient: Any) -> None:
        optimizer.apply_gradients([gradient])

    with strategy.scope():
        (rx.function(apply) if is_compiled else apply)(slices)
    require_equal(strategy, [table], [[[-1.0], [-1.0], [0.0], [-2.0]]])


def test_bad_rows_are_refused_by_name() -> None:
    table = rx.Variable(table_values(), name="table")
    scalar = rx.Variable(1.0, name="scalar")
    optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [table, scalar])
    with refused(rx.errors.InvalidArgumentError, r"'table' needs gradient rows of shape \(2, 3\)"):
        optimizer.apply_gradients([(rx.IndexedSlices(jnp.ones((2, 4)), jnp.array([0, 1])), table)])
    with refused(rx.errors.InvalidArgumentError, "'table' needs a list of integer"):
        optimizer.apply_gradients([(rx.IndexedSlices(jnp.ones((1, 3)), jnp.array([0.5])), table)])
    with refused(rx.errors.InvalidArgumentError, "'scalar' needs a list of integer"):
        optimizer.apply_gradients([(rx.IndexedSlices(jnp.ones(1), jnp.array([0])), scalar)])


@pytest.mark.strategies("mirrored_2")
def test_the_scalar_value_of_the_loss_may_be_passed(strategy: Any, run: Any) -> None:
    with strategy.scope():
        table = rx.Variable(jnp.ones((3, 1)))
        optimizer = rx.optimizers.Optimizer(optax.polyak_sgd(max_learning_rate=10.0), [table])
    gradient = rx.IndexedSlices(jnp.ones((1, 1)), jnp.array([1]))
    loss = jnp.array(0.5)
    run(strategy, lambda g, v: optimizer.apply_gradients([g], value=v), (gradient, loss))
    count = strategy.num_replicas_in_sync
    # Step size: value / |gradient|², both summed over replicas.
    require_equal(strategy, [table], [[[1.0], [1.0 - 0.5 * count / count**2 * count], [1.0]]])
    assert set(optimizer._is_row_wise.values()) == {True}


@pytest.mark.slow
@pytest.mark.strategies("mirrored_2", "virtual_2", "default")
def test_a_step_costs_its_rows_not_the_table(strategy: Any) -> None:
    # 200,000 x 64: a dense step moves 50 MB and more, a sparse one 0.1 MB.
    def time_of(sparse: str) -> float:
        with strategy.scope():
            table = rx.Variable(jnp.zeros((200_000, 64)))
            optimizer = rx.optimizers.Optimizer(optax.adagrad(0.1), [table], sparse=sparse)

        @rx.function
        def step(ids: Any) -> None:
            def replica_step() -> None:
                gradient = rx.IndexedSlices(jnp.ones((64, 64)), ids)
                optimizer.apply_gradients([gradient])

            strategy.run(replica_step)

        ids = jnp.arange(64) * 11
        best = float("inf")
        for _ in range(6):
            begin = time.perf_counter()
            step(ids)
            jax.block_until_ready(table.stored)
            best = min(best, time.perf_counter() - begin)
        return best

    assert time_of("auto") < 0.3 * time_of("dense")
