"""Every kind of optax transformation gives on two replicas what it gives on one device."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from vocabulary import copies, refused, values

import replicax as rx

STEPS = 10


def start() -> dict[str, Any]:
    """Parameters of a small network: a matrix, a vector and a scalar."""
    return {
        "bias": jnp.zeros(3),
        "kernel": jnp.array([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]]),
        "scale": jnp.array(1.5),
    }


def loss_of(params: Any, x: Any, y: Any) -> Any:
    """A share of the loss of the whole batch: shares of all replicas add up."""
    out = jnp.tanh(x @ params["kernel"] + params["bias"]) * params["scale"]
    return jnp.sum((out - y) ** 2) / 8


def batches() -> list[tuple[Any, Any]]:
    random = np.random.default_rng(0)
    return [
        (
            jnp.asarray(random.normal(size=(8, 2)), jnp.float32),
            jnp.asarray(random.normal(size=(8, 3)), jnp.float32),
        )
        for _ in range(STEPS)
    ]


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


MASK = {"bias": False, "kernel": True, "scale": False}
LABELS = {"bias": "slow", "kernel": "fast", "scale": "slow"}
WARM_UP = optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, STEPS)
TRANSFORMATIONS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.05),
    "adam_float32_momentum": optax.adam(0.05, mu_dtype=jnp.float32),
    "amsgrad": optax.amsgrad(0.05),
    "adamw_with_masks": optax.adamw(0.05, weight_decay=0.1, mask=MASK),
    "adamw_with_a_mask_function": optax.adamw(0.05, weight_decay=0.1, mask=is_matrix),
    "adagrad": optax.adagrad(0.1),
    "adadelta": optax.adadelta(0.5),
    "rmsprop": optax.rmsprop(0.05, centered=True, momentum=0.5),
    "lion": optax.lion(0.01),
    "lamb": optax.lamb(0.05, weight_decay=0.01),
    "lars": optax.lars(0.05, weight_decay=0.01),
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=2),
    "adafactor_not_factored": optax.adafactor(0.05, momentum=0.9),
    "adabelief": optax.adabelief(0.05),
    "adamax": optax.adamax(0.05),
    "adan": optax.adan(0.05),
    "nadam": optax.nadam(0.05),
    "radam": optax.radam(0.05),
    "novograd": optax.novograd(0.05),
    "rprop": optax.rprop(0.05),
    # optax.sm3 cannot take scalars.
    "sm3": optax.partition({"fast": optax.sm3(0.05), "slow": optax.sgd(0.05)}, LABELS),
    "yogi": optax.yogi(0.05),
    "optimistic": optax.optimistic_gradient_descent(0.05),
    "schedule_free": optax.contrib.schedule_free_sgd(0.05),
    "clip_and_schedule": optax.chain(
        optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.scale_by_learning_rate(WARM_UP)
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=WARM_UP, b1=0.8),
    "multi_steps": optax.MultiSteps(optax.adam(0.05), 3),
    "partition": optax.partition({"fast": optax.adam(0.1), "slow": optax.sgd(0.01)}, LABELS),
    "masked": optax.chain(optax.masked(optax.trace(0.9), is_matrix), optax.scale(-0.1)),
    "frozen": optax.chain(optax.adam(0.1), optax.masked(optax.set_to_zero(), MASK)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.scale(-0.1)),
    "noise_with_a_typed_key": optax.chain(
        optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.scale(-0.1)
    ),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.05), 3),
    "ema": optax.chain(optax.scale(-0.1), optax.ema(0.5)),
    "apply_every": optax.chain(optax.apply_every(2), optax.scale(-0.1)),
}


QUICK = (
    "adamw_with_masks",
    "clip_and_schedule",
    "multi_steps",
    "partition",
    "noise_with_a_typed_key",
)
# Those that are like others are left to `make test-all`.
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in TRANSFORMATIONS]


def by_hand(transformation: Any, with_value: bool = False) -> Any:
    """The whole batch on one device, as optax's own documentation does it."""
    params = start()
    state = transformation.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(params, x, y)
        extra = {"value": value} if with_value else {}
        updates, state = transformation.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for x, y in batches():
        params, state = step(params, state, x, y)
    return params


def on_replicas(
    strategy: Any, transformation: Any, is_compiled: bool = True, with_value: bool = False
) -> Any:
    """The batch split over replicas; returns the variables."""
    with strategy.scope():
        model = rx.make_variables(start())
        optimizer = rx.optimizers.Optimizer(transformation, model)

    def replica_step(x: Any, y: Any) -> None:
        value, gradients = rx.value_and_grad(lambda: loss_of(model, x, y), model)()
        extra = {"value": value} if with_value else {}
        optimizer.apply_gradients(gradients, **extra)

    step = rx.function(replica_step) if is_compiled else replica_step
    for x, y in batches():
        parts = (
            np.split(x, strategy.num_replicas_in_sync),
            np.split(y, strategy.num_replicas_in_sync),
        )
        own = tuple(values(strategy, lambda i, part=part: jnp.asarray(part[i])) for part in parts)
        strategy.run(step, args=own)
    return model


