"""CRC-32C, plain and masked, as TensorFlow stores it beside records, blocks and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replicax.foundation import lazy

if TYPE_CHECKING:
    import google_crc32c
else:
    google_crc32c = lazy.module("google_crc32c", "google-crc32c")

_MASK32 = (1 << 32) - 1
_DELTA = 0xA282EAD8


def crc32c(data: bytes | np.ndarray, before: int = 0) -> int:
    """Returns the checksum of bytes that follow others with the checksum `before`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return google_crc32c.extend(before, data)


def masked(checksum: int) -> int:
    """Returns the stored form of a checksum.

    It differs from the checksum, because the checksum of data that contains its own checksum
    is weak.

    >>> hex(masked(0xE3069283))
    '0xc78ab0e5'
    """
    rotated = (checksum >> 15 | checksum << 17) & _MASK32
    return (rotated + _DELTA) & _MASK32


def unmasked(stored: int) -> int:
    """Undoes `masked`.

    >>> hex(unmasked(masked(0xE3069283)))
    '0xe3069283'
    """
    rotated = (stored - _DELTA) & _MASK32
    return (rotated >> 17 | rotated << 15) & _MASK32
