"""How elements are drawn by weight, and which are kept to change how often classes come."""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.input.builder_checks import UserFunction

# As in TensorFlow: how many elements one estimate of the classes' shares is for, and as how
# many elements of each class an unseen dataset counts.
ESTIMATED_AT_ONCE = 32
SEEN_BEFORE = 10


def draw(weights: Any, number: Any) -> np.ndarray:
    """Returns an index, each as often as its weight says, by a random number of 32 bits."""
    ends = np.cumsum(np.asarray(weights, np.float64).reshape(-1))
    drawn = np.searchsorted(ends, ends[-1] * (float(number) / 2**32), side="right")
    # Rounding must not draw what weighs nothing at the end.
    return np.array(min(drawn, np.searchsorted(ends, ends[-1])), np.int64)


def checked_weights(weights: Any, num_datasets: int) -> list[float]:
    """Returns one weight per dataset, or raises."""
    found = np.ones(num_datasets) if weights is None else np.asarray(weights)
    if found.shape != (num_datasets,):
        raise errors.InvalidArgumentError(
            f"`weights` must be one number for each of the {num_datasets} datasets",
            f"their shape is {found.shape}",
            "Give every dataset a weight.",
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
            "A weight of 0.0 leaves a dataset out.",
        )
    return found.tolist()


def distribution(argument: str, value: Any) -> np.ndarray:
    """Returns the shares of classes as float32, or raises."""
    shares = np.asarray(value)
    if shares.ndim != 1 or not shares.size or shares.dtype.kind not in "fiu":
        raise errors.InvalidArgumentError(
            f"`{argument}` must be a vector of one share per class",
            f"it has type {shares.dtype} and shape {shares.shape}",
            "Pass a list such as [0.5, 0.5].",
        )
    return shares.astype(np.float32)


def acceptance(initial: Any, target: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns how probable it is to keep an element of each class, and to take any element.

    An element is taken from the dataset as it is with the second probability, and otherwise
    from the elements that were kept, which rejects as few as possible.
    """
    tiny = np.finfo(np.float32).tiny
    ratios = np.asarray(target, np.float32) / (np.asarray(initial, np.float32) + tiny)
    least, largest = ratios.min(), ratios.max()
    if least == largest:
        return np.ones_like(ratios), np.asarray(least)
    return (ratios - least) / (largest - least), np.asarray(least)


def estimate(seen: Any, classes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Counts classes; returns the counts and the shares, once for each of the next elements."""
    seen = seen + np.bincount(np.asarray(classes, np.int64), minlength=len(seen))
    shares = (seen / seen.sum()).astype(np.float32)
    return seen, np.tile(shares, (ESTIMATED_AT_ONCE, 1))


def resample(dataset: Any, class_func: Any, target_dist: Any, initial_dist: Any, seed: Any) -> Any:
    """Returns a dataset of pairs of class and element, in which classes come as they should."""
    source: Any = type(dataset)
    target = distribution("target_dist", target_dist)
    number = UserFunction(class_func, "rejection_resample", f"{dataset!r}").number

    def class_of(element: Any) -> np.ndarray:
        found = number(element)
        if not 0 <= found < len(target):
            raise errors.InvalidArgumentError(
                f"Classes must be from 0 to {len(target) - 1}, as `target_dist` has "
                f"{len(target)} shares",
                f"there is {found}",
                "Correct `class_func` or `target_dist`.",
            )
        return np.array(found, np.int32)

    # Zipped with nothing else, so that a tuple stays one element for these functions.
    pairs = source.zip((dataset,)).map(lambda element: (class_of(element), element))
    if initial_dist is not None:
        initial = distribution("initial_dist", initial_dist)
        shares = source.from_tensors(acceptance(initial, target)).repeat()
        least = float(np.min(target / initial))
    else:
        seen = np.full(len(target), SEEN_BEFORE, np.int64)
        classes = pairs.map(lambda own, element: own)
        estimates = classes.batch(ESTIMATED_AT_ONCE).scan(seen, estimate).unbatch()
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
