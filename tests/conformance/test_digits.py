"""A classifier of handwritten digits: every strategy learns the same, and learns enough."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import pytest
from programs.train_digits import GLOBAL_BATCH, STEPS_PER_EPOCH, Training, batches, digits

import replicax as rx

EPOCHS = 12
COMPARED_AT = 50
LEARNERS = ("one_device", "mirrored_2", "mirrored_4", "central_2")


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """What comes out without any strategy, after some steps."""
    return trained(rx.get_strategy(), COMPARED_AT)[1]


def trained(strategy: Any, stop_at: int) -> tuple[Training, dict[str, np.ndarray]]:
    """Trains up to a step; returns the training and its results after `COMPARED_AT` steps."""
    training, key = Training(strategy), jax.random.key(11)
    results: dict[str, np.ndarray] = {}
    with contextlib.closing(iter(batches(strategy, digits()[0]))) as iterator:
        for step in range(stop_at):
            if step % STEPS_PER_EPOCH == 0:
                training.start_epoch()
            key, own = jax.random.split(key)
            training.train(next(iterator), own)
            if step + 1 == COMPARED_AT:
                results = training.result()
    return training, results


def accuracy_on_test(training: Training) -> float:
    dataset = rx.data.Dataset.from_tensor_slices(digits()[1]).batch(GLOBAL_BATCH)
    training.accuracy.reset_state()
    for batch in training.strategy.experimental_distribute_dataset(dataset):
        training.test_step(batch)
    return float(training.accuracy.result())


@pytest.mark.slow
@pytest.mark.strategies(*LEARNERS)
def test_every_strategy_learns_the_same_digits(
    strategy: Any, expected: dict[str, np.ndarray]
) -> None:
    training, found = trained(strategy, EPOCHS * STEPS_PER_EPOCH)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    # 50 steps are two epochs with a partial batch each, and a little of the third.
    assert found["visits"].sum() == (COMPARED_AT - 2 * STEPS_PER_EPOCH) * GLOBAL_BATCH
    assert training.visits.numpy().tolist() == [1] * len(training.visits.numpy())
    assert accuracy_on_test(training) > 0.95
