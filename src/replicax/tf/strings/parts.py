"""Parts of strings, and strings joined."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from replicax.foundation import errors
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
    axes_of,
    integer,
    normalized,
)
from replicax.tf.strings import encodings
from replicax.tf.strings.arguments import array_of, mapped, only_string, placed, strings_of, text_of

__all__ = [
    "bytes_split",
    "join",
    "length",
    "lower",
    "ngrams",
    "reduce_join",
    "split",
    "strip",
    "substr",
    "unsorted_segment_join",
    "upper",
]


@op(differentiable=False)
def bytes_split(input: Value, name: str | None = None) -> Array:
    """Returns the bytes of one string as strings.

    >>> bytes_split("abc").numpy().tolist()
    [b'a', b'b', b'c']
    """
    data = only_string(input, "bytes_split")
    return array_of((data[i : i + 1] for i in range(len(data))), (len(data),))


@op(differentiable=False)
def join(inputs: Sequence[Value], separator: Value = "", name: str | None = None) -> Array:
    """Returns the strings of several tensors joined element by element.

    >>> join([["a", "b"], "c"], separator="-").numpy().tolist()
    [b'a-c', b'b-c']
    """
    between = text_of(separator)
    parts = [strings_of(value, "join") for value in inputs]
    shapes = {part.shape for part in parts if part.ndim}
    if len(shapes) > 1:
        raise errors.InvalidArgumentError(
            "Strings that are joined must have one shape, or none",
            f"the shapes are {sorted(shapes)}",
            "Reshape them.",
        )
    if not shapes:
        return array_of([between.join(part.item() for part in parts)], ())
    shape = shapes.pop()
    rows = [np.broadcast_to(part, shape).ravel().tolist() for part in parts]
    return array_of((between.join(row) for row in zip(*rows, strict=True)), shape)


@op(differentiable=False)
def reduce_join(
    inputs: Value,
    axis: Value = None,
    keepdims: bool = False,
    separator: Value = "",
    name: str | None = None,
) -> Array:
    """Returns the strings along dimensions joined; of several dimensions, the first runs fastest.

    >>> reduce_join([["a", "b"], ["c", "d"]], axis=1, separator=" ").numpy().tolist()
    [b'a b', b'c d']
    """
    strings, between = strings_of(inputs, "reduce_join"), text_of(separator)
    given = axes_of(axis)
    axes = tuple(reversed(range(strings.ndim)))
    if given is not None:
        axes = tuple(normalized(a, strings.ndim) for a in given)
    kept = [a for a in range(strings.ndim) if a not in axes]
    moved = strings.transpose([*kept, *reversed(axes)])
    shape = tuple(strings.shape[a] for a in kept)
    rows = moved.reshape(math.prod(shape), -1)
    found = array_of((between.join(row.tolist()) for row in rows), shape)
    if keepdims:
        found = found.reshape([1 if a in axes else n for a, n in enumerate(strings.shape)])
    return found


@op(differentiable=False)
def length(input: Value, unit: str = "BYTE", name: str | None = None) -> Array:
    """Returns the lengths of strings, in bytes or, for unit "UTF8_CHAR", characters.

    >>> length(["a", "bcd"]).numpy().tolist()
    [1, 3]
    """
    strings = strings_of(input, "length")
    count = _count if _is_characters(unit) else len
    found = [count(data) for data in strings.reshape(-1).tolist()]
    return placed(np.asarray(found, np.int32).reshape(strings.shape))


def _count(data: bytes) -> int:
    # Bytes that continue a character begin with the bits 10.
    return sum(byte & 0xC0 != 0x80 for byte in data)


def _is_characters(unit: str) -> bool:
    if unit not in ("BYTE", "UTF8_CHAR"):
        raise errors.InvalidArgumentError(
            "`unit` must be BYTE or UTF8_CHAR", f"it is {unit!r}", "Pass 'UTF8_CHAR'."
        )
    return unit == "UTF8_CHAR"


def _is_utf8(encoding: str) -> bool:
    if encoding not in ("", "utf-8"):
        raise errors.InvalidArgumentError(
            "`encoding` must be '' for ASCII or 'utf-8'", f"it is {encoding!r}", "Pass 'utf-8'."
        )
    return encoding == "utf-8"


@op(differentiable=False)
def lower(input: Value, encoding: str = "", name: str | None = None) -> Array:
    """Returns strings in lower case: of ASCII, or with encoding "utf-8" of all letters.

    >>> lower("AbC").numpy()
    b'abc'
    """
    if _is_utf8(encoding):
        return mapped(input, "lower", lambda data: encodings.changed(data, str.lower))
    return mapped(input, "lower", bytes.lower)


@op(differentiable=False)
def upper(input: Value, encoding: str = "", name: str | None = None) -> Array:
    """Returns strings in upper case: of ASCII, or with encoding "utf-8" of all letters."""
    if _is_utf8(encoding):
        return mapped(input, "upper", lambda data: encodings.changed(data, str.upper))
    return mapped(input, "upper", bytes.upper)


@op(differentiable=False)
def strip(input: Value, name: str | None = None) -> Array:
    """Returns strings without white space at their ends.

    >>> strip(" a b ").numpy()
    b'a b'
    """
    return mapped(input, "strip", bytes.strip)


@op(differentiable=False)
def split(input: Value, sep: Value = None, maxsplit: int = -1, name: str | None = None) -> Array:
    """Returns the parts of one string.

    Args:
      input: One string: several would give a ragged tensor.
      sep: What is between the parts; white space if left out.
      maxsplit: The most separators that are used; -1 for all.
      name: Accepted for portability.

    >>> split("data/cats/1.jpg", "/").numpy().tolist()
    [b'data', b'cats', b'1.jpg']
    """
    data = only_string(input, "split")
    between = b"" if sep is None else text_of(sep)
    parts = data.split(between or None, maxsplit)
    if not between and 0 < maxsplit == len(parts):
        # What is left after the last separator, even if there is none.
        parts.append(b"")
    return array_of(parts, (len(parts),))


@op(differentiable=False)
def substr(
    input: Value, pos: Value, len: Value, unit: str = "BYTE", name: str | None = None
) -> Array:
    """Returns parts of strings, from a position on.

    >>> substr("hello", 1, 3).numpy(), substr("hello", -2, 9).numpy()
    (b'ell', b'lo')
    """
    strings, is_characters = strings_of(input, "substr"), _is_characters(unit)
    rows = np.broadcast_arrays(strings, np.asarray(pos), np.asarray(len))
    flat = zip(*(row.ravel().tolist() for row in rows), strict=True)
    found = (_part(data, first, count, is_characters) for data, first, count in flat)
    return array_of(found, rows[0].shape)


def _part(data: bytes, first: int, count: int, is_characters: bool) -> bytes:
    units: Sequence[bytes] | bytes = encodings.characters(data) if is_characters else data
    size = units.__len__()
    if not -size <= first <= size:
        raise errors.InvalidArgumentError(
            f"`pos` must be within the string, whose length is {size}",
            f"it is {first}",
            "Test tf.strings.length first.",
        )
    start = first + size if first < 0 else first
    found = units[start : start + max(count, 0)]
    return found if isinstance(found, bytes) else b"".join(found)


@op(differentiable=False)
def ngrams(
    data: Value,
    ngram_width: int | Sequence[int],
    separator: str = " ",
    pad_values: Value = None,
    padding_width: int | None = None,
    preserve_short_sequences: bool = False,
    name: str | None = None,
) -> Array:
    """Returns the strings along the last dimension joined in groups of neighbours.

    Args:
      data: Strings.
      ngram_width: The number of strings in a group, or several numbers.
      separator: What is between the strings of a group.
      pad_values: What stands before and after the strings: a string, or two of them.
      padding_width: How often; by default once less than the width of a group.
      preserve_short_sequences: Whether rows that are too short for a group are one group.
      name: Accepted for portability.

    >>> ngrams(["a", "b", "c"], 2).numpy().tolist()
    [b'a b', b'b c']
    """
    strings = strings_of(data, "ngrams")
    widths = [ngram_width] if isinstance(ngram_width, int) else list(ngram_width)
    pads = None
    if pad_values is not None:
        given = pad_values if isinstance(pad_values, list | tuple) else (pad_values, pad_values)
        pads = text_of(given[0]), text_of(given[1])
    between = text_of(separator)
    if not strings.ndim or min(widths, default=0) < 1:
        raise errors.InvalidArgumentError(
            "`ngrams` takes rows of strings and positive widths",
            f"the shape is {strings.shape}, the widths {widths}",
            "Split the text first.",
        )
    rows = []
    for row in strings.reshape(-1, strings.shape[-1]).tolist():
        found = [g for w in widths for g in _groups(row, w, between, pads, padding_width)]
        if not found and preserve_short_sequences and row:
            found = [between.join(row)]
        rows.append(found)
    size = len(rows[0]) if rows else 0
    flat = [group for row in rows for group in row]
    return array_of(flat, (*strings.shape[:-1], size))


def _groups(
    row: list[bytes],
    width: int,
    between: bytes,
    pads: tuple[bytes, bytes] | None,
    padding_width: int | None,
) -> list[bytes]:
    if pads is not None:
        count = width - 1 if padding_width is None else min(padding_width, width - 1)
        row = [pads[0]] * count + row + [pads[1]] * count
    return [between.join(row[i : i + width]) for i in range(len(row) - width + 1)]


@op(differentiable=False)
def unsorted_segment_join(
    inputs: Value,
    segment_ids: Value,
    num_segments: Value,
    separator: str = "",
    name: str | None = None,
) -> Array:
    """Returns the strings of each segment joined.

    >>> unsorted_segment_join(["a", "b", "c"], [1, 0, 1], 2, ":").numpy().tolist()
    [b'b', b'a:c']
    """
    strings, between = strings_of(inputs, "unsorted_segment_join"), text_of(separator)
    ids, count = np.asarray(array(segment_ids)), integer(num_segments, "num_segments")
    rest = strings.shape[ids.ndim :]
    rows = strings.reshape(ids.size, -1)
    found: list[bytes] = []
    for number in range(count):
        chosen = rows[ids.reshape(-1) == number]
        found += [between.join(column.tolist()) for column in chosen.T]
    return array_of(found, (count, *rest))
