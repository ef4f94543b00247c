"""Images and boxes: parts in another size, and outlines."""

from __future__ import annotations

import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.image.pixels import pixels
from replicax.tf.ops.operands import Array, Namespace, Value, array, integers

__all__ = ["crop_and_resize", "draw_bounding_boxes"]

# Yellow, blue, red, lime, purple, olive, maroon, navy, aqua, fuchsia.
_COLOURS = np.asarray(
    [
        [1, 1, 0, 1],
        [0, 0, 1, 1],
        [1, 0, 0, 1],
        [0, 1, 0, 1],
        [0.5, 0, 0.5, 1],
        [0.5, 0.5, 0, 1],
        [0.5, 0, 0, 1],
        [0, 0, 0.5, 1],
        [0, 1, 1, 1],
        [1, 0, 1, 1],
    ],
    np.float32,
)


def _positions(ns: Namespace, low: Array, high: Array, size: int, new: int) -> Array:
    """Returns where the pixels of each box are along an axis of the image, (boxes, new)."""
    if new == 1:
        return (0.5 * (low + high) * (size - 1))[:, None]
    steps = (high - low) * (size - 1) / (new - 1)
    return (low * (size - 1))[:, None] + np.arange(new, dtype=np.float32) * steps[:, None]


@op
def crop_and_resize(
    image: Value,
    boxes: Value,
    box_indices: Value,
    crop_size: Value,
    method: str = "bilinear",
    extrapolation_value: Value = 0.0,
    name: str | None = None,
) -> Array:
    """Returns the boxes of images, all in one size, as float32.

    Args:
      image: (batch, height, width, channels).
      boxes: (n, 4): y1, x1, y2, x2 as shares of the image; a box may be turned over.
      box_indices: (n): the image of each box.
      crop_size: The height and width of the results.
      method: "bilinear" or "nearest".
      extrapolation_value: The value outside of the image.
      name: Accepted for portability.

    >>> image = np.arange(9, dtype=np.float32).reshape(1, 3, 3, 1)
    >>> crop_and_resize(image, [[0.0, 0.0, 1.0, 1.0]], [0], (2, 2)).numpy()[0, :, :, 0].tolist()
    [[0.0, 2.0], [6.0, 8.0]]
    """
    ns, x = pixels(image)
    own, sizes = array(boxes), integers(crop_size, "crop_size")
    if x.ndim != 4 or own.ndim != 2 or own.shape[1] != 4 or method not in ("bilinear", "nearest"):
        raise errors.InvalidArgumentError(
            "`crop_and_resize` takes images (batch, height, width, channels), boxes (n, 4) and "
            "bilinear or nearest",
            f"the shapes are {tuple(x.shape)} and {tuple(own.shape)}, the method {method!r}",
            "Correct them.",
        )
    own, which = own.astype(np.float32), array(box_indices)[:, None, None]
    height, width = x.shape[1], x.shape[2]
    rows = _positions(ns, own[:, 0], own[:, 2], height, sizes[0])[:, :, None]
    columns = _positions(ns, own[:, 1], own[:, 3], width, sizes[1])[:, None, :]
    # Compilers round quotients differently, which must not move the last pixel out of the image.
    slack = 0 if ns is np else 1e-5
    is_inside = (rows >= -slack) & (rows <= (height - 1) * (1 + slack))
    is_inside = is_inside & (columns >= -slack) & (columns <= (width - 1) * (1 + slack))

    def at(row: Array, column: Array) -> Array:
        row = ns.clip(row, 0, height - 1).astype(np.int32)
        column = ns.clip(column, 0, width - 1).astype(np.int32)
        return x[which, row, column].astype(np.float32)

    if method == "nearest":
        found = at(ns.floor(rows + 0.5), ns.floor(columns + 0.5))
    else:
        # XLA may compute a position twice, rounded differently: both must lead to one pixel.
        shift = 0 if ns is np else 1e-4
        top, left = ns.floor(rows + shift), ns.floor(columns + shift)
        down, right = (ns.clip(share, 0, 1)[..., None] for share in (rows - top, columns - left))
        bottom, end = top + 1, left + 1
        upper = at(top, left) * (1 - right) + at(top, end) * right
        lower = at(bottom, left) * (1 - right) + at(bottom, end) * right
        found = upper * (1 - down) + lower * down
    outside = array(extrapolation_value).astype(np.float32)
    return ns.where(is_inside[..., None], found, outside).astype(np.float32)


@op(differentiable=False)
def draw_bounding_boxes(
    images: Value, boxes: Value, colors: Value, name: str | None = None
) -> Array:
    """Returns images with the outlines of boxes on them.

    Args:
      images: (batch, height, width, channels), floats from 0 to 1.
      boxes: (batch, n, 4): y1, x1, y2, x2 as shares of the image.
      colors: (colours, channels), used in turn; None for ten colours.
      name: Accepted for portability.

    >>> image = np.zeros((1, 3, 3, 1), np.float32)
    >>> draw_bounding_boxes(image, [[[0, 0, 1, 1]]], [[1.0]]).numpy()[0, :, :, 0].tolist()
    [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
    """
    ns, x = pixels(images)
    own = array(boxes).astype(np.float32)
    if x.ndim != 4 or own.ndim != 3 or own.shape[0] != x.shape[0] or own.shape[2] != 4:
        raise errors.InvalidArgumentError(
            "`draw_bounding_boxes` takes images (batch, height, width, channels) and boxes "
            "(batch, n, 4)",
            f"the shapes are {tuple(x.shape)} and {tuple(own.shape)}",
            "Add a dimension with [tf.newaxis].",
        )
    table = _COLOURS if colors is None else array(colors)
    _, height, width, depth = x.shape
    # An image in grey gets white boxes.
    table = np.ones((1, 1), np.float32) if depth == 1 and colors is None else table
    ends = np.asarray([height - 1, width - 1, height - 1, width - 1], np.float32)
    corners = ns.trunc(own * ends).astype(np.int32)
    rows, columns = np.arange(height)[:, None], np.arange(width)[None, :]
    for number in range(own.shape[1]):
        top, left, bottom, right = (corners[:, number, i, None, None] for i in range(4))
        in_rows, in_columns = (
            (rows >= top) & (rows <= bottom),
            (columns >= left) & (columns <= right),
        )
        is_edge = (rows == top) | (rows == bottom) | (columns == left) | (columns == right)
        colour = table[number % table.shape[0]][:depth].astype(x.dtype)
        x = ns.where((in_rows & in_columns & is_edge)[..., None], colour, x)
    return x
