"""Branches and loops of `tf`, `tf.TensorArray`, and the methods of `tf.Variable` and tensors.

Their gradients are compared with those of TensorFlow in test_tf_tape.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
import replicax.tf as tf


@pytest.fixture(params=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Compiles functions, or leaves them as they are."""
    return tf.function if request.param == "compiled" else lambda fn: fn


def test_cond_takes_and_returns_structures(compiled: Any) -> None:
    v = tf.Variable(1.0)

    @compiled
    def choose(x: Any) -> Any:
        def yes() -> Any:
            v.assign_add(10.0)
            return {"a": x * 2.0, "b": (x, tf.constant(1))}

        def no() -> Any:
            v.assign_sub(1.0)
            return {"a": x - 1.0, "b": (x, tf.constant(0))}

        return tf.cond(tf.reduce_sum(x) > 0.0, yes, no)

    found = choose(tf.constant([1.0, 2.0]))
    assert found["a"].numpy().tolist() == [2.0, 4.0] and int(found["b"][1]) == 1
    found = choose(tf.constant([-1.0, -2.0]))
    assert found["a"].numpy().tolist() == [-2.0, -3.0] and int(found["b"][1]) == 0
    assert float(v) == 10.0


def test_cond_refuses_more_than_one_condition() -> None:
    @tf.function
    def choose(x: Any) -> Any:
        return tf.cond(x > 0.0, lambda: x, lambda: -x)

    with pytest.raises(ValueError, match=r"reduce_all"):
        choose(tf.constant([1.0, 2.0]))
    with pytest.raises(TypeError, match="two functions"):
        tf.cond(True, lambda: 1)


def test_case_takes_the_first_that_holds(compiled: Any) -> None:
    @compiled
    def name(x: Any) -> Any:
        pairs = [(x < 0, lambda: tf.constant(-1)), (x < 10, lambda: tf.constant(0))]
        return tf.case(pairs, default=lambda: tf.constant(1))

    assert [int(name(tf.constant(x))) for x in (-5, 5, 50)] == [-1, 0, 1]


def test_case_without_a_default_needs_one_that_holds() -> None:
    with pytest.raises(ValueError, match="default"):
        tf.case([(tf.constant(False), lambda: 1), (tf.constant(False), lambda: 2)])


def test_switch_case_takes_the_last_for_other_numbers(compiled: Any) -> None:
    @compiled
    def pick(i: Any) -> Any:
        return tf.switch_case(i, {n: (lambda n=n: tf.constant(n * 10)) for n in range(3)})

    assert [int(pick(tf.constant(i))) for i in (0, 1, 2, 7, -1)] == [0, 10, 20, 20, 20]


def test_while_loop_keeps_the_structure_of_its_variables(compiled: Any) -> None:
    @compiled
    def collatz(n: Any) -> Any:
        def body(n: Any, steps: Any) -> Any:
            half = tf.cond(tf.equal(n % 2, 0), lambda: n // 2, lambda: 3 * n + 1)
            return half, steps + 1

        return tf.while_loop(lambda n, _: n > 1, body, (n, tf.constant(0)))

    n, steps = collatz(tf.constant(7))
    assert (int(n), int(steps)) == (1, 16)


def test_while_loop_with_a_maximum_and_an_array_of_rows(compiled: Any) -> None:
    @compiled
    def squares(n: Any) -> Any:
        def body(i: Any, rows: Any) -> Any:
            return i + 1, rows.write(i, tf.cast(i * i, tf.float32))

        rows = tf.TensorArray(tf.float32, size=5)
        i, rows = tf.while_loop(
            lambda i, _: i < n, body, [tf.constant(0), rows], maximum_iterations=5
        )
        return i, rows.stack()

    i, rows = squares(tf.constant(5))
    assert int(i) == 5 and rows.numpy().tolist() == [0.0, 1.0, 4.0, 9.0, 16.0]


def test_while_loop_refuses_a_body_that_loses_a_variable(compiled: Any) -> None:
    def run() -> Any:
        return tf.while_loop(lambda a, b: a < 3, lambda a, b: (a + 1,), (0, 1))

    with pytest.raises(ValueError, match="2 values"):
        compiled(run)()


def test_the_gradient_of_a_loop_without_a_known_end_is_refused() -> None:
    v = tf.Variable(2.0)

    @tf.function
    def slope(n: Any) -> Any:
        with tf.GradientTape() as tape:
            _, y = tf.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, y * v), (0, 1.0))
        return tape.gradient(y, v)

    with pytest.raises(NotImplementedError, match="maximum_iterations"):
        slope(tf.constant(3))

    @tf.function
    def by_range(n: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.constant(1.0)
            for _ in tf.range(n):
                y = y * v
        return tape.gradient(y, v)

    with pytest.raises(NotImplementedError, match="Python int"):
        by_range(tf.constant(3))


def test_map_fn_scan_and_folds_over_structures(compiled: Any) -> None:
    @compiled
    def compute(x: Any, y: Any) -> Any:
        mapped = tf.map_fn(lambda pair: pair[0] * pair[1], (x, y), fn_output_signature=tf.float32)
        pairs = tf.map_fn(lambda row: (row, -row), x, fn_output_signature=(tf.float32, tf.float32))
        scanned = tf.scan(lambda a, row: (a[0] + row, row), x, initializer=(0.0, 0.0))
        reverse = tf.scan(lambda a, row: a + row, x, reverse=True)
        vectorized = tf.vectorized_map(lambda row: tf.reduce_sum(row * y), x)
        return mapped, pairs, scanned, reverse, vectorized

    mapped, pairs, scanned, reverse, vectorized = compute(
        tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0, 6.0])
    )
    assert mapped.numpy().tolist() == [4.0, 10.0, 18.0]
    assert pairs[1].numpy().tolist() == [-1.0, -2.0, -3.0]
    assert scanned[0].numpy().tolist() == [1.0, 3.0, 6.0]
    assert reverse.numpy().tolist() == [6.0, 5.0, 3.0]
    assert vectorized.numpy().tolist() == [15.0, 30.0, 45.0]


