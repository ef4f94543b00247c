"""Metrics with the numbers of Keras 3.15: counts at thresholds, curves, overlaps."""

from __future__ import annotations

import contextlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import refused

import replicax as rx
from replicax import metrics

# fmt: off
TRUE = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 1]
PRED = [0.44, 0.57, 0.15, 0.93, 0.92, 0.36, 0.46, 0.35, 0.68, 0.28, 0.13, 0.56, 0.52, 0.21, 0.1,
        0.45, 0.64, 0.52, 0.15, 0.56, 0.52, 0.68, 0.33, 0.5]
WEIGHTS = [3.0, 0.0, 1.0, 3.0, 3.0, 0.0, 3.0, 3.0, 1.0, 1.0, 3.0, 3.0, 2.0, 1.0, 0.0, 3.0, 1.0,
           2.0, 2.0, 0.0, 1.0, 2.0, 0.0, 2.0]
CLASSES = [2, 2, 1, 1, 2, 0, 1, 1, 1, 0, 0, 2]
CHOSEN = [2, 1, 2, 1, 0, 2, 0, 0, 0, 1, 0, 2]
CLASS_WEIGHTS = [2.0, 2.0, 2.0, 0.0, 1.0, 1.0, 0.0, 0.0, 2.0, 0.0, 2.0, 0.0]
SCORES = [[0.38, 0.71, 0.61], [0.94, 0.99, 0.72], [0.81, 0.15, 0.71], [0.85, 0.4, 0.55],
          [0.48, 0.96, 0.32], [0.4, 0.0, 0.42], [0.63, 0.93, 0.92], [0.33, 0.99, 0.19],
          [0.82, 0.16, 0.41], [0.07, 0.86, 0.83], [0.14, 0.53, 0.26], [0.49, 0.55, 0.11]]
ONE_HOT = np.eye(3)[CLASSES].tolist()

