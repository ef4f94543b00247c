"""Random boxes in images, for crops that keep enough of the objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.ops import random_sources
from replicax.tf.ops.operands import Array, Namespace, Value, array, static
from replicax.tf.ops.random_sources import Source

__all__ = ["sample_distorted_bounding_box", "stateless_sample_distorted_bounding_box"]

_ASPECTS = (0.75, 1.33)
_AREAS = (0.05, 1.0)
_ATTEMPTS = 100


# The smallest and largest aspect ratio, and area.
_Ranges = tuple[tuple[float, ...], tuple[float, ...]]


class _SampleDistortedBoundingBox(NamedTuple):
    """A box: where it begins and its size, for `tf.slice`, and its corners as shares."""

    begin: Array
    size: Array
    bboxes: Array


class _Scalars:
    """The functions that candidates are made by, for Python numbers: quicker than NumPy's."""

    floor = math.floor
    rint = round
    sqrt = math.sqrt
    minimum = min
    maximum = max

    @staticmethod
    def where(condition: bool, yes: float, no: float) -> float:
        return yes if condition else no


def _candidate(
    ns: Namespace, numbers: Array, height: Array, width: Array, ranges: _Ranges
) -> tuple[Array, Array, Array, Array, Array]:
    """Returns top, left, height and width of a box in pixels, and whether it is allowed.

    Args:
      ns: The namespace of the numbers, which may be arrays with an element for each attempt.
      numbers: Four random numbers from 0 to 1.
      height: The height of the image.
      width: Its width.
      ranges: The smallest and largest aspect ratio, and area.
    """
    (least_aspect, most_aspect), (least_area, most_area) = ranges
    aspect = numbers[0] * (most_aspect - least_aspect) + least_aspect
    least, most = least_area * height * width, most_area * height * width
    shortest = ns.rint(ns.sqrt(least / aspect))
    tallest = ns.rint(ns.sqrt(most / aspect))
    fitting = ns.floor((width + 0.5 - 1e-7) / aspect)
    fitting = ns.where(ns.rint(fitting * aspect) > width, fitting - 1, fitting)
    tallest = ns.where(ns.rint(tallest * aspect) > width, fitting, tallest)
    tallest = ns.minimum(tallest, height)
    shortest = ns.minimum(shortest, tallest)
    rows = ns.minimum(shortest + ns.floor(numbers[1] * (tallest - shortest + 1)), tallest)
    # Rounding may lead just out of the range of areas.
    rows = ns.where(rows * ns.rint(rows * aspect) < least, rows + 1, rows)
    rows = ns.where(rows * ns.rint(rows * aspect) > most, rows - 1, rows)
    columns = ns.rint(rows * aspect)
    area = rows * columns
    is_allowed = (area >= least) & (area <= most) & (rows > 0) & (columns > 0)
    is_allowed = is_allowed & (rows <= height) & (columns <= width)
    top = ns.floor(numbers[2] * ns.maximum(height - rows, 0))
    left = ns.floor(numbers[3] * ns.maximum(width - columns, 0))
    return top, left, rows, columns, is_allowed


def _share(ns: Namespace, found: Sequence[Array], box: Array) -> Array:
    """Returns the share of a box, in pixels, that a candidate covers; -1 for an empty box."""
    top, left, rows, columns = found
    tall = ns.minimum(top + rows, box[2]) - ns.maximum(top, box[0])
    wide = ns.minimum(left + columns, box[3]) - ns.maximum(left, box[1])
    area = (box[2] - box[0]) * (box[3] - box[1])
    shared = ns.maximum(tall, 0) * ns.maximum(wide, 0)
    return ns.where(area > 0, shared / ns.where(area > 0, area, 1), -1)


def _chosen_on_host(
    source: np.random.Generator,
    size: tuple[int, int],
    boxes: list[list[float]],
    least: float,
    ranges: _Ranges,
    attempts: int,
) -> Sequence[float]:
    for _ in range(attempts):
        *found, is_allowed = _candidate(_Scalars, source.random(4).tolist(), *size, ranges)
        if is_allowed and any(_share(_Scalars, found, box) >= least for box in boxes):
            return found
    return (0, 0, *size)


def _sampled(
    source: Source,
    image_size: Value,
    bounding_boxes: Value,
    least: Value,
    ranges: _Ranges,
    attempts: int,
) -> _SampleDistortedBoundingBox:
    shape = array(image_size)
    if isinstance(source, np.random.Generator):
        height, width = int(shape[0]), int(shape[1])
        sides = np.asarray([height, width, height, width], np.float32)
        boxes = np.floor(np.asarray(bounding_boxes).reshape(-1, 4) * sides).tolist()
        top, left, rows, columns = _chosen_on_host(
            source, (height, width), boxes, float(least), ranges, attempts
        )
        corners = np.asarray([top, left, top + rows, left + columns], np.float32) / sides
        begin, size = np.asarray([top, left, 0]), np.asarray([rows, columns, -1])
    else:
        sides = jnp.stack([shape[0], shape[1]] * 2).astype(jnp.float32)
        boxes = jnp.floor(array(bounding_boxes).reshape(-1, 4).astype(jnp.float32) * sides)
        numbers = jax.random.uniform(source, (4, attempts, 1))
        *found, is_allowed = _candidate(jnp, numbers, sides[0], sides[1], ranges)
        shares = _share(jnp, found, boxes.T)
        is_good = (is_allowed & (shares >= array(least).astype(jnp.float32))).any(axis=1)
        first = jnp.concatenate(found, axis=1)[jnp.argmax(is_good)]
        whole = jnp.concatenate([jnp.zeros(2), sides[:2]])
        chosen = jnp.where(is_good.any(), first, whole)
        corners = jnp.concatenate([chosen[:2], chosen[:2] + chosen[2:]]) / sides
        begin = jnp.pad(chosen[:2], (0, 1))
        size = jnp.pad(chosen[2:], (0, 1), constant_values=-1)
    return _SampleDistortedBoundingBox(
        begin.astype(shape.dtype), size.astype(shape.dtype), corners.reshape(1, 1, 4)
    )


