"""Sampling by weight, and rejection resampling of classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input.dataset.elements import UserFunction

if TYPE_CHECKING:
    from replicax.input.dataset.dataset import Dataset

# As in TensorFlow: the number of elements that share one estimate of the distribution, and the
# initial count of each class.
ESTIMATED_AT_ONCE = 32
INITIAL_COUNT = 10


def draw(weights: ArrayLike, number: np.ndarray) -> np.ndarray:
    """Draws an index in proportion to its weight, with a random number of 32 bits."""
    ends = np.cumsum(np.asarray(weights, np.float64).reshape(-1))
    drawn = np.searchsorted(ends, ends[-1] * (float(number) / 2**32), side="right")
    # Rounding must not draw a last index of weight 0.
    return np.array(min(drawn, np.searchsorted(ends, ends[-1])), np.int64)


def checked_weights(weights: ArrayLike | None, num_datasets: int) -> list[float]:
    """Returns one weight per dataset, or raises."""
    found = np.ones(num_datasets) if weights is None else np.asarray(weights)
    if found.shape != (num_datasets,):
        raise errors.InvalidArgumentError(
            f"`weights` must be one number for each of the {num_datasets} datasets",
            f"their shape is {found.shape}",
            "Pass a weight for every dataset.",
        )
    if found.dtype.kind != "f":
        raise errors.ArgumentTypeError(
            "`weights` must be floating-point numbers",
            f"they are {found.dtype}",
            "Write 1.0 instead of 1.",
        )
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise errors.InvalidArgumentError(
            "`weights` must be finite and not negative",
            f"they are {found.tolist()}",
            "A weight of 0.0 excludes a dataset.",
        )
    return found.tolist()


def distribution(argument: str, value: ArrayLike) -> np.ndarray:
    """Returns a distribution over classes as float32, or raises."""
    shares = np.asarray(value)
    if shares.ndim != 1 or not shares.size or shares.dtype.kind not in "fiu":
        raise errors.InvalidArgumentError(
            f"`{argument}` must be a vector of one probability per class",
            f"it has type {shares.dtype} and shape {shares.shape}",
            "Pass a list such as [0.5, 0.5].",
        )
    return shares.astype(np.float32)


def acceptance(initial: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probabilities to accept an element of each class, and to skip rejection.

    An element comes from the original dataset with the second probability, and otherwise from
    the accepted elements, which minimizes the number of rejections.
    """
    tiny = np.finfo(np.float32).tiny
    ratios = np.asarray(target, np.float32) / (np.asarray(initial, np.float32) + tiny)
    least, largest = ratios.min(), ratios.max()
    if least == largest:
        return np.ones_like(ratios), np.asarray(least)
    return (ratios - least) / (largest - least), np.asarray(least)


def estimate(counts: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts classes; returns the counts, and the distribution once for each of the elements."""
    counts = counts + np.bincount(np.asarray(classes, np.int64), minlength=len(counts))
    shares = (counts / counts.sum()).astype(np.float32)
    return counts, np.tile(shares, (ESTIMATED_AT_ONCE, 1))


def resample(
    dataset: Dataset,
    class_func: Callable[..., Tree],
    target_dist: ArrayLike,
    initial_dist: ArrayLike | None,
    seed: int | None,
) -> Dataset:
    """Returns pairs of class and element, whose classes follow the target distribution."""
    source = type(dataset)
    target = distribution("target_dist", target_dist)
    number = UserFunction(class_func, "rejection_resample", f"{dataset!r}").number

    def class_of(element: Tree) -> np.ndarray:
        found = number(element)
        if not 0 <= found < len(target):
            raise errors.InvalidArgumentError(
                f"Classes must be from 0 to {len(target) - 1}, the range of `target_dist`",
                f"there is {found}",
                "Correct `class_func` or `target_dist`.",
            )
        return np.array(found, np.int32)

    # Zipped alone, so that a tuple is passed to these functions as one argument.
    pairs = source.zip((dataset,)).map(lambda element: (class_of(element), element))
    if initial_dist is not None:
        initial = distribution("initial_dist", initial_dist)
        shares = source.from_tensors(acceptance(initial, target)).repeat()
        least = float(np.min(target / initial))
    else:
        counts = np.full(len(target), INITIAL_COUNT, np.int64)
        classes = pairs.map(lambda own, element: own)
        estimates = classes.batch(ESTIMATED_AT_ONCE).scan(counts, estimate).unbatch()
        shares = estimates.map(lambda initial: acceptance(initial, target))
        least = None
    if least == 1:
        return pairs
    numbers = source.random(seed, rerandomize_each_iteration=True)
    kept = (
        source.zip((shares, pairs, numbers))
        .filter(lambda share, pair, number: bool(number < share[0][pair[0]] * 2.0**32))
        .map(lambda share, pair, number: pair)
    )
    if least == 0:
        return kept
    weights = shares.map(lambda keep, original: np.stack([original, 1 - original]))
    return source.sample_from_datasets(
        [pairs, kept], weights, seed, stop_on_empty_dataset=True, rerandomize_each_iteration=True
    )