# Without weights, and with them.
BINARY = {
    "TruePositives()": (7.0, 13.0),
    "FalsePositives()": (4.0, 5.0),
    "TrueNegatives()": (10.0, 17.0),
    "FalseNegatives()": (3.0, 5.0),
    "TruePositives(thresholds=[0.7, 0.2])": ([2.0, 10.0], [6.0, 18.0]),
    "FalsePositives(thresholds=[0.7, 0.2])": ([0.0, 10.0], [0.0, 16.0]),
    "TrueNegatives(thresholds=[0.7, 0.2])": ([14.0, 4.0], [22.0, 6.0]),
    "FalseNegatives(thresholds=[0.7, 0.2])": ([8.0, 0.0], [12.0, 0.0]),
    "Precision(thresholds=[0.5])": (0.63636363, 0.72222221),
    "Recall(thresholds=[0.3, 0.6])": ([1.0, 0.5], [1.0, 0.55555558]),
    "AUC()": (0.85714281, 0.86868685),
    "AUC(curve='PR')": (0.84881306, 0.89416867),
    "AUC(num_thresholds=5)": (0.78928572, 0.82954544),
    "AUC(num_thresholds=5, curve='PR')": (0.73338705, 0.82035887),
    "AUC(num_thresholds=5, summation_method='minoring')": (0.66428572, 0.72222215),
    "AUC(num_thresholds=5, summation_method='majoring')": (0.91428572, 0.93686867),
    "AUC(num_thresholds=5, curve='PR', summation_method='minoring')": (0.47607654, 0.43237934),
    "AUC(num_thresholds=5, curve='PR', summation_method='majoring')": (0.89090908, 0.92283952),
    "AUC(thresholds=[0.3, 0.6], curve='PR')": (0.84389746, 0.86670446),
    "AUC(from_logits=True, curve='PR')": (0.848813, 0.89416867),
    "SensitivityAtSpecificity(0.7)": (0.80000001, 0.83333331),
    "SpecificityAtSensitivity(0.7)": (0.9285714, 1.0),
    "PrecisionAtRecall(0.6)": (0.875, 1.0),
    "RecallAtPrecision(0.7)": (0.69999999, 0.83333331),
    "SensitivityAtSpecificity(0.5, num_thresholds=1)": (0.69999999, 0.72222221),
    "RecallAtPrecision(1.0)": (0.5, 0.72222221),
    "BinaryIoU()": (0.59821427, 0.66608697),
    "BinaryIoU([1], threshold=0.4)": (0.47058818, 0.46874994),
}
OF_CLASSES = {
    "MeanIoU(3)": (0.20634921, 0.19444446),
    "IoU(3, [0, 2])": (0.23809525, 0.29166669),
    "MeanIoU(4)": (0.20634921, 0.19444446),
    "MeanIoU(3, ignore_class=1)": (0.21666665, 0.27777779),
}
OF_SCORES = {
    "OneHotIoU(3, [1])": (0.18181817, 0.0),
    "OneHotMeanIoU(3)": (0.06060606, 0.0),
    "F1Score()": ([0.0, 0.30769226, 0.0], [0.0, 0.0, 0.0]),
    "F1Score(average='micro')": (0.16666663, 0.0),
    "F1Score(average='macro')": (0.10256409, 0.0),
    "F1Score(average='weighted')": (0.12820511, 0.0),
    "FBetaScore(beta=2.0, threshold=0.4)": (
        [0.0, 0.35714284, 0.41666663], [0.0, 0.0, 0.68965518]),
    "FBetaScore(average='micro', beta=0.5, threshold=0.4)": (0.19230765, 0.19230765),
    "AUC(multi_label=True, num_labels=3)": (0.29820326, 0.31397706),
    "AUC(multi_label=True, num_labels=3, curve='PR', label_weights=[1.0, 2.0, 0.5])": (
        0.31046662, 0.26449734),
    "AUC(label_weights=[1.0, 2.0, 0.5])": (0.34506175, 0.14165039),
    "SensitivityAtSpecificity(0.4, class_id=1)": (0.40000001, 0.0),
    "TopKCategoricalAccuracy(k=2)": (0.33333334, 0.25),
}
# fmt: on
# Each compiles its own programs, so the default run has one of a kind.
QUICK = {"TruePositives()", "TrueNegatives(thresholds=[0.7, 0.2])", "AUC(curve='PR')"}
QUICK |= {"AUC(num_thresholds=5, summation_method='majoring')", "PrecisionAtRecall(0.6)"}
QUICK |= {"BinaryIoU()", "MeanIoU(3, ignore_class=1)", "F1Score()", "F1Score(average='weighted')"}
QUICK |= {"FBetaScore(beta=2.0, threshold=0.4)", "AUC(multi_label=True, num_labels=3)"}
DATA: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "binary": (TRUE, PRED, WEIGHTS, BINARY),
    "classes": (CLASSES, CHOSEN, CLASS_WEIGHTS, OF_CLASSES),
    "scores": (ONE_HOT, SCORES, CLASS_WEIGHTS, OF_SCORES),
}


CASES = [
    pytest.param(name, kind, marks=() if name in QUICK else pytest.mark.slow)
    for kind, (_, _, _, expected) in DATA.items()
    for name in expected
]


def made(name: str) -> Any:
    return eval(name, dict(vars(metrics)))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_numbers_are_those_of_keras(name: str, kind: str) -> None:
    true, pred, weights, expected = DATA[kind]
    metric = made(name)
    for value, own in zip(expected[name], (None, weights), strict=True):
        metric = made(name)
        for part in (slice(0, 5), slice(5, None)):
            metric.update_state(true[part], pred[part], own and own[part])
        np.testing.assert_allclose(metric.result(), value, rtol=2e-6, atol=2e-7)
        assert np.shape(metric.result()) == np.shape(value)
    metric.reset_state()
    assert not np.any(metric.result())


@pytest.mark.one_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AUC(curve='PR')", "binary"),
        ("F1Score(average='macro')", "scores"),
        ("MeanIoU(3)", "classes"),
    ],
)
def test_replicas_count_together_also_with_parts_of_different_sizes(
    strategy: Any, name: str, kind: str
) -> None:
    true, pred, weights, expected = DATA[kind]
    arrays = tuple(np.asarray(x, np.float32) for x in (true, pred, weights))
    # The last batch is smaller, and cannot be divided evenly.
    dataset = rx.data.Dataset.from_tensor_slices(arrays).batch(7)
    with strategy.scope():
        metric = made(name)

    @rx.function
    def step(batch: Any) -> None:
        strategy.run(lambda t, p, w: metric.update_state(t, p, w), args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset):
        step(batch)
    np.testing.assert_allclose(metric.result(), expected[name][1], rtol=2e-6)
    inside = strategy.run(lambda: metric.result())
    for value in strategy.experimental_local_results(inside):
        np.testing.assert_allclose(value, expected[name][1], rtol=2e-6)


