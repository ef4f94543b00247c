"""Facts about this process, read from the kernel: memory, processor time, threads, descriptors."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path

_PAGE = resource.getpagesize()


def program() -> str:
    """Returns the name of the program: of its file, or of its module.

    >>> bool(program())
    True
    """
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    if name in ("__main__.py", "-m"):
        return Path(sys.argv[0]).parent.name or name
    return "python" if name == "-c" else name


def measure() -> dict[str, int | float]:
    """Returns memory in bytes, processor time in seconds, and the numbers of threads and files.

    >>> measure()["rss_bytes"] > 0
    True
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rss_bytes": _resident_bytes(),
        "max_rss_bytes": used.ru_maxrss * 1024,
        "cpu_s": used.ru_utime + used.ru_stime,
        "threads": threading.active_count(),
        "open_files": _num_descriptors(),
    }


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _num_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
