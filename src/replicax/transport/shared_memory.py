"""Shared memory between two tasks on one machine: arrays that no socket has to carry.

The caller makes two regions, one that it writes and one that the other side writes, and names
them in its greeting. A sender copies the large buffers of a message into a free block of its
region, and says in the envelope where they lie; the receiver uses them there, and frees the block
when nothing refers to it any more. Buffers for which there is no room go through the socket, as
all do without a lane.

A region is an anonymous file that cannot change its size, opened by the other side through
/proc: the kernel checks that both processes belong to one user.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.protocol import limits

# Before the data of each block: whether it is in use, in the first byte, and a number that no other
# block at this place had. It is part of each place that a message names (the upper bits), so that a
# message that was repeated, and comes when the block is gone, does no harm to the next one.
_HEAD = limits.ALIGNMENT
_NUMBER = slice(8, 16)
_SHIFT = 32
_NUMBERS = 1 << 30
_NAME = re.compile(r"(\d+):(\d+):(\d+):([0-9a-f]{16})")
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)


class OutdatedError(errors.ProtocolError):
    """A message names a block that is gone: it was repeated, and answered before."""


class _Region:
    """A piece of memory that two processes see."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, limits.SHARED_MEMORY_BYTES)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        # The file, however often it was opened.
        self.file = os.fstat(fd).st_ino


