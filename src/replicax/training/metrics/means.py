"""Sums and weighted means of a value per example, such as accuracies."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from typing_extensions import override

from replicax.foundation import errors
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


class Sum(Metric):
    """The weighted sum of values.

    >>> m = Sum()
    >>> m.update_state([1.0, 3.0, 5.0], sample_weight=[1, 1, 0])
    >>> float(m.result())
    4.0
    """

    def __init__(self, name: str = "sum", dtype: DType = None) -> None:
        super().__init__(dtype, name)
        self._total = RunningTotal(self, "total")

    @override
    def update_state(self, values: Values, sample_weight: Weights = None) -> None:
        array, weights = weighted(self, as_array(values), sample_weight, jnp.sum)
        self._total.add(jnp.sum(array if weights is None else array * weights))

    @override
    def result(self) -> Array:
        return self._total.value()


class WeightedMean(Metric):
    """The quotient of a total and a count.

    Subclasses set `default_name`.
    """

    default_name: str

    def __init__(self, name: str | None = None, dtype: DType = None) -> None:
        super().__init__(dtype, name or self.default_name)
        self._total = RunningTotal(self, "total")
        self._count = RunningTotal(self, "count")

    def count(self, values: jax.Array, sample_weight: Weights) -> None:
        """Adds values, each with its weight."""
        values, weights = weighted(self, values, sample_weight, _mean)
        if weights is None:
            self._total.add(jnp.sum(values))
            self._count.add(values.size)
        else:
            self._total.add(jnp.sum(values * weights))
            self._count.add(jnp.sum(weights))

    @override
    def result(self) -> Array:
        return divide(self._total.value(), self._count.value())


class Mean(WeightedMean):
    """The weighted mean of values.

    Raises:
      InvalidArgumentError: The weights do not fit the values.

    >>> m = Mean()
    >>> m.update_state([1.0, 3.0, 5.0])
    >>> m.update_state([7.0])
    >>> float(m.result())
    4.0
    """

    default_name = "mean"

    @override
    def update_state(self, values: Values, sample_weight: Weights = None) -> None:
        self.count(as_array(values), sample_weight)


class MeanTensor(Metric):
    """The mean of tensors of one shape, element by element.

    Raises:
      InvalidArgumentError: The values have another shape, or the weights do not fit them.

    >>> m = MeanTensor(shape=(2,))
    >>> m.update_state([0.0, 4.0])
    >>> m.update_state([8.0, 8.0], sample_weight=[1.0, 3.0])
    >>> m.result().tolist()
    [4.0, 7.0]
    """

    def __init__(
        self, name: str = "mean_tensor", dtype: DType = None, *, shape: tuple[int, ...]
    ) -> None:
        super().__init__(dtype, name)
        self._shape = tuple(shape)
        self._total = RunningTotal(self, "total", self._shape)
        self._count = RunningTotal(self, "count", self._shape)

    @override
    def update_state(self, values: Values, sample_weight: Weights = None) -> None:
        array = as_array(values).astype(self.dtype)
        if array.shape != self._shape:
            raise errors.InvalidArgumentError(
                f"Metric {self.name!r} needs values of shape {self._shape}",
                f"they have shape {array.shape}",
                "Create the metric with the shape of the values.",
            )
        weights = _broadcast(self, as_array(1 if sample_weight is None else sample_weight), array)
        self._total.add(array * weights)
        self._count.add(weights)

    @override
    def result(self) -> Array:
        return divide(self._total.value(), self._count.value())


class MeanOfTwo(WeightedMean):
    """The mean of a value per example, computed from labels and predictions by `compare`."""

    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        """Returns one value per example."""
        raise NotImplementedError

    @override
    def update_state(self, y_true: Values, y_pred: Values, sample_weight: Weights = None) -> None:
        self.count(self.compare(as_array(y_true), as_array(y_pred)), sample_weight)


class MeanSquaredError(MeanOfTwo):
    """The mean of squared differences.

    >>> float(MeanSquaredError()([0.0, 1.0], [1.0, 3.0]))
    2.5
    """

    default_name = "mean_squared_error"

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return per_example(jnp.square(difference(self, y_true, y_pred)))


class RootMeanSquaredError(MeanSquaredError):
    """The root of the mean of squared differences.

    >>> float(RootMeanSquaredError()([0.0, 0.0], [2.0, 2.0]))
    2.0
    """

    default_name = "root_mean_squared_error"

    @override
    def result(self) -> Array:
        return jnp.sqrt(super().result())


class MeanAbsoluteError(MeanOfTwo):
    """The mean of absolute differences.

    >>> float(MeanAbsoluteError()([0.0, 1.0], [1.0, 3.0]))
    1.5
    """

    default_name = "mean_absolute_error"

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return per_example(jnp.abs(difference(self, y_true, y_pred)))


class Accuracy(MeanOfTwo):
    """How often predictions equal labels.

    >>> float(Accuracy()([1, 2, 3, 4], [0, 2, 3, 4]))
    0.75
    """

    default_name = "accuracy"

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        y_true, y_pred = same_rank(self, y_true, y_pred)
        return y_true == y_pred


class BinaryAccuracy(MeanOfTwo):
    """How often predictions, compared with a threshold, equal labels.

    >>> float(BinaryAccuracy()([1, 1, 0, 0], [0.98, 1.0, 0.0, 0.6]))
    0.75
    """

    def __init__(
        self, name: str = "binary_accuracy", dtype: DType = None, threshold: float = 0.5
    ) -> None:
        super().__init__(name, dtype)
        self._threshold = threshold

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        y_true, y_pred = same_rank(self, y_true, y_pred)
        is_right = y_true == (y_pred > self._threshold).astype(y_true.dtype)
        return per_example(is_right.astype(self.dtype))


class SparseCategoricalAccuracy(MeanOfTwo):
    """How often the largest score is that of the label, where labels are class numbers.

    Raises:
      InvalidArgumentError: There is not one class number per row of scores.

    >>> float(SparseCategoricalAccuracy()([2, 1], [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0]]))
    0.5
    """

    default_name = "sparse_categorical_accuracy"

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return _classes(self, y_true, y_pred) == jnp.argmax(y_pred, -1)


class CategoricalAccuracy(MeanOfTwo):
    """How often the largest score is that of the label, where labels are one-hot.

    Raises:
      InvalidArgumentError: Labels and scores have different shapes.

    >>> float(CategoricalAccuracy()([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]]))
    0.5
    """

    default_name = "categorical_accuracy"

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return _one_hot_classes(self, y_true, y_pred) == jnp.argmax(y_pred, -1)


class _TopKAccuracy(MeanOfTwo):
    """How often the label is among the `k` largest scores."""

    def __init__(self, k: int = 5, name: str | None = None, dtype: DType = None) -> None:
        super().__init__(name, dtype)
        self._k = positive("k", k)


class SparseTopKCategoricalAccuracy(_TopKAccuracy):
    """How often the label is among the `k` largest scores, where labels are class numbers.

    Raises:
      InvalidArgumentError: There is not one class number per row of scores.

    >>> m = SparseTopKCategoricalAccuracy(k=1)
    >>> float(m([2, 1], [[0.1, 0.9, 0.8], [0.05, 0.95, 0.0]]))
    0.5
    """

    default_name = "sparse_top_k_categorical_accuracy"

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return _is_in_top_k(_classes(self, y_true, y_pred), y_pred, self._k)


class TopKCategoricalAccuracy(_TopKAccuracy):
    """How often the label is among the `k` largest scores, where labels are one-hot.

    Raises:
      InvalidArgumentError: Labels and scores have different shapes.

    >>> m = TopKCategoricalAccuracy(k=2)
    >>> float(m([[0, 0, 1], [0, 1, 0]], [[0.1, 0.9, 0.8], [0.05, 0.95, 0]]))
    1.0
    """

    default_name = "top_k_categorical_accuracy"

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
        return _is_in_top_k(_one_hot_classes(self, y_true, y_pred), y_pred, self._k)


def per_example(values: jax.Array) -> jax.Array:
    """Averages over the last dimension, if there is another one."""
    return _mean(values, (values.ndim - 1,)) if values.ndim > 1 else values


def difference(metric: Metric, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns predictions minus labels, in the type of the metric."""
    y_true, y_pred = same_rank(metric, y_true, y_pred)
    return y_pred.astype(metric.dtype) - y_true.astype(metric.dtype)


