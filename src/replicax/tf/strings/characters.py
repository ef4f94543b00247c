"""Characters of strings in encodings of Unicode."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
)
from replicax.tf.strings import encodings
from replicax.tf.strings.arguments import array_of, mapped, only_string, placed

__all__ = [
    "unicode_decode",
    "unicode_decode_with_offsets",
    "unicode_encode",
    "unicode_split",
    "unicode_split_with_offsets",
    "unicode_transcode",
]


@op(differentiable=False)
def unicode_decode(
    input: Value,
    input_encoding: str,
    errors: str = "replace",
    replacement_char: int = 0xFFFD,
    replace_control_characters: bool = False,
    name: str | None = None,
) -> Array:
    """Returns the code points of the characters of one string.

    >>> unicode_decode("aé", "UTF-8").numpy().tolist()
    [97, 233]
    """
    rules = encodings.Rules(errors, replacement_char, replace_control_characters)
    found = encodings.decoded(only_string(input, "unicode_decode"), input_encoding, rules)
    return placed(np.asarray([point for point, _ in found], np.int32))


@op(differentiable=False)
def unicode_decode_with_offsets(
    input: Value,
    input_encoding: str,
    errors: str = "replace",
    replacement_char: int = 0xFFFD,
    replace_control_characters: bool = False,
    name: str | None = None,
) -> tuple[Array, Array]:
    """Returns the code points of one string, and the byte at which each character begins."""
    rules = encodings.Rules(errors, replacement_char, replace_control_characters)
    found = encodings.decoded(
        only_string(input, "unicode_decode_with_offsets"), input_encoding, rules
    )
    points, starts = [point for point, _ in found], [start for _, start in found]
    return placed(np.asarray(points, np.int32)), placed(np.asarray(starts, np.int64))


@op(differentiable=False)
def unicode_encode(
    input: Value,
    output_encoding: str,
    errors: str = "replace",
    replacement_char: int = 0xFFFD,
    name: str | None = None,
) -> Array:
    """Returns the code points along the last dimension as strings.

    >>> unicode_encode([97, 233], "UTF-8").numpy().decode()
    'aé'
    """
    points = np.asarray(array(input))
    rules = encodings.Rules(errors, replacement_char)
    rows = points.reshape(-1, points.shape[-1]).tolist() if points.size else [[]]
    found = (encodings.encoded(row, output_encoding, rules) for row in rows)
    return array_of(found, points.shape[:-1])


@op(differentiable=False)
def unicode_split(
    input: Value,
    input_encoding: str,
    errors: str = "replace",
    replacement_char: int = 0xFFFD,
    name: str | None = None,
) -> Array:
    """Returns the characters of one string as strings.

    >>> [s.decode() for s in unicode_split("aé", "UTF-8").numpy()]
    ['a', 'é']
    """
    rules = encodings.Rules(errors, replacement_char)
    found = encodings.decoded(only_string(input, "unicode_split"), input_encoding, rules)
    return array_of(_singles(found, input_encoding, rules), (len(found),))


def _singles(
    found: list[tuple[int, int]], encoding: str, rules: encodings.Rules
) -> Iterable[bytes]:
    return (encodings.encoded([point], encoding, rules) for point, _ in found)


@op(differentiable=False)
def unicode_split_with_offsets(
    input: Value,
    input_encoding: str,
    errors: str = "replace",
    replacement_char: int = 0xFFFD,
    name: str | None = None,
) -> tuple[Array, Array]:
    """Returns the characters of one string, and the byte at which each begins."""
    rules = encodings.Rules(errors, replacement_char)
    found = encodings.decoded(
        only_string(input, "unicode_split_with_offsets"), input_encoding, rules
    )
    starts = np.asarray([start for _, start in found], np.int64)
    parts = array_of(_singles(found, input_encoding, rules), (len(found),))
    return parts, placed(starts)


@op(differentiable=False)
def unicode_transcode(
    input: Value,
    input_encoding: str,
    output_encoding: str,
    errors: str = "replace",
    replacement_char: int = 0xFFFD,
    replace_control_characters: bool = False,
    name: str | None = None,
) -> Array:
    r"""Returns strings in another encoding: UTF-8, UTF-16-BE or UTF-32-BE.

    >>> unicode_transcode("aé", "UTF-8", "UTF-16-BE").numpy()
    b'\x00a\x00\xe9'
    """
    rules = encodings.Rules(errors, replacement_char, replace_control_characters)

    def change(data: bytes) -> bytes:
        points = [point for point, _ in encodings.decoded(data, input_encoding, rules)]
        return encodings.encoded(points, output_encoding, rules)

    return mapped(input, "unicode_transcode", change)