def test_rows_of_different_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="one number of rows"):
        tf.map_fn(lambda p: p[0], (tf.zeros([2]), tf.zeros([3])))


# TensorArray.


def test_a_tensor_array_reads_what_was_written() -> None:
    rows = tf.TensorArray(tf.int32, size=0, dynamic_size=True)
    for i in range(3):
        rows = rows.write(i, [i, i * 10])
    assert int(rows.size()) == 3
    assert rows.read(2).numpy().tolist() == [2, 20]
    assert rows.stack().numpy().tolist() == [[0, 0], [1, 10], [2, 20]]
    assert rows.concat().numpy().tolist() == [0, 0, 1, 10, 2, 20]
    assert rows.gather([2, 0]).numpy().tolist() == [[2, 20], [0, 0]]
    again = tf.TensorArray(tf.float32, size=2).unstack(tf.constant([1.0, 2.0]))
    assert again.scatter([1], tf.constant([5.0])).stack().numpy().tolist() == [1.0, 5.0]


def test_a_tensor_array_refuses_other_rows_and_dtypes() -> None:
    rows = tf.TensorArray(tf.float32, size=2)
    with pytest.raises(IndexError, match="dynamic_size"):
        rows.write(2, 1.0)
    with pytest.raises(ValueError, match=r"tf\.cast"):
        rows.write(0, tf.constant(1))
    with pytest.raises(ValueError, match="written"):
        rows.read(0)


# Variables.


def test_a_variable_is_assigned_and_read(compiled: Any) -> None:
    v = tf.Variable([1.0, 2.0, 3.0], name="weights")

    @compiled
    def change() -> Any:
        v.assign([4.0, 5.0, 6.0])
        v.assign_add([1.0, 1.0, 1.0])
        v.assign_sub(tf.constant([0.5, 0.5, 0.5]))
        v[0].assign(9.0)
        v[1:].assign_add([10.0, 20.0])
        return v.value(), v.read_value(), tf.identity(v), tf.convert_to_tensor(v)

    for found in change():
        assert isinstance(found, tf.Tensor)
        assert found.numpy().tolist() == [9.0, 15.5, 26.5]
    assert v.numpy().tolist() == [9.0, 15.5, 26.5]


def test_the_facts_of_a_variable() -> None:
    v = tf.Variable(np.ones((2, 3)), dtype=tf.float32, trainable=False, name="v")
    assert v.name == "v:0"
    assert v.shape.as_list() == [2, 3] and v.get_shape()[1] == 3
    assert v.dtype == tf.float32 and not v.trainable
    assert isinstance(v, tf.Variable)
    assert not isinstance(tf.constant(1.0), tf.Variable)
    assert "'v:0' shape=(2, 3)" in repr(v)
    assert tf.Variable(3).dtype == tf.int32 and tf.Variable(3.0).dtype == tf.float32
    assert tf.Variable(lambda: tf.zeros([2])).shape.as_list() == [2]
    assert isinstance(tf.Variable(2.5).numpy(), np.float32)


def test_variables_are_compared_and_kept_in_containers() -> None:
    v, w = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 3.0])
    assert (v == w).numpy().tolist() == [True, False]
    assert (v != w).numpy().tolist() == [False, True]
    assert any(v is other for other in [w, v])
    slots = {v.ref(): "first", w.ref(): "second"}
    assert slots[v.ref()] == "first" and v.ref().deref() is v


