"""Values of tensors as text, as `tf.print` and `tf.strings.format` write them."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def number_text(value: object) -> str:
    """Returns a number or string in the fewest digits that stand for it alone.

    >>> number_text(np.float32(0.1)), number_text(np.float32(2)), number_text(np.True_)
    ('0.1', '2', '1')
    """
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, complex | np.complexfloating):
        return f"({number_text(value.real)},{number_text(value.imag)})"
    if isinstance(value, float | np.floating | ml_dtypes.bfloat16):
        return _float_text(value)
    return str(value)


def _float_text(value: object) -> str:
    # As C's "%g", first with the digits that are always exact.
    digits = (15, 17) if isinstance(value, float) else (6, 9)
    number = float(value)  # type: ignore[arg-type]
    short = f"{number:.{digits[0]}g}"
    kind = np.float64 if isinstance(value, float) else np.float32
    return short if kind(short) == kind(number) or number != number else f"{number:.{digits[1]}g}"


def summary(array: np.ndarray, summarize: int = 3) -> str:
    """Returns the first and last elements of each dimension.

    Args:
      array: Numbers or strings.
      summarize: How many elements at both ends; -1 for all.

    >>> summary(np.arange(8), 2)
    '[0 1 ... 6 7]'
    """
    return _summary(np.asarray(array), summarize, 0)


def _summary(array: np.ndarray, count: int, depth: int) -> str:
    if not array.ndim:
        return _quoted(array[()])
    size = array.shape[0]
    is_cut = count >= 0 and size > 2 * count
    chosen = [*range(count), *range(size - count, size)] if is_cut else list(range(size))
    if array.ndim == 1:
        parts = [_quoted(array[i]) for i in chosen]
    else:
        parts = [_summary(array[i], count, depth + 1) for i in chosen]
    if is_cut:
        parts.insert(count, "...")
    separator = " " if array.ndim == 1 else "\n" * (array.ndim - 1) + " " * (depth + 1)
    return f"[{separator.join(parts)}]"


def _quoted(value: object) -> str:
    return f'"{number_text(value)}"' if isinstance(value, bytes | str) else number_text(value)
