"""Parts of a parameter server in checkpoints: written and read by the server itself.

Note [Which files a server touches]
    A compromised coordinator must not gain a way to write files. So a server writes one file,
    named after itself, into an existing directory that belongs to its own user and has the name of
    an unpublished bundle; and it reads only checkpoints that belong to its own user, and of them
    only rows whose checksums are right. Other requests are rejected with PermissionDeniedError, and
    a directory that the server does not have with NotFoundError: then the coordinator transfers
    the values itself.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from replicax.bundle import publishing
from replicax.bundle.data_files import Piece, Source, write_stream
from replicax.bundle.dtypes import name_of_dtype
from replicax.bundle.manifest import CHECKPOINT
from replicax.bundle.reading import Bundle
from replicax.foundation import errors, uncached_files
from replicax.protocol import messages
from replicax.ps.store.frozen import piece_bytes
from replicax.ps.store.parts import Part
from replicax.ps.store.service import PartRows


class CheckpointFiles:
    """Writes and reads the parts of one server.

    Args:
      index: The index of the server.
    """

    def __init__(self, index: int) -> None:
        self._task = f"/job:ps/task:{index}"
        self._file = f"ps-{index:05d}.safetensors"
        # A repeated request gets the reply of the first one.
        self._last_saved: tuple[str, bytes] | None = None

    def save(self, directory: str, rows: PartRows) -> bytes:
        """Writes parts into a new file; returns their part of the manifest, as JSON."""
        if self._last_saved is not None and self._last_saved[0] == directory:
            return self._last_saved[1]
        path = self._own_directory(directory)
        if publishing.TEMPORARY not in path.name:
            raise self._denied(f"{directory} is not the directory of an unpublished bundle")
        sources = [_source(row, part, self._task) for row, part in rows]
        try:
            # What a process of this server left that died while it wrote.
            (path / self._file).unlink(missing_ok=True)
            with uncached_files.synced(path / self._file) as target:
                written = write_stream(target, self._file, sources)
        except OSError as error:
            raise publishing.cannot_write(path / self._file, error, CHECKPOINT) from error
        self._last_saved = directory, msgspec.json.encode(written)
        return self._last_saved[1]

    def load(self, path: str, rows: PartRows, *, is_check: bool) -> None:
        """Reads parts, or only compares their checksums."""
        with Bundle(self._own_directory(path), CHECKPOINT) as bundle:
            for row, part in rows:
                _require_fit(bundle, row, part)
            for row, part in rows:
                wanted = row.start, row.start + part.num_rows
                for start, octets in bundle.pieces(row.name, wanted):
                    if not is_check:
                        with part.lock:
                            part.write_octets(start, octets)

    def _own_directory(self, name: str) -> Path:
        path = Path(name)
        try:
            found = path.lstat()
        except OSError as error:
            raise errors.NotFoundError(
                f"{self._task} must share the directory {name} with the coordinator",
                f"it cannot be found there ({error.strerror})",
                "Use a file system that all tasks share; the coordinator transfers the values.",
            ) from error
        if not path.is_absolute() or not stat.S_ISDIR(found.st_mode):
            raise self._denied(f"{name} is not an absolute path of a directory")
        if found.st_uid != os.geteuid():
            raise self._denied(f"{name} belongs to user {found.st_uid}, not to {os.geteuid()}")
        return path

    def _denied(self, found: str) -> errors.PermissionDeniedError:
        return errors.PermissionDeniedError(
            f"{self._task} reads and writes checkpoints of its own user only",
            found,
            "Run all tasks as one user; the coordinator transfers the values.",
        )


def _source(row: messages.StoredRows, part: Part, task: str) -> Source:
    dtype = name_of_dtype(part.dtype)
    end = row.start + part.num_rows
    if dtype is None or row.shape[1:] != part.shape[1:] or not 0 <= row.start <= end:
        raise _misfit(row, part, task)
    with part.lock:
        value = part.read()
    size = piece_bytes(part.num_bytes, part.num_rows)

    def pieces() -> Iterator[Piece]:
        for start in range(0, value.size, size):
            yield start, value[start : start + size]

    return Source(row.name, dtype, row.shape, (row.start, end), size, pieces)


def _require_fit(bundle: Bundle, row: messages.StoredRows, part: Part) -> None:
    entry = bundle.arrays.get(row.name)
    is_stored = entry is not None and entry.shape == row.shape and bool(row.shape)
    is_same = is_stored and entry is not None and entry.dtype == name_of_dtype(part.dtype)
    is_within = is_same and 0 <= row.start <= row.start + part.num_rows <= row.shape[0]
    if not is_within or row.shape[1:] != part.shape[1:]:
        raise _misfit(row, part, "the checkpoint")


def _misfit(row: messages.StoredRows, part: Part, where: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"{part.label} must be rows of {row.name!r} in {where}",
        f"that has the shape {row.shape}, and the part {part.shape} from row {row.start} on",
        "Correct the request.",
    )
