"""A directory of numbered checkpoints: its contents, and the lock of its writer."""

from __future__ import annotations

import errno
import os
import re
import weakref
from pathlib import Path

from replicax.bundle import manifest, publishing
from replicax.bundle.manifest import CHECKPOINT
from replicax.foundation import errors, exclusive_files

_NUMBERED = re.compile(r"(?P<name>.+)-(?P<step>[0-9]{1,18})")
_LOCK_FILE = ".writer.lock"
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def steps_in(directory: Path, name: str | None = None) -> dict[int, Path]:
    """Returns the finished checkpoints of a directory by number, the newest last.

    The number counts, never the time of a file, which clocks and copies change.
    """
    found: dict[int, Path] = {}
    try:
        entries = sorted(directory.iterdir())
    except FileNotFoundError:
        return found
    except OSError as error:
        raise errors.CheckpointError(
            f"{directory} must be a directory that can be read",
            f"reading it failed: {error.strerror}",
            "Give the directory of a CheckpointManager.",
        ) from error
    for entry in entries:
        match = _NUMBERED.fullmatch(entry.name)
        if not match or name not in (None, match["name"]) or publishing.TEMPORARY in entry.name:
            continue
        if (entry / manifest.FILE_NAME).is_file():
            found[int(match["step"])] = entry
    return dict(sorted(found.items()))


class WriterLock:
    """The write lock of a directory: held by one process, until it is released or the process ends.

    Readers need no lock. Several managers of one process share it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._closer: weakref.finalize | None = None

    def acquire(self) -> bool:
        """Acquires the lock; returns False if the directory is read-only.

        Raises:
          CheckpointError: Another process holds it.
        """
        if self._closer is not None and self._closer.alive:
            return True
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = exclusive_files.hold(self._directory / _LOCK_FILE)
        except exclusive_files.HeldError as error:
            if error.holder == str(os.getpid()):
                return True
            raise errors.CheckpointError(
                f"Only one process may manage the checkpoints in {self._directory}",
                f"process {error.holder or 'unknown'} does",
                "Wait for it, or use another directory. To read only, use "
                "`rx.train.latest_checkpoint` and `Checkpoint.restore`.",
            ) from error
        except OSError as error:
            if error.errno in _READ_ONLY:
                return False
            raise publishing.cannot_write(self._directory, error, CHECKPOINT) from error
        self._closer = weakref.finalize(self, os.close, descriptor)
        return True

    def release(self) -> None:
        """Releases the lock."""
        if self._closer is not None:
            self._closer()
