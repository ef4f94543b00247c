"""The file with the master of a parameter server; see Note [The master record] in store/jobs.py."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from replicax.foundation import durable_files
from replicax.ps.store.jobs import Master

# In the directory of the snapshots.
FILE_NAME = "master.json"

_log = logging.getLogger(__name__)


class MasterRecordFile:
    """Stores the master of a server in a file.

    Args:
      directory: The snapshot directory of the server.

    Attributes:
      master: The last one written, or found by `read`.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self.master: Master | None = None

    def read(self) -> None:
        """Reads the record of the previous process, if there is one."""
        try:
            self.master = msgspec.json.decode(self._path.read_bytes(), type=Master)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be read, and is ignored: %s", self._path, error)

    def write(self, master: Master) -> None:
        """Stores the master.

        If the disk fails, the record holds until the process ends: a job must not wait for the
        disk of one of its servers.
        """
        self.master = master
        new = self._path.with_name(f".{self._path.name}.new")
        try:
            new.unlink(missing_ok=True)
            with durable_files.synced(new) as file:
                file.write(msgspec.json.encode(master))
            os.replace(new, self._path)
            durable_files.sync_directory(self._path.parent)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error)

    def clear(self) -> None:
        """Removes the record."""
        self.master = None
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", self._path, error)
