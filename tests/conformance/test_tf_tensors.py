"""Dtypes, shapes and tensors of `replicax.tf` behave as those of TensorFlow 2.21 did."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import replicax.tf as tf
from replicax.tf.ops import clipping
from tests.fixtures.tf_ops import cases, facts

RECORDED: dict[str, Any] = json.loads(cases.FILE.read_text())["facts"]

# What is meant to differ, and why.
DIFFERENT = {
    "tf.as_dtype(int).name": "int and str are accepted as dtypes",
    "tf.as_dtype(str).name": "int and str are accepted as dtypes",
    "tf.TensorShape([-1, 2]).as_list()": "-1 is accepted for an unknown size",
}


def fact(text: str) -> Any:
    try:
        value = eval(text, {"tf": tf, "np": np})
    except Exception as error:
        return [type(error).__name__]
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.mark.parametrize("text", [text for text in facts.FACTS if text not in DIFFERENT])
def test_values_of_expressions(text: str) -> None:
    right, found = RECORDED[text], fact(text)
    if isinstance(right, list):
        assert isinstance(found, list), f"{text} is {found}, and TensorFlow raised {right[0]}"
    else:
        assert found == right


# Shapes in compiled code: `tf.shape(x)` and what is computed from it is known there.

SHAPES = [
    lambda x: tf.reshape(x, [tf.shape(x)[0], -1, 2]),
    lambda x: tf.reshape(x, tf.concat([tf.shape(x)[:-1], [3, 2]], 0)),
    lambda x: tf.reshape(x, tf.stack([tf.shape(x)[0], 2, 3])),
    lambda x: tf.reshape(x, [tf.size(x)]),
    lambda x: tf.reshape(x, [tf.reduce_prod(tf.shape(x))]),
    lambda x: tf.zeros(tf.concat([[1], tf.shape(x)[1:]], axis=0)),
    lambda x: tf.zeros([tf.shape(x)[0] // 2, tf.math.floordiv(tf.shape(x)[1], 2)]),
    lambda x: tf.zeros(tf.unstack(tf.shape(x))),
    lambda x: tf.fill([tf.shape(x)[0]], 1.0),
    lambda x: tf.eye(tf.shape(x)[1]),
    lambda x: tf.range(tf.shape(x)[0]),
    lambda x: tf.random.stateless_uniform([tf.shape(x)[0], 1], [1, 2]) * 0,
    lambda x: tf.tile(x[:1], [tf.shape(x)[0], 1]),
    lambda x: tf.repeat(x, tf.shape(x)[0], axis=0),
    lambda x: tf.broadcast_to(x[:1], tf.shape(x)),
    lambda x: x[: tf.shape(x)[0] // 2],
    lambda x: x[: tf.minimum(tf.shape(x)[0], 3)],
    lambda x: tf.slice(x, [0, 0], [tf.shape(x)[0] // 2, 3]),
    lambda x: tf.pad(x, [[0, 8 - tf.shape(x)[0]], [0, 0]]),
    lambda x: tf.one_hot(tf.argmax(x, -1), tf.shape(x)[-1]),
    lambda x: tf.linalg.band_part(tf.ones([tf.shape(x)[0]] * 2), -1, 0),
    lambda x: tf.sequence_mask(tf.cast(x[:, 0], tf.int32), tf.shape(x)[1]),
    lambda x: tf.reduce_sum(x, axis=tf.range(1, tf.rank(x))),
    lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32),
    lambda x: tf.meshgrid(tf.range(tf.shape(x)[0]), tf.range(3))[0],
    lambda x: x + 1.0 if tf.shape(x)[0] > 2 else x,
    lambda x: x[tf.cast(x[0, 0], tf.int32)],
    lambda x: tf.slice(x, [tf.cast(x[0, 0], tf.int32), 0], [1, 3]),
    lambda x: tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), [0, 1, 2, 0]], 1)),
    lambda x: tf.reduce_sum([tf.reduce_mean(x), tf.reduce_max(x), 1.0]),
]


def test_shapes_are_known_in_compiled_code() -> None:
    x = tf.constant(np.arange(24.0).reshape(4, 6) / 8, tf.float32)

    @tf.function
    def compiled(x: Any) -> Any:
        return [call(x) for call in SHAPES]

    for number, (call, found) in enumerate(zip(SHAPES, compiled(x), strict=True)):
        np.testing.assert_allclose(found.numpy(), call(x).numpy(), err_msg=str(number))


def test_sparse_gradients_are_clipped_by_their_rows() -> None:
    rows = tf.constant([[3.0, 0.0], [0.0, 4.0]])
    slices = tf.IndexedSlices(rows, tf.constant([0, 2]), dense_shape=(4, 2))
    (first, second, third), norm = tf.clip_by_global_norm([slices, tf.zeros([2]), None], 1.0)
    assert float(norm) == 5.0 and third is None and second.shape == (2,)
    assert isinstance(first, tf.IndexedSlices)
    np.testing.assert_allclose(first.values.numpy(), [[0.6, 0.0], [0.0, 0.8]], 1e-6)
    dense = tf.convert_to_tensor(first).numpy()
    np.testing.assert_allclose(dense, [[0.6, 0], [0, 0], [0, 0.8], [0, 0]], 1e-6)
    np.testing.assert_allclose(tf.clip_by_norm(slices, 2.5).values.numpy(), rows.numpy() / 2)


def test_ops_of_version_1_and_graphs() -> None:
    np.testing.assert_allclose(clipping.clip_by_average_norm([3.0, 4.0], 0.5).numpy(), [0.6, 0.8])
    parts = [tf.constant([1, 2]), tf.constant([3, 4])]
    assert tf.parallel_stack(parts).numpy().tolist() == [[1, 2], [3, 4]]


def test_only_a_text_of_several_lines_starts_on_a_line_of_its_own() -> None:
    assert str(tf.constant([[1, 2]])) == "tf.Tensor([[1 2]], shape=(1, 2), dtype=int32)"
    assert str(tf.constant([[1], [2]])) == "tf.Tensor(\n[[1]\n [2]], shape=(2, 1), dtype=int32)"