def same_rank(metric: Metric, y_true: jax.Array, y_pred: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Drops a last dimension of size 1 that only one of the two has."""
    if y_true.ndim == y_pred.ndim + 1 and y_true.shape[-1] == 1:
        y_true = y_true[..., 0]
    elif y_pred.ndim == y_true.ndim + 1 and y_pred.shape[-1] == 1:
        y_pred = y_pred[..., 0]
    if y_true.shape != y_pred.shape:
        raise errors.InvalidArgumentError(
            f"Metric {metric.name!r} needs labels and predictions of one shape",
            f"they have shapes {y_true.shape} and {y_pred.shape}",
            "Reshape one of them.",
        )
    return y_true, y_pred


def weighted(
    metric: Metric,
    values: jax.Array,
    sample_weight: Weights,
    reduce: Callable[[jax.Array, tuple[int, ...]], jax.Array],
) -> tuple[jax.Array, jax.Array | None]:
    """Returns values and weights of one shape.

    If weights have fewer dimensions than the values, the values are reduced over their last
    dimensions. A dimension of size 1 is broadcast.
    """
    values = values.astype(metric.dtype)
    if sample_weight is None:
        return values, None
    weights = as_array(sample_weight)
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    if 0 < weights.ndim < values.ndim:
        values = reduce(values, tuple(range(weights.ndim, values.ndim)))
    return values, _broadcast(metric, weights, values)


def _broadcast(metric: Metric, weights: jax.Array, values: jax.Array) -> jax.Array:
    sizes = zip(weights.shape, values.shape, strict=False)
    fits = not weights.ndim or (weights.ndim == values.ndim and all(a in (1, b) for a, b in sizes))
    if not fits:
        raise errors.InvalidArgumentError(
            f"`sample_weight` of metric {metric.name!r} must fit values of shape {values.shape}",
            f"it has shape {weights.shape}",
            "Pass one weight per value, per example, or one for all.",
        )
    return jnp.broadcast_to(weights.astype(metric.dtype), values.shape)


def _mean(values: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    size = math.prod(values.shape[axis] for axis in axes)
    return jnp.sum(values, axes) / max(size, 1)


def positive(argument: str, value: int) -> int:
    """Returns a whole number of at least 1, or raises."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise errors.InvalidArgumentError(
            f"`{argument}` must be a whole number of at least 1",
            f"it is {value!r}",
            f"Pass {argument}=1 or more.",
        )
    return value


def _classes(metric: MeanOfTwo, y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns class numbers, without a last dimension of size 1."""
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
    """Returns per row whether fewer than `k` scores are larger than that of the class."""
    # The score of a class number out of range is nan, which is never correct.
    own = jnp.take_along_axis(
        scores.astype(jnp.promote_types(scores.dtype, jnp.float32)),
        jnp.where(classes < 0, scores.shape[-1], classes)[..., None],
        -1,
        mode="fill",
        fill_value=jnp.nan,
    )
    return (jnp.sum(scores > own, -1) < k) & jnp.isfinite(own[..., 0])
