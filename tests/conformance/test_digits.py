"""A classifier of handwritten digits: every strategy learns the same, and learns enough."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import pytest
from programs.train_digits import (
    GLOBAL_BATCH,
    NUM_TRAIN,
    STEPS_PER_EPOCH,
    Training,
    batches,
    digits,
)
from worker_groups import same_on_all_workers

import replicax as rx

EPOCHS = 12
COMPARED_AT = 50
# An epoch, the last batch of which is smaller, and the first step of the next: of all examples,
# or of some for eager code, which is slow.
STEPS = {"compiled": STEPS_PER_EPOCH + 1, "eager": 3}
NUM_EXAMPLES = {"compiled": NUM_TRAIN, "eager": GLOBAL_BATCH + NUM_TRAIN % GLOBAL_BATCH}
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


@pytest.fixture(scope="module")
def examples() -> dict[str, np.ndarray]:
    return digits()[0]


def trained_for_an_epoch(
    strategy: Any, how: str, examples: dict[str, np.ndarray], *, is_compiled: bool
) -> dict[str, np.ndarray]:
    training = Training(strategy, is_compiled=is_compiled)
    examples = {name: column[: NUM_EXAMPLES[how]] for name, column in examples.items()}
    with contextlib.closing(iter(batches(strategy, examples))) as iterator:
        for key in jax.random.split(jax.random.key(11), STEPS[how]):
            training.train(next(iterator), key)
    return training.result()


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_4")
@pytest.mark.parametrize("how", [pytest.param("eager", marks=pytest.mark.slow), "compiled"])
def test_the_same_program_ends_with_equal_parameters(
    strategy: Any, how: str, examples: dict[str, np.ndarray]
) -> None:
    """Batches that replicas and workers share unevenly included."""
    assert NUM_EXAMPLES[how] % GLOBAL_BATCH % strategy.num_replicas_in_sync
    one = rx.OneDeviceStrategy("CPU:0")
    expected = trained_for_an_epoch(one, how, examples, is_compiled=True)
    found = trained_for_an_epoch(strategy, how, examples, is_compiled=how == "compiled")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=2e-6, err_msg=name)
    assert found["iterations"] == STEPS[how]
    assert found["visits"].sum() == NUM_EXAMPLES[how] + GLOBAL_BATCH
    same_on_all_workers(strategy, found)


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
