"""Slices of tensors: their places, and the keys under which a checkpoint stores them.

The keys sort like the names and the numbers that they encode (an order-preserving code).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from replicax.tensorflow_files import wire

# The start and the length in each dimension; a length of None means all of it.
Slice: TypeAlias = tuple[tuple[int, int | None], ...]


def decode_slice(data: bytes) -> Slice:
    """Returns the slice of a TensorSliceProto."""
    extents: list[tuple[int, int | None]] = []
    for number, _, value in wire.fields(data):
        if number != 1:
            continue
        start, length = 0, None
        for part, _, inner in wire.fields(wire.as_bytes(value)):
            if part == 1:
                start = wire.as_signed(inner)
            elif part == 2:
                length = wire.as_signed(inner)
        extents.append((start, length))
    return tuple(extents)


def key_of_slice(name: str, slice_: Slice) -> bytes:
    """Returns the key of a slice of the tensor `name`.

    >>> key_of_slice("v", ((0, 2), (0, None))).hex(" ")
    '00 76 00 01 01 02 80 82 80 7f'
    """
    text = name.encode().replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff")
    numbers: list[int] = []
    for start, length in slice_:
        numbers += [start, -1 if length is None else length]
    rank = len(slice_).to_bytes((len(slice_).bit_length() + 7) // 8, "big")
    head = b"\x00" + text + b"\x00\x01" + bytes([len(rank)]) + rank
    return head + b"".join(map(_ordered, numbers))


def _ordered(value: int) -> bytes:
    """Returns a number in the code: the leading ones of the first bits give its length."""
    bits = (~value if value < 0 else value).bit_length()
    length = bits // 7 + 1
    # As many ones as bytes, then the number in the bits that are left, its sign first.
    header = ((1 << length) - 1) << (7 * length)
    plain = value & ((1 << (8 * length)) - 1)
    return (plain ^ header).to_bytes(length, "big")


def places_of(slice_: Slice, shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns where a slice is in a tensor; WireError if it is outside.

    >>> places_of(((2, 2), (0, None)), (5, 3))
    (slice(2, 4, None), slice(0, 3, None))
    """
    if len(slice_) != len(shape):
        raise wire.WireError(f"a slice has {len(slice_)} dimensions, its tensor {len(shape)}")
    places: list[slice] = []
    for (start, length), size in zip(slice_, shape, strict=True):
        stop = size if length is None else start + length
        if not 0 <= start <= stop <= size:
            raise wire.WireError(f"a slice from {start} to {stop} is outside of {size}")
        places.append(slice(start, stop))
    return tuple(places)
