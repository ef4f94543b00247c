"""The disk of a simulated machine: real files, of which a power cut leaves what was synced."""

from __future__ import annotations

import os
import posix
import stat
import tempfile
import threading
from pathlib import Path

# In memory, where there is such a place: nothing here has to last.
_PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

# Protects `_disks`, and who `os.fsync` is.
_lock = threading.Lock()
# All disks, by their directory.
_disks: dict[str, Disk] = {}


class Disk:
    """A directory of real files. It knows which names and contents were synced.

    As careless as a disk may be: a file that was not synced is empty after a power cut, and one
    whose directory was not synced is not there, or still has its old name.

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

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="replicax-disk-", dir=_PLACE)
        self.path = Path(self._directory.name)
        # What is safe: the names, and the contents of what they stand for.
        self._names: dict[str, int] = {}
        self._contents: dict[int, bytes] = {}
        with _lock:
            _disks[os.path.realpath(self.path)] = self
            # Whoever has taken syncing away, as a saboteur does, is not interfered with.
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
        """Leaves of all files what was synced."""
        left = {name: self._contents.get(node, b"") for name, node in self._names.items()}
        for file in self.path.iterdir():
            file.unlink()
        self._contents = {}
        for name, content in left.items():
            file = self.path / name
            file.write_bytes(content)
            self._names[name] = file.stat().st_ino
            self._contents[self._names[name]] = content

    def note_synced(self, descriptor: int) -> None:
        """A file, or the directory, was synced."""
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self._names = {file.name: file.stat().st_ino for file in self.path.iterdir()}
            nodes = set(self._names.values())
            self._contents = {n: content for n, content in self._contents.items() if n in nodes}
        else:
            self._contents[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()


def _sync(descriptor: int) -> None:
    """Syncs as `os.fsync` does, and tells the disk that the file is on."""
    posix.fsync(descriptor)
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    disk = _disks.get(path) or _disks.get(os.path.dirname(path))
    if disk is not None:
        disk.note_synced(descriptor)
