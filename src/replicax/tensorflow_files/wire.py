"""The wire format of protocol buffers: fields of a message, read and written one by one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

# How a field is encoded.
VARINT = 0
FIXED64 = 1
LENGTH = 2
FIXED32 = 5

_MASK64 = (1 << 64) - 1
_SIGN64 = 1 << 63
_MAX_NUMBER = (1 << 29) - 1

# A number (VARINT, FIXED32 and FIXED64, all without a sign), or the bytes of the field.
Value: TypeAlias = int | bytes


class WireError(ValueError):
    """Raised for bytes that are not a protocol buffer of the expected message."""


def read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Returns a number without a sign, and the offset behind it.

    >>> read_varint(bytes([0xAC, 0x02]), 0)
    (300, 2)
    """
    value = shift = 0
    for offset in range(start, min(start + 10, len(data))):
        octet = data[offset]
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            if value > _MASK64:
                raise WireError(f"the number at byte {start} has more than 64 bits")
            return value, offset + 1
        shift += 7
    raise WireError(f"the number at byte {start} does not end")


def fields(data: bytes) -> Iterator[tuple[int, int, Value]]:
    """Yields number, encoding and value of each field of a message.

    >>> list(fields(number(1, 300) + text(2, "ab")))
    [(1, 0, 300), (2, 2, b'ab')]
    """
    offset, end = 0, len(data)
    while offset < end:
        tag, offset = read_varint(data, offset)
        field, kind = tag >> 3, tag & 7
        if not 0 < field <= _MAX_NUMBER:
            raise WireError(f"a field has the number {field}")
        value: Value
        if kind == VARINT:
            value, offset = read_varint(data, offset)
        elif kind == LENGTH:
            size, offset = read_varint(data, offset)
            value = data[offset : offset + size]
            offset += size
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
            value = int.from_bytes(data[offset : offset + size], "little")
            offset += size
        else:
            raise WireError(f"field {field} has the encoding {kind}")
        if offset > end:
            raise WireError(f"field {field} is longer than its message")
        yield field, kind, value


def as_bytes(value: Value) -> bytes:
    """Returns the bytes of a field that has to have some."""
    if not isinstance(value, bytes):
        raise WireError("a field is a number and must be bytes")
    return value


def as_text(value: Value) -> str:
    """Returns the text of a field."""
    try:
        return as_bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"a text is not UTF-8 ({error})") from None


def as_unsigned(value: Value) -> int:
    """Returns the number of a field, which has no sign."""
    if isinstance(value, bytes):
        raise WireError("a field is bytes and must be a number")
    return value


def as_signed(value: Value) -> int:
    """Returns the number of an int64 or int32 field.

    >>> as_signed((1 << 64) - 1)
    -1
    """
    plain = as_unsigned(value)
    return plain - (1 << 64) if plain & _SIGN64 else plain


def signed_varints(data: bytes) -> np.ndarray:
    """Returns the numbers of a packed int64 field.

    >>> signed_varints(varint(300) + varint(-1) + varint(5)).tolist()
    [300, -1, 5]
    """
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if not len(octets):
        return np.empty(0, np.int64)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise WireError("the last number of a list does not end")
    if len(ends) == len(octets):
        return octets.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise WireError("a number of a list does not end")
    found = np.zeros(len(ends), np.uint64)
    for place in range(int(lengths.max())):
        has_place = lengths > place
        part = (octets[starts[has_place] + place] & 0x7F).astype(np.uint64)
        found[has_place] |= part << np.uint64(7 * place)
    return found.view(np.int64)


def varint(value: int) -> bytes:
    """Returns the encoding of a number; a negative one as 64 bits.

    >>> varint(300).hex(), len(varint(-1))
    ('ac02', 10)
    """
    value &= _MASK64
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """Returns an integer field."""
    return varint(field << 3 | VARINT) + varint(value)


def octets(field: int, value: bytes) -> bytes:
    """Returns a field of bytes, or of a message."""
    return varint(field << 3 | LENGTH) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    """Returns a field of text."""
    return octets(field, value.encode("utf-8"))


def double(field: int, value: float) -> bytes:
    """Returns a double field."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", value)


def fixed64(field: int, value: int) -> bytes:
    """Returns a fixed64 field, which has no sign."""
    return varint(field << 3 | FIXED64) + struct.pack("<Q", value)


def single(field: int, value: float) -> bytes:
    """Returns a float field."""
    return varint(field << 3 | FIXED32) + struct.pack("<f", value)


def packed_doubles(field: int, values: Sequence[float]) -> bytes:
    """Returns a packed field of doubles; nothing if there are none."""
    return octets(field, struct.pack(f"<{len(values)}d", *values)) if len(values) else b""


def packed_singles(field: int, values: Sequence[float]) -> bytes:
    """Returns a packed field of floats; nothing if there are none."""
    return octets(field, struct.pack(f"<{len(values)}f", *values)) if len(values) else b""


def packed_varints(field: int, values: Sequence[int]) -> bytes:
    """Returns a packed field of integers; nothing if there are none."""
    return octets(field, b"".join(map(varint, values))) if len(values) else b""
