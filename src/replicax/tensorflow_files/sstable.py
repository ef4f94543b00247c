"""Sorted string tables: the format of the index of a checkpoint, as in LevelDB."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from replicax.tensorflow_files import wire
from replicax.tensorflow_files.checksums import crc32c, masked

# Two handles, padded to 40 bytes, and a number that marks such files.
_FOOTER_BYTES = 48
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
# After each block: the kind of compression, and the checksum of the block and this byte.
_TRAILER = struct.Struct("<BI")
_UINT32 = struct.Struct("<I")
_COMPRESSIONS = {1: "snappy"}


class TableError(ValueError):
    """Raised for bytes that are not a sorted string table as it was written."""


class CompressedTableError(TableError):
    """Raised for a block that is compressed."""


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table, in order, after comparing all checksums.

    Raises:
      TableError: The table is damaged.
      CompressedTableError: It is compressed.
    """
    if len(data) < _FOOTER_BYTES or data[-len(_MAGIC) :] != _MAGIC:
        raise TableError(f"its {len(data)} bytes do not end as an index does")
    footer = data[-_FOOTER_BYTES:]
    try:
        # The first handle is that of a block of metadata, which TensorFlow leaves empty.
        _block(data, footer)
        offset = wire.read_varint(footer, 0)[1]
        offset = wire.read_varint(footer, offset)[1]
        for _, handle in _entries(_block(data, footer[offset:])):
            yield from _entries(_block(data, handle))
    except wire.WireError as error:
        raise TableError(str(error)) from error


def _block(data: bytes, handle: bytes) -> bytes:
    """Returns the content of a block, given the encoding of its offset and size."""
    offset, place = wire.read_varint(handle, 0)
    size, _ = wire.read_varint(handle, place)
    end = offset + size
    if end + _TRAILER.size > len(data) - _FOOTER_BYTES:
        raise TableError(f"a block ends at byte {end}, behind the end of the file")
    compression, checksum = _TRAILER.unpack_from(data, end)
    if masked(crc32c(data[offset : end + 1])) != checksum:
        raise TableError(f"the checksum of the block at byte {offset} differs")
    if compression:
        name = _COMPRESSIONS.get(compression, f"kind {compression}")
        raise CompressedTableError(f"the block at byte {offset} is compressed ({name})")
    return data[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the entries of a block; each key shares a prefix with the one before."""
    if len(block) < _UINT32.size:
        raise TableError("a block is too short")
    (num_restarts,) = _UINT32.unpack_from(block, len(block) - _UINT32.size)
    end = len(block) - _UINT32.size * (num_restarts + 1)
    if end < 0:
        raise TableError("a block is too short for its restarts")
    offset, key = 0, b""
    while offset < end:
        shared, offset = wire.read_varint(block, offset)
        rest, offset = wire.read_varint(block, offset)
        size, offset = wire.read_varint(block, offset)
        if shared > len(key) or offset + rest + size > end:
            raise TableError("an entry is longer than its block")
        key = key[:shared] + block[offset : offset + rest]
        offset += rest
        yield key, block[offset : offset + size]
        offset += size
