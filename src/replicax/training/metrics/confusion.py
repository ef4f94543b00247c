"""Metrics made of true and false positives and negatives at thresholds."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from replicax.foundation import errors
from replicax.training.metrics.means import positive, same_rank, weighted
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


class Thresholded(Metric):
    """Counts positives and negatives by whether predictions exceed thresholds."""

    def __init__(self, name: str, dtype: DType, thresholds: Sequence[float]) -> None:
        super().__init__(dtype, name)
        self._thresholds = np.asarray(thresholds, np.float32)

    def _above(
        self,
        y_true: Values,
        y_pred: Values,
        sample_weight: Weights,
        by_label: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns the weights of positives and negatives above each threshold, and in total.

        With `by_label`, per column of the predictions.
        """
        true, pred = same_rank(self, as_array(y_true), as_array(y_pred))
        positives = true.astype(bool).astype(self.dtype)
        # The weight of an example applies to each of its predictions.
        if sample_weight is not None:
            weights = as_array(sample_weight)
            missing = max(positives.ndim - weights.ndim, 0) if weights.ndim else 0
            sample_weight = weights.reshape(weights.shape + (1,) * missing)
        positives, weights = weighted(self, positives, sample_weight, jnp.sum)
        negatives = 1 - positives
        if weights is not None:
            positives, negatives = positives * weights, negatives * weights
        pred = pred.astype(jnp.promote_types(pred.dtype, jnp.float32))
        if not by_label:
            pred, positives, negatives = (x.reshape(-1) for x in (pred, positives, negatives))

        def above(weights: jax.Array) -> jax.Array:
            if not by_label:
                return _weight_above(pred, weights, self._thresholds)
            of_column = functools.partial(_weight_above, thresholds=self._thresholds)
            return jax.vmap(of_column, in_axes=1, out_axes=1)(pred, weights)

        return above(positives), above(negatives), jnp.sum(positives, 0), jnp.sum(negatives, 0)


class _OfPositives(Thresholded):
    """The ratio of true positives to another count."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | None,
        top_k: int | None,
        class_id: int | None,
        name: str,
        dtype: DType,
    ) -> None:
        self._top_k = None if top_k is None else positive("top_k", top_k)
        self._class_id = class_id
        if thresholds is None:
            thresholds = 0.5 if top_k is None else -np.inf
        found = np.atleast_1d(np.asarray(thresholds, float))
        if top_k is None:
            _checked_thresholds(self, found.tolist())
        self._is_scalar = len(found) == 1
        super().__init__(name, dtype, np.sort(found).tolist())
        # The index of each of the user's thresholds among the sorted ones.
        self._order = np.argsort(np.argsort(found, kind="stable"), kind="stable")
        self._true_positives = RunningTotal(self, "true_positives", (len(found),))

    def _selected(self, y_true: Values, y_pred: Values) -> tuple[jax.Array, jax.Array]:
        true, pred = as_array(y_true), as_array(y_pred)
        if self._top_k is not None:
            pred = pred.astype(jnp.promote_types(pred.dtype, jnp.float32))
            k = min(self._top_k, pred.shape[-1])
            smallest = jax.lax.top_k(pred, k)[0][..., -1:]
            pred = jnp.where(pred >= smallest, pred, -jnp.inf)
        if self._class_id is not None:
            true, pred = true[..., self._class_id], pred[..., self._class_id]
        return true, pred

    def _ratio(self, total: Array) -> Array:
        ratios = divide(self._true_positives.value(), total)[self._order]
        return ratios[0] if self._is_scalar else ratios


class Precision(_OfPositives):
    """The share of examples predicted positive that are positive.

    Args:
      thresholds: A prediction above it is positive; several give one result each.
      top_k: If given, only the `k` largest predictions of each row are positive.
      class_id: If given, only this class of the last dimension is used.
      name: The metric's name.
      dtype: The type of state and result.

    >>> round(float(Precision()([0, 1, 1, 1], [1, 0, 1, 1])), 4)
    0.6667
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str = "precision",
        dtype: DType = None,
    ) -> None:
        super().__init__(thresholds, top_k, class_id, name, dtype)
        self._false_positives = RunningTotal(self, "false_positives", self._thresholds.shape)

    @override
    def update_state(self, y_true: Values, y_pred: Values, sample_weight: Weights = None) -> None:
        true, pred = self._selected(y_true, y_pred)
        true_above, false_above, _, _ = self._above(true, pred, sample_weight)
        self._true_positives.add(true_above)
        self._false_positives.add(false_above)

    @override
    def result(self) -> Array:
        return self._ratio(self._false_positives.value() + self._true_positives.value())


