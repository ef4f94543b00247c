"""Losses, normalization and lookups of `tf.nn`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, lazy
from replicax.tf import tape_recording
from replicax.tf.dispatch import on_host, op
from replicax.tf.ops import clipping, indexing
from replicax.tf.ops.activations import log_softmax
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
    axes_of,
    integer,
    is_concrete,
    kind_of,
    normalized,
    numbers,
    operands,
    quiet_op,
    xp,
)
from replicax.tf.ops.reductions import reduce_mean
from replicax.tf.tensor import raw, wrap
from replicax.tracing import gradients
from replicax.training import losses
from replicax.variables.remote import RemoteVariable
from replicax.variables.sharded import ShardedVariable

if TYPE_CHECKING:
    import optax
else:
    optax = lazy.module("optax")

__all__ = [
    "batch_normalization",
    "bias_add",
    "compute_average_loss",
    "ctc_loss",
    "embedding_lookup",
    "l2_loss",
    "local_response_normalization",
    "log_poisson_loss",
    "lrn",
    "moments",
    "normalize_moments",
    "scale_regularization_loss",
    "sigmoid_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits",
    "sparse_softmax_cross_entropy_with_logits",
    "sufficient_statistics",
    "weighted_cross_entropy_with_logits",
    "weighted_moments",
]

compute_average_loss = op(losses.compute_average_loss)
scale_regularization_loss = op(losses.scale_regularization_loss)


@quiet_op
def softmax_cross_entropy_with_logits(
    labels: Value, logits: Value, axis: Value = -1, name: str | None = None
) -> Array:
    """Returns -sum(labels * log(softmax(logits))) along a dimension.

    >>> loss = softmax_cross_entropy_with_logits([[0.0, 1.0]], [[0.0, 0.0]])
    >>> round(float(loss[0]), 3)
    0.693
    """
    x = numbers(logits, "nn.softmax_cross_entropy_with_logits", "f")
    true = array(labels).astype(x.dtype)
    place = normalized(integer(axis, "axis"), x.ndim)
    return -xp(x, true).sum(true * log_softmax.raw(x, place), axis=place)


@quiet_op
def sparse_softmax_cross_entropy_with_logits(
    labels: Value, logits: Value, name: str | None = None
) -> Array:
    """Returns -log(softmax(logits)) of the class that each label names.

    >>> round(float(sparse_softmax_cross_entropy_with_logits([1], [[0.0, 0.0]])[0]), 3)
    0.693
    """
    own = "nn.sparse_softmax_cross_entropy_with_logits"
    classes, x = numbers(labels, own, "iu"), numbers(logits, own, "f")
    if tuple(classes.shape) != tuple(x.shape[:-1]):
        raise errors.InvalidArgumentError(
            f"`labels` must have the shape {tuple(x.shape[:-1])}, one class for each row",
            f"it has {tuple(classes.shape)}",
            "Use softmax_cross_entropy_with_logits for labels of probabilities.",
        )
    if is_concrete(classes) and classes.size:
        known = np.asarray(classes)
        if known.min() < 0 or known.max() >= x.shape[-1]:
            raise errors.InvalidArgumentError(
                f"`labels` must be from 0 to {x.shape[-1] - 1}",
                f"they are from {known.min()} to {known.max()}",
                "Check the number of classes.",
            )
    ns = xp(x, classes)
    rows = log_softmax.raw(x)
    found = -ns.take_along_axis(rows, classes[..., None].astype(np.int32), axis=-1)[..., 0]
    # A class out of range has no loss: not a number, as in TensorFlow on a GPU.
    is_class = (classes >= 0) & (classes < x.shape[-1])
    return ns.where(is_class, found, np.asarray(np.nan, x.dtype))


def _same_shape(a: Array, b: Array, names: str) -> None:
    if tuple(a.shape) != tuple(b.shape):
        raise errors.InvalidArgumentError(
            f"{names} must have one shape",
            f"they have {tuple(a.shape)} and {tuple(b.shape)}",
            "Reshape one of them.",
        )


@quiet_op
def sigmoid_cross_entropy_with_logits(
    labels: Value = None, logits: Value = None, name: str | None = None
) -> Array:
    """Returns the cross entropy of probabilities and sigmoid(logits), element by element."""
    x, true = operands(logits, labels, op="nn.sigmoid_cross_entropy_with_logits")
    _same_shape(x, true, "`labels` and `logits`")
    ns = xp(x, true)
    zero = np.asarray(0, x.dtype)
    return ns.where(x >= 0, x, zero) - x * true + ns.log1p(ns.exp(-ns.abs(x)))


@quiet_op
def weighted_cross_entropy_with_logits(
    labels: Value, logits: Value, pos_weight: Value, name: str | None = None
) -> Array:
    """Returns the cross entropy with a weight for positive labels."""
    x, true, weight = operands(logits, labels, pos_weight, op="weighted_cross_entropy_with_logits")
    _same_shape(x, true, "`labels` and `logits`")
    ns = xp(x, true, weight)
    factor = 1 + (weight - 1) * true
    below = ns.maximum(-x, np.asarray(0, x.dtype))
    return (1 - true) * x + factor * (ns.log1p(ns.exp(-ns.abs(x))) + below)


@quiet_op
def log_poisson_loss(
    targets: Value, log_input: Value, compute_full_loss: bool = False, name: str | None = None
) -> Array:
    """Returns exp(log_input) - log_input * targets, with Stirling's term for the full loss."""
    x, true = operands(log_input, targets, op="nn.log_poisson_loss")
    ns = xp(x, true)
    found = ns.exp(x) - x * true
    if not compute_full_loss:
        return found
    one = np.asarray(1, x.dtype)
    safe = ns.where(true > 1, true, one)
    stirling = safe * ns.log(safe) - safe + ns.log(np.asarray(2 * np.pi, x.dtype) * safe) / 2
    is_small = (true >= 0) & (true <= 1)
    return found + ns.where(is_small, np.asarray(0, x.dtype), stirling)


