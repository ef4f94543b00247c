"""Files and names that are on the disk, not only in its cache, when the call returns."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# Of Linux: the directory that relative paths begin at, and the flag that exchanges two names.
_AT_CURRENT_DIRECTORY = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file for writing; it is flushed to the disk when the block ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: str | Path) -> None:
    """Flushes the content of a file to the disk."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: str | Path) -> None:
    """Flushes the entries of a directory to the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: str | Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(first: Path, second: Path, spare: Path) -> None:
    """Exchanges two names: in one step, or with the name `spare` where the system cannot do that.

    Raises:
      OSError: It failed; both names are as they were.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        place = _AT_CURRENT_DIRECTORY
        if not rename(place, os.fsencode(first), place, os.fsencode(second), _RENAME_EXCHANGE):
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(second))
    os.rename(second, spare)
    try:
        os.rename(first, second)
    except OSError:
        os.rename(spare, second)
        raise
    os.rename(spare, first)
