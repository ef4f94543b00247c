"""Directories that only their user can enter: for sockets and for the files of running jobs."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from replicax.foundation import errors, settings


def of_user() -> Path:
    """Returns the runtime directory of this user; creates it if necessary."""
    runtime = settings.XDG_RUNTIME_DIR.read()
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        directory = Path(runtime) / "replicax"
    else:
        directory = Path(tempfile.gettempdir()) / f"replicax-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    require_private(directory)
    return directory


def require_private(directory: Path) -> None:
    """Raises unless a directory exists, belongs to this user, and is closed to others.

    Raises:
      NotFoundError: There is no such directory.
      PermissionDeniedError: Others can enter it, or own it.
    """
    try:
        found = os.lstat(directory)
    except OSError as error:
        raise errors.NotFoundError(
            "The directory of a socket must exist",
            f"{str(directory)!r} does not",
            "Create it with `mkdir -m 700`.",
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
        raise errors.PermissionDeniedError(
            "The directory of a socket must be private to its user",
            f"{str(directory)!r} has mode {mode:o} and belongs to user {found.st_uid}",
            "Use a directory made with `mkdir -m 700`.",
        )
