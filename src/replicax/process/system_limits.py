"""Settings of the operating system and the C library for a process that serves a task."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource

# More than any cluster needs; some libraries iterate over all possible descriptors.
_MAX_DESCRIPTORS = 65_536
# Options of `mallopt`: the threshold to return memory, the size of an allocation from the kernel,
# the largest size to keep (the maximum allowed), and the number of heaps.
_MALLOC_OPTIONS = {-1: 1 << 30, -2: 64 << 20, -3: 32 << 20, -8: 1}


def tune_for_serving() -> None:
    """Applies all settings; to be called before other threads start, which inherit them."""
    _keep_freed_memory()
    _raise_descriptor_limit()
    _finish_before_wakeups()


def _raise_descriptor_limit() -> None:
    """Raises the soft limit on open files towards the hard limit.

    Each connection needs a descriptor, and the usual soft limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _keep_freed_memory() -> None:
    """Makes the C library reuse freed memory instead of returning it to the kernel.

    Each step allocates and frees arrays of the same sizes. The kernel clears returned pages, which
    costs more than all copies of the data of a step of milliseconds. No effect where `mallopt` is
    missing.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        for option, value in _MALLOC_OPTIONS.items():
            library.mallopt(option, value)


def _finish_before_wakeups() -> None:
    """Lets this process continue on its core when it wakes another one by a message.

    Where tasks share cores, the kernel otherwise switches to the receiver of a request at once,
    before the sender has sent those to the other servers. No effect on idle cores.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
