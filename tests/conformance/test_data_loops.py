"""Loops over many steps of a dataset inside one compiled function."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import refused

import replicax as rx

SUM = rx.VariableAggregation.SUM
SOME = ("one_device", "mirrored_2", "virtual_2", "default")


def _iterator(strategy: Any, size: int, batch: int) -> Any:
    data = rx.data.Dataset.from_tensor_slices(np.arange(size, dtype=np.float32)).batch(batch)
    return iter(strategy.experimental_distribute_dataset(data))


@pytest.mark.strategies(*SOME)
def test_a_loop_takes_an_element_per_round_and_is_traced_once(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=SUM)
    traces = []

    def step(x: Any) -> Any:
        traces.append(1)
        v.assign_add(x.sum())
        return x.sum()

    @rx.function
    def train(it: Any) -> Any:
        def body(i: Any, total: Any) -> Any:
            results = strategy.run(step, args=(next(it),))
            return total + strategy.reduce("SUM", results, axis=None) * (i + 1)

        return rx.fori_loop(0, 3, body, jnp.zeros(()))

    iterator = _iterator(strategy, 28, 4)
    sums = np.arange(28.0).reshape(7, 4).sum(1)
    assert float(train(iterator)) == sums[:3] @ [1, 2, 3]
    assert float(v) == sums[:3].sum()
    assert float(train(iterator)) == sums[3:6] @ [1, 2, 3]
    assert len(traces) == 1 == train.experimental_get_tracing_count()
    # One element is left: the call has no effect, and takes nothing.
    with pytest.raises(rx.errors.OutOfRangeError):
        train(iterator)
    assert float(v) == sums[:6].sum()
    assert (
        float(
            sum(
                map(
                    float,
                    strategy.experimental_local_results(strategy.run(step, (next(iterator),))),
                )
            )
        )
        == sums[6]
    )


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_more_than_1024_rounds(strategy: Any) -> None:
    @rx.function
    def total(it: Any) -> Any:
        def body(_: Any, total: Any) -> Any:
            x = strategy.run(lambda x: x * 2, args=(next(it),))
            return total + strategy.reduce("SUM", x, axis=0)

        return rx.fori_loop(0, 2000, body, jnp.zeros(()))

    assert float(total(_iterator(strategy, 4000, 2))) == 2 * np.arange(4000.0).sum()


@pytest.mark.strategies(*SOME)
def test_the_last_partial_batch_is_a_round_like_the_others(strategy: Any) -> None:
    with strategy.scope():
        count = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=SUM
        )

    def step(x: Any) -> Any:
        count.assign_add(jnp.asarray(x.shape[0], jnp.float32))
        return x.sum()

    @rx.function
    def epoch(it: Any) -> Any:
        def body(carry: Any, scale: Any) -> Any:
            results = strategy.run(step, args=(it.get_next(),))
            return carry, scale * strategy.reduce("SUM", results, axis=None)

        return rx.scan(body, None, jnp.arange(1.0, 4.0))[1]

    np.testing.assert_array_equal(epoch(_iterator(strategy, 9, 4)), [6.0, 44.0, 24.0])
    assert float(count.read_value()) == 9.0


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_scan_over_a_dataset(strategy: Any, is_compiled: bool) -> None:
    data = rx.data.Dataset.from_tensor_slices(np.arange(9, dtype=np.float32)).batch(4)
    distributed = strategy.experimental_distribute_dataset(data)

    def epoch(source: Any) -> Any:
        def body(total: Any, batch: Any) -> Any:
            value = strategy.reduce("SUM", strategy.run(jnp.sum, args=(batch,)), axis=None)
            return total + value, value

        return rx.scan(body, 0.0, source)

    epoch = rx.function(epoch) if is_compiled else epoch
    for source in (
        (distributed, iter(distributed), data, iter(data))
        if strategy.num_replicas_in_sync == 1
        else (distributed, iter(distributed))
    ):
        for _ in range(2 if source is distributed else 1):
            total, values = epoch(source)
            assert float(total) == 36.0
            np.testing.assert_array_equal(values, [6.0, 22.0, 8.0])
        if source is not distributed and source is not data:
            total, values = epoch(source)
            assert float(total) == 0.0 and values is None


def test_two_iterators_and_two_elements_per_round() -> None:
    first = iter(rx.data.Dataset.range(12))
    second = iter(rx.data.Dataset.range(100, 103))

    @rx.function
    def fn() -> Any:
        def body(carry: Any, _: Any) -> Any:
            return carry, (next(first), next(second), next(first))

        head = next(first)
        rows = rx.scan(body, None, None, length=3, reverse=False)[1]
        return head, rows, next(first)

    head, (a, b, c), last = fn()
    assert (int(head), int(last)) == (0, 7)
    np.testing.assert_array_equal([a, b, c], [[1, 3, 5], [100, 101, 102], [2, 4, 6]])


@pytest.mark.parametrize("wrap", [rx.function, lambda fn: fn])
def test_elements_come_in_the_order_of_time(wrap: Any) -> None:
    def fn(it: Any, xs: Any) -> Any:
        return rx.scan(lambda c, x: (c, (x, next(it))), None, xs, reverse=True)[1]

    rows, elements = wrap(fn)(iter(rx.data.Dataset.range(4)), jnp.arange(4))
    np.testing.assert_array_equal([rows, elements], [[0, 1, 2, 3], [3, 2, 1, 0]])


def test_an_optional_element_ends_the_data_inside_the_loop() -> None:
    @rx.function
    def fn(it: Any) -> Any:
        def body(_: Any, total: Any) -> Any:
            element = it.get_next_as_optional()
            return total + (element.get_value() if element.has_value() else 100)

        return rx.fori_loop(0, 5, body, 0)

    assert int(fn(iter(rx.data.Dataset.range(3)))) == 203


def test_a_python_iterator_in_a_loop() -> None:
    @rx.function
    def fn(it: Any) -> Any:
        return rx.fori_loop(0, 3, lambda i, c: c + next(it) * i, 0.0)

    generator = (np.float32(x) for x in range(100))
    assert float(fn(generator)) == 5.0 and float(fn(generator)) == 14.0
    assert fn.experimental_get_tracing_count() == 1


def test_elements_where_their_number_is_unknown_are_refused() -> None:
    it = iter(rx.data.Dataset.range(100))
    loops = [
        lambda n: rx.fori_loop(0, n, lambda i, c: c + next(it), 0),
        lambda n: rx.while_loop(lambda c: c < 3, lambda c: c + next(it), 0),
        lambda n: rx.cond(n > 0, lambda: next(it), lambda: jnp.asarray(0)),
        lambda n: rx.fori_loop(
            0, 2, lambda i, c: rx.fori_loop(0, 2, lambda j, d: d + next(it), c), 0
        ),
    ]
    for loop in loops:
        with pytest.raises(rx.errors.TracingError, match="once per element"):
            rx.function(loop)(jnp.asarray(2))
    assert int(next(it)) == 0


def test_an_endless_loop_that_is_unrolled_names_the_compiled_ones() -> None:
    @rx.function
    def fn(it: Any) -> Any:
        return sum(x for x in it)

    with pytest.raises(rx.errors.TracingError, match=r"rx\.fori_loop or rx\.scan"):
        fn(iter(rx.data.Dataset.range(2).repeat()))


@pytest.mark.strategies("one_device", "mirrored_2")
def test_reduce_of_a_long_dataset_is_one_compiled_loop(strategy: Any) -> None:
    data = rx.data.Dataset.from_tensor_slices(np.arange(3001, dtype=np.float32)).batch(2)
    distributed = strategy.experimental_distribute_dataset(data)
    steps = []

    @rx.function
    def total() -> Any:
        def add(state: Any, batch: Any) -> Any:
            steps.append(1)
            return state + strategy.reduce("SUM", batch, axis=0)

        return distributed.reduce(jnp.zeros(()), add)

    assert float(total()) == np.arange(3001.0).sum() == float(total())
    # The last batch is a partial one.
    assert len(steps) == 2


def test_scan_refuses_an_iterator_that_compiled_code_captures() -> None:
    captured = iter([1.0, 2.0])

    @rx.function
    def total() -> Any:
        return rx.scan(lambda c, x: (c + x, None), 0.0, captured)[0]

    with refused(rx.errors.TracingError, "argument of the function"):
        total()
