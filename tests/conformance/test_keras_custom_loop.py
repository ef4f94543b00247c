"""Custom training loops with Keras models, in replica code, as with tf.distribute.

S209-S217: optimizers sum gradients over replicas, metrics sum what replicas saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras_programs as programs
import numpy as np
import pytest
from keras_programs import UNEVEN, keras
from strategies_under_test import STRATEGIES

import replicax as rx

X, Y = programs.data_of("sequential", UNEVEN)
BATCH = 8
# Batches of equal parts, and a last one whose parts differ, which runs uncompiled.
EVEN, ALL_ROWS = (X[:16], Y[:16]), (X, Y)
STRATEGY_NAMES = ("default", "one_device", "mirrored_2", "virtual_2", "central_2")
EXECUTORS = ("eager", "compiled")


def cases(*default: tuple[str, str], executors: tuple[str, ...] = EXECUTORS) -> Any:
    """Runs a test over all strategies and executors; all but the given pairs are slow."""
    pairs = [(name, executor) for name in STRATEGY_NAMES for executor in executors]
    marked = [pytest.param(*p, marks=() if p in default else pytest.mark.slow) for p in pairs]
    return pytest.mark.parametrize(("name", "executor"), marked)


COMPILED = ("mirrored_2", "compiled")
EAGER = ("mirrored_2", "eager")
VIRTUAL = ("virtual_2", "compiled")


class Loop:
    """A training loop over a model that is made in a scope.

    Attributes:
      losses: The loss of each step.
    """

    def __init__(
        self,
        strategy: Any,
        executor: str,
        make_model: Callable[[], keras.Model],
        make_optimizer: Callable[[], keras.optimizers.Optimizer],
        make_loss: Callable[[], Any] | None = None,
    ) -> None:
        keras.utils.set_random_seed(1)
        self.strategy = strategy
        with strategy.scope():
            self.model, self.optimizer = make_model(), make_optimizer()
            if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
                self.optimizer.build(self.model.trainable_variables)
            self.mean = keras.metrics.Mean()
            self.error = keras.metrics.MeanAbsoluteError()
            self.loss = None if make_loss is None else make_loss()
        self.losses: list[float] = []
        self._step = rx.function(self._one) if executor == "compiled" else self._one

    def loss_of(self, y: Any, y_pred: Any) -> Any:
        if self.loss is not None:
            return self.loss(y, y_pred)
        errors = keras.losses.MeanSquaredError(reduction=None)(y, y_pred)
        return rx.nn.compute_average_loss(errors, global_batch_size=BATCH)

    def replica_step(self, x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            y_pred = self.model(x, training=True)
            loss = self.loss_of(y, y_pred)
            if self.model.losses:
                loss = loss + rx.nn.scale_regularization_loss(sum(self.model.losses))
            return self.scaled(loss), (loss, y_pred)

        variables = self.model.trainable_variables
        if not variables:
            self.model(x)
            variables = self.model.trainable_variables
        (_, (loss, y_pred)), grads = rx.value_and_grad(loss_fn, variables, has_aux=True)()
        self.optimizer.apply_gradients(zip(grads, variables, strict=True))
        self.mean.update_state(keras.ops.mean(y, axis=-1))
        self.error.update_state(y, y_pred)
        return loss

    def scaled(self, loss: Any) -> Any:
        return self.optimizer.scale_loss(loss)

    def _one(self, batch: Any) -> Any:
        losses = self.strategy.run(self.replica_step, args=batch)
        return self.strategy.reduce("SUM", losses, axis=None)

    def train(self, epochs: int = 2, data: Any = EVEN) -> programs.Outcome:
        dataset = rx.data.Dataset.from_tensor_slices(data).batch(BATCH)
        for _ in range(epochs):
            for batch in self.strategy.experimental_distribute_dataset(dataset):
                self.losses.append(float(self._step(batch)))
        return self.outcome()

    def outcome(self) -> programs.Outcome:
        found = programs.outcome(
            self.model,
            self.losses,
            self.mean.result(),
            self.error.result(),
            [keras.ops.convert_to_numpy(v.value) for v in self.optimizer.variables],
        )
        for variable in [*self.model.variables, *self.optimizer.variables]:
            values = self.strategy.experimental_local_results(variable.replicax_variable)
            if "moving" not in variable.path and "seed" not in variable.path:
                assert all(np.array_equal(values[0], value) for value in values), variable.path
        return found


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05)


@pytest.fixture(scope="module")
def wanted() -> Callable[..., programs.Outcome]:
    """Returns what the loop comes to without a strategy, once per program."""
    known: dict[Any, programs.Outcome] = {}

    def find(key: str, *parts: Any, data: Any = EVEN) -> programs.Outcome:
        if key not in known:
            known[key] = Loop(rx.get_strategy(), "compiled", *parts).train(2, data)
        return known[key]

    return find


@cases(COMPILED, VIRTUAL)
@pytest.mark.parametrize(
    "model",
    ["sequential", *(pytest.param(m, marks=pytest.mark.slow) for m in ("lstm", "functional"))],
)
def test_a_custom_loop_comes_to_the_same_under_every_strategy(
    name: str, executor: str, model: str, wanted: Any
) -> None:
    parts = programs.MODELS[model], sgd
    found = Loop(STRATEGIES[name](), executor, *parts).train(2, ALL_ROWS)
    found.require_equal(wanted(model, *parts, data=ALL_ROWS))


def test_a_custom_loop_comes_to_what_fit_comes_to() -> None:
    found = Loop(STRATEGIES["mirrored_2"](), "compiled", programs.sequential, sgd).train()
    model = programs.compiled("sequential")
    model.fit(*EVEN, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    for i, weights in enumerate(model.get_weights()):
        np.testing.assert_allclose(found.arrays[f"weights {i}"], weights, rtol=1e-5, atol=1e-6)


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05), initial_scale=8.0, dynamic_growth_steps=2
    ),
    "accumulation": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=2),
    "clipping": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1, weight_decay=0.01),
}


@cases(COMPILED)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_sum_gradients_and_update_all_copies_alike(
    name: str, executor: str, kind: str, wanted: Any
) -> None:
    """S214, S215."""
    parts = programs.sequential, OPTIMIZERS[kind]
    found = Loop(STRATEGIES[name](), executor, *parts).train()
    found.require_equal(wanted(kind, *parts))


def test_an_optimizer_that_scales_losses_must_be_built_before_the_first_step() -> None:
    strategy = STRATEGIES["mirrored_2"]()
    with strategy.scope():
        optimizer = OPTIMIZERS["loss_scale"]()
    with pytest.raises(RuntimeError, match=r"optimizer\.build"):
        rx.function(lambda: strategy.run(lambda: optimizer.scale_loss(jnp.ones(()))))()


@cases(COMPILED)
def test_metrics_made_in_the_scope_sum_what_all_replicas_saw(name: str, executor: str) -> None:
    """S217."""
    strategy = STRATEGIES[name]()
    with strategy.scope():
        metrics = [
            keras.metrics.Mean(),
            keras.metrics.MeanAbsoluteError(),
            keras.metrics.AUC(num_thresholds=5),
        ]
    plain = [
        keras.metrics.Mean(),
        keras.metrics.MeanAbsoluteError(),
        keras.metrics.AUC(num_thresholds=5),
    ]
    labels, scores = (Y > 0).astype(np.float32), 1 / (1 + np.exp(-X[:, :1]))

    def replica_step(y: Any, s: Any) -> None:
        metrics[0].update_state(s)
        for metric in metrics[1:]:
            metric.update_state(y, s)

    def step(batch: Any) -> None:
        strategy.run(replica_step, args=batch)

    if executor == "compiled":
        step = rx.function(step)
    dataset = rx.data.Dataset.from_tensor_slices((labels, scores)).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(dataset):
        step(batch)
    plain[0].update_state(scores)
    for metric in plain[1:]:
        metric.update_state(labels, scores)
    for metric, other in zip(metrics, plain, strict=True):
        assert float(metric.result()) == pytest.approx(float(other.result()), rel=1e-5)
        metric.reset_state()
        assert all(not np.any(v.value) for v in metric.variables)


def _masks(strategy: Any, executor: str) -> list[np.ndarray]:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)

    def step() -> Any:
        return strategy.run(lambda: layer(jnp.ones((4, 8)), training=True))

    if executor == "compiled":
        step = rx.function(step)
    found = [strategy.experimental_local_results(step()) for _ in range(2)]
    return [np.asarray(part) for parts in found for part in parts]


@cases(EAGER, VIRTUAL)
def test_dropout_differs_per_replica_and_step_and_follows_the_seed(
    name: str, executor: str
) -> None:
    masks = _masks(STRATEGIES[name](), executor)
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    again = _masks(STRATEGIES[name](), executor)
    for first, second in zip(masks, again, strict=True):
        np.testing.assert_array_equal(first, second)


def test_dropout_is_the_same_in_both_executors() -> None:
    eager, compiled = (_masks(STRATEGIES["mirrored_2"](), e) for e in EXECUTORS)
    for first, second in zip(eager, compiled, strict=True):
        np.testing.assert_array_equal(first, second)


def synchronized() -> keras.Model:
    parts = [
        keras.layers.Dense(3),
        keras.layers.BatchNormalization(momentum=0.5, synchronized=True),
        keras.layers.Dense(1),
    ]
    return keras.Sequential([keras.Input((4,)), *parts])


@cases(COMPILED)
def test_synchronized_batch_norm_has_the_statistics_of_the_global_batch(
    name: str, executor: str, wanted: Any
) -> None:
    found = Loop(STRATEGIES[name](), executor, synchronized, sgd).train()
    found.require_equal(wanted("batch_norm", programs.batch_norm, sgd))


@cases()
def test_synchronized_batch_norm_counts_the_rows_of_uneven_parts(
    name: str, executor: str, wanted: Any
) -> None:
    found = Loop(STRATEGIES[name](), executor, synchronized, sgd).train(2, ALL_ROWS)
    found.require_equal(wanted("uneven", programs.batch_norm, sgd, data=ALL_ROWS))


def test_other_batch_norm_has_the_statistics_of_each_replica() -> None:
    """S109, S110: moving averages are local, and their mean is read."""
    strategy = STRATEGIES["mirrored_2"]()
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        layer.build((None, 4))
    data = strategy.experimental_distribute_dataset(
        rx.data.Dataset.from_tensor_slices(X[:16]).batch(16)
    )
    for rows in data:
        strategy.run(lambda x: layer(x, training=True), args=(rows,))
    parts = strategy.experimental_local_results(layer.moving_mean.replicax_variable)
    np.testing.assert_allclose(parts[0], X[:8].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts[1], X[8:16].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_mean.value, X[:16].mean(0), rtol=1e-5, atol=1e-6)


@cases(COMPILED, executors=("compiled",))
def test_losses_of_default_reduction_are_divided_by_the_replicas(
    name: str, executor: str, wanted: Any
) -> None:
    """As Keras does under tf.distribute: equal parts add up to the mean of the batch."""
    parts = programs.sequential, sgd
    loss = keras.losses.MeanSquaredError
    found = Loop(STRATEGIES[name](), executor, *parts, loss).train()
    found.require_equal(wanted("even", *parts))


def regularized() -> keras.Model:
    layer = keras.layers.Dense(1, kernel_regularizer="l2", activity_regularizer=None)
    return keras.Sequential([keras.Input((4,)), layer])


@cases(COMPILED, executors=("compiled",))
def test_losses_of_layers_are_scaled_by_scale_regularization_loss(
    name: str, executor: str, wanted: Any
) -> None:
    found = Loop(STRATEGIES[name](), executor, regularized, sgd).train()
    found.require_equal(wanted("regularized", regularized, sgd))


@cases(COMPILED)
def test_a_model_that_is_built_in_the_first_step_has_variables_of_the_strategy(
    name: str, executor: str, wanted: Any
) -> None:
    """T25: made once, for all replicas."""
    parts = programs.lazy, lambda: keras.optimizers.SGD(0.05, momentum=0.9)
    loop = Loop(STRATEGIES[name](), executor, *parts)
    found = loop.train()
    assert all(v.replicax_variable is not None for v in loop.model.variables)
    found.require_equal(wanted("lazy", *parts))


def test_a_loop_and_fit_take_turns_on_one_model() -> None:
    def run(name: str) -> programs.Outcome:
        strategy = STRATEGIES[name]()
        loop = Loop(strategy, "compiled", synchronized, sgd)
        loop.model.compile(loop.optimizer, "mse")
        history = []
        for _ in range(2):
            loop.train(1)
            fitted = loop.model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
            history.append(fitted.history)
        return programs.outcome(loop.model, history, loop.losses)

    run("mirrored_2").require_equal(run("one_device"))


def test_a_subclassed_model_is_built_by_its_first_compiled_step() -> None:
    """Keras makes its variables while it infers shapes; they get values before they are used."""

    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(4, activation="relu")
            self.out = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.out(self.hidden(inputs))

    def losses(strategy: rx.Strategy) -> list[float]:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model, optimizer = Subclassed(), keras.optimizers.SGD(0.1)

        def step(rows: Any) -> Any:
            def loss() -> Any:
                return (model(rows) ** 2).sum() / 8

            if not model.built:
                model(rows)
            value, gradients = rx.value_and_grad(loss, model.trainable_variables)()
            optimizer.apply(gradients, model.trainable_variables)
            return value

        train = rx.function(
            lambda rows: strategy.reduce("SUM", strategy.run(step, args=(rows,)), axis=None)
        )
        data = np.arange(32, dtype=np.float32).reshape(16, 2) / 32
        batches = rx.data.Dataset.from_tensor_slices(data).repeat(2).batch(16)
        return [float(train(b)) for b in strategy.experimental_distribute_dataset(batches)]

    alone = losses(rx.OneDeviceStrategy("CPU:0"))
    np.testing.assert_allclose(losses(rx.MirroredStrategy(["CPU:0", "CPU:1"])), alone, rtol=1e-5)
    assert alone[1] < alone[0]


def test_a_model_of_no_scope_is_built_by_its_first_compiled_call() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    call = rx.function(lambda rows: model(rows, training=False))
    inside = call(X[:4])
    assert [weight.shape for weight in model.weights[:2]] == [(X.shape[1], 3), (3,)]
    np.testing.assert_allclose(np.asarray(model(X[:4])), np.asarray(inside), rtol=1e-6)
    model.layers[0].kernel.assign(np.zeros((X.shape[1], 3), np.float32))
    np.testing.assert_array_equal(np.asarray(call(X[:4])), np.zeros((4, 3)))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_replicas_have_the_settings_of_keras_around_them(executor: str) -> None:
    """Keras keeps them per thread, and replicas of an eager run are threads."""

    class Late(keras.Model):
        def build(self, input_shape: Any) -> None:
            self.dense = keras.layers.Dense(2)
            self.dense.build(input_shape)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    strategy = STRATEGIES["mirrored_2"]()
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        with strategy.scope():
            model = Late()

        def step() -> Any:
            return strategy.run(lambda: model(X))

        results = (rx.function(step) if executor == "compiled" else step)()
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    assert model.dense.compute_dtype == "bfloat16"
    for result in strategy.experimental_local_results(results):
        assert result.dtype == jnp.bfloat16


def test_unseeded_numbers_of_eager_replicas_follow_the_seed() -> None:
    strategy = STRATEGIES["mirrored_2"]()

    def draw() -> list[list[float]]:
        keras.utils.set_random_seed(3)
        steps = [strategy.run(lambda: keras.random.normal(())) for _ in range(2)]
        return [[float(v) for v in strategy.experimental_local_results(step)] for step in steps]

    found = draw()
    assert len({number for step in found for number in step}) == 4
    strategy.run(lambda: keras.random.normal(()))
    assert draw() == found