class SharedMemoryWriter:
    """The sender's side of a region."""

    def __init__(self, region: _Region) -> None:
        self._bytes = region.bytes
        # Blocks by their place: where each ends, and the question that may be asked again.
        self._blocks: list[tuple[int, int, int]] = []
        self._number = 0

    def put(self, buffers: Sequence[Any], request: int = 0) -> list[int]:
        """Copies buffers into one block of the region.

        Args:
          buffers: Bytes.
          request: The question that the block belongs to, if it must stay until the answer
            is there.

        Returns:
          Where each of them lies; nothing if there is no room.
        """
        sizes = [len(data) for data in buffers]
        start, index = self._room(_HEAD + sum(-(-size // _HEAD) * _HEAD for size in sizes))
        if start < 0:
            return []
        places: list[int] = []
        end = start + _HEAD
        region = self._bytes
        number = self._number = (self._number + 1) % _NUMBERS
        region[start + _NUMBER.start : start + _NUMBER.stop].view(np.uint64)[0] = number
        for data, size in zip(buffers, sizes, strict=True):
            places.append(number << _SHIFT | end)
            region[end : end + size] = np.frombuffer(data, np.uint8)
            end += -(-size // _HEAD) * _HEAD
        region[start] = 1
        self._blocks.insert(index, (start, end, request))
        return places

    def _room(self, size: int) -> tuple[int, int]:
        """Finds the first gap of a size, and its place among the blocks."""
        region = self._bytes
        blocks = self._blocks = [b for b in self._blocks if b[2] or region[b[0]]]
        start = 0
        for i, (begin, end, _) in enumerate(blocks):
            if begin - start >= size:
                return start, i
            start = end
        return (start if start + size <= limits.SHARED_MEMORY_BYTES else -1), len(blocks)

    def release(self, request: int) -> None:
        """Lets go of the blocks of a question that was answered."""
        self._blocks = [(b, e, 0 if r == request else r) for b, e, r in self._blocks]


# The blocks that are in use in this process. A question that was repeated, on this connection or a
# new one, names a block again: it is one block, and free when all who use it are done.
_in_use: weakref.WeakValueDictionary[tuple[int, int, int, int], Any] = weakref.WeakValueDictionary()


class SharedMemoryReader:
    """The receiver's side of a region."""

    def __init__(self, region: _Region) -> None:
        self._region = region

    def views(self, places: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Returns the buffers of a block, which is free again when all of them are gone."""
        number = places[0] >> _SHIFT
        places = [place - (number << _SHIFT) for place in places]
        start = places[0] - _HEAD
        end = places[-1] + sizes[-1]
        is_ordered = all(a + n <= b for a, n, b in zip(places, sizes, places[1:], strict=False))
        is_inside = start >= 0 and end <= limits.SHARED_MEMORY_BYTES and min(sizes) > 0
        if not is_inside or not is_ordered or start % _HEAD:
            raise errors.ProtocolError(
                "Buffers in shared memory must lie inside of it, in order",
                f"some of {list(sizes)} bytes are said to lie at {list(places)}",
                "Check that all tasks have the same version of replicax.",
            )
        if _number_at(self._region.bytes, start) != number:
            raise OutdatedError(
                "A block of shared memory must be there until its question is answered",
                "it belongs to a later question",
                "Nothing is to be done: this one was repeated, and answered before.",
            )
        first = start + _HEAD
        key = (self._region.file, number, first, end)
        block = _in_use.get(key)
        if block is None:
            # Also if it was free already: of a question that came twice the first may be refused.
            self._region.bytes[start] = 1
            block = (ctypes.c_ubyte * (end - first)).from_buffer(self._region.memory, first)
            weakref.finalize(block, _free, self._region.bytes, start, number).atexit = False
            _in_use[key] = block
        whole = memoryview(block).cast("B").toreadonly()
        return [whole[a - first : a - first + n] for a, n in zip(places, sizes, strict=True)]


def _number_at(region: np.ndarray, start: int) -> int:
    return int(region[start + _NUMBER.start : start + _NUMBER.stop].view(np.uint64)[0])


def _free(region: np.ndarray, start: int, number: int) -> None:
    if _number_at(region, start) == number:
        region[start] = 0


class SharedMemoryClient:
    """The lane of a caller: it makes the regions."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._files = [self._make("up")]
        self._up = _Region(self._files[0])
        self.writer = SharedMemoryWriter(self._up)
        self.reader: SharedMemoryReader | None = None
        # Whether the other side has joined.
        self.is_open = False

    def _make(self, name: str) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        fd = os.memfd_create(f"replicax-{name}-{self._nonce}", flags)
        os.ftruncate(fd, limits.SHARED_MEMORY_BYTES)
        fcntl.fcntl(fd, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
        return fd

    def offer(self) -> str:
        """Returns the name of the lane for a greeting.

        The other side begins anew after each greeting, so it writes into a new region: what
        it wrote before may still be in use here.
        """
        self.is_open = False
        for fd in self._files[1:]:
            os.close(fd)
        down = self._make("down")
        self._files[1:] = [down]
        self.reader = SharedMemoryReader(_Region(down))
        return f"{os.getpid()}:{self._files[0]}:{down}:{self._nonce}"

    def close(self) -> None:
        """Closes the files; memory stays for as long as it is in use."""
        for fd in self._files:
            os.close(fd)
        self._files = []
        self.is_open = False


def join(name: str) -> tuple[SharedMemoryReader, SharedMemoryWriter] | None:
    """Opens the lane of a caller: what it writes, and what is written for it.

    Returns:
      None if the regions are not what they are said to be, or cannot be reached: the caller
      may live in another container.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    pid, up, down, nonce = found.groups()
    regions = [
        _opened(pid, fd, f"/memfd:replicax-{n}-{nonce}") for n, fd in (("up", up), ("down", down))
    ]
    if regions[0] is None or regions[1] is None:
        return None
    return SharedMemoryReader(regions[0]), SharedMemoryWriter(regions[1])


def _opened(pid: str, fd: str, name: str) -> _Region | None:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if not os.readlink(path).startswith(name):
            return None
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(own)
        seals = fcntl.fcntl(own, getattr(fcntl, "F_GET_SEALS", 1034))
        is_right = status.st_uid == os.getuid() and status.st_size == limits.SHARED_MEMORY_BYTES
        if not is_right or seals & _SEALS != _SEALS:
            return None
        return _Region(own)
    except OSError:
        return None
    finally:
        os.close(own)