class Recall(_OfPositives):
    """The share of positive examples that are predicted positive. Arguments as in `Precision`.

    >>> round(float(Recall()([0, 1, 1, 1], [1, 0, 1, 1])), 4)
    0.6667
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str = "recall",
        dtype: DType = None,
    ) -> None:
        super().__init__(thresholds, top_k, class_id, name, dtype)
        self._positives = RunningTotal(self, "positives")

    @override
    def update_state(self, y_true: Values, y_pred: Values, sample_weight: Weights = None) -> None:
        true, pred = self._selected(y_true, y_pred)
        true_above, _, positives, _ = self._above(true, pred, sample_weight)
        self._true_positives.add(true_above)
        self._positives.add(positives)

    @override
    def result(self) -> Array:
        return self._ratio(self._positives.value())


class Counts(Thresholded):
    """The weights of positives and negatives, in total and above each threshold."""

    def __init__(
        self,
        name: str,
        dtype: DType,
        thresholds: Sequence[float],
        num_labels: int | None = None,
    ) -> None:
        super().__init__(name, dtype, thresholds)
        labels = () if num_labels is None else (num_labels,)
        shape = (*self._thresholds.shape, *labels)
        self._true_positives = RunningTotal(self, "true_positives", shape)
        self._false_positives = RunningTotal(self, "false_positives", shape)
        self._positives = RunningTotal(self, "positives", labels)
        self._negatives = RunningTotal(self, "negatives", labels)

    def count(
        self,
        y_true: Values,
        y_pred: Values,
        sample_weight: Weights,
        by_label: bool = False,
    ) -> None:
        """Adds a batch."""
        found = self._above(y_true, y_pred, sample_weight, by_label)
        totals = (self._true_positives, self._false_positives, self._positives, self._negatives)
        for total, value in zip(totals, found, strict=True):
            total.add(value)

    def counts(self) -> tuple[Array, Array, Array, Array]:
        """Returns true and false positives, true and false negatives, at each threshold."""
        true_positives = self._true_positives.value()
        false_positives = self._false_positives.value()
        return (
            true_positives,
            false_positives,
            self._negatives.value() - false_positives,
            self._positives.value() - true_positives,
        )


class _OneCount(Counts):
    """One of the four counts, in the order of the user's thresholds.

    Subclasses set `default_name`, and the index of their count.
    """

    default_name: str
    index: int

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str | None = None,
        dtype: DType = None,
    ) -> None:
        found = _checked_thresholds(self, 0.5 if thresholds is None else thresholds)
        super().__init__(name or self.default_name, dtype, np.sort(found).tolist())
        self._order = np.argsort(np.argsort(found, kind="stable"), kind="stable")

    @override
    def update_state(self, y_true: Values, y_pred: Values, sample_weight: Weights = None) -> None:
        self.count(y_true, y_pred, sample_weight)

    @override
    def result(self) -> Array:
        found = self.counts()[self.index][self._order]
        return found[0] if len(self._order) == 1 else found


class TruePositives(_OneCount):
    """The weight of positive examples that are predicted positive.

    Args:
      thresholds: A prediction above it is positive; 0.5 if None. Several give one count each.
      name: The metric's name.
      dtype: The type of state and result.

    >>> float(TruePositives()([0, 1, 1, 1], [1, 0, 1, 1]))
    2.0
    """

    default_name = "true_positives"
    index = 0


class FalsePositives(_OneCount):
    """The weight of negative examples that are predicted positive. Arguments as in `TruePositives`.

    >>> float(FalsePositives()([0, 1, 0, 0], [0, 0, 1, 1]))
    2.0
    """

    default_name = "false_positives"
    index = 1


class TrueNegatives(_OneCount):
    """The weight of negative examples that are predicted negative. Arguments as in `TruePositives`.

    >>> float(TrueNegatives()([0, 1, 0, 0], [1, 1, 0, 0]))
    2.0
    """

    default_name = "true_negatives"
    index = 2


class FalseNegatives(_OneCount):
    """The weight of positive examples that are predicted negative. Arguments as in `TruePositives`.

    >>> float(FalseNegatives()([0, 1, 1, 1], [0, 1, 0, 0]))
    2.0
    """

    default_name = "false_negatives"
    index = 3


def _checked_thresholds(metric: Metric, thresholds: float | Sequence[float]) -> np.ndarray:
    found = np.atleast_1d(np.asarray(thresholds, float))
    if not ((found >= 0) & (found <= 1)).all():
        raise errors.InvalidArgumentError(
            f"`thresholds` of {type(metric).__name__} must be between 0 and 1",
            f"they are {found.tolist()}",
            "Predictions are probabilities.",
        )
    return found


def _weight_above(pred: jax.Array, weights: jax.Array, thresholds: np.ndarray) -> jax.Array:
    """Returns for each of the sorted thresholds the weight of the predictions above it."""
    num_exceeded = jnp.searchsorted(thresholds.astype(pred.dtype), pred, side="left")
    num_exceeded = jnp.where(jnp.isnan(pred), 0, num_exceeded)
    by_number = jnp.zeros(len(thresholds) + 1, weights.dtype).at[num_exceeded].add(weights)
    return jnp.cumsum(by_number[::-1])[::-1][1:]
