"""The log of a task in files of bounded size, on disks that may be full."""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path

# The newest file and the older ones, with the numbers 1, 2, 3.
NUM_FILES = 4
# After a failure to write, before the next attempt.
_RETRY_S = 5.0


class RotatingLog:
    """Appends to a file, and renames it when it is long; the oldest one is removed.

    Writing never raises: a task goes on when the disk for its log is full. The oldest file makes
    room first. What is lost is counted, and noted in the log when there is room again.

    Args:
      path: The newest file; older ones have a number at the end.
      most_bytes: The most bytes of all files together.

    Attributes:
      failure: Why nothing was written the last time; None if it was.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self.failure: OSError | None = None
        self._most_bytes = max(1, most_bytes // NUM_FILES)
        self._file: io.FileIO | None = None
        self._size = 0
        self._lost_bytes = 0
        self._retry_s = 0.0

    def write(self, data: bytes) -> bool:
        """Appends; returns whether it was written."""
        if self.failure is not None and time.monotonic() < self._retry_s:
            self._lost_bytes += len(data)
            return False
        try:
            self._append(data)
        except OSError as error:
            self.failure = error
            self._lost_bytes += len(data)
            self._retry_s = time.monotonic() + _RETRY_S
            return False
        self.failure = None
        return True

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _append(self, data: bytes) -> None:
        if self._lost_bytes:
            data = b"[%d bytes are missing: no room to write]\n" % self._lost_bytes + data
        # A piece that is longer than a file keeps its end.
        data = data[-self._most_bytes :]
        if self._file is None:
            self._file = io.FileIO(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a")
            self._size = os.fstat(self._file.fileno()).st_size
        if self._size and self._size + len(data) > self._most_bytes:
            self._rotate()
        try:
            self._write_all(data)
        except OSError:
            # Older output makes room for newer one.
            oldest = [number for number in range(1, NUM_FILES) if self._old(number).exists()]
            if not oldest:
                raise
            self._old(oldest[-1]).unlink(missing_ok=True)
            self._write_all(data)
        self._lost_bytes = 0

    def _write_all(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            self._size += written or 0
            view = view[written or 0 :]

    def _rotate(self) -> None:
        self.close()
        for number in reversed(range(NUM_FILES - 1)):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._old(number), self._old(number + 1))
        self._file = io.FileIO(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a")
        self._size = 0

    def _old(self, number: int) -> Path:
        return self.path if number == 0 else self.path.with_name(f"{self.path.name}.{number}")