def _arguments(
    bounding_boxes: Value,
    aspects: Value,
    areas: Value,
    attempts: Value,
    use_image: Value,
) -> tuple[Value, _Ranges, int]:
    boxes = array(bounding_boxes)
    if boxes.ndim != 3 or boxes.shape[-1] != 4:
        raise errors.InvalidArgumentError(
            "`bounding_boxes` must be (batch, n, 4)",
            f"the shape is {tuple(boxes.shape)}",
            "Pass tf.zeros([1, 0, 4]) with use_image_if_no_bounding_boxes=True for no boxes.",
        )
    if not boxes.size:
        if not use_image:
            raise errors.InvalidArgumentError(
                "There must be a bounding box",
                "there is none",
                "Pass use_image_if_no_bounding_boxes=True to take the whole image.",
            )
        boxes = np.asarray([[[0, 0, 1, 1]]], np.float32)
    ranges = tuple(
        tuple(float(v) for v in static(default if given is None else given, name))
        for given, default, name in (
            (aspects, _ASPECTS, "aspect_ratio_range"),
            (areas, _AREAS, "area_range"),
        )
    )
    if any(len(limits) != 2 or limits[0] > limits[1] or limits[0] <= 0 for limits in ranges):
        raise errors.InvalidArgumentError(
            "A range must be two positive numbers, the smaller one first",
            f"aspect_ratio_range and area_range are {ranges}",
            "Pass for example (0.75, 1.33) and (0.08, 1.0).",
        )
    return boxes, (ranges[0], ranges[1]), _ATTEMPTS if attempts is None else int(attempts)


@op(differentiable=False)
def _stateful(image_size: Value, boxes: Value, seed: Value, least: Value, *rest: Value) -> Array:
    own, ranges, attempts = _arguments(boxes, *rest)
    source = random_sources.stateful(seed)
    return _sampled(source, image_size, own, least, ranges, attempts)


@op(differentiable=False)
def _stateless(image_size: Value, boxes: Value, seed: Value, least: Value, *rest: Value) -> Array:
    own, ranges, attempts = _arguments(boxes, *rest)
    source = random_sources.stateless(seed)
    return _sampled(source, image_size, own, least, ranges, attempts)


def sample_distorted_bounding_box(
    image_size: Value,
    bounding_boxes: Value,
    seed: Value = 0,
    min_object_covered: Value = 0.1,
    aspect_ratio_range: Value = None,
    area_range: Value = None,
    max_attempts: Value = None,
    use_image_if_no_bounding_boxes: bool | None = None,
    name: str | None = None,
) -> _SampleDistortedBoundingBox:
    """Returns a random box that covers enough of one of the boxes of objects.

    Args:
      image_size: (height, width, channels).
      bounding_boxes: (batch, n, 4): y1, x1, y2, x2 of objects, as shares of the image.
      seed: A seed of the operation; 0 for different boxes in each program.
      min_object_covered: The least share of an object that is inside of the box.
      aspect_ratio_range: The range of width / height of the box.
      area_range: The range of its share of the image.
      max_attempts: After as many attempts, the box is the whole image.
      use_image_if_no_bounding_boxes: Whether the image is the object if there is none.
      name: Accepted for portability.

    Returns:
      `begin` and `size`, for `tf.slice`, and `bboxes`, for `tf.image.draw_bounding_boxes`.

    >>> found = sample_distorted_bounding_box([40, 60, 3], [[[0.0, 0.0, 1.0, 1.0]]])
    >>> found.begin.shape, found.size.numpy()[2], found.bboxes.shape
    (TensorShape([3]), np.int32(-1), TensorShape([1, 1, 4]))
    """
    op_seed = None if isinstance(seed, int) and seed == 0 else seed
    rest = aspect_ratio_range, area_range, max_attempts, use_image_if_no_bounding_boxes
    return _stateful(image_size, bounding_boxes, op_seed, min_object_covered, *rest)


def stateless_sample_distorted_bounding_box(
    image_size: Value,
    bounding_boxes: Value,
    seed: Value,
    min_object_covered: Value = 0.1,
    aspect_ratio_range: Value = None,
    area_range: Value = None,
    max_attempts: Value = None,
    use_image_if_no_bounding_boxes: bool | None = None,
    name: str | None = None,
) -> _SampleDistortedBoundingBox:
    """Returns the box that belongs to a seed of two integers."""
    rest = aspect_ratio_range, area_range, max_attempts, use_image_if_no_bounding_boxes
    return _stateless(image_size, bounding_boxes, seed, min_object_covered, *rest)
