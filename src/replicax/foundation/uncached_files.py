"""Large files that are written without the page cache (O_DIRECT).

A gigabyte in the page cache takes a gigabyte of memory from other processes, and allocating its
pages costs more processor time than the rest of the write. A file that is only read after a crash
is better written directly to the disk.
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

# The memory address, the offset and the length of a direct write must be multiples of this.
BLOCK_BYTES = 4096
_BUFFER_BYTES = 4 << 20


class UncachedFile:
    """A new file that is written sequentially, in blocks; skipped ranges read as zeros.

    Seeking back is permitted to the start of a block; the rest of the last block that is written
    there becomes zero, so no other data may be in that block.

    On file systems without direct writes, the page cache is used.

    Args:
      path: The file; it must be new.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        # Set afterwards: opening with the flag creates the file even if it fails.
        with contextlib.suppress(OSError):
            self._bypass_cache(True)
        self._buffer = np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)
        # The offset of the buffer in the file, and its used size.
        self._start = 0
        self._filled = 0

    def seek(self, offset: int) -> None:
        """Moves to an offset in the file."""
        skipped = offset - self._start - self._filled
        if 0 <= skipped <= _BUFFER_BYTES - self._filled:
            self._buffer[self._filled : self._filled + skipped] = 0
            self._filled += skipped
            return
        self._flush()
        self._filled = offset % BLOCK_BYTES
        assert skipped > 0 or not self._filled, "only whole blocks can be written again"
        self._start = offset - self._filled
        self._buffer[: self._filled] = 0

    def write(self, data: bytes | memoryview) -> None:
        """Writes bytes, and moves behind them."""
        octets = np.frombuffer(data, np.uint8)
        while octets.size:
            count = min(octets.size, _BUFFER_BYTES - self._filled)
            # Unlike a copy by a memoryview, this one releases the GIL.
            np.copyto(self._buffer[self._filled : self._filled + count], octets[:count])
            self._filled += count
            octets = octets[count:]
            if self._filled == _BUFFER_BYTES:
                self._flush()

    def truncate(self, size: int) -> None:
        """Truncates the file."""
        self._flush()
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Flushes everything that was written to the disk."""
        self._flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file; buffered data is dropped."""
        os.close(self._descriptor)

    def _flush(self) -> None:
        """Writes the buffer, padded with zeros to whole blocks."""
        end = -(-self._filled // BLOCK_BYTES) * BLOCK_BYTES
        self._buffer[self._filled : end] = 0
        written = 0
        while written < end:
            try:
                offset = self._start + written
                written += os.pwrite(self._descriptor, self._buffer[written:end].data, offset)
            except OSError as error:
                # Another block size, or a file size limit within a block: needs the cache.
                if error.errno != errno.EINVAL or not self._bypass_cache(False):
                    raise
        self._start += end
        self._filled = 0

    def _bypass_cache(self, is_wanted: bool) -> bool:
        """Enables or disables direct writes; returns whether that is a change."""
        bypass = getattr(os, "O_DIRECT", 0)
        before = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        after = before | bypass if is_wanted else before & ~bypass
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, after)
        return after != before


@contextlib.contextmanager
def synced(path: Path) -> Iterator[UncachedFile]:
    """Opens a new file for writing; it is flushed to the disk when the block ends."""
    file = UncachedFile(path)
    try:
        yield file
        file.sync()
    finally:
        file.close()
