"""Non-maximum suppression: the best of boxes that overlap.

All functions choose greedily: the box with the best score, then without those that overlap it.
Results whose length depends on values need values that are known; the others compile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf.dispatch import on_host, op
from replicax.tf.ops.operands import (
    Array,
    Namespace,
    Value,
    array,
    integer,
    require_values,
    static,
    xp,
)

__all__ = [
    "combined_non_max_suppression",
    "non_max_suppression",
    "non_max_suppression_overlaps",
    "non_max_suppression_padded",
    "non_max_suppression_with_scores",
]

_ADVICE = (
    "Use tf.image.non_max_suppression_padded with pad_to_max_output_size=True, or "
    "tf.image.combined_non_max_suppression."
)


class _Limits(NamedTuple):
    """When boxes are chosen and left out.

    Attributes:
      most: The most boxes that are chosen.
      overlap: The intersection over union above which a box is left out.
      score: The score that a box must exceed.
      sigma: If positive, boxes lose a part of their score by their overlap instead.
      is_padded: Whether the rules of `non_max_suppression_padded` hold: a box with exactly the
        overlap is left out, and the corners of all boxes are in the order of the first one.
    """

    most: int
    overlap: Array
    score: Array
    sigma: float = 0.0
    is_padded: bool = False


def _overlaps(ns: Namespace, boxes: Array, one: Array, is_ordered: bool = False) -> Array:
    """Returns the intersection over union of boxes (n, 4) with one box."""
    low, high, own_low, own_high = boxes[:, :2], boxes[:, 2:], one[:2], one[2:]
    if not is_ordered:
        low, high = ns.minimum(low, high), ns.maximum(low, high)
        own_low, own_high = ns.minimum(own_low, own_high), ns.maximum(own_low, own_high)
    sides = ns.maximum(ns.minimum(high, own_high) - ns.maximum(low, own_low), 0)
    shared = sides[:, 0] * sides[:, 1]
    areas, own = ns.prod(high - low, axis=1), ns.prod(own_high - own_low)
    is_real = (areas > 0) & (own > 0)
    return ns.where(is_real, shared / ns.where(is_real, areas + own - shared, 1), 0)


def _lowered(ns: Namespace, scores: Array, overlaps: Array, limits: _Limits) -> Array:
    """Returns scores after a box was chosen; -inf for boxes that are left out."""
    is_far = overlaps < limits.overlap if limits.is_padded else overlaps <= limits.overlap
    if limits.sigma <= 0:
        return ns.where(is_far, scores, -np.inf)
    weights = ns.exp(-0.5 / limits.sigma * overlaps * overlaps)
    # A score of -inf stays; 0 * -inf is not a number.
    lower = ns.where(scores == -np.inf, scores, weights * ns.where(scores == -np.inf, 0, scores))
    return ns.where(lower > limits.score, lower, -np.inf)


def _chosen(
    boxes: np.ndarray, scores: np.ndarray, limits: _Limits, matrix: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices and scores of the chosen boxes."""
    current = np.where(scores > limits.score, scores, -np.inf).astype(np.float32)
    indices: list[int] = []
    found: list[float] = []
    while len(indices) < limits.most and current.size:
        best = int(np.argmax(current))
        if current[best] == -np.inf:
            break
        indices.append(best)
        found.append(float(current[best]))
        overlaps = (
            _overlaps(np, boxes, boxes[best], limits.is_padded)
            if matrix is None
            else matrix[:, best]
        )
        current = _lowered(np, current, overlaps, limits)
        current[best] = -np.inf
    return np.asarray(indices, np.int32), np.asarray(found, np.float32)


def _chosen_padded(boxes: Array, scores: Array, limits: _Limits) -> tuple[Array, Array, Array]:
    """Returns indices and scores with zeros at the end, and their number, in compiled code."""

    def step(at: Array, state: tuple[Array, Array, Array, Array]) -> tuple[Array, ...]:
        current, indices, found, count = state
        best = jnp.argmax(current)
        is_valid = current[best] > -jnp.inf
        indices = indices.at[at].set(jnp.where(is_valid, best, 0).astype(jnp.int32))
        found = found.at[at].set(jnp.where(is_valid, current[best], 0))
        lowered = _lowered(
            jnp, current, _overlaps(jnp, boxes, boxes[best], limits.is_padded), limits
        )
        return lowered.at[best].set(-jnp.inf), indices, found, count + is_valid

    current = jnp.where(scores > limits.score, scores, -jnp.inf).astype(jnp.float32)
    empty = jnp.zeros(limits.most, jnp.int32), jnp.zeros(limits.most, jnp.float32)
    if not scores.shape[0]:
        return *empty, jnp.int32(0)
    _, indices, found, count = jax.lax.fori_loop(
        0, limits.most, step, (current, *empty, jnp.int32(0))
    )
    return indices, found, count


