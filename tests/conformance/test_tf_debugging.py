"""`tf.debugging` raises where TensorFlow 2.21 does: the errors below are those that it raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import replicax.tf as tf
from replicax.tf import dispatch

nan, inf = float("nan"), float("inf")
debugging = tf.debugging

# Calls that raise nothing.
RIGHT: list[Callable[[], Any]] = [
    lambda: debugging.assert_equal([1], [1]),
    lambda: debugging.assert_equal(tf.constant([1.0, 2.0]), [1.0, 2.0]),
    lambda: debugging.assert_equal(tf.constant([b"a"]), [b"a"]),
    lambda: debugging.assert_none_equal([1, 2], [2, 1]),
    lambda: debugging.assert_less([1, 2], [2, 3]),
    lambda: debugging.assert_less_equal([1, 2], [1, 3]),
    lambda: debugging.assert_greater(tf.ones([2]), 0.5),
    lambda: debugging.assert_greater_equal(2, 2),
    lambda: debugging.assert_near(1.0, 1.0000001),
    lambda: debugging.assert_near(1.0, 1.1, atol=0.2),
    lambda: debugging.assert_positive([1, 2]),
    lambda: debugging.assert_negative([-1.0]),
    lambda: debugging.assert_non_negative([]),
    lambda: debugging.assert_non_positive([0]),
    lambda: debugging.assert_rank([1], 1),
    lambda: debugging.assert_rank_at_least([[1]], 1),
    lambda: debugging.assert_rank_in([1], [0, 1]),
    lambda: debugging.assert_scalar(1),
    lambda: debugging.assert_integer([1]),
    lambda: debugging.assert_type(tf.ones([]), tf.float32),
    lambda: debugging.assert_proper_iterable([1]),
    lambda: debugging.Assert(True, [1]),
    lambda: debugging.Assert([True, False], [1]),
    lambda: debugging.assert_shapes([(tf.ones([2, 3]), ("N", "D")), (tf.ones([2]), ("N",))]),
    lambda: debugging.assert_shapes([(tf.ones([2, 3]), "NM"), (tf.ones([3, 2]), "MN")]),
    lambda: debugging.assert_shapes([(tf.ones([4, 2, 3]), (..., 2, 3))]),
    lambda: debugging.assert_shapes([(tf.ones([4, 2, 3]), (4, None, "."))]),
    lambda: debugging.assert_shapes([(tf.ones([4, 2]), (4, ...)), (3.0, ())]),
]
# Calls that raise one of two errors: about a value, or about a type.
WRONG: list[tuple[Callable[[], Any], type[Exception]]] = [
    (lambda: debugging.assert_equal([1], [2]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_equal([1, 2], [1, 2, 3]), ValueError),
    (lambda: debugging.assert_equal(tf.constant([1]), tf.constant([1.0])), TypeError),
    (lambda: debugging.assert_none_equal([1, 2], [1, 1]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_less([1, 2], [2, 2]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_less(nan, 1.0), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_less_equal([3], [2]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_greater([1], [1]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_greater_equal([1], [2]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_near(1.0, 1.0001), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_positive([1, 0]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_negative([0]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_non_negative([-1]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_non_positive([1]), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_rank([1], 2), ValueError),
    (lambda: debugging.assert_rank_at_least([1], 2), ValueError),
    (lambda: debugging.assert_rank_in([1], [0, 2]), ValueError),
    (lambda: debugging.assert_scalar([1]), ValueError),
    (lambda: debugging.assert_integer(1.5), TypeError),
    (lambda: debugging.assert_type(tf.ones([]), tf.int32), TypeError),
    (lambda: debugging.assert_same_float_dtype([tf.constant(1)]), ValueError),
    (lambda: debugging.assert_proper_iterable(5), TypeError),
    (lambda: debugging.assert_proper_iterable(tf.ones([2])), TypeError),
    (lambda: debugging.Assert(False, [1]), tf.errors.InvalidArgumentError),
    (lambda: debugging.check_numerics([1.0, nan], "m"), tf.errors.InvalidArgumentError),
    (lambda: debugging.check_numerics([1], "m"), TypeError),
    (lambda: debugging.assert_all_finite(inf, "m"), tf.errors.InvalidArgumentError),
    (lambda: debugging.assert_shapes([(tf.ones([2, 3]), ("N", "N"))]), ValueError),
    (lambda: debugging.assert_shapes([(tf.ones([2, 3]), (2,))]), ValueError),
    (lambda: debugging.assert_shapes({"a": (1,)}.items()), ValueError),
    (lambda: debugging.assert_shapes([(tf.ones([3]), (..., 2, 3))]), ValueError),
]


@pytest.mark.parametrize("is_host", [False, True])
def test_assertions_that_hold_return_none(is_host: bool) -> None:
    with dispatch.host_mode(is_host):
        for call in RIGHT:
            assert call() is None


@pytest.mark.parametrize("is_host", [False, True])
@pytest.mark.parametrize(("call", "error"), WRONG)
def test_assertions_that_do_not_hold_raise(
    call: Callable[[], Any], error: type[Exception], is_host: bool
) -> None:
    with dispatch.host_mode(is_host), pytest.raises(error):
        call()


def test_errors_show_message_place_and_values() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        debugging.assert_less([1, 5, 2, 3, 4], [9, 4, 9, 9, 9], message="Bad ids.", summarize=2)
    text = str(caught.value)
    assert text.startswith("Bad ids: ") and "1 of 5 places, the first at [1]" in text
    assert "x is [1, 5, …]" in text
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"loss: .*NaN and Inf"):
        debugging.check_numerics([nan, inf], "loss")


def test_compiled_code_checks_shapes_and_leaves_values() -> None:
    @tf.function
    def values(x: Any) -> Any:
        debugging.assert_positive(x)
        debugging.Assert(tf.reduce_all(x > 0), [x])
        return debugging.check_numerics(x, "x") * 2

    assert values(tf.constant([-1.0])).numpy().tolist() == [-2.0]

    @tf.function
    def shapes(x: Any) -> Any:
        debugging.assert_rank(x, 2)
        return x

    with pytest.raises(ValueError, match="rank 2"):
        shapes(tf.constant([1.0]))

    @tf.function
    def constants(x: Any) -> Any:
        debugging.assert_equal(tf.shape(x)[0], 3)
        return x

    assert constants(tf.ones([3])).shape == (3,)
    with pytest.raises(tf.errors.InvalidArgumentError):
        constants(tf.ones([2]))


def test_check_numerics_has_a_gradient() -> None:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(debugging.check_numerics(x * x, "y"))
    assert tape.gradient(y, x).numpy().tolist() == [2.0, 4.0]


def test_names_at_the_top_are_the_same_functions() -> None:
    assert tf.Assert is debugging.Assert and tf.assert_equal is debugging.assert_equal
    assert tf.assert_less is debugging.assert_less and tf.assert_rank is debugging.assert_rank


def test_enable_check_numerics_raises_for_the_first_nan() -> None:
    step = tf.function(lambda x: tf.math.log(x))
    debugging.enable_check_numerics()
    try:
        with pytest.raises(FloatingPointError):
            step(tf.constant(-1.0)).numpy()
    finally:
        debugging.disable_check_numerics()
    assert np.isnan(step(tf.constant(-1.0)).numpy())


def test_settings_are_kept() -> None:
    debugging.set_log_device_placement(True)
    assert debugging.get_log_device_placement()
    debugging.set_log_device_placement(False)
    before = jax.config.jax_traceback_filtering
    debugging.disable_traceback_filtering()
    assert not debugging.is_traceback_filtering_enabled()
    debugging.enable_traceback_filtering()
    assert debugging.is_traceback_filtering_enabled()
    jax.config.update("jax_traceback_filtering", before)


def test_kinds_of_values() -> None:
    assert debugging.is_numeric_tensor(tf.constant(1)) and not debugging.is_numeric_tensor(5)
    assert not debugging.is_numeric_tensor(tf.constant("a"))
    assert debugging.assert_same_float_dtype([]) == tf.float32
    assert debugging.assert_same_float_dtype([tf.ones([])], tf.float32) == tf.float32
