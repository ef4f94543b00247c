"""The disk of a simulated machine: real files; only synced data survives a power cut."""

from __future__ import annotations

import os
import posix
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

# In memory if possible: nothing here is persistent.
_PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

# Protects `_disks`, and the replacement of `os.fsync`.
_lock = threading.Lock()
# All disks, by their directory.
_disks: dict[str, Disk] = {}


class Disk:
    """A directory of real files, with a record of the synced names and contents.

    The worst case of a real disk: after a power cut a file that was not synced is empty, and one
    whose directory was not synced is missing, or still has its old name.

    Args:
      on_sync: Called while a file is being synced, before its content is safe.

    Attributes:
      path: The directory.

    >>> disk = Disk()
    >>> safe, unsafe = disk.path / "safe", disk.path / "unsafe"
    >>> with safe.open("wb") as file:
    ...     _ = file.write(b"content")
    ...     file.flush()
    ...     os.fsync(file.fileno())
    >>> directory = os.open(disk.path, os.O_RDONLY)
    >>> os.fsync(directory)
    >>> _ = unsafe.write_bytes(b"content")
    >>> disk.cut_power()
    >>> safe.read_bytes(), unsafe.exists()
    (b'content', False)
    >>> os.close(directory)
    >>> disk.close()
    """

    def __init__(self, on_sync: Callable[[], None] = lambda: None) -> None:
        self._on_sync = on_sync
        self._directory = tempfile.TemporaryDirectory(prefix="replicax-disk-", dir=_PLACE)
        self.path = Path(self._directory.name)
        # What is safe, by inode: the names in each directory, and the contents of files.
        self._names: dict[int, dict[str, int]] = {}
        self._contents: dict[int, bytes] = {}
        with _lock:
            _disks[os.path.realpath(self.path)] = self
            # A saboteur may have replaced it already.
            if os.fsync is posix.fsync:
                os.fsync = _sync

    def close(self) -> None:
        """Removes everything."""
        with _lock:
            del _disks[os.path.realpath(self.path)]
            if not _disks and os.fsync is _sync:
                os.fsync = posix.fsync
        self._directory.cleanup()

    def cut_power(self) -> None:
        """Restores all files to their synced state."""
        names, contents = self._names, self._contents
        root = self.path.stat().st_ino
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self._names, self._contents = {}, {}

        def rebuild(directory: Path, node: int) -> None:
            found = self._names[directory.stat().st_ino] = {}
            for name, child in names.get(node, {}).items():
                entry = directory / name
                if child in names:
                    entry.mkdir()
                    rebuild(entry, child)
                else:
                    entry.write_bytes(contents.get(child, b""))
                    self._contents[entry.stat().st_ino] = contents.get(child, b"")
                found[name] = entry.stat().st_ino

        rebuild(self.path, root)

    def note_synced(self, descriptor: int) -> None:
        """Records that a file, or the names in a directory, were synced."""
        self._on_sync()
        status = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(status.st_mode):
            entries = list(path.iterdir())
            self._names[status.st_ino] = {entry.name: entry.stat().st_ino for entry in entries}
            # A directory whose name is synced exists, if only without content.
            for entry in entries:
                if entry.is_dir():
                    self._names.setdefault(entry.stat().st_ino, {})
            self._forget_removed()
        else:
            self._contents[status.st_ino] = path.read_bytes()

    def _forget_removed(self) -> None:
        """Drops what neither exists nor has a synced name."""
        kept = {entry.stat().st_ino for entry in (self.path, *self.path.rglob("*"))}
        kept |= {node for found in self._names.values() for node in found.values()}
        self._names = {node: found for node, found in self._names.items() if node in kept}
        self._contents = {node: one for node, one in self._contents.items() if node in kept}


def _sync(descriptor: int) -> None:
    """Syncs like `os.fsync`, and records it at the disk of the file."""
    posix.fsync(descriptor)
    path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    for place in (path, *path.parents):
        disk = _disks.get(str(place))
        if disk is not None:
            disk.note_synced(descriptor)
            return
