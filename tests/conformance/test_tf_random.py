"""`tf.random` and its generators: shapes, dtypes, ranges, seeds and distributions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import replicax.tf as tf
from replicax.foundation import errors
from replicax.tf import dispatch
from replicax.tf.ops import random as ops

COUNT = 4000
SEED = [3, 5]
LOGITS = [[0.0, np.log(3.0)]]

# By name: a call that draws COUNT numbers, and their mean and standard deviation.
DRAWS: dict[str, tuple[Callable[..., Any], float, float]] = {
    "normal": (lambda **k: tf.random.normal([COUNT], 1.0, 2.0, **k), 1.0, 2.0),
    "truncated_normal": (lambda **k: tf.random.truncated_normal([COUNT], **k), 0.0, 0.8796),
    "uniform": (lambda **k: tf.random.uniform([COUNT], 2.0, 4.0, **k), 3.0, 0.5774),
    "uniform_int": (
        lambda **k: tf.random.uniform([COUNT], 0, 10, dtype=tf.int32, **k),
        4.5,
        2.8723,
    ),
    "gamma": (lambda **k: tf.random.gamma([COUNT], 4.0, 2.0, **k), 2.0, 1.0),
    "poisson": (lambda **k: tf.random.poisson([COUNT], 4.0, **k), 4.0, 2.0),
    "categorical": (lambda **k: tf.random.categorical(LOGITS, COUNT, **k), 0.75, 0.4330),
    "shuffle": (
        lambda **k: tf.random.shuffle(tf.range(COUNT), **k),
        (COUNT - 1) / 2,
        COUNT / 12**0.5,
    ),
    "dropout": (lambda **k: tf.nn.dropout(tf.ones([COUNT]), 0.25, **k), 1.0, 0.5774),
}
STATELESS: dict[str, tuple[Callable[..., Any], float, float]] = {
    "normal": (lambda **k: tf.random.stateless_normal([COUNT], mean=1.0, **k), 1.0, 1.0),
    "truncated_normal": (
        lambda **k: tf.random.stateless_truncated_normal([COUNT], **k),
        0.0,
        0.8796,
    ),
    "uniform": (lambda **k: tf.random.stateless_uniform([COUNT], **k), 0.5, 0.2887),
    "uniform_int": (
        lambda **k: tf.random.stateless_uniform([COUNT], minval=0, maxval=10, dtype=tf.int32, **k),
        4.5,
        2.8723,
    ),
    "gamma": (lambda **k: tf.random.stateless_gamma([COUNT], alpha=4.0, **k), 4.0, 2.0),
    "poisson": (lambda **k: tf.random.stateless_poisson([COUNT], lam=4.0, **k), 4.0, 2.0),
    "binomial": (
        lambda **k: tf.random.stateless_binomial([COUNT], counts=10.0, probs=0.5, **k),
        5.0,
        1.5811,
    ),
    "categorical": (
        lambda **k: tf.random.stateless_categorical(LOGITS, COUNT, **k),
        0.75,
        0.4330,
    ),
    "shuffle": (
        lambda **k: tf.random.experimental.stateless_shuffle(tf.range(COUNT), **k),
        (COUNT - 1) / 2,
        COUNT / 12**0.5,
    ),
    "dropout": (
        lambda **k: tf.nn.experimental.stateless_dropout(tf.ones([COUNT]), 0.25, **k),
        1.0,
        0.5774,
    ),
}


@pytest.fixture(params=["device", "host"])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    on_host = dispatch.host_mode() if request.param == "host" else contextlib.nullcontext()
    with on_host:
        yield request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    tf.random.set_seed(11)


def require_distribution(sample: Any, mean: float, deviation: float) -> None:
    numbers = np.asarray(sample.numpy(), np.float64).reshape(-1)
    assert numbers.size == COUNT
    # Four standard errors.
    assert abs(numbers.mean() - mean) < 4 * deviation / COUNT**0.5 + 1e-9
    assert abs(numbers.std() - deviation) < 0.1 * deviation


@pytest.mark.parametrize("name", DRAWS)
def test_stateful_numbers_have_their_distribution_and_follow_their_seed(
    place: str, name: str
) -> None:
    draw, mean, deviation = DRAWS[name]
    first = draw(seed=1)
    require_distribution(first, mean, deviation)
    second = draw(seed=1)
    assert (first.numpy() != second.numpy()).any()
    tf.random.set_seed(11)
    np.testing.assert_array_equal(draw(seed=1).numpy(), first.numpy())
    tf.random.set_seed(12)
    assert (draw(seed=1).numpy() != first.numpy()).any()


@pytest.mark.parametrize("name", STATELESS)
def test_stateless_numbers_depend_on_their_seed_alone(place: str, name: str) -> None:
    draw, mean, deviation = STATELESS[name]
    first = draw(seed=SEED)
    require_distribution(first, mean, deviation)
    np.testing.assert_array_equal(draw(seed=SEED).numpy(), first.numpy())
    assert (draw(seed=[3, 6]).numpy() != first.numpy()).any()
    with pytest.raises(errors.InvalidArgumentError, match="two integers"):
        draw(seed=[1, 2, 3])


def test_every_random_op_is_drawn_here() -> None:
    tested = {
        *("categorical dropout gamma normal poisson shuffle truncated_normal uniform").split(),
        *(f"stateless_{name.removesuffix('_int')}" for name in STATELESS),
        *("experimental_stateless_fold_in experimental_stateless_split").split(),
        *("experimental_stateless_shuffle fold_in set_seed split").split(),
    }
    assert set(ops.__all__) == tested


def test_dtypes_and_shapes_of_random_numbers(place: str) -> None:
    wide = "64" if place == "host" else "32"
    assert tf.random.normal([2, 0]).shape == (2, 0)
    assert tf.random.uniform([]).shape == ()
    assert tf.random.normal([2], dtype=tf.float16).dtype == tf.float16
    assert tf.random.normal([2], dtype=tf.float64).dtype == f"float{wide}"
    assert tf.random.categorical(LOGITS, 3).dtype == f"int{wide}"
    assert tf.random.categorical(LOGITS, 3, dtype=tf.int32).shape == (1, 3)
    assert tf.random.gamma([2], [1.0, 2.0, 3.0]).shape == (2, 3)
    assert tf.random.poisson([2], [1.0, 2.0, 3.0]).dtype == tf.float32
    assert tf.random.stateless_poisson([2], SEED, 3.0).dtype == tf.int32
    full = tf.random.stateless_uniform([99], SEED, minval=None, maxval=None, dtype=tf.int32)
    assert full.numpy().min() < 0 < full.numpy().max()
    assert tf.random.split(SEED, 3).shape == (3, 2)
    assert tf.random.fold_in(SEED, 7).shape == (2,)
    assert (tf.random.fold_in(SEED, 7).numpy() != tf.random.fold_in(SEED, 8).numpy()).any()


def test_random_arguments_are_checked() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="maxval"):
        tf.random.uniform([2], dtype=tf.int32)
    with pytest.raises(errors.ArgumentTypeError, match="float"):
        tf.random.normal([2], dtype=tf.int32)
    with pytest.raises(errors.InvalidArgumentError, match="logits"):
        tf.random.categorical([0.5, 0.5], 3)


def test_scaled_samples_have_gradients() -> None:
    spread = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        sample = tf.random.stateless_normal([3], SEED)
        drawn = tf.random.stateless_normal([3], SEED, stddev=spread)
    np.testing.assert_allclose(tape.gradient(drawn, spread).numpy(), sample.numpy().sum(), 1e-5)


def test_dropout_keeps_or_scales_elements() -> None:
    found = tf.nn.dropout(tf.ones([50, 4]), 0.5, noise_shape=[50, 1], seed=1).numpy()
    assert set(np.unique(found)) == {0.0, 2.0}
    assert (found == found[:, :1]).all()


# Generators.


def test_a_generator_repeats_its_numbers_after_a_reset(place: str) -> None:
    rng = tf.random.Generator.from_seed(7)
    first, second = rng.normal([3]), rng.normal([3])
    assert (first.numpy() != second.numpy()).any()
    rng.reset_from_seed(7)
    np.testing.assert_array_equal(rng.normal([3]).numpy(), first.numpy())
    other = tf.random.Generator.from_seed(8)
    assert (other.normal([3]).numpy() != first.numpy()).any()
    assert (other.normal([3]).numpy() != second.numpy()).any()


def test_a_generator_continues_from_its_state() -> None:
    rng = tf.random.Generator.from_seed(7)
    rng.uniform([3])
    state = rng.state
    copy = tf.random.Generator.from_state(state, alg="philox")
    twin = tf.random.Generator(copy_from=rng)
    after = rng.uniform([3]).numpy()
    np.testing.assert_array_equal(copy.uniform([3]).numpy(), after)
    np.testing.assert_array_equal(twin.uniform([3]).numpy(), after)
    skipped = tf.random.Generator.from_seed(7)
    skipped.skip(1)
    np.testing.assert_array_equal(skipped.uniform([3]).numpy(), after)


def test_generators_draw_every_distribution(place: str) -> None:
    rng = tf.random.Generator.from_seed(1)
    require_distribution(rng.normal([COUNT], 1.0, 2.0), 1.0, 2.0)
    require_distribution(rng.truncated_normal([COUNT]), 0.0, 0.8796)
    require_distribution(rng.uniform([COUNT], 2.0, 4.0), 3.0, 0.5774)
    require_distribution(rng.uniform([COUNT], 0, 10, tf.int32), 4.5, 2.8723)
    require_distribution(rng.binomial([COUNT], 10.0, 0.5), 5.0, 1.5811)
    full = rng.uniform_full_int([99], tf.uint8)
    assert full.dtype == tf.uint8 and full.numpy().max() > 200
    wide = "64" if place == "host" else "32"
    assert rng.uniform_full_int([2]).dtype == f"uint{wide}"
    assert rng.make_seeds(3).shape == (2, 3) and rng.make_seeds().dtype == f"int{wide}"
    with pytest.raises(errors.InvalidArgumentError, match="maxval"):
        rng.uniform([2], dtype=tf.int32)


def test_generators_that_are_split_differ() -> None:
    streams = tf.random.Generator.from_seed(1).split(3)
    drawn = {float(stream.normal([])) for stream in streams}
    assert len(drawn) == 3


def test_a_generator_advances_in_a_compiled_function() -> None:
    rng = tf.random.Generator.from_seed(1)
    draw = tf.function(lambda: rng.normal([2]))
    first, second = draw().numpy(), draw().numpy()
    assert (first != second).any()
    rng.reset_from_seed(1)
    np.testing.assert_array_equal(draw().numpy(), first)


def test_replicas_draw_different_numbers_from_a_generator() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    with strategy.scope():
        rng = tf.random.Generator.from_seed(1)
    found = strategy.experimental_local_results(strategy.run(tf.function(lambda: rng.normal([]))))
    assert float(found[0]) != float(found[1])


def test_states_of_seeds_and_names_of_algorithms() -> None:
    assert tf.random.create_rng_state(5, "philox").numpy().tolist() == [5, 0, 0]
    assert tf.random.create_rng_state(5, tf.random.Algorithm.THREEFRY).numpy().tolist() == [5, 0]
    assert tf.random.Generator.from_seed(5).state.numpy().tolist() == [5, 0, 0]
    assert tf.random.Generator.from_seed(5).algorithm == 1
    keyed = tf.random.Generator.from_key_counter(3, [1, 2], "philox")
    assert keyed.state.numpy().tolist() == [1, 2, 3] and int(keyed.key) == 3
    with pytest.raises(errors.InvalidArgumentError, match="alg"):
        tf.random.Generator.from_seed(1, alg="mersenne")
    with pytest.raises(errors.InvalidArgumentError, match="copy_from"):
        tf.random.Generator()
    assert tf.random.experimental.Generator is tf.random.Generator


def test_the_global_generator_can_be_replaced() -> None:
    mine = tf.random.Generator.from_seed(1)
    tf.random.set_global_generator(mine)
    assert tf.random.get_global_generator() is mine
