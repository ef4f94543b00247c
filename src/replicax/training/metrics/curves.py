"""Metrics of curves over all thresholds: areas, and best points under a constraint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from replicax.foundation import errors
from replicax.training.metrics.confusion import Counts
from replicax.training.metrics.means import positive
from replicax.training.metrics.metric import (
    Array,
    DType,
    Values,
    Weights,
    as_array,
    divide,
    numpy_for,
)

_CURVES = ("ROC", "PR")
_SUMMATIONS = ("interpolation", "minoring", "majoring")
# Just below 0, so that every prediction is above it.
_BELOW = -1e-7


class AUC(Counts):
    """The area under the ROC or the precision-recall curve, from counts at fixed thresholds.

    Args:
      num_thresholds: The number of thresholds from 0 to 1.
      curve: "ROC" or "PR".
      summation_method: "interpolation": the trapezoidal rule for ROC, and the interpolation of
        Davis and Goadrich for PR; "minoring" and "majoring": sums below and above the curve.
      name: The metric's name.
      dtype: The type of state and result.
      thresholds: The inner thresholds, instead of `num_thresholds`.
      multi_label: Whether the areas of columns are computed separately, and averaged.
      num_labels: The number of columns; needed for `multi_label`.
      label_weights: The weight of each column.
      from_logits: Whether predictions are logits, to which a sigmoid is applied.

    Raises:
      InvalidArgumentError: An option is not one of its choices, or `num_labels` or thresholds are
        missing.

    >>> m = AUC(num_thresholds=3)
    >>> float(m([0, 0, 1, 1], [0.0, 0.5, 0.3, 0.9]))
    0.75
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str = "auc",
        dtype: DType = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Sequence[float] | None = None,
        from_logits: bool = False,
    ) -> None:
        self._curve = _one_of("curve", curve, _CURVES)
        self._summation = _one_of("summation_method", summation_method, _SUMMATIONS)
        self._by_label, self._from_logits = multi_label, from_logits
        self._label_weights = None if label_weights is None else np.asarray(label_weights, float)
        if multi_label and num_labels is None:
            raise errors.InvalidArgumentError(
                "AUC with multi_label=True needs the number of labels",
                "`num_labels` is None",
                "Pass num_labels, the last dimension of the predictions.",
            )
        # Thresholds below and above all predictions are the ends of the curve.
        inner = _inner_thresholds(num_thresholds, thresholds)
        super().__init__(
            name, dtype, [_BELOW, *inner, 1 - _BELOW], num_labels if multi_label else None
        )

    @override
    def update_state(self, y_true: Values, y_pred: Values, sample_weight: Weights = None) -> None:
        if self._from_logits:
            y_pred = jax.nn.sigmoid(as_array(y_pred))
        if self._label_weights is not None and not self._by_label:
            shape = as_array(y_pred).shape
            weights = as_array(1.0 if sample_weight is None else sample_weight)
            weights = weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim))
            sample_weight = jnp.broadcast_to(weights * self._label_weights, shape)
        self.count(y_true, y_pred, sample_weight, self._by_label)

    @override
    def result(self) -> Array:
        true_positives, false_positives, true_negatives, false_negatives = counts = self.counts()
        if self._curve == "ROC":
            x, y = divide(false_positives, false_positives + true_negatives), _recall(*counts)
        else:
            x, y = _recall(*counts), _precision(*counts)
        xnp = numpy_for(x, y)
        if self._summation == "minoring":
            heights = xnp.minimum(y[:-1], y[1:])
        elif self._summation == "majoring":
            heights = xnp.maximum(y[:-1], y[1:])
        else:
            heights = (y[:-1] + y[1:]) / 2
        areas = xnp.sum((x[:-1] - x[1:]) * heights, 0)
        if self._curve == "PR" and self._summation == "interpolation":
            positives = true_positives + false_negatives
            areas = _interpolated(true_positives, false_positives, positives)
        if not self._by_label:
            return areas
        weights = xnp.ones_like(areas) if self._label_weights is None else self._label_weights
        return divide(xnp.sum(areas * weights), xnp.sum(xnp.asarray(weights))).astype(self.dtype)


def _interpolated(true_positives: Array, false_positives: Array, positives: Array) -> Array:
    """Integrates precision over recall, with counts interpolated linearly between thresholds."""
    xnp = numpy_for(true_positives, false_positives, positives)
    predicted = true_positives + false_positives
    steps = true_positives[:-1] - true_positives[1:]
    slope = divide(steps, xnp.maximum(predicted[:-1] - predicted[1:], 0))
    intercept = true_positives[1:] - slope * predicted[1:]
    is_inside = (predicted[:-1] > 0) & (predicted[1:] > 0)
    ratio = xnp.where(is_inside, divide(predicted[:-1], xnp.maximum(predicted[1:], 0)), 1)
    return xnp.sum(
        divide(slope * (steps + intercept * xnp.log(ratio)), xnp.maximum(positives[1:], 0)), 0
    )


Rate: TypeAlias = Callable[[Array, Array, Array, Array], Array]


def _recall(true_positives: Array, _fp: Array, _tn: Array, false_negatives: Array) -> Array:
    return divide(true_positives, true_positives + false_negatives)


