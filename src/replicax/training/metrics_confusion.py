"""Metrics made of true and false positives and negatives at thresholds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from replicax.foundation import errors
from replicax.training.metrics import Metric, RunningTotal, as_array, divide
from replicax.training.metrics_accuracy import positive
from replicax.training.metrics_means import same_rank, weighted


class Thresholded(Metric):
    """Counts positives and negatives by whether predictions exceed thresholds."""

    def __init__(self, name: str, dtype: Any, thresholds: Sequence[float]) -> None:
        super().__init__(dtype, name)
        self._thresholds = np.asarray(thresholds, np.float32)

    def _above(
        self, y_true: Any, y_pred: Any, sample_weight: Any, by_label: bool = False
    ) -> tuple[Any, Any, Any, Any]:
        """Returns the weight of positives and of negatives: above each threshold, and in all.

        With `by_label`, each column of the predictions has its own.
        """
        true, pred = same_rank(self, as_array(y_true), as_array(y_pred))
        positives = true.astype(bool).astype(self.dtype)
        # Weights per example count for each of its predictions.
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

        def above(weights: Any) -> Any:
            if not by_label:
                return _weight_above(pred, weights, self._thresholds)
            of_column = functools.partial(_weight_above, thresholds=self._thresholds)
            return jax.vmap(of_column, in_axes=1, out_axes=1)(pred, weights)

        return above(positives), above(negatives), jnp.sum(positives, 0), jnp.sum(negatives, 0)


class _OfPositives(Thresholded):
    """What `Precision` and `Recall` share: true positives as a part of something."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | None,
        top_k: int | None,
        class_id: int | None,
        name: str,
        dtype: Any,
    ) -> None:
        self._top_k = None if top_k is None else positive("top_k", top_k)
        self._class_id = class_id
        if thresholds is None:
            thresholds = 0.5 if top_k is None else -np.inf
        found = np.atleast_1d(np.asarray(thresholds, float))
        if top_k is None:
            _checked_thresholds(self, found)
        self._is_scalar = len(found) == 1
        super().__init__(name, dtype, np.sort(found).tolist())
        # Where each of the user's thresholds is among the sorted ones.
        self._order = np.argsort(np.argsort(found, kind="stable"), kind="stable")
        self._true_positives = RunningTotal(self, "true_positives", (len(found),))

    def _selected(self, y_true: Any, y_pred: Any) -> tuple[jax.Array, jax.Array]:
        true, pred = as_array(y_true), as_array(y_pred)
        if self._top_k is not None:
            pred = pred.astype(jnp.promote_types(pred.dtype, jnp.float32))
            k = min(self._top_k, pred.shape[-1])
            smallest = jax.lax.top_k(pred, k)[0][..., -1:]
            pred = jnp.where(pred >= smallest, pred, -jnp.inf)
        if self._class_id is not None:
            true, pred = true[..., self._class_id], pred[..., self._class_id]
        return true, pred

    def _part(self, whole: RunningTotal, is_rest: bool = True) -> Any:
        found = self._true_positives.value()
        total = whole.value() + found if is_rest else whole.value()
        parts = divide(found, total)[self._order]
        return parts[0] if self._is_scalar else parts


class Precision(_OfPositives):
    """How many of the examples that are predicted positive are so.

    Args:
      thresholds: A prediction above it is positive; several give one result each.
      top_k: If given, only the `k` largest predictions of each row are positive.
      class_id: If given, only this class of the last dimension counts.
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
        dtype: Any = None,
    ) -> None:
        super().__init__(thresholds, top_k, class_id, name, dtype)
        self._false_positives = RunningTotal(self, "false_positives", self._thresholds.shape)

    @override
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        true, pred = self._selected(y_true, y_pred)
        true_above, false_above, _, _ = self._above(true, pred, sample_weight)
        self._true_positives.add(true_above)
        self._false_positives.add(false_above)

    @override
    def result(self) -> Any:
        return self._part(self._false_positives)


class Recall(_OfPositives):
    """How many of the positive examples are predicted so. Arguments as of `Precision`.

    >>> round(float(Recall()([0, 1, 1, 1], [1, 0, 1, 1])), 4)
    0.6667
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str = "recall",
        dtype: Any = None,
    ) -> None:
        super().__init__(thresholds, top_k, class_id, name, dtype)
        self._positives = RunningTotal(self, "positives")

    @override
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        true, pred = self._selected(y_true, y_pred)
        true_above, _, positives, _ = self._above(true, pred, sample_weight)
        self._true_positives.add(true_above)
        self._positives.add(positives)

    @override
    def result(self) -> Any:
        return self._part(self._positives, is_rest=False)