def test_arithmetic_with_variables_gives_tensors() -> None:
    v = tf.Variable([1.0, 2.0])
    c = tf.constant([3.0, 4.0])
    results = {
        "add": v + c,
        "radd": c + v,
        "number": 2.0 * v,
        "list": v - [1.0, 1.0],
        "numpy": np.asarray([2.0, 2.0], np.float32) * v,
        "pow": v**2,
        "neg": -v,
        "abs": abs(-v),
        "compare": tf.cast(v > 1.5, tf.float32),
    }
    wanted = {
        "add": [4.0, 6.0],
        "radd": [4.0, 6.0],
        "number": [2.0, 4.0],
        "list": [0.0, 1.0],
        "numpy": [2.0, 4.0],
        "pow": [1.0, 4.0],
        "neg": [-1.0, -2.0],
        "abs": [1.0, 2.0],
        "compare": [0.0, 1.0],
    }
    assert all(isinstance(found, tf.Tensor) for found in results.values())
    assert {name: found.numpy().tolist() for name, found in results.items()} == wanted
    matrix = tf.Variable([[1.0, 0.0], [0.0, 2.0]])
    assert (matrix @ tf.constant([[1.0], [1.0]])).numpy().tolist() == [[1.0], [2.0]]


def test_rows_are_scattered_into_a_variable() -> None:
    v = tf.Variable(tf.zeros([4, 2]))
    v.scatter_update(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1])))
    v.scatter_add(tf.IndexedSlices(tf.constant([[2.0, 3.0]]), tf.constant([1])))
    v.scatter_nd_add(tf.constant([[0, 1]]), tf.constant([7.0]))
    assert v.numpy().tolist() == [[0.0, 7.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
    assert v.sparse_read(tf.constant([1])).numpy().tolist() == [[3.0, 4.0]]
    assert v.gather_nd(tf.constant([[1, 0]])).numpy().tolist() == [3.0]


def test_a_variable_refuses_another_shape() -> None:
    v = tf.Variable([1.0, 2.0])
    with pytest.raises(ValueError, match="shape"):
        v.assign([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="shape"):
        v.assign_add([[1.0], [2.0], [3.0]])


# Tensors.


def test_tensors_are_arrays_for_numpy_and_jax() -> None:
    x = tf.constant([[1.0, 2.0]])
    assert np.asarray(x).tolist() == [[1.0, 2.0]]
    assert float(jnp.sum(x)) == 3.0
    assert float(jax.jit(lambda t: tf.reduce_sum(t)._raw)(x)) == 3.0
    assert len(x) == 1 and [row.numpy().tolist() for row in x] == [[1.0, 2.0]]
    assert x.shape == (1, 2) and x.shape.rank == 2 and x.ndim == 2
    assert copy.deepcopy(x) is x
    assert f"{tf.constant(1.25):.1f}" == "1.2"
    assert str(tf.constant(3)) == "tf.Tensor(3, shape=(), dtype=int32)"


def test_tensors_of_two_dtypes_are_not_mixed() -> None:
    with pytest.raises((TypeError, ValueError), match=r"tf\.cast"):
        tf.constant(1.0) + tf.constant(1)
    with pytest.raises((TypeError, ValueError), match="int32"):
        tf.constant(1) + 1.5
    assert (tf.constant(1.0) + 1).dtype == tf.float32


def test_tensors_are_not_hashable_but_their_references_are() -> None:
    x = tf.constant(1.0)
    with pytest.raises(TypeError):
        hash(x)
    assert {x.ref(): 1}[x.ref()] == 1


def test_a_shape_that_does_not_fit_is_refused() -> None:
    x = tf.zeros([2, 3])
    x.set_shape([None, 3])
    with pytest.raises(ValueError, match="set_shape"):
        x.set_shape([3, 3])


def test_a_spec_describes_tensors() -> None:
    spec = tf.TensorSpec.from_tensor(tf.zeros([2, 3], tf.int32))
    assert spec.shape.as_list() == [2, 3] and spec.dtype == tf.int32
    assert tf.TensorSpec([None, 3], tf.int32).is_compatible_with(spec)
    assert not tf.TensorSpec([None, 4], tf.int32).is_compatible_with(tf.zeros([2, 3], tf.int32))
    assert rx.TensorSpec is not tf.TensorSpec


def test_a_loop_that_starts_with_python_numbers_ends_with_tensors() -> None:
    def count() -> Any:
        return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2.0), (0, 1.0))

    for i, x in (count(), tf.function(count)()):
        assert (i.dtype, i.numpy(), x.numpy()) == (tf.int32, 3, 8.0)
