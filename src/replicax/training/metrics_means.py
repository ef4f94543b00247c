"""Metrics that are sums and weighted means of a value per example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from typing_extensions import override

from replicax.foundation import errors
from replicax.training.metrics import Metric, RunningTotal, as_array, divide


class Sum(Metric):
    """The sum of all values, each times its weight.

    >>> m = Sum()
    >>> m.update_state([1.0, 3.0, 5.0], sample_weight=[1, 1, 0])
    >>> float(m.result())
    4.0
    """

    def __init__(self, name: str = "sum", dtype: Any = None) -> None:
        super().__init__(dtype, name)
        self._total = RunningTotal(self, "total")

    @override
    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        values, weights = weighted(self, as_array(values), sample_weight, jnp.sum)
        self._total.add(jnp.sum(values if weights is None else values * weights))

    @override
    def result(self) -> Any:
        return self._total.value()


class WeightedMean(Metric):
    """What means have in common: a total, a count, and their quotient."""

    def __init__(self, name: str, dtype: Any = None) -> None:
        super().__init__(dtype, name)
        self._total = RunningTotal(self, "total")
        self._count = RunningTotal(self, "count")

    def count(self, values: jax.Array, sample_weight: Any) -> None:
        """Takes in values, each with its weight."""
        values, weights = weighted(self, values, sample_weight, _mean)
        if weights is None:
            self._total.add(jnp.sum(values))
            self._count.add(values.size)
        else:
            self._total.add(jnp.sum(values * weights))
            self._count.add(jnp.sum(weights))

    @override
    def result(self) -> Any:
        return divide(self._total.value(), self._count.value())


class Mean(WeightedMean):
    """The mean of all values, each counted with its weight.

    >>> m = Mean()
    >>> m.update_state([1.0, 3.0, 5.0])
    >>> m.update_state([7.0])
    >>> float(m.result())
    4.0
    """

    def __init__(self, name: str = "mean", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    @override
    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        self.count(as_array(values), sample_weight)


class MeanTensor(Metric):
    """The mean of tensors of one shape, element by element.

    >>> m = MeanTensor(shape=(2,))
    >>> m.update_state([0.0, 4.0])
    >>> m.update_state([8.0, 8.0], sample_weight=[1.0, 3.0])
    >>> m.result().tolist()
    [4.0, 7.0]
    """

    def __init__(
        self, name: str = "mean_tensor", dtype: Any = None, *, shape: tuple[int, ...]
    ) -> None:
        super().__init__(dtype, name)
        self._shape = tuple(shape)
        self._total = RunningTotal(self, "total", self._shape)
        self._count = RunningTotal(self, "count", self._shape)

    @override
    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        values = as_array(values).astype(self.dtype)
        if values.shape != self._shape:
            raise errors.InvalidArgumentError(
                f"Metric {self.name!r} needs values of shape {self._shape}",
                f"they have shape {values.shape}",
                "Make the metric with the shape of the values.",
            )
        weights = _fitting(self, as_array(1 if sample_weight is None else sample_weight), values)
        self._total.add(values * weights)
        self._count.add(weights)

    @override
    def result(self) -> Any:
        return divide(self._total.value(), self._count.value())


class MeanOfTwo(WeightedMean):
    """A mean of a value per example that is computed from labels and predictions.

    Subclasses define `compare`, which returns that value for each example.
    """

    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> Any:
        """Returns one value per example."""
        raise NotImplementedError

    @override
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count(self.compare(as_array(y_true), as_array(y_pred)), sample_weight)


class MeanSquaredError(MeanOfTwo):
    """The mean of squared differences.

    >>> float(MeanSquaredError()([0.0, 1.0], [1.0, 3.0]))
    2.5
    """

    def __init__(self, name: str = "mean_squared_error", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> Any:
        return per_example(jnp.square(difference(self, y_true, y_pred)))


class RootMeanSquaredError(MeanSquaredError):
    """The root of the mean of squared differences.

    >>> float(RootMeanSquaredError()([0.0, 0.0], [2.0, 2.0]))
    2.0
    """

    def __init__(self, name: str = "root_mean_squared_error", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    @override
    def result(self) -> Any:
        return jnp.sqrt(super().result())


class MeanAbsoluteError(MeanOfTwo):
    """The mean of absolute differences.

    >>> float(MeanAbsoluteError()([0.0, 1.0], [1.0, 3.0]))
    1.5
    """

    def __init__(self, name: str = "mean_absolute_error", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    @override
    def compare(self, y_true: jax.Array, y_pred: jax.Array) -> Any:
        return per_example(jnp.abs(difference(self, y_true, y_pred)))


def per_example(values: jax.Array) -> jax.Array:
    """Averages over the last dimension, if it is not the one of the examples."""
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
    metric: Metric, values: jax.Array, sample_weight: Any, reduce: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Brings values and weights to one shape.

    Weights with fewer dimensions than the values weigh groups of values: these are reduced
    over their last dimensions first. A dimension of size 1 is repeated.
    """
    values = values.astype(metric.dtype)
    if sample_weight is None:
        return values, None
    weights = as_array(sample_weight)
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    if 0 < weights.ndim < values.ndim:
        values = reduce(values, tuple(range(weights.ndim, values.ndim)))
    return values, _fitting(metric, weights, values)


def _fitting(metric: Metric, weights: jax.Array, values: jax.Array) -> jax.Array:
    sizes = zip(weights.shape, values.shape, strict=False)
    fits = not weights.ndim or (weights.ndim == values.ndim and all(a in (1, b) for a, b in sizes))
    if not fits:
        raise errors.InvalidArgumentError(
            f"`sample_weight` of metric {metric.name!r} must fit values of shape {values.shape}",
            f"it has shape {weights.shape}",
            "Give one weight per value, per example, or one for all.",
        )
    return jnp.broadcast_to(weights.astype(metric.dtype), values.shape)


def _mean(values: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    size = 1
    for axis in axes:
        size *= values.shape[axis]
    return jnp.sum(values, axes) / max(size, 1)
