"""Signals cut into frames, and frames added up to signals."""

from __future__ import annotations

import functools
import operator

import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import Array, Namespace, Value, array, integer, normalized
from replicax.tf.signal_transforms import signal_array

__all__ = ["frame", "overlap_and_add"]


def framed(
    ns: Namespace,
    x: Array,
    length: int,
    step: int,
    pad_end: bool,
    pad_value: Value = 0,
) -> Array:
    """Returns the frames along the last dimension: (..., frames, length)."""
    size = x.shape[-1]
    if length <= 0 or step <= 0:
        raise errors.InvalidArgumentError(
            "The length and the step of frames must be positive",
            f"they are {length} and {step}",
            "Pass for example 256 and 128.",
        )
    if pad_end:
        count = -(-size // step)
        missing = max(0, (count - 1) * step + length - size) if count else 0
        around = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
        x = ns.pad(x, around, constant_values=array(pad_value).astype(x.dtype))
    else:
        count = max(0, 1 + (size - length) // step)
    indices = np.arange(count)[:, None] * step + np.arange(length)
    return x[..., indices]


@op
def frame(
    signal: Value,
    frame_length: Value,
    frame_step: Value,
    pad_end: bool = False,
    pad_value: Value = 0,
    axis: Value = -1,
    name: str | None = None,
) -> Array:
    """Returns the frames of signals; a dimension of samples becomes (frames, samples).

    Args:
      signal: (..., samples, ...).
      frame_length: The samples of a frame.
      frame_step: The samples between the beginnings of two frames.
      pad_end: Whether the last frames are filled.
      pad_value: With what.
      axis: The dimension of the samples.
      name: Accepted for portability.

    >>> frame(np.arange(5), 3, 2).numpy().tolist()
    [[0, 1, 2], [2, 3, 4]]
    """
    ns, x = signal_array(signal, "frame", "fciub")
    at = normalized(integer(axis, "axis"), x.ndim)
    length, step = integer(frame_length, "frame_length"), integer(frame_step, "frame_step")
    found = framed(ns, ns.moveaxis(x, at, -1), length, step, pad_end, pad_value)
    return ns.moveaxis(found, (-2, -1), (at, at + 1))


def overlapped(ns: Namespace, frames: Array, step: int) -> Array:
    """Returns the sum of frames (..., frames, length) that begin `step` samples apart."""
    *outer, count, length = frames.shape
    parts = -(-length // step)
    frames = ns.pad(frames, [(0, 0)] * (frames.ndim - 1) + [(0, parts * step - length)])
    pieces = frames.reshape(*outer, count, parts, step)
    around = [(0, 0)] * len(outer)
    shifted = [
        ns.pad(pieces[..., number, :], [*around, (number, parts - 1 - number), (0, 0)])
        for number in range(parts)
    ]
    total = functools.reduce(operator.add, shifted)
    size = (count - 1) * step + length if count else 0
    return total.reshape(*outer, (count + parts - 1) * step)[..., :size]


@op
def overlap_and_add(signal: Value, frame_step: Value, name: str | None = None) -> Array:
    """Returns the sum of frames (..., frames, samples) that begin `frame_step` samples apart.

    >>> overlap_and_add(np.ones((3, 4)), 2).numpy().tolist()
    [1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0]
    """
    ns, x = signal_array(signal, "overlap_and_add", "fciu")
    step = integer(frame_step, "frame_step")
    if x.ndim < 2 or step <= 0:
        raise errors.InvalidArgumentError(
            "`overlap_and_add` takes frames (..., frames, samples) and a positive step",
            f"the shape is {tuple(x.shape)}, the step {step}",
            "Correct them.",
        )
    return overlapped(ns, x, step)
