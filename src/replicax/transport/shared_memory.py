"""Shared memory between two tasks on one machine, for large buffers.

The client creates two regions, one that it writes and one that the server writes, and passes their
descriptors with its handshake. A sender copies the large buffers of a message into a free block of
its region and puts their offsets into the envelope; the receiver uses them in place, and frees the
block when nothing refers to it any more. Buffers that do not fit go through the socket.

A region is a sealed anonymous file: no side can change its size while the other one uses it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.protocol import limits

# The header of a block: whether it is in use, in the first byte, and a number that no other block
# at this offset had. The number is the upper bits of each offset in a message, so that a retried
# message that arrives after its block was freed does not read the next block.
_HEAD = limits.ALIGNMENT
_NUMBER = slice(8, 16)
_SHIFT = 32
_NUMBERS = 1 << 30
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)


class OutdatedError(errors.ProtocolError):
    """A repeated message refers to a block that was freed after its reply."""


class _Region:
    """Memory that two processes map."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, limits.SHARED_MEMORY_BYTES)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        # Identifies the file, however often it was opened.
        self.file = os.fstat(fd).st_ino


class SharedMemoryWriter:
    """The sender's side of a region: allocates blocks."""

    def __init__(self, region: _Region) -> None:
        self._bytes = region.bytes
        # The start, the end and the request, which may be retried, of each block.
        self._blocks: list[tuple[int, int, int]] = []
        self._number = 0

    def put(self, buffers: Sequence[memoryview | bytes], request: int = 0) -> list[int]:
        """Copies buffers into one block of the region.

        Args:
          buffers: Bytes.
          request: The request of the block, if it must stay until `release`.

        Returns:
          The offset of each; an empty list if there is no room.
        """
        sizes = [len(data) for data in buffers]
        start, index = self._find_gap(_HEAD + sum(-(-size // _HEAD) * _HEAD for size in sizes))
        if start < 0:
            return []
        offsets: list[int] = []
        end = start + _HEAD
        region = self._bytes
        number = self._number = (self._number + 1) % _NUMBERS
        region[start + _NUMBER.start : start + _NUMBER.stop].view(np.uint64)[0] = number
        for data, size in zip(buffers, sizes, strict=True):
            offsets.append(number << _SHIFT | end)
            region[end : end + size] = np.frombuffer(data, np.uint8)
            end += -(-size // _HEAD) * _HEAD
        region[start] = 1
        self._blocks.insert(index, (start, end, request))
        return offsets

    def _find_gap(self, size: int) -> tuple[int, int]:
        """Returns the start of the first gap of a size, and its index among the blocks."""
        region = self._bytes
        blocks = self._blocks = [b for b in self._blocks if b[2] or region[b[0]]]
        start = 0
        for i, (begin, end, _) in enumerate(blocks):
            if begin - start >= size:
                return start, i
            start = end
        return (start if start + size <= limits.SHARED_MEMORY_BYTES else -1), len(blocks)

    def release(self, request: int) -> None:
        """Releases the blocks of a request whose reply has arrived."""
        self._blocks = [(b, e, 0 if r == request else r) for b, e, r in self._blocks]


# The blocks in use in this process. A retried request, on the same connection or a new one, refers
# to the same block, which is freed after the last use.
_in_use: weakref.WeakValueDictionary[tuple[int, int, int, int], Any] = weakref.WeakValueDictionary()


class SharedMemoryReader:
    """The receiver's side of a region: uses blocks in place."""

    def __init__(self, region: _Region) -> None:
        self._region = region

    def views(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Returns the buffers of a block, which is freed when all of them are."""
        number = offsets[0] >> _SHIFT
        offsets = [offset - (number << _SHIFT) for offset in offsets]
        start = offsets[0] - _HEAD
        end = offsets[-1] + sizes[-1]
        is_ordered = all(a + n <= b for a, n, b in zip(offsets, sizes, offsets[1:], strict=False))
        is_inside = start >= 0 and end <= limits.SHARED_MEMORY_BYTES and min(sizes) > 0
        if not is_inside or not is_ordered or start % _HEAD:
            raise errors.ProtocolError(
                "Buffers in shared memory must be inside of it, in order",
                f"buffers of {list(sizes)} bytes have the offsets {list(offsets)}",
                "Check that all tasks have the same version of replicax.",
            )
        if _number_at(self._region.bytes, start) != number:
            raise OutdatedError(
                "A block of shared memory must belong to its request",
                "it belongs to a later one",
                "Ignore this: the request was retried, and its reply was sent before.",
            )
        first = start + _HEAD
        key = (self._region.file, number, first, end)
        block = _in_use.get(key)
        if block is None:
            # Also if it was freed already: of a retried request the first copy may have failed.
            self._region.bytes[start] = 1
            block = (ctypes.c_ubyte * (end - first)).from_buffer(self._region.memory, first)
            weakref.finalize(block, _free, self._region.bytes, start, number).atexit = False
            _in_use[key] = block
        whole = memoryview(block).cast("B").toreadonly()
        return [whole[a - first : a - first + n] for a, n in zip(offsets, sizes, strict=True)]


def _number_at(region: np.ndarray, start: int) -> int:
    return int(region[start + _NUMBER.start : start + _NUMBER.stop].view(np.uint64)[0])


def _free(region: np.ndarray, start: int, number: int) -> None:
    if _number_at(region, start) == number:
        region[start] = 0


class SharedMemoryClient:
    """The shared memory of a client: creates the regions.

    Attributes:
      writer: Writes the client's region.
      reader: Reads the server's region.
      is_open: Whether the server has attached the regions.
    """

    def __init__(self) -> None:
        self._files = [self._create("up")]
        self._up = _Region(self._files[0])
        self.writer = SharedMemoryWriter(self._up)
        self.reader: SharedMemoryReader | None = None
        self.is_open = False

    def _create(self, name: str) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        fd = os.memfd_create(f"replicax-{name}", flags)
        os.ftruncate(fd, limits.SHARED_MEMORY_BYTES)
        fcntl.fcntl(fd, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
        return fd

    def offer(self) -> list[int]:
        """Returns the descriptors of the regions for a handshake.

        The server starts again after each handshake, with a new region to write: buffers in the old
        one may still be in use here.
        """
        self.is_open = False
        for fd in self._files[1:]:
            os.close(fd)
        down = self._create("down")
        self._files[1:] = [down]
        self.reader = SharedMemoryReader(_Region(down))
        return self._files

    def close(self) -> None:
        """Closes the files; memory in use stays mapped."""
        for fd in self._files:
            os.close(fd)
        self._files = []
        self.is_open = False


def attach(
    descriptors: Sequence[int],
) -> tuple[SharedMemoryReader, SharedMemoryWriter] | None:
    """Maps the regions of a client: the one that it writes, and the one that it reads.

    Returns:
      None if the descriptors are not two sealed regions of the right size.
    """
    regions = [_opened(fd) for fd in descriptors]
    if len(regions) != 2 or regions[0] is None or regions[1] is None:
        return None
    return SharedMemoryReader(regions[0]), SharedMemoryWriter(regions[1])


def _opened(fd: int) -> _Region | None:
    try:
        seals = fcntl.fcntl(fd, getattr(fcntl, "F_GET_SEALS", 1034))
        if os.fstat(fd).st_size != limits.SHARED_MEMORY_BYTES or seals & _SEALS != _SEALS:
            return None
        return _Region(fd)
    except (OSError, ValueError):
        return None
