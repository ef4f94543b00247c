"""`rx.random`: keys that differ between replicas and steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

SOME = ("default", "one_device", "mirrored_2", "virtual_2", "central_2")


def data_of(key: Any) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def expected(replica_id: int, *data: int, seed: int = 7) -> tuple[int, ...]:
    key = jax.random.key(seed)
    for number in (replica_id, *data):
        key = jax.random.fold_in(key, number)
    return data_of(key)


def locals_of(strategy: Any, value: Any) -> list[Any]:
    return [tuple(np.ravel(v).tolist()) for v in strategy.experimental_local_results(value)]


@pytest.mark.strategies(*SOME)
def test_each_replica_gets_its_own_key(strategy: Any, run: Any) -> None:
    with strategy.scope():
        step = rx.Variable(3)

    def draw() -> Any:
        return jax.random.key_data(rx.random.replica_key(7, step))

    found = locals_of(strategy, run(strategy, draw))
    assert found == [expected(i, 3) for i in range(strategy.num_replicas_in_sync)]


@pytest.mark.parametrize("key", [7, np.int64(7), jax.random.key(7), jax.random.PRNGKey(7)])
def test_keys_of_every_kind(key: Any) -> None:
    assert data_of(rx.random.replica_key(key)) == expected(0)
    traced = rx.function(lambda seed: jax.random.key_data(rx.random.replica_key(seed)))
    assert tuple(traced(jnp.asarray(7)).tolist()) == expected(0)


@pytest.mark.parametrize("key", ["7", 1.5, None, True, np.zeros((2, 2), np.uint32)])
def test_things_that_are_no_keys(key: Any) -> None:
    with pytest.raises(rx.errors.ArgumentTypeError, match="seed"):
        rx.random.replica_key(key)


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("seed", [7, jax.random.PRNGKey(7)])
def test_cross_replica_code_gets_the_keys_of_all_replicas(
    strategy: Any, is_compiled: bool, seed: Any
) -> None:
    def step() -> Any:
        with strategy.scope():
            keys = rx.random.replica_key(seed, 5)
        return strategy.run(jax.random.key_data, args=(keys,))

    found = locals_of(strategy, (rx.function(step) if is_compiled else step)())
    assert found == [expected(i, 5) for i in range(strategy.num_replicas_in_sync)]


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_keys_are_results_and_arguments_of_replicas(strategy: Any, run: Any) -> None:
    keys = run(strategy, lambda: rx.random.replica_key(7))
    assert "key<" in repr(keys)
    found = run(strategy, jax.random.key_data, args=(keys,))
    assert locals_of(strategy, found) == [expected(0), expected(1)]


@pytest.mark.strategies("mirrored_2")
def test_update_code_has_no_replica(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(0.0)
        with pytest.raises(rx.errors.ContextError, match="replica_key"):
            strategy.extended.update(v, lambda v: rx.random.replica_key(0))


@pytest.mark.one_strategy
@pytest.mark.strategies(*SOME)
def test_a_generator_goes_on(strategy: Any, run: Any) -> None:
    with strategy.scope():
        rng = rx.random.Generator(7)

    def draw() -> Any:
        return jnp.stack([jax.random.key_data(rng.key()) for _ in range(2)])

    step = rx.function(draw) if run.executor == "compiled" else draw
    for call in range(2):
        result = run(strategy, step) if run.executor != "compiled" else strategy.run(step)
        for i, keys in enumerate(strategy.experimental_local_results(result)):
            first, second = (tuple(k) for k in np.asarray(keys).tolist())
            assert (first, second) == (expected(i, 2 * call), expected(i, 2 * call + 1))
    assert int(rng.count.read_value()) == 4


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_a_generator_inside_a_gradient_and_across_replicas(strategy: Any) -> None:
    with strategy.scope():
        rng, w = rx.random.Generator(7), rx.Variable(2.0)

    def replica() -> Any:
        return rx.grad(lambda: w * jax.random.uniform(rng.key()), [w])()[0]

    want = [
        (float(jax.random.uniform(jax.random.wrap_key_data(np.uint32(expected(i, 0))))),)
        for i in (0, 1)
    ]
    for fn in (replica, rx.function(replica)):
        rng.count.assign(0)
        assert locals_of(strategy, strategy.run(fn)) == want
    with strategy.scope():
        keys = rng.key()
    found = strategy.run(jax.random.key_data, args=(keys,))
    assert locals_of(strategy, found) == [expected(0, 1), expected(1, 1)]
    assert int(rng.count.read_value()) == 2


def test_a_generator_is_saved_with_a_checkpoint(tmp_path: Any) -> None:
    rng = rx.random.Generator(7)
    rng.key()
    path = rx.train.Checkpoint(rng=rng).save(str(tmp_path / "checkpoint"))
    after = data_of(rng.key())
    other = rx.random.Generator(0)
    rx.train.Checkpoint(rng=other).restore(path).assert_consumed()
    assert data_of(other.key()) == after


def test_a_seed_is_a_small_whole_number() -> None:
    for seed in (-1, 2**32, 1.5, True):
        with pytest.raises(rx.errors.InvalidArgumentError, match="seed"):
            rx.random.Generator(seed)  # type: ignore[arg-type]
