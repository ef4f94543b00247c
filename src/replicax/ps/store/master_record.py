"""Whom a parameter server obeys, on its disk.

Note [A promise outlives its process]
    A coordinator that has taken a job over must not lose a server to the one before it. Snapshots
    say who had the server when they were taken, and it may be killed before the next one: then it
    would come back in the hands of a coordinator that was replaced. So whom it obeys is on the
    disk, in a file of its own, before it says so.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Protocol

import msgspec

from replicax.foundation import durable_files

_log = logging.getLogger(__name__)


class Promise(msgspec.Struct, frozen=True):
    """To obey one coordinator of a job, and none before it.

    Attributes:
      job: The name of the job.
      epoch: Which coordinator of the job it is.
      coordinator: The life of its process.
    """

    job: str
    epoch: int
    coordinator: int


class Promises(Protocol):
    """What remembers the last promise, also for the next process of a server.

    Attributes:
      kept: The last one.
    """

    kept: Promise | None

    def keep(self, promise: Promise) -> None:
        """Remembers a promise; it is safe when this returns."""
        ...

    def forget(self) -> None:
        """The job is over."""
        ...


class PromiseFile:
    """Remembers the promise of a server in a file.

    Args:
      path: The file; its directory belongs to the server.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.kept: Promise | None = None

    def read(self) -> None:
        """Finds out what the process before has promised."""
        try:
            self.kept = msgspec.json.decode(self._path.read_bytes(), type=Promise)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be read, and is ignored: %s", self._path, error)

    def keep(self, promise: Promise) -> None:
        """Remembers a promise.

        On a disk that takes nothing it holds for as long as the process lives: a job shall not
        wait for the disk of one of its servers.
        """
        self.kept = promise
        new = self._path.with_name(f".{self._path.name}.new")
        try:
            new.unlink(missing_ok=True)
            with durable_files.synced(new) as file:
                file.write(msgspec.json.encode(promise))
            os.replace(new, self._path)
            durable_files.sync_directory(self._path.parent)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error)

    def forget(self) -> None:
        """The job is over, and with it the promise."""
        self.kept = None
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", self._path, error)