class Counts(Thresholded):
    """Keeps how much weight positives and negatives have, in all and above each threshold."""

    def __init__(
        self, name: str, dtype: Any, thresholds: Sequence[float], num_labels: int | None = None
    ) -> None:
        super().__init__(name, dtype, thresholds)
        labels = () if num_labels is None else (num_labels,)
        shape = (*self._thresholds.shape, *labels)
        self._true_positives = RunningTotal(self, "true_positives", shape)
        self._false_positives = RunningTotal(self, "false_positives", shape)
        self._positives = RunningTotal(self, "positives", labels)
        self._negatives = RunningTotal(self, "negatives", labels)

    def count(self, y_true: Any, y_pred: Any, sample_weight: Any, by_label: bool = False) -> None:
        """Takes in a batch."""
        found = self._above(y_true, y_pred, sample_weight, by_label)
        totals = (self._true_positives, self._false_positives, self._positives, self._negatives)
        for total, value in zip(totals, found, strict=True):
            total.add(value)

    def counts(self) -> tuple[Any, Any, Any, Any]:
        """Returns true and false positives, true and false negatives, at each threshold."""
        true_positives, false_positives = (
            self._true_positives.value(),
            self._false_positives.value(),
        )
        return (
            true_positives,
            false_positives,
            self._negatives.value() - false_positives,
            self._positives.value() - true_positives,
        )


class _OneCount(Counts):
    """One of the four counts, in the order of the user's thresholds."""

    _which = 0

    def __init__(
        self, thresholds: float | Sequence[float] | None, name: str, dtype: Any = None
    ) -> None:
        found = _checked_thresholds(self, 0.5 if thresholds is None else thresholds)
        super().__init__(name, dtype, np.sort(found).tolist())
        self._order = np.argsort(np.argsort(found, kind="stable"), kind="stable")

    @override
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count(y_true, y_pred, sample_weight)

    @override
    def result(self) -> Any:
        found = self.counts()[self._which][self._order]
        return found[0] if len(self._order) == 1 else found


class TruePositives(_OneCount):
    """How many positive examples are predicted so, each with its weight.

    Args:
      thresholds: A prediction above it is positive; 0.5 if None. Several give one count each.
      name: The metric's name.
      dtype: The type of state and result.

    >>> float(TruePositives()([0, 1, 1, 1], [1, 0, 1, 1]))
    2.0
    """

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str = "true_positives",
        dtype: Any = None,
    ) -> None:
        super().__init__(thresholds, name, dtype)


class FalsePositives(_OneCount):
    """How many negative examples are predicted positive. Arguments as of `TruePositives`.

    >>> float(FalsePositives()([0, 1, 0, 0], [0, 0, 1, 1]))
    2.0
    """

    _which = 1

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str = "false_positives",
        dtype: Any = None,
    ) -> None:
        super().__init__(thresholds, name, dtype)


class TrueNegatives(_OneCount):
    """How many negative examples are predicted so. Arguments as of `TruePositives`.

    >>> float(TrueNegatives()([0, 1, 0, 0], [1, 1, 0, 0]))
    2.0
    """

    _which = 2

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str = "true_negatives",
        dtype: Any = None,
    ) -> None:
        super().__init__(thresholds, name, dtype)


class FalseNegatives(_OneCount):
    """How many positive examples are predicted negative. Arguments as of `TruePositives`.

    >>> float(FalseNegatives()([0, 1, 1, 1], [0, 1, 0, 0]))
    2.0
    """

    _which = 3

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str = "false_negatives",
        dtype: Any = None,
    ) -> None:
        super().__init__(thresholds, name, dtype)


def _checked_thresholds(metric: Metric, thresholds: Any) -> np.ndarray:
    found = np.atleast_1d(np.asarray(thresholds, float))
    if not ((found >= 0) & (found <= 1)).all():
        raise errors.InvalidArgumentError(
            f"`thresholds` of {type(metric).__name__} must lie between 0 and 1",
            f"they are {found.tolist()}",
            "Predictions are taken as probabilities.",
        )
    return found


def _weight_above(pred: jax.Array, weights: jax.Array, thresholds: np.ndarray) -> jax.Array:
    """Returns for each of the sorted thresholds the weight of the predictions above it."""
    num_exceeded = jnp.searchsorted(thresholds.astype(pred.dtype), pred, side="left")
    num_exceeded = jnp.where(jnp.isnan(pred), 0, num_exceeded)
    by_number = jnp.zeros(len(thresholds) + 1, weights.dtype).at[num_exceeded].add(weights)
    return jnp.cumsum(by_number[::-1])[::-1][1:]
