"""Plain iterators and datasets inside `rx.function`: every call takes new elements."""

from __future__ import annotations

import cProfile
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx


def pairs() -> Any:
    return rx.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)


def takes_11_then_15_then_ends(step: Any, *args: Any) -> None:
    assert [float(step(*args)), float(step(*args))] == [11.0, 15.0]
    for _ in range(2):
        with pytest.raises(rx.errors.OutOfRangeError, match="end"):
            step(*args)


def test_an_iterator_as_an_argument_moves_on() -> None:
    step = rx.function(lambda it: next(it).sum())
    takes_11_then_15_then_ends(step, iter(pairs()))
    takes_11_then_15_then_ends(step, iter(pairs()))
    assert step.experimental_get_tracing_count() == 1


def test_a_captured_iterator_moves_on() -> None:
    iterator = iter(pairs())
    takes_11_then_15_then_ends(rx.function(lambda: next(iterator).sum()))


def test_an_iterator_in_a_structure_and_a_nested_function_moves_on() -> None:
    inner = rx.function(lambda it: next(it).sum())
    takes_11_then_15_then_ends(
        rx.function(lambda d: inner(d["train"][0])), {"train": [iter(pairs())]}
    )


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
@pytest.mark.parametrize("kind", ["dataset", "function"])
def test_distributed_data_moves_on(strategy: Any, kind: str) -> None:
    if kind == "dataset":
        iterator = iter(strategy.experimental_distribute_dataset(pairs()))
        sums = [11.0, 15.0]
    else:
        iterator = iter(strategy.distribute_datasets_from_function(lambda _: pairs()))
        sums = [11.0, 15.0] if strategy.num_replicas_in_sync == 1 else [26.0]

    @rx.function
    def step(it: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(jnp.sum, args=(next(it),)), axis=None)

    captured = rx.function(lambda: step(iterator))
    found = [
        float(fn()) for fn, _ in zip(itertools.cycle([captured, lambda: step(iterator)]), sums)
    ]
    assert found == sums
    with pytest.raises(rx.errors.OutOfRangeError):
        step(iterator)


@pytest.mark.strategies("default", "one_device")
def test_one_replica_may_take_elements_in_replica_code(strategy: Any, run: Any) -> None:
    iterator = iter(pairs())
    found = [
        strategy.reduce("SUM", run(strategy, lambda: next(iterator).sum()), axis=None) for _ in "12"
    ]
    assert [float(x) for x in found] == [11.0, 15.0]


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_compiled_code_of_several_replicas_may_not_take_elements(strategy: Any) -> None:
    iterator = iter(pairs())
    with pytest.raises(rx.errors.TracingError, match="pass the element"):
        strategy.run(rx.function(lambda: next(iterator).sum()))
    assert next(iterator).tolist() == [5.0, 6.0]


@pytest.mark.strategies("mirrored_2")
def test_a_plain_element_is_given_to_all_replicas(strategy: Any) -> None:
    iterator = iter(pairs())

    @rx.function
    def step() -> Any:
        return strategy.reduce("SUM", strategy.run(jnp.sum, args=(next(iterator),)), axis=None)

    assert [float(step()), float(step())] == [22.0, 30.0]


def test_a_loop_over_a_dataset_has_a_new_order_in_each_call() -> None:
    dataset = rx.data.Dataset.range(64).shuffle(64, seed=1)

    @rx.function
    def order() -> Any:
        return jnp.stack(list(dataset))

    orders = [tuple(order().tolist()) for _ in range(3)]
    assert len(set(orders)) == 3
    assert all(sorted(o) == list(range(64)) for o in orders)
    assert order.experimental_get_tracing_count() == 1
    again = rx.data.Dataset.range(64).shuffle(64, seed=1)
    assert orders == [tuple(int(x) for x in again) for _ in range(3)]


def test_plain_iterators_have_get_next_and_optional_elements() -> None:
    iterator = iter(pairs())
    assert iterator.get_next().tolist() == [5.0, 6.0]
    optional = iterator.get_next_as_optional()
    assert optional.has_value() and optional.get_value().tolist() == [7.0, 8.0]
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(rx.errors.OutOfRangeError, match="end"):
        iterator.get_next()


def test_optional_elements_in_a_function() -> None:
    @rx.function
    def rest(it: Any) -> Any:
        found = jnp.zeros(())
        while (optional := it.get_next_as_optional()).has_value():
            found += optional.get_value().sum()
        return found

    iterator = iter(pairs())
    assert [float(rest(iterator)), float(rest(iterator))] == [26.0, 0.0]


def test_a_call_that_fails_gives_elements_back() -> None:
    iterator = iter(rx.data.Dataset.range(3))
    two = rx.function(lambda it: next(it) + next(it))
    assert int(two(iterator)) == 1
    with pytest.raises(rx.errors.OutOfRangeError):
        two(iterator)
    position = iterator.get_state()
    assert int(next(iterator)) == 2
    iterator.set_state(position)
    assert int(next(iterator)) == 2