def _numbers(*arrays: np.ndarray) -> tuple[Array, ...]:
    return arrays if on_host() else tuple(map(jnp.asarray, arrays))


def _known(name: str, boxes: Value, scores: Value) -> tuple[np.ndarray, np.ndarray]:
    found = require_values(f"image.{name}", array(boxes), array(scores), advice=_ADVICE)
    own, points = found[0].astype(np.float32), found[1].astype(np.float32)
    if own.ndim != 2 or points.ndim != 1 or own.shape[0] != points.shape[0]:
        raise errors.InvalidArgumentError(
            f"`tf.image.{name}` takes boxes (n, 4) and n scores",
            f"the shapes are {own.shape} and {points.shape}",
            "Use tf.image.combined_non_max_suppression for batches.",
        )
    return own, points


def _limits(count: Value, overlap: Value, score: Value, sigma: Value = 0.0) -> _Limits:
    most = integer(count, "max_output_size")
    spread = float(static(sigma, "soft_nms_sigma"))
    return _Limits(most, _level(overlap), _level(score), spread)


def _level(value: Value) -> Array:
    return np.asarray(value, np.float32) if isinstance(value, int | float) else array(value)


@op(differentiable=False)
def non_max_suppression(
    boxes: Value,
    scores: Value,
    max_output_size: Value,
    iou_threshold: Value = 0.5,
    score_threshold: Value = float("-inf"),
    name: str | None = None,
) -> Array:
    """Returns the indices of the best boxes that do not overlap, best first.

    Args:
      boxes: (n, 4): y1, x1, y2, x2 of two opposite corners.
      scores: (n).
      max_output_size: The most boxes.
      iou_threshold: The intersection over union above which boxes overlap.
      score_threshold: The score that a box must exceed.
      name: Accepted for portability.

    >>> boxes = np.asarray([[0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3]], np.float32)
    >>> non_max_suppression(boxes, np.asarray([0.5, 0.9, 0.1], np.float32), 5).numpy().tolist()
    [1, 2]
    """
    own, points = _known("non_max_suppression", boxes, scores)
    limits = _limits(max_output_size, iou_threshold, score_threshold)
    return _numbers(_chosen(own, points, limits)[0])[0]


@op(differentiable=False)
def non_max_suppression_with_scores(
    boxes: Value,
    scores: Value,
    max_output_size: Value,
    iou_threshold: Value = 0.5,
    score_threshold: Value = float("-inf"),
    soft_nms_sigma: Value = 0.0,
    name: str | None = None,
) -> tuple[Array, ...]:
    """Returns the indices and the scores of the best boxes.

    With a positive `soft_nms_sigma`, boxes that overlap a better one lose a part of their score
    rather than being left out.
    """
    own, points = _known("non_max_suppression_with_scores", boxes, scores)
    limits = _limits(max_output_size, iou_threshold, score_threshold, soft_nms_sigma)
    return _numbers(*_chosen(own, points, limits))


@op(differentiable=False)
def non_max_suppression_overlaps(
    overlaps: Value,
    scores: Value,
    max_output_size: Value,
    overlap_threshold: Value = 0.5,
    score_threshold: Value = float("-inf"),
    name: str | None = None,
) -> Array:
    """Returns the indices of the best of n things with given overlaps (n, n)."""
    matrix, points = _known("non_max_suppression_overlaps", overlaps, scores)
    limits = _limits(max_output_size, overlap_threshold, score_threshold)
    return _numbers(_chosen(matrix, points, limits, matrix)[0])[0]