def _precision(true_positives: Array, false_positives: Array, _tn: Array, _fn: Array) -> Array:
    return divide(true_positives, true_positives + false_positives)


def _specificity(_tp: Array, false_positives: Array, true_negatives: Array, _fn: Array) -> Array:
    return divide(true_negatives, true_negatives + false_positives)


class _BestUnderConstraint(Counts):
    """The largest value of one rate at the thresholds where another reaches a bound."""

    bounded: Rate
    maximized: Rate

    def __init__(
        self,
        argument: str,
        bound: float,
        num_thresholds: int,
        class_id: int | None,
        name: str,
        dtype: DType,
    ) -> None:
        if not 0 <= bound <= 1:
            raise errors.InvalidArgumentError(
                f"`{argument}` must be between 0 and 1",
                f"it is {bound}",
                "Pass a share of examples.",
            )
        self._bound, self._class_id = bound, class_id
        count = positive("num_thresholds", num_thresholds)
        found = [0.5] if count == 1 else [_BELOW, *_inner_thresholds(count, None), 1.0]
        super().__init__(name, dtype, found)

    @override
    def update_state(self, y_true: Values, y_pred: Values, sample_weight: Weights = None) -> None:
        true, pred = as_array(y_true), as_array(y_pred)
        if self._class_id is not None:
            true, pred = true[..., self._class_id], pred[..., self._class_id]
        self.count(true, pred, sample_weight)

    @override
    def result(self) -> Array:
        counts = self.counts()
        bounded, maximized = self.bounded(*counts), self.maximized(*counts)
        xnp = numpy_for(bounded, maximized)
        return xnp.max(xnp.where(bounded >= self._bound, maximized, 0))


class SensitivityAtSpecificity(_BestUnderConstraint):
    """The largest sensitivity at thresholds with a minimum specificity.

    Args:
      specificity: The minimum share of negatives that are predicted negative.
      num_thresholds: The number of thresholds from 0 to 1.
      class_id: If given, only this class of the last dimension is used.
      name: The metric's name.
      dtype: The type of state and result.

    >>> m = SensitivityAtSpecificity(0.5)
    >>> float(m([0, 0, 0, 1, 1], [0, 0.3, 0.8, 0.3, 0.8]))
    0.5
    """

    bounded, maximized = staticmethod(_specificity), staticmethod(_recall)

    def __init__(
        self,
        specificity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str = "sensitivity_at_specificity",
        dtype: DType = None,
    ) -> None:
        super().__init__("specificity", specificity, num_thresholds, class_id, name, dtype)


class SpecificityAtSensitivity(_BestUnderConstraint):
    """The largest specificity at thresholds with a minimum sensitivity.

    Arguments as in `SensitivityAtSpecificity`, with `sensitivity`.

    >>> m = SpecificityAtSensitivity(0.5)
    >>> round(float(m([0, 0, 0, 1, 1], [0, 0.3, 0.8, 0.3, 0.8])), 6)
    0.666667
    """

    bounded, maximized = staticmethod(_recall), staticmethod(_specificity)

    def __init__(
        self,
        sensitivity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str = "specificity_at_sensitivity",
        dtype: DType = None,
    ) -> None:
        super().__init__("sensitivity", sensitivity, num_thresholds, class_id, name, dtype)


class PrecisionAtRecall(_BestUnderConstraint):
    """The largest precision at thresholds with a minimum recall.

    Arguments as in `SensitivityAtSpecificity`, with `recall`.

    >>> m = PrecisionAtRecall(0.5)
    >>> float(m([0, 0, 0, 1, 1], [0, 0.3, 0.8, 0.3, 0.8]))
    0.5
    """

    bounded, maximized = staticmethod(_recall), staticmethod(_precision)

    def __init__(
        self,
        recall: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str = "precision_at_recall",
        dtype: DType = None,
    ) -> None:
        super().__init__("recall", recall, num_thresholds, class_id, name, dtype)


class RecallAtPrecision(_BestUnderConstraint):
    """The largest recall at thresholds with a minimum precision.

    Arguments as in `SensitivityAtSpecificity`, with `precision`.

    >>> m = RecallAtPrecision(0.8)
    >>> float(m([0, 0, 1, 1], [0, 0.5, 0.3, 0.9]))
    0.5
    """

    bounded, maximized = staticmethod(_precision), staticmethod(_recall)

    def __init__(
        self,
        precision: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str = "recall_at_precision",
        dtype: DType = None,
    ) -> None:
        super().__init__("precision", precision, num_thresholds, class_id, name, dtype)


def _inner_thresholds(count: int, given: Sequence[float] | None) -> list[float]:
    """Returns the thresholds between the ends, evenly spaced unless given."""
    if given is not None:
        return np.sort(np.asarray(given, float)).tolist()
    if positive("num_thresholds", count) < 2:
        raise errors.InvalidArgumentError(
            "`num_thresholds` must be 2 or more", "it is 1", "The default is 200."
        )
    return (np.arange(1, count - 1) / (count - 1)).tolist()


def _one_of(argument: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise errors.InvalidArgumentError(
            f"`{argument}` must be one of {', '.join(map(repr, choices))}",
            f"it is {value!r}",
            "Choose one of them.",
        )
    return value