def require_equal(strategy: Any, model: Any, expected: Any) -> None:
    moved = False
    for name, variable in model.items():
        for copy in copies(strategy, variable):
            np.testing.assert_allclose(copy, expected[name], rtol=2e-4, atol=2e-5)
        moved = moved or not np.allclose(expected[name], start()[name])
    assert moved


@pytest.mark.strategies("mirrored_2")
@pytest.mark.parametrize("name", NAMES)
def test_S214_equals_optax_on_the_whole_batch(strategy: Any, name: str) -> None:
    transformation = TRANSFORMATIONS[name]
    require_equal(strategy, on_replicas(strategy, transformation), by_hand(transformation))


@pytest.mark.strategies("mirrored_2")
def test_S214_global_norms_are_those_of_all_replicas_in_eager_code(strategy: Any) -> None:
    transformation = TRANSFORMATIONS["clip_and_schedule"]
    model = on_replicas(strategy, transformation, is_compiled=False)
    require_equal(strategy, model, by_hand(transformation))


@pytest.mark.slow
@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("name", ["adamw_with_masks", "multi_steps", "noise"])
def test_S214_equals_optax_in_eager_code(strategy: Any, name: str) -> None:
    transformation = TRANSFORMATIONS[name]
    model = on_replicas(strategy, transformation, is_compiled=False)
    require_equal(strategy, model, by_hand(transformation))


@pytest.mark.strategies("mirrored_2")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_further_arguments_are_summed_like_gradients(strategy: Any, is_compiled: bool) -> None:
    transformation = optax.polyak_sgd(max_learning_rate=0.1)
    model = on_replicas(strategy, transformation, is_compiled, with_value=True)
    require_equal(strategy, model, by_hand(transformation, with_value=True))


@pytest.mark.strategies("mirrored_2", "default")
def test_a_missing_further_argument_is_named(strategy: Any) -> None:
    with refused(rx.errors.ArgumentTypeError, "'value'.*value=loss"):
        on_replicas(strategy, optax.polyak_sgd())


def quadratic(params: Any) -> Any:
    return jnp.sum((params["w"] - jnp.array([3.0, -1.0])) ** 2 * jnp.array([1.0, 20.0]))


@pytest.mark.slow
@pytest.mark.strategies("mirrored_2", "default")
def test_lbfgs_searches_a_line(strategy: Any) -> None:
    with strategy.scope():
        model = {"w": rx.Variable([0.0, 0.0])}
        optimizer = rx.optimizers.Optimizer(optax.lbfgs(), model)
    with strategy.scope():
        for _ in range(8):
            value, gradients = rx.value_and_grad(lambda: quadratic(model), model)()
            optimizer.apply_gradients(gradients, value=value, grad=gradients, value_fn=quadratic)
    np.testing.assert_allclose(model["w"].numpy(), [3.0, -1.0], atol=1e-3)


@pytest.mark.strategies("mirrored_2", "default")
def test_what_is_not_finite_is_skipped(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(1.0)
        optimizer = rx.optimizers.Optimizer(optax.apply_if_finite(optax.sgd(0.5), 5), [w])
    run(strategy, lambda: optimizer.apply_gradients([jnp.array(jnp.nan)]))
    assert float(w) == 1.0
    run(strategy, lambda: optimizer.apply_gradients([jnp.array(1.0)]))
    assert float(w) == 1.0 - 0.5 * strategy.num_replicas_in_sync


def test_lookahead_needs_other_parameters_and_is_refused() -> None:
    w = rx.Variable(1.0)
    with refused(rx.errors.UnsupportedError, "optax.lookahead"):
        rx.optimizers.Optimizer(optax.lookahead(optax.sgd(0.1), 5, 0.5), [w])


def test_masks_that_do_not_fit_are_refused() -> None:
    w = rx.Variable(1.0)
    with refused(rx.errors.InvalidArgumentError, "its `init` raised"):
        rx.optimizers.Optimizer(optax.masked(optax.adam(0.1), {"other": True}), {"w": w})


class Broken(NamedTuple):
    """A state of its own."""

    what: Any


def test_a_state_that_is_not_of_arrays_is_refused() -> None:
    w = rx.Variable(1.0)
    broken = optax.GradientTransformation(lambda _: Broken("text"), lambda u, s, p=None: (u, s))
    with refused(rx.errors.UnsupportedError, "a str at 'what'"):
        rx.optimizers.Optimizer(broken, [w])


def test_a_state_that_changes_its_structure_is_refused() -> None:
    w = rx.Variable(1.0)
    broken = optax.GradientTransformation(lambda _: jnp.zeros(2), lambda u, s, p=None: (u, (s, s)))
    with refused(rx.errors.UnsupportedError, "keep the structure"):
        rx.optimizers.Optimizer(broken, [w]).apply_gradients([(1.0, w)])


def test_a_state_that_changes_its_shape_is_refused() -> None:
    w = rx.Variable(1.0)
    broken = optax.GradientTransformation(
        lambda _: jnp.zeros(2), lambda u, s, p=None: (u, jnp.zeros(3))
    )
    optimizer = rx.optimizers.Optimizer(broken, [w])
    assert list(optimizer.checkpoint_children()) == ["iterations", "state/"]
    with refused(rx.errors.UnsupportedError, r"shape \(2,\) became \(3,\)"):
        optimizer.apply_gradients([(1.0, w)])
    assert float(w) == 1.0