def _in_order(boxes: Array) -> Array:
    """Returns boxes with their corners exchanged along an axis if those of the first box are."""
    ns = xp(boxes)
    first = boxes.reshape(-1, 4)[0]
    low, high = boxes[..., :2], boxes[..., 2:]
    is_ordered = first[:2] <= first[2:]
    ordered = ns.where(is_ordered, low, high), ns.where(is_ordered, high, low)
    return ns.concatenate(ordered, axis=-1)


def _is_compiled(*values: Value) -> bool:
    return any(map(jax_compat.is_traced, values))


def _padded_on_host(
    boxes: np.ndarray, scores: np.ndarray, limits: _Limits
) -> tuple[np.ndarray, np.ndarray, int]:
    indices, found = _chosen(boxes, scores, limits)
    rest = limits.most - len(indices)
    return np.pad(indices, (0, rest)), np.pad(found, (0, rest)), len(indices)


@op(differentiable=False)
def non_max_suppression_padded(
    boxes: Value,
    scores: Value,
    max_output_size: Value,
    iou_threshold: Value = 0.5,
    score_threshold: Value = float("-inf"),
    pad_to_max_output_size: bool = False,
    name: str | None = None,
    sorted_input: bool = False,
    canonicalized_coordinates: bool = False,
    tile_size: int = 512,
) -> tuple[Array, Array]:
    """Returns the indices of the best boxes, with zeros at the end, and their number.

    Args:
      boxes: (..., n, 4): y1, x1, y2, x2 of two opposite corners.
      scores: (..., n).
      max_output_size: The most boxes.
      iou_threshold: The intersection over union from which boxes overlap.
      score_threshold: The score that a box must exceed.
      pad_to_max_output_size: Whether the result has always `max_output_size` indices; needed in
        compiled functions and for batches.
      name: Accepted for portability.
      sorted_input: Accepted for portability.
      canonicalized_coordinates: Accepted for portability.
      tile_size: Accepted for portability.
    """
    own, points = array(boxes), array(scores)
    if own.ndim < 2 or points.ndim != own.ndim - 1:
        raise errors.InvalidArgumentError(
            "`non_max_suppression_padded` takes boxes (..., n, 4) and scores (..., n)",
            f"the shapes are {tuple(own.shape)} and {tuple(points.shape)}",
            "Correct them.",
        )
    limits = _limits(max_output_size, iou_threshold, score_threshold)._replace(is_padded=True)
    outer = tuple(points.shape[:-1])
    if own.size:
        own = _in_order(own)
    if not pad_to_max_output_size:
        if outer:
            raise errors.InvalidArgumentError(
                "A batch of boxes needs `pad_to_max_output_size`", "it is False", "Pass True."
            )
        known = _known("non_max_suppression_padded", own, points)
        indices, _ = _chosen(*known, limits)
        found = _numbers(indices, np.asarray(len(indices), np.int32))
        return found[0], found[1]
    flat = own.reshape(-1, *own.shape[-2:]), points.reshape(-1, points.shape[-1])
    if _is_compiled(own, points, iou_threshold, score_threshold):
        rows, _, counts = jax.vmap(functools.partial(_chosen_padded, limits=limits))(*flat)
        return rows.reshape(*outer, limits.most), counts.reshape(outer)
    parts = [
        _padded_on_host(np.asarray(b, np.float32), np.asarray(s, np.float32), limits)
        for b, s in zip(*map(np.asarray, flat), strict=True)
    ]
    rows = np.asarray([part[0] for part in parts], np.int32).reshape(*outer, limits.most)
    found = _numbers(rows, np.asarray([part[2] for part in parts], np.int32).reshape(outer))
    return found[0], found[1]


# All classes of a batch of images together.


