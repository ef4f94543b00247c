"""`tf.random` in closures and dataset functions, on workers, which can make no variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import replicax.tf as tf

# What a closure does: it draws two numbers.
DRAWS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "eager": lambda _: lambda: tf.random.normal([2]),
    "compiled": lambda _: tf.function(lambda: tf.random.normal([2])),
    "seed of the operation": lambda _: tf.function(lambda: tf.random.normal([2], seed=3)),
    "replica": lambda strategy: tf.function(
        lambda: strategy.reduce("SUM", strategy.run(lambda: tf.random.uniform([2])), axis=None)
    ),
    "dropout": lambda _: lambda: tf.nn.dropout(tf.random.normal([2]), 1e-6),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_s184_a_closure_draws_other_numbers_each_time(desk: Any, draw: Any) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    drawn = [coordinator.schedule(draw(strategy)) for _ in range(6)]
    coordinator.join()
    numbers = np.array([value.fetch() for value in drawn])
    assert np.isfinite(numbers).all()
    assert len(np.unique(numbers)) == numbers.size


def test_s186_workers_draw_different_numbers_from_one_seed(desk: Any) -> None:
    coordinator = desk.coordinator()

    def dataset() -> Any:
        tf.random.set_seed(5)
        return tf.data.Dataset.from_tensors(tf.random.uniform([1000])).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    seen = [coordinator.schedule(next, args=(iterator,)) for _ in range(40)]
    coordinator.join()
    by_worker = {np.asarray(value.fetch()).tobytes() for value in seen}
    assert len(by_worker) == 2


def test_s184_a_generator_is_shared_with_the_workers(desk: Any) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        generator = tf.random.Generator.from_seed(3)
    step = tf.function(lambda: generator.normal([2]))
    first = coordinator.schedule(step).fetch()
    coordinator.join()
    second = coordinator.schedule(step).fetch()
    assert not np.array_equal(first, second)
    assert generator.state.numpy()[1] == 2
