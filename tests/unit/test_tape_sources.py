"""`tf.GradientTape` with tables in parts: rows that are looked up have sparse gradients."""

from __future__ import annotations

import numpy as np
import pytest

import replicax as rx
import replicax.tf as tf
from replicax.tf.variable import as_tensor_variable
from replicax.variables.sharded import ShardedVariable


@pytest.fixture
def table() -> ShardedVariable:
    parts = [rx.Variable([[0.0, 1.0], [2.0, 3.0]]), rx.Variable([[4.0, 5.0]])]
    return as_tensor_variable(ShardedVariable(parts, name="table"))


def test_the_gradient_of_a_lookup_is_sparse(table: ShardedVariable) -> None:
    with tf.GradientTape() as tape:
        rows = tf.nn.embedding_lookup(table, [[2, 0], [2, 2]])
        loss = tf.reduce_sum(rows**2)
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.indices.numpy().tolist() == [2, 0, 2, 2]
    assert gradient.dense_shape == (3, 2)
    expected = np.array([[0.0, 2.0], [0.0, 0.0], [24.0, 30.0]])
    np.testing.assert_allclose(tf.convert_to_tensor(gradient).numpy(), expected)


def test_two_lookups_add_up(table: ShardedVariable) -> None:
    with tf.GradientTape() as tape:
        first = tf.nn.embedding_lookup(table, [0])
        second = tf.nn.embedding_lookup(table, [0, 1])
        loss = tf.reduce_sum(first) + 2.0 * tf.reduce_sum(second)
    gradient = tape.gradient(loss, table)
    assert gradient.indices.numpy().tolist() == [0, 0, 1]
    np.testing.assert_allclose(gradient.values.numpy(), [[1, 1], [2, 2], [2, 2]])


def test_a_lookup_and_a_dense_use_give_a_dense_gradient(table: ShardedVariable) -> None:
    with tf.GradientTape() as tape:
        rows = tf.nn.embedding_lookup(table, [2, 0, 2])
        weights = tf.constant([[1.0], [2.0], [3.0]])
        loss = tf.reduce_sum(rows * weights) + tf.reduce_sum(table[0] * 3.0)
    gradient = tape.gradient(loss, table)
    np.testing.assert_allclose(gradient.numpy(), [[5, 5], [0, 0], [4, 4]])


def test_a_table_that_the_target_does_not_need_has_no_gradient(table: ShardedVariable) -> None:
    with tf.GradientTape() as tape:
        tf.nn.embedding_lookup(table, [0])
        other = tf.Variable(2.0)
        loss = other * other
    assert tape.gradient(loss, [table, other])[0] is None
