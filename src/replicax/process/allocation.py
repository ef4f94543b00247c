"""How a process that serves a task treats memory that it has freed: it keeps it.

A step allocates and frees arrays of the same sizes again and again. The C library gives large ones
back to the kernel each time, and the kernel clears the pages each time: for steps of milliseconds
that costs more than all copies of their data.
"""

from __future__ import annotations

import contextlib
import ctypes

# Options of `mallopt`, and what they are set to: when to give memory back, how much to take at
# once, up to which size to keep it (the largest that is allowed), how many heaps to have.
_OPTIONS = {-1: 1 << 30, -2: 64 << 20, -3: 32 << 20, -8: 1}


def keep_freed_memory() -> None:
    """Sets the C library to reuse memory; where it cannot be set, it stays as it is."""
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        for option, value in _OPTIONS.items():
            library.mallopt(option, value)
