"""Files that are on the disk, not only in its cache, when the call returns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file for writing; it is on the disk when the block ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: str | Path) -> None:
    """Waits until the content of a file is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: str | Path) -> None:
    """Waits until the names in a directory are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: str | Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
