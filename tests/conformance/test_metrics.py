"""Metrics count per replica and are combined when read (S217, S107-S112, X5)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import STRATEGIES, TWO_REPLICAS
from vocabulary import in_compiled_merge, in_merge, number, refused, replica_values, values

import replicax as rx

M = rx.metrics
MANY = tuple(name for name in STRATEGIES if name not in ("default", "one_device", "mirrored_1"))
RNG = np.random.default_rng(7)


def make(strategy: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    with strategy.scope():
        return cls(*args, **kwargs)


def parts(strategy: Any, arrays: tuple[Any, ...], sizes: list[int]) -> tuple[Any, ...]:
    """Cuts arrays into one part of the given size per replica."""
    starts = np.cumsum([0, *sizes])
    return tuple(
        values(strategy, lambda i, a=a: jnp.asarray(a[starts[i] : starts[i + 1]])) for a in arrays
    )


def uneven(strategy: Any, first: int = 1) -> list[int]:
    """1 element on replica 0, 2 on replica 1, and so on, from `first`."""
    return [first + i for i in range(strategy.num_replicas_in_sync)]


# Metrics, and their values computed with NumPy from labels, scores and weights.


def mean_of(per_example: Any) -> Any:
    def expected(y: Any, p: Any, w: Any) -> float:
        return float((per_example(y, p) * w).sum() / w.sum())

    return expected


def top_k(y: Any, p: Any) -> Any:
    order = np.argsort(-p, axis=-1, kind="stable")[:, :2]
    return (order == np.asarray(y).reshape(-1, 1)).any(-1)


def one_hot(y: Any) -> Any:
    return np.eye(4, dtype=np.float32)[y]


def area(y: Any, p: Any, w: Any) -> float:
    steps = np.concatenate([[-1e-7], np.arange(1, 199) / 199, [1 + 1e-7]]).astype(np.float32)
    above = p[None, :] > steps[:, None]
    hits = (above * (y * w)).sum(1) / (y * w).sum()
    alarms = (above * ((1 - y) * w)).sum(1) / ((1 - y) * w).sum()
    return float(np.trapezoid(hits[::-1], alarms[::-1]))


def precision(y: Any, p: Any, w: Any) -> float:
    above = p > 0.5
    return float((above * y * w).sum() / (above * w).sum())


def recall(y: Any, p: Any, w: Any) -> float:
    return float(((p > 0.5) * y * w).sum() / (y * w).sum())


NUMBERS = RNG.integers(0, 4, 20)
SCORES = RNG.normal(size=(20, 4)).astype(np.float32)
BINARY = np.tile([1, 0, 1, 0], 5).astype(np.float32)
CHANCES = RNG.uniform(size=20).astype(np.float32)
REAL = RNG.normal(size=(20, 3)).astype(np.float32)
GUESS = RNG.normal(size=(20, 3)).astype(np.float32)
WEIGHTS = RNG.integers(1, 5, 20).astype(np.float32) / 2

CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "accuracy": (M.Accuracy, NUMBERS, SCORES.argmax(-1), mean_of(lambda y, p: y == p)),
    "binary": (M.BinaryAccuracy, BINARY, CHANCES, mean_of(lambda y, p: y == (p > 0.5))),
    "categorical": (
        M.CategoricalAccuracy,
        one_hot(NUMBERS),
        SCORES,
        mean_of(lambda y, p: y.argmax(-1) == p.argmax(-1)),
    ),
    "sparse": (
        M.SparseCategoricalAccuracy,
        NUMBERS,
        SCORES,
        mean_of(lambda y, p: y == p.argmax(-1)),
    ),
    "top_k": (
        lambda: M.TopKCategoricalAccuracy(2),
        one_hot(NUMBERS),
        SCORES,
        mean_of(lambda y, p: top_k(y.argmax(-1), p)),
    ),
    "sparse_top_k": (
        lambda: M.SparseTopKCategoricalAccuracy(2),
        NUMBERS[:, None],
        SCORES,
        mean_of(top_k),
    ),
    "mse": (M.MeanSquaredError, REAL, GUESS, mean_of(lambda y, p: ((y - p) ** 2).mean(-1))),
    "rmse": (
        M.RootMeanSquaredError,
        REAL,
        GUESS,
        lambda y, p, w: math.sqrt(mean_of(lambda y, p: ((y - p) ** 2).mean(-1))(y, p, w)),
    ),
    "mae": (M.MeanAbsoluteError, REAL, GUESS, mean_of(lambda y, p: abs(y - p).mean(-1))),
    "precision": (M.Precision, BINARY, CHANCES, precision),
    "recall": (M.Recall, BINARY, CHANCES, recall),
    "auc": (M.AUC, BINARY, CHANCES, area),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.strategies("virtual_2")
def test_S217_every_metric_equals_numpy(strategy: Any, run: Any, case: str) -> None:
    check_against_numpy(strategy, run, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.strategies(*(name for name in STRATEGIES if name != "virtual_2"))
def test_S217_every_metric_equals_numpy_everywhere(strategy: Any, run: Any, case: str) -> None:
    check_against_numpy(strategy, run, case)


def check_against_numpy(strategy: Any, run: Any, case: str) -> None:
    maker, labels, scores, expected = CASES[case]
    metric = make(strategy, maker)
    sizes = uneven(strategy, first=3)
    total = sum(sizes)
    y, p, w = labels[:total], scores[:total], WEIGHTS[:total]
    run(strategy, metric.update_state, parts(strategy, (y, p), sizes))
    want = expected(y, p, np.ones(total))
    np.testing.assert_allclose(float(metric.result()), want, rtol=2e-6)
    run(strategy, metric.update_state, parts(strategy, (y, p, w), sizes))
    twice = np.concatenate([np.ones(total), w])
    want = expected(np.concatenate([y, y]), np.concatenate([p, p]), twice)
    np.testing.assert_allclose(float(metric.result()), want, rtol=2e-6)


def test_S217_mean_over_uneven_replicas_and_empty_parts(strategy: Any, run: Any) -> None:
    mean, total = make(strategy, M.Mean), make(strategy, M.Sum)
    seen = []
    for sizes in (uneven(strategy), uneven(strategy, first=0), [0] * strategy.num_replicas_in_sync):
        data = RNG.normal(size=sum(sizes)).astype(np.float32)
        seen.append(data)

        def step(x: Any) -> None:
            mean.update_state(x)
            total.update_state(x)

        run(strategy, step, parts(strategy, (data,), sizes))
    everything = np.concatenate(seen)
    with strategy.scope():
        inside_scope = float(mean.result())
    # Not the mean of the replicas' means.
    np.testing.assert_allclose(inside_scope, everything.mean(dtype=np.float64), rtol=1e-5)
    assert float(mean.result()) == inside_scope
    np.testing.assert_allclose(float(total.result()), everything.sum(), rtol=1e-5)
    with strategy.scope():
        mean.reset_state()
    total.reset_states()
    assert (float(mean.result()), float(total.result())) == (0.0, 0.0)
    run(strategy, mean.update_state, (values(strategy, lambda i: jnp.full(2, float(i))),))
    assert float(mean.result()) == (strategy.num_replicas_in_sync - 1) / 2


def test_S217_result_of_nothing_is_zero(strategy: Any) -> None:
    for cls in (M.Sum, M.Mean, M.Accuracy, M.RootMeanSquaredError, M.Precision, M.Recall, M.AUC):
        assert float(make(strategy, cls).result()) == 0.0


@pytest.mark.every_strategy
def test_S217_result_in_replica_context_is_the_total_everywhere(strategy: Any, run: Any) -> None:
    metric = make(strategy, M.Mean)

    def step(x: Any) -> Any:
        metric.update_state(x)
        # The result is on the device of the replica.
        return metric.result() + 0 * x[0]

    n = strategy.num_replicas_in_sync
    got = run(strategy, step, (values(strategy, lambda i: jnp.full(1 + i % 2, i + 1.0)),))
    sizes = [1 + i % 2 for i in range(n)]
    want = sum(s * (i + 1.0) for i, s in enumerate(sizes)) / sum(sizes)
    np.testing.assert_allclose(replica_values(strategy, got), [want] * n, rtol=1e-6)


@pytest.mark.strategies("default", "one_device", "mirrored_2", "central_2", "virtual_2")
def test_S217_calling_a_metric_updates_and_returns_the_result(strategy: Any, run: Any) -> None:
    metric = make(strategy, M.Mean)
    for round_number in (1.0, 2.0):
        got = run(strategy, lambda r=round_number: metric(jnp.full(3, r)))
    assert replica_values(strategy, got) == [1.5] * strategy.num_replicas_in_sync


@pytest.mark.every_strategy
@pytest.mark.strategies(*TWO_REPLICAS)
@pytest.mark.parametrize("where", [in_merge, in_compiled_merge])
def test_S110_result_in_merge_call(strategy: Any, where: Any) -> None:
    metric = make(strategy, M.Mean)
    strategy.run(lambda: metric.update_state(number()))
    assert float(where(strategy, lambda s: metric.result())) == 1.5


@pytest.mark.strategies(*MANY)
def test_X5_update_outside_replicas_is_refused(strategy: Any) -> None:
    metric = make(strategy, M.Mean, name="loss")
    with strategy.scope(), refused(ValueError, match="strategy.run"):
        metric.update_state([1.0])
    with refused(rx.errors.InvalidArgumentError, match="'loss'"):
        metric.update_state([1.0])
    with strategy.scope(), refused(ValueError, match="inside the function"):
        metric([1.0])
    assert float(metric.result()) == 0.0


@pytest.mark.strategies("default", "one_device", "mirrored_1")
def test_X5_one_replica_may_update_anywhere(strategy: Any) -> None:
    metric = make(strategy, M.Mean)
    with strategy.scope():
        metric.update_state([1.0, 3.0])
    metric.update_state([8.0])
    assert float(metric.result()) == 4.0


@pytest.mark.strategies(*TWO_REPLICAS)
def test_a_metric_from_outside_the_scope_is_refused(strategy: Any) -> None:
    metric = M.Mean()
    with refused(rx.errors.ContextError, match="created outside of every scope"):
        strategy.run(lambda: metric.update_state([1.0]))
    metric.update_state([2.0, 4.0])
    # One shared copy: nothing is summed.
    assert replica_values(strategy, strategy.run(metric.result)) == [3.0, 3.0]


@pytest.mark.one_strategy
@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_counts_stay_exact_beyond_24_bits(strategy: Any, run: Any) -> None:
    total, mean = make(strategy, M.Sum), make(strategy, M.Mean)
    n = strategy.num_replicas_in_sync
    large = 2.0**24

    def step(value: Any, weight: Any) -> None:
        total.update_state(value)
        mean.update_state(1.0, sample_weight=weight)

    run(strategy, step, (jnp.float32(large), jnp.float32(large)))
    for _ in range(8):
        run(strategy, step, (jnp.float32(1.0), jnp.float32(1.0)))
    run(strategy, step, (jnp.float32(-large), jnp.float32(-large)))
    # Sums in float32 would have lost all of the ones.
    assert float(total.result()) == 8.0 * n
    assert float(mean.result()) == 1.0
    counts = {v.name: float(v.read_value()) for v in mean.variables}
    assert counts["count"] + counts["count_rest"] == 8.0 * n


def test_a_million_ones_after_2_24_in_one_program() -> None:
    total = M.Sum()
    total.update_state(2.0**24)

    @rx.function
    def ones() -> None:
        for _ in range(64):
            total.update_state(1.0)

    for _ in range(1000):
        ones()
    assert float(total.result()) == 2.0**24 + 64_000


@pytest.mark.parametrize(
    ("shape", "weight_shape"),
    [((4,), ()), ((4,), (4,)), ((4,), (4, 1)), ((4, 3), (4,)), ((4, 3), (4, 1)), ((4, 3), (4, 3))],
    ids=str,
)
def test_weights_are_broadcast_as_in_keras(shape: Any, weight_shape: Any) -> None:
    x = RNG.normal(size=shape).astype(np.float32)
    w = RNG.uniform(0.5, 2, size=weight_shape).astype(np.float32)
    # A weight per example applies to its whole row.
    full = np.broadcast_to(w.reshape(-1, *[1] * (x.ndim - 1)) if w.size == 4 else w, shape)
    np.testing.assert_allclose(
        float(M.Mean()(x, sample_weight=w)), (x * full).sum() / full.sum(), rtol=1e-5
    )
    np.testing.assert_allclose(float(M.Sum()(x, sample_weight=w)), (x * full).sum(), rtol=1e-5)


def test_examples_of_the_keras_documentation() -> None:
    column = np.array([[1], [2], [3], [4]])
    found = np.array([[0], [2], [3], [4]])
    assert float(M.Accuracy()(column, found)) == 0.75
    assert float(M.Accuracy()(column, found, sample_weight=[1, 1, 0, 0])) == 0.5
    labels, scores = [[1], [1], [0], [0]], [[0.98], [1.0], [0.0], [0.6]]
    assert float(M.BinaryAccuracy()(labels, scores)) == 0.75
    assert float(M.BinaryAccuracy()(labels, scores, sample_weight=[1, 0, 0, 1])) == 0.5
    assert float(M.BinaryAccuracy(threshold=0.7)(labels, scores)) == 1.0
    weights = [0.7, 0.3]
    scores = [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]]
    assert float(M.SparseCategoricalAccuracy()([[2], [1]], scores, weights)) == pytest.approx(0.3)
    assert float(M.TopKCategoricalAccuracy(1)([[0, 0, 1], [0, 1, 0]], scores)) == 0.5
    error = M.MeanSquaredError()
    assert float(error([[0, 1], [0, 0]], [[1, 1], [0, 0]])) == 0.25
    error.reset_state()
    assert float(error([[0, 1], [0, 0]], [[1, 1], [0, 0]], sample_weight=[1, 0])) == 0.5
    assert float(M.Precision(thresholds=0.5)([0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0])) == 1.0
    assert float(M.Precision(top_k=2)([0, 0, 1, 1], [1, 1, 1, 1])) == 0.5
    area = M.AUC(num_thresholds=3)
    assert float(area([0, 0, 1, 1], [0, 0.5, 0.3, 0.9], sample_weight=[1, 0, 0, 1])) == 1.0


def test_precision_and_recall_at_several_thresholds_in_the_given_order() -> None:
    y, p = np.array([0, 1, 1, 0, 1]), np.array([0.1, 0.3, 0.6, 0.7, 0.9], np.float32)
    thresholds = [0.65, 0.2, 0.95]
    got = M.Precision(thresholds)(y, p)
    np.testing.assert_allclose(got, [1 / 2, 3 / 4, 0.0], rtol=1e-6)
    np.testing.assert_allclose(M.Recall(thresholds)(y, p), [1 / 3, 1.0, 0.0], rtol=1e-6)
    two = M.Recall(class_id=1)
    assert float(two([[1, 0], [0, 1]], [[0.9, 0.9], [0.9, 0.1]])) == 0.0


def test_top_k_counts_ties_and_never_a_class_that_does_not_exist() -> None:
    scores = np.array([[1.0, 1.0, 0.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]], np.float32)
    metric = M.SparseTopKCategoricalAccuracy(1)
    assert float(metric([1, 7, -1], scores)) == pytest.approx(1 / 3)


def test_nan_predictions_are_not_positive() -> None:
    assert float(M.Precision()([1, 1], [np.nan, 0.9])) == 1.0
    assert float(M.Recall()([1, 1], [np.nan, 0.9])) == 0.5


@pytest.mark.one_strategy
@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_mean_tensor_keeps_the_shape(strategy: Any, run: Any) -> None:
    metric = make(strategy, M.MeanTensor, shape=(2,))
    run(strategy, lambda: metric.update_state(jnp.array([1.0, 2.0]) * number()))
    n = strategy.num_replicas_in_sync
    np.testing.assert_allclose(metric.result(), np.array([1.0, 2.0]) * (n + 1) / 2)
    with refused(ValueError, match=r"\(2,\)"):
        strategy.run(lambda: metric.update_state([1.0]))


class FractionAbove(M.Metric):
    """Written as for Keras: plain variables, and a result that reads them."""

    def __init__(self) -> None:
        super().__init__(name="above")
        self.above = self.add_weight(name="above", initializer="zeros")
        self.seen = self.add_weight(name="seen", dtype=jnp.int32)

    def update_state(self, x: Any) -> None:
        self.above.assign_add(jnp.sum(x > 1.5, dtype=jnp.float32))
        self.seen.assign_add(jnp.int32(x.size))

    def result(self) -> Any:
        return self.above / self.seen


@pytest.mark.strategies("default", "mirrored_2", "mirrored_4", "virtual_2", "central_2")
def test_S217_a_metric_of_the_user(strategy: Any, run: Any) -> None:
    metric = make(strategy, FractionAbove)
    n = strategy.num_replicas_in_sync

    def step() -> Any:
        metric.update_state(jnp.full(2, number()))
        return metric.result()

    got = run(strategy, step)
    assert replica_values(strategy, got) == [(n - 1) / n] * n
    assert float(metric.result()) == (n - 1) / n
    metric.reset_state()
    assert int(metric.seen.read_value()) == 0


@pytest.mark.one_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device")
def test_metrics_inside_a_gradient(strategy: Any, run: Any) -> None:
    metric = make(strategy, M.Mean)
    with strategy.scope():
        w = rx.Variable(2.0)

    def step(x: Any) -> Any:
        def loss() -> Any:
            value = jnp.sum(w * x)
            metric.update_state(value)
            return value

        return rx.value_and_grad(loss, [w])()[1][0]

    n = strategy.num_replicas_in_sync
    got = run(strategy, step, (values(strategy, lambda i: jnp.array([1.0 + i])),))
    assert replica_values(strategy, got) == [1.0 + i for i in range(n)]
    assert float(metric.result()) == n + 1.0


def test_names_types_and_state() -> None:
    metric = M.Mean(name="loss", dtype=jnp.bfloat16)
    assert (metric.name, metric.dtype) == ("loss", jnp.bfloat16)
    assert repr(metric) == "<rx.metrics.Mean name=loss>"
    children = metric.checkpoint_children()
    assert list(children) == ["total", "total_rest", "count", "count_rest"]
    assert {id(v) for v in metric.variables} == {id(v) for v in children.values()}
    assert all(v.synchronization is rx.VariableSynchronization.ON_READ for v in metric.variables)
    assert all(v.aggregation is rx.VariableAggregation.SUM for v in metric.variables)
    assert not metric.trainable_variables
    assert M.Mean()([1.0]).dtype == jnp.float32
    whole = M.Sum(dtype=jnp.int32)
    assert int(whole([2**24, 1])) == 2**24 + 1

    class Pair(M.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = M.Sum(), M.Sum()

        def update_state(self, x: Any) -> None:
            self.left.update_state(x)
            self.right.update_state(2 * x)

        def result(self) -> Any:
            return {"left": self.left.result(), "right": self.right.result()}

    pair = Pair()
    assert {k: float(v) for k, v in pair(jnp.float32(2)).items()} == {"left": 2.0, "right": 4.0}
    assert pair.checkpoint_children() == {"left": pair.left, "right": pair.right}
    pair.reset_state()
    assert float(pair.left.result()) == 0.0


def test_state_moves_to_another_strategy() -> None:
    """What a checkpoint does: one logical value per variable, whichever replica counted it."""
    source = STRATEGIES["mirrored_4"]()
    metric = make(source, M.Mean)
    source.run(lambda: metric.update_state(number()))
    other = make(STRATEGIES["virtual_2"](), M.Mean)
    for name, variable in metric.checkpoint_children().items():
        other.checkpoint_children()[name].assign(variable.read_value())
    assert float(other.result()) == float(metric.result()) == 2.5


def test_wrong_arguments_are_refused_with_shapes() -> None:
    with refused(ValueError, match=r"\(3,\).*\(2,\)"):
        M.Mean().update_state([1.0, 2.0, 3.0], sample_weight=[1.0, 1.0])
    with refused(ValueError, match=r"\(2,\) and \(3,\)"):
        M.MeanSquaredError().update_state([1.0, 2.0], [1.0, 2.0, 3.0])
    with refused(ValueError, match="without `Sparse`"):
        M.SparseCategoricalAccuracy().update_state([[0, 1], [1, 0]], [[0.1, 0.2], [0.2, 0.1]])
    with refused(ValueError, match="with `Sparse`"):
        M.CategoricalAccuracy().update_state([1], [[0.1, 0.2]])
    with refused(ValueError, match="`k`"):
        M.TopKCategoricalAccuracy(0)
    with refused(ValueError, match="between 0 and 1"):
        M.Precision(thresholds=[0.5, 2.0])
    with refused(ValueError, match="num_thresholds"):
        M.AUC(1)
    with refused(rx.errors.InvalidArgumentError, "'ROC', 'PR'"):
        M.AUC(curve="XY")
    with refused(ValueError, match="initializer"):
        M.Metric().add_weight("w", initializer="glorot")
    metric = M.Metric()
    metric.add_weight("w", (2,), initializer=lambda shape, dtype: jnp.ones(shape, dtype))
    with refused(ValueError, match="'w'"):
        metric.add_weight("w")


def test_x64_metrics() -> None:
    with jax.enable_x64(True):
        metric = M.Mean(dtype=jnp.float64)
        metric.update_state(np.array([1.0, 1.0 + 1e-12]))
        assert metric.result().dtype == jnp.float64
        assert float(metric.result()) > 1.0