@pytest.mark.strategies("mirrored_2")
def test_checkpoints_keep_metrics_that_are_built_by_their_first_batch(
    strategy: Any, tmp_path: Any
) -> None:
    def counted() -> Any:
        with strategy.scope():
            return metrics.F1Score()

    true, pred = jnp.asarray(ONE_HOT), jnp.asarray(SCORES)
    first = counted()
    strategy.run(lambda: first.update_state(true, pred))
    path = rx.train.Checkpoint(metric=first).write(tmp_path / "a")
    strategy.run(lambda: first.update_state(pred, pred))
    second = counted()
    strategy.run(lambda: second.update_state(true, pred))
    rx.train.Checkpoint(metric=second).restore(path).assert_consumed()
    strategy.run(lambda: second.update_state(pred, pred))
    np.testing.assert_allclose(second.result(), first.result())


def test_values_that_wait_for_the_first_batch_are_counted_on(tmp_path: Any) -> None:
    first, second = metrics.F1Score(), metrics.F1Score()
    first.update_state(ONE_HOT, SCORES)
    path = rx.train.Checkpoint(metric=first).write(tmp_path / "a")
    first.update_state(SCORES, SCORES)
    status = rx.train.Checkpoint(metric=second).restore(path)
    second.update_state(SCORES, SCORES)
    status.assert_consumed()
    np.testing.assert_allclose(second.result(), first.result())


def test_what_metrics_refuse() -> None:
    invalid = rx.errors.InvalidArgumentError
    for name in (
        "AUC(curve='XY')",
        "AUC(summation_method='x')",
        "AUC(multi_label=True)",
        "AUC(num_thresholds=1)",
        "PrecisionAtRecall(1.5)",
        "RecallAtPrecision(-1)",
        "SensitivityAtSpecificity(0.5, num_thresholds=0)",
        "TruePositives(thresholds=[2.0])",
        "F1Score(average='x')",
        "F1Score(threshold=2.0)",
        "FBetaScore(beta=0.0)",
        "FBetaScore(beta=1)",
        "IoU(2, [2])",
        "IoU(2, [])",
        "MeanIoU(0)",
    ):
        with refused(invalid):
            made(name)
    with refused(invalid, "first batch"):
        metrics.F1Score().result()
    with refused(invalid, "batch, classes"):
        metrics.F1Score().update_state([0, 1], [0.5, 0.5])
    with refused(invalid, "as many labels"):
        metrics.MeanIoU(2).update_state([0, 1, 1], [0, 1])


def test_labels_that_are_no_class_and_empty_batches_count_nowhere() -> None:
    metric = metrics.MeanIoU(2)
    metric.update_state([0, 0, 1, 1, 255, -1, 0], [0, 1, 0, 1, 1, 0, 9])
    assert round(float(metric.result()), 6) == 0.333333
    assert float(metrics.MeanIoU(2).result()) == 0
    for name in ("AUC(curve='PR')", "TruePositives()", "PrecisionAtRecall(0.5)"):
        empty = made(name)
        empty.update_state(np.zeros(0), np.zeros(0))
        assert float(empty.result()) == 0


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("where", ["outside", "in the scope of another"])
def test_a_metric_that_the_strategy_did_not_make_says_so(strategy: Any, where: str) -> None:
    other = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    with contextlib.nullcontext() if where == "outside" else other.scope():
        metric = metrics.TruePositives()
    args = (jnp.ones(2), jnp.ones(2))

    def step() -> None:
        strategy.run(lambda: metric.update_state(*args))

    for fn in (step, rx.function(step)):
        with refused(rx.errors.ContextError, f"metric was created {where}.*strategy.scope"):
            fn()
