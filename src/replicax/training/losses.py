"""Losses of replicas as parts of the loss over the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.foundation import errors, jax_compat
from replicax.values.array_surface import as_operand

# An array, a variable, or a list of numbers.
Losses: TypeAlias = ArrayLike | Sequence[ArrayLike]


def compute_average_loss(
    per_example_loss: Losses,
    sample_weight: Losses | None = None,
    global_batch_size: ArrayLike | None = None,
) -> jax.Array:
    """Sums the losses of a replica's examples, and divides by the global batch size.

    The sum of the result over all replicas is the mean loss of the global batch, and the sum of
    its gradients, which `apply_gradients` computes, is the gradient of the mean loss.

    Args:
      per_example_loss: The loss of each example of this replica; at least one dimension.
      sample_weight: The weight of each example, or one for all.
      global_batch_size: The number of examples of all replicas. If None: the number of this
        replica's examples, times the number of replicas, which is right if all have the same
        number; pass it where the last batch of an epoch may be smaller.

    Raises:
      InvalidArgumentError: The loss is a scalar, or weights or batch size do not fit it.
      ArgumentTypeError: `global_batch_size` is not a whole number.
      ContextError: This is not replica code.

    >>> float(compute_average_loss([2.0, 4.0], global_batch_size=4))
    1.5
    """
    losses = jnp.asarray(as_operand(per_example_loss))
    if losses.ndim < 1:
        raise errors.InvalidArgumentError(
            "`per_example_loss` needs at least one dimension, that of the examples",
            "it is a scalar",
            "Do not reduce the loss first: pass one loss per example.",
        )
    dtype = losses.dtype
    if sample_weight is not None:
        weights = _fitting(jnp.asarray(as_operand(sample_weight)), losses)
        losses = (losses.astype(jnp.float32) * weights.astype(jnp.float32)).astype(dtype)
    if global_batch_size is None:
        global_batch_size = losses.shape[0] * _num_replicas("compute_average_loss")
    size = _checked_size(global_batch_size).astype(dtype)
    is_zero = size == 0
    return jnp.where(is_zero, 0, jnp.sum(losses) / jnp.where(is_zero, 1, size)).astype(dtype)


def scale_regularization_loss(regularization_loss: Losses) -> jax.Array:
    """Sums a loss that every replica computes alike, and divides by the number of replicas.

    The sum of the result over all replicas counts the loss once.

    Raises:
      ContextError: This is not replica code.

    >>> float(scale_regularization_loss([1.0, 2.0]))
    3.0
    """
    loss = jnp.asarray(as_operand(regularization_loss))
    return jnp.sum(loss) / _num_replicas("scale_regularization_loss")


def _num_replicas(api: str) -> int:
    frame = frames.current()
    if frame.mode is not Mode.REPLICA and not frame.is_default:
        raise errors.ContextError(
            f"`{api}` needs a replica context",
            f"this is {frame.describe()}",
            "Call it inside the function that `strategy.run` runs.",
        )
    return frame.strategy.num_replicas_in_sync


def _fitting(weights: jax.Array, losses: jax.Array) -> jax.Array:
    """Reshapes weights such that they broadcast to the losses, as Keras does."""
    if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    elif weights.ndim and weights.ndim == losses.ndim - 1:
        weights = weights[..., None]
    try:
        np.broadcast_shapes(weights.shape, losses.shape)
    except ValueError:
        raise errors.InvalidArgumentError(
            f"`sample_weight` must fit losses of shape {losses.shape}",
            f"it has shape {weights.shape}",
            "Give one weight per example, or one for all.",
        ) from None
    return weights


def _checked_size(size: ArrayLike) -> jax.Array:
    found = jnp.asarray(as_operand(size))
    if found.ndim:
        raise errors.InvalidArgumentError(
            "`global_batch_size` must be one number",
            f"it has shape {found.shape}",
            "Pass the number of examples of all replicas.",
        )
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise errors.ArgumentTypeError(
            "`global_batch_size` must be a whole number",
            f"it has type {found.dtype}",
            "Pass an int.",
        )
    if not jax_compat.is_traced(found) and found < 0:
        raise errors.InvalidArgumentError(
            "`global_batch_size` must be 0 or more", f"it is {found}", "Pass another number."
        )
    return found
