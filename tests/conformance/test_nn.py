"""`rx.nn`: lookups of many ids per example, and losses over the global batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from vocabulary import refused, values

import replicax as rx

TABLE = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
ARRAY = np.array(TABLE, np.float32)
INDICES = [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]]
IDS = rx.SparseTensor(INDICES, [0, 1, 3, 2, 2], (3, 2))
WEIGHTS = rx.SparseTensor(INDICES, [0.1, 1.0, 0.5, 2.0, -1.0], (3, 2))

# As recorded from TensorFlow 2.21: without weights, with them, and with max_norm=3.
EXPECTED = {
    "sum": (
        [[4.0, 6.0], [7.0, 8.0], [10.0, 12.0]],
        [[3.1, 4.2], [3.5, 4.0], [5.0, 6.0]],
        [[1.9, 2.6], [0.9877569, 1.128865], [1.9205532, 2.3046639]],
    ),
    "mean": (
        [[2.0, 3.0], [7.0, 8.0], [5.0, 6.0]],
        [[2.8181818, 3.8181815], [7.0, 8.0], [5.0, 6.0]],
        [[1.7272726, 2.3636365], [1.9755138, 2.25773], [1.9205532, 2.3046639]],
    ),
    "sqrtn": (
        [[2.828427, 4.2426405], [7.0, 8.0], [7.071068, 8.485281]],
        [[3.084615, 4.1791558], [7.0, 8.0], [2.236068, 2.6832814]],
        [[1.8905705, 2.5870967], [1.9755138, 2.25773], [0.8588975, 1.030677]],
    ),
}


@pytest.mark.parametrize("combiner", EXPECTED)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_embedding_lookup_sparse_as_in_tensorflow(combiner: str, is_compiled: bool) -> None:
    table = rx.Variable(TABLE)

    def look_up(ids: Any, weights: Any) -> Any:
        return (
            rx.nn.embedding_lookup_sparse(table, ids, None, combiner=combiner),
            rx.nn.embedding_lookup_sparse(table, ids, weights, combiner=combiner),
            rx.nn.embedding_lookup_sparse(table, ids, weights, combiner, max_norm=3.0),
        )

    found = (rx.function(look_up) if is_compiled else look_up)(IDS, WEIGHTS)
    for array, expected in zip(found, EXPECTED[combiner], strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6)


def test_forms_of_sparse_ids() -> None:
    expected = EXPECTED["mean"][0]
    matrix = jax.experimental.sparse.BCOO(
        (jnp.array([0, 1, 3, 2, 2]), jnp.array(INDICES)), shape=(3, 2)
    )
    # What BCOO fills up with: an index outside of the shape.
    padded = jax.experimental.sparse.BCOO(
        (jnp.array([0, 1, 3, 2, 2, 0]), jnp.array([*INDICES, [3, 2]])), shape=(3, 2)
    )
    triple = (INDICES, [0, 1, 3, 2, 2], (3, 2))
    ragged = ([0, 1, 3, 2, 2], [0, 2, 3, 5])
    padded_ragged = ([0, 1, 3, 2, 2, 0, 0], [0, 2, 3, 5])
    for ids in (IDS, matrix, padded, triple, ragged, padded_ragged):
        for fn in (rx.nn.embedding_lookup_sparse, rx.nn.safe_embedding_lookup_sparse):
            assert fn(jnp.array(TABLE), ids, None).tolist() == expected
    compiled = rx.function(lambda v, s: rx.nn.embedding_lookup_sparse(ARRAY, (v, s), None))
    assert compiled(jnp.array(padded_ragged[0]), jnp.array(ragged[1])).tolist() == expected
    empty = ([], [0, 0, 0])
    ids = (np.zeros(0, np.int32), empty[1])
    assert rx.nn.embedding_lookup_sparse(ARRAY, ids, None).tolist() == [[0, 0], [0, 0]]


SAFE = {
    ("sum", None): [[7.0, 10.0], [0.0, 0.0], [0.0, 0.0], [22.0, 26.0], [-2.5, -3.0]],
    ("sum", 3): [[7.0, 10.0], [7.0, 8.0], [7.0, 8.0], [22.0, 26.0], [-2.5, -3.0]],
    ("mean", None): [[7 / 3, 10 / 3], [0.0, 0.0], [0.0, 0.0], [5.5, 6.5], [0.0, 0.0]],
    ("mean", 3): [[7 / 3, 10 / 3], [7.0, 8.0], [7.0, 8.0], [5.5, 6.5], [7.0, 8.0]],
    ("sqrtn", 3): [[3.130495, 4.472136], [7, 8], [7, 8], [6.957011, 8.221922], [7, 8]],
}


@pytest.mark.parametrize(("combiner", "default_id"), SAFE)
def test_safe_embedding_lookup_sparse_as_in_tensorflow(combiner: str, default_id: Any) -> None:
    indices = [[0, 0], [0, 1], [1, 0], [3, 0], [3, 1], [4, 1]]
    ids = rx.SparseTensor(indices, [0, 1, -1, 3, 2, 2], (5, 2))
    weights = rx.SparseTensor(indices, [1.0, 2.0, 1.0, 1.0, 3.0, -0.5], (5, 2))
    table = rx.Variable(TABLE)

    def look_up(ids: Any, weights: Any) -> Any:
        return rx.nn.safe_embedding_lookup_sparse(table, ids, weights, combiner, default_id)

    for fn in (look_up, rx.function(look_up)):
        np.testing.assert_allclose(fn(ids, weights), SAFE[combiner, default_id], rtol=1e-6)


def test_safe_lookup_of_more_dimensions() -> None:
    indices = [[0, 0, 0], [0, 0, 1], [0, 2, 0], [1, 0, 0], [1, 1, 0], [1, 1, 2]]
    ids = rx.SparseTensor(indices, [0, 1, -1, 1, 2, 0], (2, 3, 4))
    found = rx.nn.safe_embedding_lookup_sparse(ARRAY, ids)
    assert found.tolist() == [
        [[2.0, 3.0], [0.0, 0.0], [0.0, 0.0]],
        [[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]],
    ]
    with refused(rx.errors.InvalidArgumentError, "one row per example"):
        rx.nn.embedding_lookup_sparse(ARRAY, ids, None)


@pytest.mark.one_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device")
def test_the_gradient_of_a_sparse_lookup_comes_by_rows(strategy: Any, run: Any) -> None:
    with strategy.scope():
        table = rx.Variable(TABLE)
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [table])
    kinds = []

    def step(ids: Any) -> None:
        def loss() -> Any:
            return jnp.sum(rx.nn.safe_embedding_lookup_sparse(table, ids, None, "mean"))

        gradients = rx.grad(loss, [table])()
        kinds.append(isinstance(gradients[0], rx.IndexedSlices))
        optimizer.apply_gradients(gradients)

    run(strategy, step, (rx.SparseTensor(jnp.array(INDICES[:3]), jnp.array([0, 1, -1]), (2, 2)),))
    assert all(kinds)
    count = strategy.num_replicas_in_sync
    expected = np.array(TABLE) - count * np.array([[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0]])
    np.testing.assert_allclose(table.read_value(), expected)


def test_the_gradient_of_a_sharded_table_and_of_clipping_agree_with_a_dense_one() -> None:
    parts = [rx.Variable(TABLE[:2]), rx.Variable(TABLE[2:])]
    sharded = rx.ShardedVariable(parts)
    np.testing.assert_allclose(
        rx.nn.embedding_lookup_sparse(sharded, IDS, WEIGHTS, "sqrtn", max_norm=3.0),
        EXPECTED["sqrtn"][2],
        rtol=1e-6,
    )

    def loss(table: Any, fn: Any = rx.nn.embedding_lookup_sparse) -> Any:
        return jnp.sum(jnp.sin(fn(table, IDS, WEIGHTS, "sqrtn", max_norm=3.0)))

    variable = rx.Variable(TABLE)
    by_rows = rx.grad(lambda: loss(variable), [variable])()[0]
    dense = jax.grad(loss)(jnp.array(TABLE))
    np.testing.assert_allclose(by_rows.to_dense(), dense, rtol=1e-5)


def test_16_bit_tables_are_added_up_in_32_bits() -> None:
    table = jnp.ones((1, 1), jnp.bfloat16)
    ids = (np.zeros(1000, np.int32), [0, 1000])
    found = rx.nn.embedding_lookup_sparse(table, ids, None, "sum")
    assert (found.dtype, float(found[0, 0])) == (jnp.bfloat16, 1000.0)


def test_what_sparse_lookups_refuse() -> None:
    with refused(rx.errors.ArgumentTypeError, "sparse ids"):
        rx.nn.embedding_lookup_sparse(ARRAY, jnp.array([[0]]), None)
    with refused(rx.errors.ArgumentTypeError, "sparse weights"):
        rx.nn.embedding_lookup_sparse(ARRAY, IDS, jnp.ones(5))
    with refused(rx.errors.InvalidArgumentError, "combiner"):
        rx.nn.embedding_lookup_sparse(ARRAY, IDS, None, combiner="max")
    with refused(rx.errors.InvalidArgumentError, "one weight"):
        rx.nn.embedding_lookup_sparse(ARRAY, IDS, rx.SparseTensor([[0, 0]], [1.0], (3, 2)))
    with refused(rx.errors.InvalidArgumentError, "one index"):
        rx.nn.embedding_lookup_sparse(ARRAY, rx.SparseTensor([[0]], [1], (3, 2)), None)
    with refused(rx.errors.ArgumentTypeError, "integers"):
        rx.nn.embedding_lookup_sparse(ARRAY, rx.SparseTensor([[0, 0]], [1.0], (3, 2)), None)
    with refused(rx.errors.InvalidArgumentError, "in \\[0, 4\\)"):
        rx.nn.embedding_lookup_sparse(ARRAY, rx.SparseTensor([[0, 0]], [9], (1, 1)), None)
    for nothing in (None, []):
        with refused(rx.errors.InvalidArgumentError, "must be a table"):
            rx.nn.safe_embedding_lookup_sparse(nothing, IDS)


# Losses.


@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device", "default")
def test_average_losses_sum_to_the_mean_of_the_global_batch(strategy: Any, run: Any) -> None:
    def losses(per_example: Any, weights: Any) -> Any:
        return (
            rx.nn.compute_average_loss(per_example),
            rx.nn.compute_average_loss(per_example, sample_weight=weights),
            rx.nn.compute_average_loss(per_example, global_batch_size=10),
            rx.nn.scale_regularization_loss(jnp.array([1.0, 2.0])),
        )

    per_example = values(strategy, lambda r: jnp.array([1.0, 3.0]) + r)
    weights = values(strategy, lambda r: jnp.array([1.0, 0.5]))
    found = run(strategy, losses, (per_example, weights))
    count = strategy.num_replicas_in_sync
    shift = np.arange(count).sum()
    expected = [
        (4 * count + 2 * shift) / (2 * count),
        (2.5 * count + 1.5 * shift) / (2 * count),
        (4 * count + 2 * shift) / 10,
        3.0,
    ]
    sums = [float(strategy.reduce("SUM", value, axis=None)) for value in found]
    np.testing.assert_allclose(sums, expected, rtol=1e-6)


def test_average_losses_and_their_arguments() -> None:
    average = rx.nn.compute_average_loss
    assert float(average([1.0, 2.0, 3.0])) == 2.0
    assert float(average([1.0, 2.0], global_batch_size=0)) == 0.0
    assert float(average([[1.0, 2.0], [3.0, 4.0]])) == 5.0
    assert float(average([[1.0, 2.0], [3.0, 4.0]], sample_weight=[1.0, 0.0])) == 1.5
    assert float(average([1.0, 2.0], sample_weight=[[1.0], [2.0]])) == 2.5
    assert float(average([1.0, 2.0], sample_weight=2.0)) == 3.0
    assert average(jnp.ones(2, jnp.bfloat16), sample_weight=[1.0, 2.0]).dtype == jnp.bfloat16
    assert float(rx.function(average)(jnp.ones(3), None, jnp.array(6))) == 0.5
    assert float(average(np.zeros((0,), np.float32))) == 0.0
    with refused(rx.errors.InvalidArgumentError, "at least one dimension"):
        average(1.0)
    with refused(rx.errors.InvalidArgumentError, "one number"):
        average([1.0], global_batch_size=[2])
    with refused(rx.errors.ArgumentTypeError, "whole number"):
        average([1.0], global_batch_size=2.0)
    with refused(rx.errors.InvalidArgumentError, "0 or more"):
        average([1.0], global_batch_size=-2)
    with refused(rx.errors.InvalidArgumentError, "sample_weight"):
        average([1.0, 2.0], sample_weight=[1.0, 2.0, 3.0])


@pytest.mark.strategies("mirrored_2", "one_device")
def test_losses_need_a_replica_context(strategy: Any) -> None:
    with strategy.scope():
        with refused(rx.errors.ContextError, "replica context"):
            rx.nn.compute_average_loss([1.0])
        with refused(rx.errors.ContextError, "replica context"):
            rx.nn.scale_regularization_loss(1.0)
        assert float(rx.nn.compute_average_loss([1.0, 3.0], global_batch_size=8)) == 0.5
