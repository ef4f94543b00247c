"""Steps that an optimizer skips: gradients that are not finite, and loss scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import Desk
from vocabulary import copies, refused

import replicax as rx

DynamicLossScale = rx.optimizers.DynamicLossScale


def make(strategy: Any, **options: Any) -> Any:
    """Three variables, one a table with a constraint, and their optimizer."""
    with strategy.scope():
        w = rx.Variable([1.0, -2.0], name="w")
        b = rx.Variable(0.5, name="b")
        table = rx.Variable(jnp.ones((6, 2)), name="table", constraint=lambda x: x * 0.99)
        # By rows, momentum and all.
        options = {"sparse": "rows", **options}
        trained = [w, b, table]
        return trained, rx.optimizers.Optimizer(optax.adam(0.1), trained, **options)


def gradients_of(trained: Any, factor: Any) -> Any:
    rows = rx.IndexedSlices(jnp.ones((2, 2)) * factor, jnp.asarray([4, 1]), (6, 2))
    return list(zip([jnp.ones(2), jnp.asarray(1.0), rows], trained, strict=True))


def state_of(strategy: Any, optimizer: Any, trained: Any) -> list[Any]:
    kept = [v for name, v in optimizer.checkpoint_children().items() if "guard" not in name]
    return [np.asarray(copy) for v in [*trained, *kept] for copy in copies(strategy, v)]


@pytest.mark.one_strategy
@pytest.mark.strategies("mirrored_2", "central_2")
def test_a_step_with_a_bad_gradient_changes_nothing_on_any_replica(strategy: Any, run: Any) -> None:
    trained, optimizer = make(strategy, skip_nonfinite=True)
    twins, reference = make(strategy)

    def step(factor: Any, on: Any, trained: Any, optimizer: Any) -> None:
        number = rx.get_replica_context().replica_id_in_sync_group
        # One replica alone has it; what all have is the sum.
        own = jnp.where(number == on, factor, 1.0)
        optimizer.apply_gradients(gradients_of(trained, own))

    last = strategy.num_replicas_in_sync - 1
    for factor, on in ((2.0, 0), (np.nan, last), (np.inf, 0), (-np.inf, last), (3.0, 0)):
        before = state_of(strategy, optimizer, trained)
        run(strategy, lambda f, n: step(f, n, trained, optimizer), args=(jnp.float32(factor), on))
        after = state_of(strategy, optimizer, trained)
        if np.isfinite(factor):
            run(strategy, lambda f, n: step(f, n, twins, reference), args=(jnp.float32(factor), on))
            for one, other in zip(after, state_of(strategy, reference, twins), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)
        else:
            for one, other in zip(after, before, strict=True):
                np.testing.assert_array_equal(one, other)
    assert (int(optimizer.iterations), int(optimizer.skipped)) == (2, 3)


@pytest.mark.strategies("virtual_2")
def test_loss_scales_shrink_and_grow(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(1.0, name="w")
        optimizer = rx.optimizers.Optimizer(
            optax.sgd(0.25),
            [w],
            loss_scale=DynamicLossScale(initial_scale=8.0, growth_steps=2),
        )
    count = strategy.num_replicas_in_sync

    def step(factor: Any) -> Any:
        scaled = rx.grad(lambda: optimizer.get_scaled_loss(w * factor / count), [w])()
        optimizer.apply_gradients(optimizer.get_unscaled_gradients(scaled))
        return scaled[0]

    scales, values = [], []
    for factor in (1.0, 1.0, 1.0, np.inf, 1.0, np.nan, np.nan, np.nan, np.nan, np.inf, 1.0):
        run(strategy, step, args=(jnp.float32(factor),))
        scales.append(float(optimizer.loss_scale))
        values.append(float(w))
    assert scales == [8, 16, 16, 8, 8, 4, 2, 1, 1, 1, 1]
    assert values == [0.75, 0.5, 0.25, 0.25, 0, 0, 0, 0, 0, 0, -0.25]
    assert int(optimizer.skipped) == 6 and int(optimizer.iterations) == 5


def test_gradients_of_half_precision_are_unscaled_beyond_its_range() -> None:
    w = rx.Variable(jnp.ones(2, jnp.float16), name="w")
    optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [w], loss_scale=2.0**17)
    rows = rx.IndexedSlices(jnp.full((1, 2), 64.0, jnp.float16), jnp.asarray([1]), (4, 2))
    dense, sparse, none = optimizer.get_unscaled_gradients(
        [jnp.full(2, 64.0, jnp.float16), rows, None]
    )
    assert dense.dtype == jnp.float16 and dense.tolist() == [2.0**-11] * 2
    np.testing.assert_array_equal(sparse.values, [[2.0**-11] * 2])
    assert none is None
    plain = rx.optimizers.Optimizer(optax.sgd(1.0), [w])
    assert plain.get_scaled_loss(3.0) == 3.0 and plain.get_unscaled_gradients([2.0]) == [2.0]
    assert plain.loss_scale is None and plain.skipped is None


def test_a_bad_gradient_is_not_accumulated() -> None:
    w = rx.Variable(1.0)
    optimizer = rx.optimizers.Optimizer(
        optax.sgd(1.0), [w], gradient_accumulation_steps=2, skip_nonfinite=True
    )
    for gradient in (1.0, np.nan, 3.0):
        optimizer.apply_gradients([(jnp.float32(gradient), w)])
    assert float(w) == -1.0 and int(optimizer.iterations) == 1


def test_loss_scales_are_checked_and_saved(tmp_path: Path) -> None:
    w = rx.Variable(1.0, name="w")
    for bad in (0.0, "dynamic", True):
        with refused(rx.errors.InvalidArgumentError, "loss_scale"):
            rx.optimizers.Optimizer(optax.sgd(0.1), [w], loss_scale=bad)
    for options in ({"factor": 1.0}, {"growth_steps": 0}, {"initial_scale": 0.5}):
        with refused(rx.errors.InvalidArgumentError, "DynamicLossScale"):
            DynamicLossScale(**options)

    def made() -> Any:
        own = rx.Variable(1.0, name="w")
        return own, rx.optimizers.Optimizer(optax.sgd(0.1), [own], loss_scale=DynamicLossScale())

    w, optimizer = made()
    optimizer.apply_gradients([(jnp.float32(np.inf), w)])
    optimizer.apply_gradients([(jnp.float32(1.0), w)])
    path = rx.train.Checkpoint(w=w, optimizer=optimizer).save(str(tmp_path / "saved"))
    v, other = made()
    rx.train.Checkpoint(w=v, optimizer=other).restore(path).assert_consumed()
    assert [v.numpy() for v in other.variables] == [v.numpy() for v in optimizer.variables]
    assert float(other.loss_scale) == 2.0**14


@pytest.mark.parametrize("parts", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_steps_on_servers_are_skipped_as_a_whole(desk: Desk, parts: Any) -> None:
    strategy = desk.strategy(parts)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        # On different servers: only one of them would see the bad gradient.
        w, v = rx.Variable(jnp.ones(4), name="w"), rx.Variable(jnp.ones((4, 2)), name="v")
        optimizer = rx.optimizers.Optimizer(
            optax.adam(0.1), [w, v], loss_scale=DynamicLossScale(8.0, growth_steps=2)
        )

    def step(factor: Any) -> Any:
        def loss() -> Any:
            total = jnp.sum(w.read_value() * jnp.asarray([factor, 1.0, 1.0, 1.0]))
            return optimizer.get_scaled_loss(total + jnp.sum(v.read_value()))

        gradients = optimizer.get_unscaled_gradients(rx.grad(loss, [w, v])())
        optimizer.apply_gradients(gradients)
        return optimizer.loss_scale.read_value()

    compiled = rx.function(step)
    for i, run in enumerate((compiled, step)):
        scales = []
        for factor in (1.0, np.nan, 2.0, np.inf, 1.0, 1.0):
            before = [np.asarray(x.numpy()) for x in (w, v, *optimizer.variables[:-3])]
            result = coordinator.schedule(run, args=(np.float32(factor),)).fetch(60)
            scales.append(float(result))
            assert float(optimizer.loss_scale) == scales[-1]
            after = [np.asarray(x.numpy()) for x in (w, v, *optimizer.variables[:-3])]
            is_same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
            assert not any(is_same) if np.isfinite(factor) else all(is_same)
        assert scales == [[8, 4, 4, 2, 2, 4], [4, 2, 2, 1, 1, 2]][i]
        assert int(optimizer.skipped) == 2 * (i + 1)
        assert int(optimizer.iterations) == 4 * (i + 1)
    assert all(np.isfinite(jax.tree.leaves([x.numpy() for x in (w, v)])[0]).ravel())