def test_numpy_iterators_zip_and_map_take_new_elements() -> None:
    first, second = pairs().as_numpy_iterator(), map(lambda x: x * 2, iter(pairs()))
    step = rx.function(lambda: sum(a.sum() + b.sum() for a, b in [(next(first), next(second))]))
    assert [float(step()), float(step())] == [33.0, 45.0]


def test_elements_that_are_no_numbers_are_refused() -> None:
    iterator = iter(rx.data.Dataset.from_tensor_slices(np.array(["a", "b"])))
    with pytest.raises(rx.errors.ArgumentTypeError, match="numbers"):
        rx.function(lambda it: next(it))(iterator)


def test_a_map_function_may_use_variables_and_datasets() -> None:
    scale = rx.Variable(2.0)
    dataset = pairs().map(
        lambda x: x * np.asarray(scale.read_value()) + int(next(iter(pairs()))[0])
    )
    step = rx.function(lambda it: next(it).sum() + scale.read_value())
    iterator = iter(dataset)
    assert float(step(iterator)) == 34.0
    scale.assign(0.0)
    assert float(step(iterator)) == 10.0


# Iterators of Python and other libraries.


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers(3),
        lambda: iter([0, 1, 2]),
        lambda: iter(np.arange(3)),
        lambda: (jnp.asarray(i) for i in range(3)),
        lambda: map(int, "012"),
        lambda: itertools.count(),
        lambda: iter(
            rx.data.Dataset.range(3).to_grain().to_iter_dataset(grain.ReadOptions(num_threads=0))
        ),
    ],
)
def test_every_iterator_given_as_an_argument_moves_on(make: Any) -> None:
    step = rx.function(lambda it: next(it) * 10)
    iterator = make()
    assert [int(step(iterator)) for _ in range(3)] == [0, 10, 20]
    assert step.experimental_get_tracing_count() == 1


def test_enumerate_and_zip_of_iterators_given_as_arguments_move_on() -> None:
    iterator = enumerate(zip(iter(pairs()), iter([1.0, 2.0]), strict=False))
    step = rx.function(lambda it: (lambda i, pair: i * 100 + pair[0].sum() + pair[1])(*next(it)))
    assert [float(step(iterator)), float(step(iterator))] == [12.0, 117.0]
    with pytest.raises(rx.errors.OutOfRangeError):
        step(iterator)


def test_attributes_of_an_iterator_given_as_an_argument_are_refused() -> None:
    class Loader:
        num_classes = 2

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return 1

    assert int(rx.function(lambda it: next(it))(Loader())) == 1
    with pytest.raises(rx.errors.TracingError, match="num_classes"):
        rx.function(lambda it: next(it) * it.num_classes)(Loader())
    assert not rx.function(lambda it: hasattr(it, "shape"))(Loader())


def test_an_iterator_in_a_captured_structure_moves_on() -> None:
    data = {"train": [iter(pairs())]}
    takes_11_then_15_then_ends(rx.function(lambda: next(data["train"][0]).sum()))


def test_functions_that_capture_a_generator_can_be_profiled() -> None:
    numbers = (i for i in range(3))
    step = rx.function(lambda x: x + 1 if numbers is not None else x)
    profiler = cProfile.Profile()
    with profiler:
        assert float(step(1.0)) == 2.0
        assert sys.getprofile() is profiler
    assert sys.getprofile() is None
    seen: list[str] = []
    sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code.co_name))
    try:
        assert float(rx.function(lambda x: x - 1 if numbers is not None else x)(1.0)) == 0.0
    finally:
        sys.setprofile(None)
    assert "<lambda>" in seen


def test_generators_may_be_captured_and_not_advanced() -> None:
    def endless() -> Any:
        while True:
            yield 2.0

    numbers = endless()
    next(numbers)
    made: list[Any] = []

    @rx.function
    def creates() -> Any:
        if not made:
            made.append(rx.Variable(lambda: next(numbers)))
        return made[0] + 1.0

    assert [float(creates()), float(creates())] == [3.0, 3.0]
    with pytest.raises(rx.errors.TracingError, match="advances 'numbers'"):
        rx.function(lambda: jnp.asarray(next(numbers)))()


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_calls_do_not_split_batches(strategy: Any) -> None:
    """The key of a call is made of the stored array; taking a batch apart costs time."""
    data = strategy.experimental_distribute_dataset(rx.data.Dataset.range(12).batch(4))
    total = rx.function(lambda batch: strategy.run(lambda x: x.sum(), args=(batch,)))
    doubled = rx.function(lambda x: x * 2)
    for batch in data:
        assert not batch.is_split
        total(batch)
        strategy.run(doubled, args=(batch,))
        assert not batch.is_split
