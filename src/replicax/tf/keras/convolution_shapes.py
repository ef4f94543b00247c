"""Checks of the arguments of convolutions, and the sizes of their outputs."""

from __future__ import annotations

from collections.abc import Iterable

import keras

from replicax.tf.keras.argument_types import Value

__all__ = [
    "conv_output_length",
    "convert_data_format",
    "normalize_data_format",
    "normalize_padding",
    "normalize_tuple",
]


def convert_data_format(data_format: str, ndim: int) -> str:
    """Returns the name that ops of `tf.nn` have for a data format.

    >>> convert_data_format("channels_last", 4)
    'NHWC'
    """
    sizes = {3: "W", 4: "HW", 5: "DHW"}[ndim]
    return f"N{sizes}C" if normalize_data_format(data_format) == "channels_last" else f"NC{sizes}"


def normalize_data_format(value: str | None) -> str:
    """Returns a data format, by default that of Keras.

    >>> normalize_data_format(None)
    'channels_last'
    """
    found = (value or keras.backend.image_data_format()).lower()
    if found not in ("channels_first", "channels_last"):
        raise ValueError(f"A data format is channels_first or channels_last, not {value!r}.")
    return found


def normalize_padding(value: str) -> str:
    """Returns the name of a padding.

    >>> normalize_padding("SAME")
    'same'
    """
    found = value.lower()
    if found not in ("valid", "same", "causal"):
        raise ValueError(f"A padding is valid, same or causal, not {value!r}.")
    return found


def normalize_tuple(value: Value, n: int, name: str, allow_zero: bool = False) -> tuple[int, ...]:
    """Returns one size for each of `n` dimensions.

    >>> normalize_tuple(3, 2, "kernel_size")
    (3, 3)
    """
    sizes = tuple(value) if isinstance(value, Iterable) else (value,) * n
    if len(sizes) != n or any(size < (0 if allow_zero else 1) for size in sizes):
        raise ValueError(f"{name} must be {n} positive sizes, not {value!r}.")
    return sizes


def conv_output_length(
    input_length: int | None, filter_size: int, padding: str, stride: int, dilation: int = 1
) -> int | None:
    """Returns the length of the output of a convolution.

    >>> conv_output_length(10, 3, "valid", 2)
    4
    """
    if input_length is None:
        return None
    covered = filter_size + (filter_size - 1) * (dilation - 1)
    length = {
        "same": input_length,
        "causal": input_length,
        "valid": input_length - covered + 1,
        "full": input_length + covered - 1,
    }[padding]
    return (length + stride - 1) // stride
