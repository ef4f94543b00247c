"""Metrics that count how often predictions are right."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from typing_extensions import override

from replicax.foundation import errors
from replicax.training.metrics_means import MeanOfTwo, per_example, same_rank


class Accuracy(MeanOfTwo):
    """How often predictions equal labels.

    >>> float(Accuracy()([1, 2, 3, 4], [0, 2, 3, 4]))
    0.75
    """

    def __init__(self, name: str = "accuracy", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> Any:
        y_true, y_pred = same_rank(self, y_true, y_pred)
        return y_true == y_pred


class BinaryAccuracy(MeanOfTwo):
    """How often predictions above a threshold are those with label 1.

    >>> float(BinaryAccuracy()([1, 1, 0, 0], [0.98, 1.0, 0.0, 0.6]))
    0.75
    """

    def __init__(
        self, name: str = "binary_accuracy", dtype: Any = None, threshold: float = 0.5
    ) -> None:
        super().__init__(name, dtype)
        self._threshold = threshold

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> Any:
        y_true, y_pred = same_rank(self, y_true, y_pred)
        is_right = y_true == (y_pred > self._threshold).astype(y_true.dtype)
        return per_example(is_right.astype(self.dtype))


class SparseCategoricalAccuracy(MeanOfTwo):
    """How often the largest score is that of the label, where labels are class numbers.

    >>> float(SparseCategoricalAccuracy()([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]]))
    0.5
    """

    def __init__(self, name: str = "sparse_categorical_accuracy", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> Any:
        return _classes(self, y_true, y_pred) == jnp.argmax(y_pred, -1)


class CategoricalAccuracy(MeanOfTwo):
    """How often the largest score is that of the label, where labels are one-hot.

    >>> float(CategoricalAccuracy()([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]]))
    0.5
    """

    def __init__(self, name: str = "categorical_accuracy", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> Any:
        return _one_hot_classes(self, y_true, y_pred) == jnp.argmax(y_pred, -1)


class SparseTopKCategoricalAccuracy(MeanOfTwo):
    """How often the label is among the `k` largest scores, where labels are class numbers.

    >>> m = SparseTopKCategoricalAccuracy(k=1)
    >>> float(m([2, 1], [[0.1, 0.9, 0.8], [0.05, 0.95, 0.0]]))
    0.5
    """

    def __init__(
        self, k: int = 5, name: str = "sparse_top_k_categorical_accuracy", dtype: Any = None
    ) -> None:
        super().__init__(name, dtype)
        self._k = positive("k", k)

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> Any:
        return _is_in_top_k(_classes(self, y_true, y_pred), y_pred, self._k)


class TopKCategoricalAccuracy(MeanOfTwo):
    """How often the label is among the `k` largest scores, where labels are one-hot.

    >>> m = TopKCategoricalAccuracy(k=2)
    >>> float(m([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]]))
    1.0
    """

    def __init__(
        self, k: int = 5, name: str = "top_k_categorical_accuracy", dtype: Any = None
    ) -> None:
        super().__init__(name, dtype)
        self._k = positive("k", k)

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> Any:
        return _is_in_top_k(_one_hot_classes(self, y_true, y_pred), y_pred, self._k)


def positive(argument: str, value: int) -> int:
    """Returns a whole number above 0, or raises."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise errors.InvalidArgumentError(
            f"`{argument}` must be a whole number of at least 1",
            f"it is {value!r}",
            f"Pass {argument}=1 or more.",
        )
    return value


def _classes(metric: MeanOfTwo, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns class numbers without the last dimension of size 1 that they may have."""
    if y_true.ndim == y_pred.ndim and y_true.ndim and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    if not y_pred.ndim or y_true.shape != y_pred.shape[:-1]:
        raise errors.InvalidArgumentError(
            f"Metric {metric.name!r} needs one class number per row of scores",
            f"labels have shape {y_true.shape} and scores have shape {y_pred.shape}",
            "Use the metric without `Sparse` for one-hot labels.",
        )
    return y_true.astype(jnp.int32)


def _one_hot_classes(metric: MeanOfTwo, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    if y_true.ndim < 1 or y_true.shape != y_pred.shape:
        raise errors.InvalidArgumentError(
            f"Metric {metric.name!r} needs one-hot labels of the shape of the scores",
            f"labels have shape {y_true.shape} and scores have shape {y_pred.shape}",
            "Use the metric with `Sparse` for class numbers.",
        )
    return jnp.argmax(y_true, -1)


def _is_in_top_k(classes: jax.Array, scores: jax.Array, k: int) -> jax.Array:
    """Tells per row whether fewer than `k` scores are larger than that of the class."""
    # A class number that does not exist is never right: its score is nan.
    own = jnp.take_along_axis(
        scores.astype(jnp.promote_types(scores.dtype, jnp.float32)),
        jnp.where(classes < 0, scores.shape[-1], classes)[..., None],
        -1,
        mode="fill",
        fill_value=jnp.nan,
    )
    return (jnp.sum(scores > own, -1) < k) & jnp.isfinite(own[..., 0])
