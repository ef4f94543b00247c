"""Files that one process at a time can lock; the kernel releases them when it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class HeldError(Exception):
    """Raised when a file is locked already.

    Attributes:
      holder: The id of the process that has locked it, as text; empty if it is unknown.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def hold(path: Path) -> int:
    """Locks a file, and returns the descriptor that holds the lock until it is closed.

    Raises:
      HeldError: It is locked already, by this process or another.
      OSError: It cannot be created or written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode("ascii"), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise HeldError(holder) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
