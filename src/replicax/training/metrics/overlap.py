"""Metrics of the overlap of predicted and true classes: F scores, intersection over union."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from typing_extensions import override

from replicax.foundation import errors
from replicax.training.metrics.means import positive
from replicax.training.metrics.metric import (
    Array,
    DType,
    Metric,
    RunningTotal,
    Values,
    Weights,
    as_array,
    divide,
)

_AVERAGES = (None, "micro", "macro", "weighted")


class FBetaScore(Metric):
    """The weighted harmonic mean of precision and recall, for each class or averaged.

    Args:
      average: None for one score per class; "macro" for their mean; "weighted" for their mean
        weighted by class frequency; "micro" for one score over all classes.
      beta: The weight of recall relative to precision, a float above 0.
      threshold: A prediction above it is positive, a float; if None, the largest of each row.
      name: The metric's name.
      dtype: The type of state and result.

    Raises:
      InvalidArgumentError: An option is out of its range; labels and predictions do not have the
        shape (batch, classes); or there is a result before the first batch.

    >>> m = FBetaScore(beta=2.0, threshold=0.5)
    >>> m.update_state([[1, 1, 1], [1, 0, 0], [1, 1, 0]],
    ...                [[0.2, 0.6, 0.7], [0.2, 0.6, 0.6], [0.6, 0.8, 0.0]])
    >>> [round(float(x), 6) for x in m.result()]
    [0.384615, 0.909091, 0.833333]
    """

    def __init__(
        self,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str = "fbeta_score",
        dtype: DType = None,
    ) -> None:
        super().__init__(dtype, name)
        _require("average", average, average in _AVERAGES, f"must be one of {_AVERAGES}")
        is_float = isinstance(beta, float) and beta > 0
        _require("beta", beta, is_float, "must be a float above 0")
        is_share = threshold is None or (isinstance(threshold, float) and 0 < threshold <= 1)
        _require(
            "threshold", threshold, is_share, "must be None or a float with 0 < threshold <= 1"
        )
        self._average, self._beta, self._threshold = average, beta, threshold
        # Created with the first batch, which has the number of classes.
        self._totals: list[RunningTotal] = []

    @override
    def update_state(self, y_true: Values, y_pred: Values, sample_weight: Weights = None) -> None:
        true, pred = as_array(y_true).astype(self.dtype), as_array(y_pred).astype(self.dtype)
        if true.ndim != 2 or true.shape != pred.shape:
            raise errors.InvalidArgumentError(
                f"Metric {self.name!r} needs labels and predictions of shape (batch, classes)",
                f"they have shapes {true.shape} and {pred.shape}",
                "Reshape them, or make labels one-hot.",
            )
        if not self._totals:
            shape = () if self._average == "micro" else true.shape[1:]
            names = ("true_positives", "false_positives", "false_negatives", "intermediate_weights")
            self._totals = [RunningTotal(self, name, shape) for name in names]
        if self._threshold is None:
            largest = jnp.max(pred, -1, keepdims=True)
            pred = (pred >= largest) & (jnp.abs(pred) > 1e-9)
        else:
            pred = pred > self._threshold
        pred = pred.astype(self.dtype)
        weights = jnp.ones((), self.dtype)
        if sample_weight is not None:
            weights = as_array(sample_weight).astype(self.dtype)
            weights = weights.reshape(
                weights.shape + (1,) * (2 - weights.ndim if weights.ndim else 0)
            )
        axis = None if self._average == "micro" else 0
        found = (pred * true, pred * (1 - true), (1 - pred) * true, true)
        for total, value in zip(self._totals, found, strict=True):
            total.add(jnp.sum(value * weights, axis))

    @override
    def result(self) -> Array:
        if not self._totals:
            raise errors.InvalidArgumentError(
                f"Metric {self.name!r} gets the number of classes from its first batch",
                "there was none",
                "Call `update_state` first.",
            )
        true_positives, false_positives, false_negatives, truths = (t.value() for t in self._totals)
        precision = divide(true_positives, true_positives + false_positives)
        recall = divide(true_positives, true_positives + false_negatives)
        square = self._beta**2
        scores = (1 + square) * divide(precision * recall, square * precision + recall)
        if self._average == "weighted":
            return jnp.sum(scores * divide(truths, jnp.sum(truths)))
        return scores if self._average is None else jnp.mean(scores)


class F1Score(FBetaScore):
    """The harmonic mean of precision and recall. Arguments as in `FBetaScore`.

    >>> m = F1Score(threshold=0.5)
    >>> m.update_state([[1, 1, 1], [1, 0, 0], [1, 1, 0]],
    ...                [[0.2, 0.6, 0.7], [0.2, 0.6, 0.6], [0.6, 0.8, 0.0]])
    >>> [round(float(x), 6) for x in m.result()]
    [0.5, 0.8, 0.666667]
    """

    def __init__(
        self,
        average: str | None = None,
        threshold: float | None = None,
        name: str = "f1_score",
        dtype: DType = None,
    ) -> None:
        super().__init__(average, 1.0, threshold, name, dtype)


class IoU(Metric):
    """The intersection over the union of predicted and true examples, averaged over classes.

    Classes without labels and predictions are excluded from the average.

    Args:
      num_classes: The number of classes.
      target_class_ids: The classes to average over.
      name: The metric's name.
      dtype: The type of the state; counts are exact up to 2**48.
      ignore_class: Examples with this label are ignored.
      sparse_y_true: Whether labels are class numbers; otherwise one-hot.
      sparse_y_pred: Whether predictions are class numbers; otherwise scores.
      axis: The dimension of classes in what is not sparse.

    Raises:
      InvalidArgumentError: An option is out of its range, or there are not as many labels as
        predictions.

    >>> round(float(IoU(2, [0])([0, 0, 1, 1], [0, 1, 0, 1])), 6)
    0.333333
    """

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str = "io_u",
        dtype: DType = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        super().__init__(dtype, name)
        self._num_classes = positive("num_classes", num_classes)
        self._targets = list(target_class_ids)
        is_inside = bool(self._targets) and all(0 <= i < num_classes for i in self._targets)
        _require(
            "target_class_ids",
            self._targets,
            is_inside,
            f"must be classes from 0 to {num_classes - 1}, at least one",
        )
        self._ignored, self._axis = ignore_class, axis
        self._sparse_true, self._sparse_pred = sparse_y_true, sparse_y_pred
        shape = (num_classes, num_classes)
        self._matrix = RunningTotal(self, "total_confusion_matrix", shape)

    @override
    def update_state(self, y_true: Values, y_pred: Values, sample_weight: Weights = None) -> None:
        true, pred = as_array(y_true), as_array(y_pred)
        true = true if self._sparse_true else jnp.argmax(true, self._axis)
        pred = pred if self._sparse_pred else jnp.argmax(pred, self._axis)
        true, pred = true.astype(jnp.int32).reshape(-1), pred.astype(jnp.int32).reshape(-1)
        if true.shape != pred.shape:
            raise errors.InvalidArgumentError(
                f"Metric {self.name!r} needs as many labels as predictions",
                f"there are {true.size} and {pred.size}",
                "Reshape them, or set `sparse_y_true` or `sparse_y_pred` to False.",
            )
        weights = as_array(1 if sample_weight is None else sample_weight).astype(self.dtype)
        weights = jnp.broadcast_to(weights.reshape(-1) if weights.ndim else weights, true.shape)
        # Values that are not classes are ignored.
        count = self._num_classes
        is_inside = (true >= 0) & (true < count) & (pred >= 0) & (pred < count)
        if self._ignored is not None:
            is_inside &= true != self._ignored
        indices = jnp.where(is_inside, true * count + pred, 0)
        added = jax.ops.segment_sum(jnp.where(is_inside, weights, 0), indices, count * count)
        self._matrix.add(added.reshape(count, count))

    @override
    def result(self) -> Array:
        matrix = self._matrix.value()
        both = jnp.diagonal(matrix)
        either = jnp.sum(matrix, 0) + jnp.sum(matrix, 1) - both
        both, either = (x[jnp.asarray(self._targets)] for x in (both, either))
        return divide(jnp.sum(divide(both, either)), jnp.sum(either > 0).astype(both.dtype))


class BinaryIoU(IoU):
    """`IoU` of two classes; predictions of at least a threshold are class 1.

    Args:
      target_class_ids: The classes to average over.
      threshold: The smallest prediction of class 1.
      name: The metric's name.
      dtype: The type of the state.

    >>> round(float(BinaryIoU(threshold=0.3)([0, 1, 0, 1], [0.1, 0.2, 0.4, 0.7])), 6)
    0.333333
    """

    def __init__(
        self,
        target_class_ids: Sequence[int] = (0, 1),
        threshold: float = 0.5,
        name: str = "binary_io_u",
        dtype: DType = None,
    ) -> None:
        super().__init__(2, target_class_ids, name, dtype)
        self._threshold = threshold

    @override
    def update_state(self, y_true: Values, y_pred: Values, sample_weight: Weights = None) -> None:
        super().update_state(y_true, as_array(y_pred) >= self._threshold, sample_weight)


class MeanIoU(IoU):
    """`IoU` averaged over all classes. Arguments as in `IoU`.

    >>> round(float(MeanIoU(num_classes=2)([0, 0, 1, 1], [0, 1, 0, 1])), 6)
    0.333333
    """

    def __init__(
        self,
        num_classes: int,
        name: str = "mean_io_u",
        dtype: DType = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        targets = range(positive("num_classes", num_classes))
        layout = (sparse_y_true, sparse_y_pred, axis)
        super().__init__(num_classes, targets, name, dtype, ignore_class, *layout)


class OneHotIoU(IoU):
    """`IoU` of one-hot labels and scores. Arguments as in `IoU`.

    >>> m = OneHotIoU(2, [0])
    >>> float(m([[1, 0], [0, 1]], [[0.9, 0.1], [0.2, 0.8]]))
    1.0
    """

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str = "one_hot_io_u",
        dtype: DType = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ) -> None:
        layout = (False, sparse_y_pred, axis)
        super().__init__(num_classes, target_class_ids, name, dtype, ignore_class, *layout)


class OneHotMeanIoU(MeanIoU):
    """`MeanIoU` of one-hot labels and scores. Arguments as in `IoU`.

    >>> m = OneHotMeanIoU(2)
    >>> float(m([[1, 0], [0, 1]], [[0.9, 0.1], [0.2, 0.8]]))
    1.0
    """

    def __init__(
        self,
        num_classes: int,
        name: str = "one_hot_mean_io_u",
        dtype: DType = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ) -> None:
        layout = (False, sparse_y_pred, axis)
        super().__init__(num_classes, name, dtype, ignore_class, *layout)


def _require(argument: str, value: object, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise errors.InvalidArgumentError(
            f"`{argument}` {wanted}", f"it is {value!r}", "Pass such a value."
        )
