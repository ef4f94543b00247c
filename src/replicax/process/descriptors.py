"""How many files and connections a process that serves a task may have open."""

from __future__ import annotations

import contextlib
import resource

# More than any cluster needs; some libraries walk through all descriptors that there may be.
_ENOUGH = 65_536


def allow_many() -> None:
    """Raises the limit on open files as far as the administrator allows, and as is sensible.

    Each caller takes a descriptor, and the usual limit of 1,024 was made for other programs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
