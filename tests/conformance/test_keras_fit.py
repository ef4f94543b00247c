"""fit, evaluate and predict of Keras models made in a scope equal those of Keras alone.

S208, S210: a model made in the scope of a strategy is distributed by its own methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras_programs as programs
import numpy as np
import pytest
from keras_programs import EVEN, MODELS, SOURCES, STRATEGY_NAMES, UNEVEN, keras

# Keras ends an epoch over data of unknown size with this warning, with and without a strategy.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")

# Each model, each source, each strategy and both sizes at least once.
DEFAULT = {
    ("one_device", "sequential", "numpy", EVEN),
    ("mirrored_2", "sequential", "numpy", UNEVEN),
    ("mirrored_2", "lazy", "py_dataset", UNEVEN),
    ("virtual_2", "functional", "generator", UNEVEN),
    ("central_2", "subclassed", "rx_data", UNEVEN),
    ("mirrored_2", "batch_norm", "numpy", UNEVEN),
    ("virtual_2", "batch_norm", "distributed", EVEN),
    ("mirrored_2", "dropout", "numpy", UNEVEN),
    ("mirrored_2", "lstm", "numpy", UNEVEN),
    ("virtual_2", "embedding", "grain", UNEVEN),
    ("mirrored_2", "several", "distributed", UNEVEN),
    ("mirrored_2", "pair", "numpy", EVEN),
}
MATRIX = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow)
    for case in (
        (strategy, model, source, rows)
        for strategy in STRATEGY_NAMES
        for model in MODELS
        for source in SOURCES
        for rows in (EVEN, UNEVEN)
    )
]


@pytest.mark.parametrize(("strategy_name", "model", "source", "rows"), MATRIX)
def test_fit_evaluate_and_predict_equal_keras_alone(
    strategy_name: str, model: str, source: str, rows: int
) -> None:
    found = programs.run_whole(strategy_name, model, source, rows)
    found.require_equal(programs.reference(model, rows))


def require_same(
    run: Callable[[Any], programs.Outcome], name: str = "mirrored_2", tolerance: float = 2e-5
) -> None:
    """Compares what a function comes to in the scope of a strategy with Keras alone."""
    wanted = run(programs.scope_of(None))
    run(programs.scope_of(name)).require_equal(wanted, tolerance)


X, Y = programs.data_of("sequential", UNEVEN)
LABELS = (Y > 0).astype(np.float32)
WEIGHTS = np.linspace(0.1, 2.0, UNEVEN).astype(np.float32)
optimizers = keras.optimizers


def fit(
    compile_options: Callable[[], dict[str, Any]], fit_options: dict[str, Any]
) -> Callable[[Any], programs.Outcome]:
    """Returns a function that fits the sequential model in a scope."""

    def run(scope: Any) -> programs.Outcome:
        with scope:
            model = programs.compiled("sequential", **compile_options())
        given = {"x": X, "y": Y, "batch_size": 8, "epochs": 2, **fit_options}
        history = model.fit(**given, shuffle=False, verbose=0)
        return programs.outcome(model, history.history)

    return run


# Options of `compile` and of `fit`.
OPTIONS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "validation_data": (dict, {"validation_data": (X[:5], Y[:5])}),
    "validation_split": (dict, {"validation_split": 0.4, "validation_batch_size": 3}),
    "validation_freq": (
        dict,
        {"validation_data": (X, Y), "validation_steps": 1, "validation_freq": 2},
    ),
    "sample_weight": (
        lambda: {"weighted_metrics": ["mae"]},
        {"sample_weight": WEIGHTS, "validation_data": (X, Y, WEIGHTS)},
    ),
    "class_weight": (
        lambda: {"loss": keras.losses.BinaryCrossentropy(from_logits=True)},
        {"y": LABELS, "class_weight": {0: 0.3, 1: 2.0}},
    ),
    "steps_per_epoch": (dict, {"steps_per_epoch": 1}),
    "steps_per_execution": (lambda: {"steps_per_execution": 2}, {"validation_data": (X, Y)}),
    "initial_epoch": (dict, {"initial_epoch": 1, "epochs": 3}),
    "run_eagerly": (lambda: {"run_eagerly": True}, {"validation_data": (X, Y)}),
    "no_jit": (lambda: {"jit_compile": False}, {"validation_data": (X, Y)}),
    "accumulation": (
        lambda: {"optimizer": optimizers.SGD(0.05, gradient_accumulation_steps=2)},
        {"epochs": 3},
    ),
    "ema": (
        lambda: {"optimizer": optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)},
        {},
    ),
    "ema_overwrite": (
        lambda: {
            "optimizer": optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=2),
        },
        {},
    ),
    "weight_decay": (lambda: {"optimizer": optimizers.AdamW(0.01, weight_decay=0.1)}, {}),
    "clipnorm": (lambda: {"optimizer": optimizers.SGD(0.05, clipnorm=0.1)}, {}),
    "clipvalue": (lambda: {"optimizer": optimizers.SGD(0.05, clipvalue=0.1)}, {}),
    "global_clipnorm": (lambda: {"optimizer": optimizers.SGD(0.05, global_clipnorm=0.1)}, {}),
    "adam": (lambda: {"optimizer": "adam"}, {}),
    "momentum": (lambda: {"optimizer": optimizers.SGD(0.05, momentum=0.9, nesterov=True)}, {}),
    "adagrad": (lambda: {"optimizer": optimizers.Adagrad(0.05)}, {}),
    "loss_scale": (
        lambda: {"optimizer": optimizers.LossScaleOptimizer(optimizers.SGD(0.05))},
        {},
    ),
    "auto_scale": (lambda: {"auto_scale_loss": True}, {}),
    "schedule": (
        lambda: {"optimizer": optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))},
        {},
    ),
    "loss_weights": (lambda: {"loss": ["mse"], "loss_weights": [0.5], "metrics": ["mae"]}, {}),
}
# Each kind of option once; the others take the same way.
FAST_OPTIONS = (
    *("sample_weight", "steps_per_execution"),
    *("run_eagerly", "accumulation", "global_clipnorm", "adam"),
)


@pytest.mark.parametrize(
    "option",
    [pytest.param(o, marks=() if o in FAST_OPTIONS else pytest.mark.slow) for o in OPTIONS],
)
def test_options_of_compile_and_fit_mean_the_same(option: str) -> None:
    require_same(fit(*OPTIONS[option]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy_name", STRATEGY_NAMES)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_mean_the_same_under_every_strategy(option: str, strategy_name: str) -> None:
    require_same(fit(*OPTIONS[option]), strategy_name)


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.slow)]
)
def test_mixed_precision_computes_and_scales_as_keras_alone(policy: str) -> None:
    def run(scope: Any) -> programs.Outcome:
        before = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy(policy)
        try:
            with scope:
                model = programs.compiled("sequential")
            history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        finally:
            keras.mixed_precision.set_dtype_policy(before)
        assert model.layers[0].compute_dtype == policy.removeprefix("mixed_")
        assert model.trainable_variables[0].dtype == "float32"
        if policy == "mixed_float16":
            assert isinstance(model.optimizer, optimizers.LossScaleOptimizer)
        return programs.outcome(model, history.history)

    require_same(run, tolerance=2e-2)


def test_methods_on_one_batch_equal_those_of_keras_alone() -> None:
    def run(scope: Any) -> programs.Outcome:
        with scope:
            model = programs.compiled("batch_norm", metrics=["mae"])
        trained = [model.train_on_batch(X, Y, return_dict=True) for _ in range(3)]
        trained.append(model.train_on_batch(X[:3], Y[:3], WEIGHTS[:3], return_dict=True))
        tested = model.test_on_batch(X, Y)
        return programs.outcome(model, trained, tested, model.predict_on_batch(X[:7]))

    require_same(run)


class OwnStep(keras.Model):
    """A model with a training step of its own, as Keras' guide for JAX writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def compute_loss_and_updates(  # type: ignore[override]
        self, trainable: Any, non_trainable: Any, x: Any, y: Any
    ) -> Any:
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x)
        return keras.ops.mean(keras.ops.abs(y - y_pred)), non_trainable

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        x, y = data
        grad = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, non_trainable), grads = grad(trainable, non_trainable, x, y)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        metrics = self.tracker.stateless_update_state(metrics, loss)
        logs = {"loss": self.tracker.stateless_result(metrics)}
        return logs, (trainable, non_trainable, optimizer, metrics)


class OwnLoss(keras.Model):
    """A model whose loss has terms of layers, of weights and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3, kernel_regularizer="l2")
        self.activity = keras.layers.ActivityRegularization(l2=0.1)
        self.out = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="largest")

    def call(self, x: Any) -> Any:
        hidden = self.activity(self.dense(x))
        self.add_loss(0.01 * keras.ops.sum(hidden**2))
        return self.out(hidden)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.tracker.update_state(keras.ops.max(y_pred))
        return loss + 0.1 * keras.ops.mean(y_pred**2)


@pytest.mark.parametrize("kind", [OwnStep, OwnLoss])
def test_a_subclass_with_its_own_step_or_loss_trains_as_with_keras_alone(kind: Any) -> None:
    def run(scope: Any) -> programs.Outcome:
        keras.utils.set_random_seed(1)
        with scope:
            model = kind()
            model.compile(optimizer="sgd", loss="mse")
        history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return programs.outcome(model, history.history)

    require_same(run, "mirrored_2")


def test_shuffling_follows_the_seed_under_a_strategy_as_without() -> None:
    def run(scope: Any) -> programs.Outcome:
        with scope:
            model = programs.compiled("dropout")
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        return programs.outcome(model, history.history)

    require_same(run, "mirrored_2")