@op(differentiable=False)
def combined_non_max_suppression(
    boxes: Value,
    scores: Value,
    max_output_size_per_class: Value,
    max_total_size: Value,
    iou_threshold: Value = 0.5,
    score_threshold: Value = float("-inf"),
    pad_per_class: bool = False,
    clip_boxes: bool = True,
    name: str | None = None,
) -> _CombinedNonMaxSuppression:
    """Returns the best boxes of all classes, for each image of a batch.

    Args:
      boxes: (batch, n, q, 4): q is 1 if all classes share the boxes, else the number of classes.
      scores: (batch, n, classes).
      max_output_size_per_class: The most boxes of a class.
      max_total_size: The most boxes of an image.
      iou_threshold: The intersection over union above which boxes overlap.
      score_threshold: The score that a box must exceed.
      pad_per_class: Whether fewer boxes are returned if all classes together have fewer.
      clip_boxes: Whether coordinates are limited to the range from 0 to 1.
      name: Accepted for portability.

    Returns:
      Boxes, scores and classes, with zeros at the end, and the number of boxes of each image.
    """
    own, points = array(boxes), array(scores)
    if own.ndim != 4 or points.ndim != 3 or own.shape[2] not in (1, points.shape[2]):
        raise errors.InvalidArgumentError(
            "`combined_non_max_suppression` takes boxes (batch, n, q, 4) and scores "
            "(batch, n, classes), where q is 1 or the number of classes",
            f"the shapes are {tuple(own.shape)} and {tuple(points.shape)}",
            "Add the dimension q with boxes[:, :, tf.newaxis].",
        )
    limits = _limits(max_output_size_per_class, iou_threshold, score_threshold)
    total = integer(max_total_size, "max_total_size")
    if pad_per_class:
        total = min(total, limits.most * points.shape[2])
    count = min(limits.most, own.shape[1])
    limits = limits._replace(most=count)
    if _is_compiled(own, points, iou_threshold, score_threshold):
        found = jax.vmap(functools.partial(_of_image, limits=limits, total=total))(
            jnp.asarray(own, jnp.float32), jnp.asarray(points, jnp.float32)
        )
        limit = jnp.clip if clip_boxes else None
    else:
        own, points = np.asarray(own, np.float32), np.asarray(points, np.float32)
        images = [_of_image_on_host(b, s, limits, total) for b, s in zip(own, points, strict=True)]
        found = _numbers(*map(np.stack, zip(*images, strict=True)))
        limit = np.clip if on_host() else jnp.clip
        limit = limit if clip_boxes else None
    best = found[0] if limit is None else limit(found[0], 0, 1)
    return _CombinedNonMaxSuppression(best, *found[1:])


class _CombinedNonMaxSuppression(NamedTuple):
    nmsed_boxes: Array
    nmsed_scores: Array
    nmsed_classes: Array
    valid_detections: Array


def _boxes_of(boxes: Array, kind: int) -> Array:
    return boxes[:, kind if boxes.shape[1] > 1 else 0]


def _of_image_on_host(
    boxes: np.ndarray, scores: np.ndarray, limits: _Limits, total: int
) -> tuple[np.ndarray, ...]:
    parts = []
    for kind in range(scores.shape[1]):
        own = _boxes_of(boxes, kind)
        indices, found = _chosen(own, scores[:, kind], limits)
        parts.append((own[indices], found, np.full(len(indices), kind, np.float32)))
    best, points, kinds = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(-points, kind="stable")[:total]
    rest = (0, total - len(order))
    return (
        np.pad(best[order], [rest, (0, 0)]),
        np.pad(points[order], rest),
        np.pad(kinds[order], rest),
        np.asarray(len(order), np.int32),
    )


def _of_image(boxes: Array, scores: Array, limits: _Limits, total: int) -> tuple[Array, ...]:
    kinds = scores.shape[1]
    per_class = jnp.swapaxes(jnp.broadcast_to(boxes, (boxes.shape[0], kinds, 4)), 0, 1)
    choose = functools.partial(_chosen_padded, limits=limits)
    indices, found, counts = jax.vmap(choose)(per_class, scores.T)
    is_valid = jnp.arange(limits.most) < counts[:, None]
    best = jnp.take_along_axis(per_class, indices[..., None], axis=1).reshape(-1, 4)
    points = jnp.where(is_valid, found, -jnp.inf).reshape(-1)
    labels = jnp.repeat(jnp.arange(kinds, dtype=jnp.float32), limits.most)
    missing = max(0, total - points.shape[0])
    order = jnp.argsort(-points, stable=True)[:total]
    is_kept = points[order] > -jnp.inf
    return (
        jnp.pad(jnp.where(is_kept[:, None], best[order], 0), [(0, missing), (0, 0)]),
        jnp.pad(jnp.where(is_kept, points[order], 0), (0, missing)),
        jnp.pad(jnp.where(is_kept, labels[order], 0), (0, missing)),
        is_kept.sum().astype(jnp.int32),
    )
