"""Tries out whether the variables of a model's metrics are sums over batches.

Steps on several workers are added up. The metrics of Keras allow that; those of the user are tried.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
import keras
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.keras import internals

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-3


def require_sums(model: keras.Model, batch: Tree) -> None:
    """Raises if a metric of the user does something else than adding to its variables.

    Args:
      model: A model that is built.
      batch: A batch of it.
    """
    own = [m for m in internals.metrics_of(model) if not _is_of_keras(m)]
    if not own:
        return
    try:
        first, second = _increments(model, batch)
    except Exception as error:  # It may work on outputs of the model only.
        _log.info("The metrics of %s were not tried out: %r", model.name, error)
        return
    for variable, a, b in zip(model.metrics_variables, first, second, strict=True):
        if not np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE):
            names = ", ".join(type(metric).__name__ for metric in own)
            raise errors.UnsupportedError(
                "With parameter servers, a metric must add to its variables: the steps of all "
                "workers are added up",
                f"variable {variable.path!r} depends on its old value in another way ({names})",
                "Write the metric with sums and counts, or compute it in a callback.",
            )


def _is_of_keras(metric: keras.metrics.Metric) -> bool:
    return type(metric).__module__.partition(".")[0] == "keras"


def _increments(model: keras.Model, batch: Tree) -> list[list[np.ndarray]]:
    """Returns what a batch adds to the metrics, from two states of them."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    random = np.random.default_rng(0)

    def draw(spec: keras.KerasTensor) -> np.ndarray:
        return random.uniform(0.1, 0.9, size=spec.shape).astype(spec.dtype)

    y_pred = jax.tree.map(draw, internals.output_spec(model, x))
    zeros = [np.zeros(v.shape, v.dtype) for v in model.metrics_variables]
    ones = [np.ones(v.shape, v.dtype) for v in model.metrics_variables]

    def added(values: Sequence[np.ndarray]) -> list[np.ndarray]:
        loss = np.ones((), np.float32)
        new = internals.update_metrics(model, values, loss, (x, y, weights), y_pred)
        return [np.asarray(a) - b for a, b in zip(new, values, strict=True)]

    with jax_compat.eagerly():
        return [added(zeros), added(ones)]
