"""What Keras optimizers do to gradients as a whole, before a server sees its part of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import keras

from replicax.tracing.gradients import Gradient
from replicax.values.indexed_slices import IndexedSlices


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Clips gradients by their norms, and scales losses.

    Attributes:
      clipnorm: The largest norm of each gradient.
      global_clipnorm: The largest norm of all gradients together.
      loss_scale: The factor of the loss, by which the servers divide the gradients.
    """

    clipnorm: float | None = None
    global_clipnorm: float | None = None
    loss_scale: float | None = None

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> Clipping:
        """Returns what an optimizer does."""
        scale = optimizer.loss_scale_factor
        return cls(optimizer.clipnorm, optimizer.global_clipnorm, scale)

    def scaled(self, loss: jax.Array) -> jax.Array:
        """Returns the loss whose gradients are computed."""
        return loss if self.loss_scale is None else loss * self.loss_scale

    def clipped(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Returns gradients whose norms are limited."""
        found = list(gradients)
        if self.clipnorm and self.clipnorm > 0:
            limit = self._limit(self.clipnorm)
            return [_times(g, _factor(_square(g), limit)) for g in found]
        if self.global_clipnorm and self.global_clipnorm > 0:
            total = jnp.asarray(sum(_square(g) for g in found))
            factor = _factor(total, self._limit(self.global_clipnorm))
            return [_times(g, factor) for g in found]
        return found

    def _limit(self, norm: float) -> float:
        # Keras clips gradients after it has divided them by the scale.
        return norm * (self.loss_scale or 1.0)


def _factor(square: jax.Array, limit: float) -> jax.Array:
    norm = jnp.sqrt(square)
    return limit / jnp.maximum(norm, limit)


def _times(gradient: Gradient, factor: jax.Array) -> Gradient:
    if isinstance(gradient, IndexedSlices):
        return gradient.map_values(lambda rows: rows * factor.astype(rows.dtype))
    return gradient * factor.astype(gradient.dtype)


def _square(gradient: Gradient) -> jax.Array:
    """Returns the sum of the squares of a gradient."""
    if not isinstance(gradient, IndexedSlices):
        return jnp.sum(jnp.square(gradient))
    # Rows of one number are summed first: the gradient has each of them once.
    numbers = jnp.asarray(gradient.indices)
    if not numbers.size:
        return jnp.zeros((), gradient.values.dtype)
    unique, inverse = jnp.unique(
        numbers, return_inverse=True, size=numbers.size, fill_value=numbers[0]
    )
    rows = jax.ops.segment_sum(gradient.values, inverse.reshape(-1), unique.shape[0])
    return jnp.sum(jnp.square(rows))