@quiet_op
def l2_loss(t: Value, name: str | None = None) -> Array:
    """Returns half the sum of the squares.

    >>> float(l2_loss([3.0, 4.0]))
    12.5
    """
    x = numbers(t, "nn.l2_loss", "f")
    return xp(x).sum(x * x) / np.asarray(2, x.dtype)


@op
def ctc_loss(
    labels: Value,
    logits: Value,
    label_length: Value,
    logit_length: Value,
    logits_time_major: bool = True,
    unique: Value = None,
    blank_index: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the connectionist temporal classification loss of dense labels."""
    x, classes = numbers(logits, "nn.ctc_loss", "f"), numbers(labels, "nn.ctc_loss", "iu")
    x = jnp.asarray(x)
    x = jnp.swapaxes(x, 0, 1) if logits_time_major else x
    blank = 0 if blank_index is None else integer(blank_index, "blank_index")
    blank = blank + x.shape[-1] if blank < 0 else blank
    frames, steps = np.arange(x.shape[1]), np.arange(classes.shape[1])
    no_frame = (frames >= jnp.asarray(logit_length)[:, None]).astype(x.dtype)
    no_label = (steps >= jnp.asarray(label_length)[:, None]).astype(x.dtype)
    found = optax.ctc_loss(x, no_frame, jnp.asarray(classes), no_label, blank_id=blank)
    return np.asarray(found) if on_host() else found


@quiet_op
def bias_add(
    value: Value, bias: Value, data_format: str | None = None, name: str | None = None
) -> Array:
    """Returns the tensor plus a vector along its channels."""
    x, vector = operands(value, bias, op="nn.bias_add")
    is_first = data_format is not None and data_format.startswith("NC")
    place = 1 if is_first else x.ndim - 1
    if vector.ndim != 1 or x.ndim < 2 or vector.shape[0] != x.shape[place]:
        raise errors.InvalidArgumentError(
            f"`bias` must be a vector for the channels of {tuple(x.shape)}",
            f"its shape is {tuple(vector.shape)}",
            "Check `data_format`.",
        )
    return x + vector.reshape([-1 if i == place else 1 for i in range(x.ndim)])


@quiet_op
def moments(
    x: Value, axes: Value, shift: Value = None, keepdims: bool = False, name: str | None = None
) -> tuple[Array, Array]:
    """Returns mean and variance over dimensions.

    >>> [float(part) for part in moments([1.0, 3.0], [0])]
    [2.0, 1.0]
    """
    x = numbers(x, "nn.moments", "fiu")
    if kind_of(x.dtype) in "iu":
        mean = reduce_mean.raw(x, axes, True)
        variance = reduce_mean.raw((x - mean) * (x - mean), axes, keepdims)
        return (mean if keepdims else xp(x).squeeze(mean, axis=axes_of(axes))), variance
    wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    places, ns = axes_of(axes), xp(x)
    mean = ns.mean(wide, axis=places, keepdims=True)
    variance = ns.mean(ns.square(wide - mean), axis=places, keepdims=keepdims)
    mean = mean if keepdims else ns.squeeze(mean, axis=places)
    return mean.astype(x.dtype), variance.astype(x.dtype)


@quiet_op
def sufficient_statistics(
    x: Value, axes: Value, shift: Value = None, keepdims: bool = False, name: str | None = None
) -> tuple[Array, Array, Array, Array | None]:
    """Returns the count, sum and sum of squares over dimensions, and the shift of the elements.

    >>> count, total, squares, _ = sufficient_statistics([1.0, 2.0], [0])
    >>> float(count), float(total), float(squares)
    (2.0, 3.0, 5.0)
    """
    x = numbers(x, "nn.sufficient_statistics", "f")
    places, ns = axes_of(axes), xp(x)
    away = None if shift is None else array(shift, x.dtype)
    moved = x if away is None else x - away
    sizes = x.shape if places is None else [x.shape[place] for place in places]
    count = xp(x).asarray(np.asarray(math.prod(sizes), x.dtype))
    total = ns.sum(moved, axis=places, keepdims=keepdims)
    return count, total, ns.sum(moved * moved, axis=places, keepdims=keepdims), away


@quiet_op
def normalize_moments(
    counts: Value, mean_ss: Value, variance_ss: Value, shift: Value, name: str | None = None
) -> tuple[Array, Array]:
    """Returns the mean and variance of what `sufficient_statistics` returned."""
    count, total, squares = operands(counts, mean_ss, variance_ss, op="nn.normalize_moments")
    moved = total / count
    mean = moved if shift is None else moved + array(shift, moved.dtype)
    return mean, squares / count - moved * moved


@quiet_op
def weighted_moments(
    x: Value,
    axes: Value,
    frequency_weights: Value,
    keepdims: bool = False,
    name: str | None = None,
) -> tuple[Array, Array]:
    """Returns mean and variance over dimensions of elements with weights."""
    x, weights = operands(x, frequency_weights, op="nn.weighted_moments")
    ns, places = xp(x, weights), axes_of(axes)
    weights = ns.broadcast_to(weights, x.shape)
    total = ns.sum(weights, axis=places, keepdims=True)
    mean = ns.sum(x * weights, axis=places, keepdims=True) / total
    variance = ns.sum(weights * ns.square(x - mean), axis=places, keepdims=True) / total
    if keepdims:
        return mean, variance
    return ns.squeeze(mean, axis=places), ns.squeeze(variance, axis=places)


@quiet_op
def batch_normalization(
    x: Value,
    mean: Value,
    variance: Value,
    offset: Value,
    scale: Value,
    variance_epsilon: Value,
    name: str | None = None,
) -> Array:
    """Returns (x - mean) / sqrt(variance + epsilon) * scale + offset."""
    x = numbers(x, "nn.batch_normalization", "f")
    mean, variance = array(mean, x.dtype), array(variance, x.dtype)
    factor = 1 / xp(x, variance).sqrt(variance + array(variance_epsilon, x.dtype))
    if scale is not None:
        factor = factor * array(scale, x.dtype)
    start = -mean * factor if offset is None else array(offset, x.dtype) - mean * factor
    return x * factor.astype(x.dtype) + start.astype(x.dtype)


@quiet_op
def local_response_normalization(
    input: Value,
    depth_radius: int = 5,
    bias: float = 1,
    alpha: float = 1,
    beta: float = 0.5,
    name: str | None = None,
) -> Array:
    """Returns each element divided by a power of the squares of channels around it."""
    x = numbers(input, "nn.local_response_normalization", "f")
    ns, radius = xp(x), integer(depth_radius, "depth_radius")
    squares = ns.pad(x * x, [(0, 0)] * (x.ndim - 1) + [(radius, radius)])
    width = x.shape[-1]
    total = ns.zeros_like(x)
    for i in range(2 * radius + 1):
        total = total + squares[..., i : i + width]
    base = np.asarray(bias, x.dtype) + np.asarray(alpha, x.dtype) * total
    return x / ns.power(base, np.asarray(beta, x.dtype))


lrn = local_response_normalization


def embedding_lookup(
    params: Value, ids: Value, max_norm: Value = None, name: str | None = None
) -> Value:
    """Returns rows of a table by id; only these rows of a remote table travel.

    >>> embedding_lookup([[0.0], [1.0], [2.0]], [2, 0]).numpy().tolist()
    [[2.0], [0.0]]
    """
    table = params[0] if isinstance(params, list | tuple) and len(params) == 1 else params
    if isinstance(table, RemoteVariable | ShardedVariable):
        tapes = tape_recording.recording_tapes()
        row_ids = raw(ids)
        with tape_recording.suspended():
            taken = gradients.embedding_lookup(table, row_ids)
        for tape in tapes:
            tape.note_lookup(table, jnp.asarray(row_ids), taken)
        rows = wrap(taken)
    else:
        rows = indexing.gather(table, ids)
    return rows if max_norm is None else _clip_rows(rows, ids, max_norm)


@op
def _clip_rows(rows: Value, ids: Value, max_norm: Value) -> Array:
    x, places = array(rows), array(ids)
    return clipping.clip_by_norm.raw(x, max_norm, axes=tuple(range(places.ndim, x.ndim)))
