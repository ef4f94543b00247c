"""Long files that are written past the cache of the system.

A gigabyte that goes through the cache takes a gigabyte of memory from everybody else, and its fresh
pages cost more processor time than all the rest of writing it. A file that is only read after a
crash is better written straight to the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Disks are written in blocks: memory, place and length of a write must be multiples of this.
BLOCK_BYTES = 4096
_BUFFER_BYTES = 4 << 20


class UncachedFile:
    """A new file that is written forwards, in blocks; what is skipped reads as zeros.

    Going back is allowed to the beginning of a block; the rest of the block that is written last
    there becomes zero, so only blocks that nothing else was written to may be gone back to.

    Where a file system cannot do without its cache, the file goes through it.

    Args:
      path: The file; it must be new.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        # Asked for afterwards: to open a file so where it is not possible fails, and makes it.
        with contextlib.suppress(OSError):
            self._bypass_cache(True)
        self._buffer = np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)
        # Where in the file the buffer belongs, and how much of it counts.
        self._start = 0
        self._filled = 0

    def seek(self, place: int) -> None:
        """Goes to a byte of the file."""
        skipped = place - self._start - self._filled
        if 0 <= skipped <= _BUFFER_BYTES - self._filled:
            self._buffer[self._filled : self._filled + skipped] = 0
            self._filled += skipped
            return
        self._flush()
        self._filled = place % BLOCK_BYTES
        assert skipped > 0 or not self._filled, "only whole blocks are written again"
        self._start = place - self._filled
        self._buffer[: self._filled] = 0

    def write(self, data: bytes | memoryview) -> None:
        """Writes bytes, and goes behind them."""
        octets = np.frombuffer(data, np.uint8)
        while octets.size:
            count = min(octets.size, _BUFFER_BYTES - self._filled)
            # Unlike that of a memoryview, this copy lets other threads run.
            np.copyto(self._buffer[self._filled : self._filled + count], octets[:count])
            self._filled += count
            octets = octets[count:]
            if self._filled == _BUFFER_BYTES:
                self._flush()

    def truncate(self, size: int) -> None:
        """Makes the file end at a byte."""
        self._flush()
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Waits until all that was written is on the disk."""
        self._flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file; what is in the buffer is dropped."""
        os.close(self._descriptor)

    def _flush(self) -> None:
        """Writes the buffer, filled up with zeros to the end of a block."""
        end = -(-self._filled // BLOCK_BYTES) * BLOCK_BYTES
        self._buffer[self._filled : end] = 0
        written = 0
        while written < end:
            try:
                place = self._start + written
                written += os.pwrite(self._descriptor, self._buffer[written:end].data, place)
            except OSError as error:
                # Other blocks, or a limit within one: only the cache can do that.
                if error.errno != errno.EINVAL or not self._bypass_cache(False):
                    raise
        self._start += end
        self._filled = 0

    def _bypass_cache(self, is_wanted: bool) -> bool:
        """Writes past the cache from now on, or not; tells whether that is a change."""
        bypass = getattr(os, "O_DIRECT", 0)
        before = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        after = before | bypass if is_wanted else before & ~bypass
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, after)
        return after != before


@contextlib.contextmanager
def synced(path: Path) -> Iterator[UncachedFile]:
    """Opens a new file for writing; it is on the disk when the block ends."""
    file = UncachedFile(path)
    try:
        yield file
        file.sync()
    finally:
        file.close()
