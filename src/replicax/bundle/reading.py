"""Reading bundles: only the bytes that are asked for, each piece checked against its checksum."""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self, TypeVar

import numpy as np
from typing_extensions import override

from replicax.bundle.data_files import ALIGNMENT, Piece, thread_pool
from replicax.bundle.dtypes import dtype_named
from replicax.bundle.manifest import (
    FILE_NAME,
    MAX_BYTES,
    PACKED_FILE,
    PACKED_LENGTH,
    ArrayEntry,
    Kind,
    Manifest,
    damaged,
    decode_contents,
    parse,
)
from replicax.foundation import errors

_T = TypeVar("_T")
# A device or a pipe in the place of a file must not block.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class _StoredPiece(NamedTuple):
    """A piece of an array: its file, its place there, its place in the array, its checksum."""

    file: str
    offset: int
    start: int
    size: int
    crc32: int


class Bundle:
    """A published bundle, open for reading.

    Files are opened below the directory that was opened first, so a bundle that is replaced
    meanwhile is read as it was.

    Args:
      path: The directory.
      kind: The kind that it must be of.

    Attributes:
      manifest: Its manifest, checked.
      arrays: Its arrays, by name.
      num_bytes: The size of all its files.
      digest: The SHA-256 of its manifest, which contains the checksums of all its bytes.

    Raises:
      CheckpointError: There is no readable bundle of this kind and format.
      DataLossError: The manifest is damaged.
    """

    def __init__(self, path: Path, kind: Kind) -> None:
        self._path = path
        self._kind = kind
        self._directory = -1
        self._descriptors: dict[str, int] = {}
        try:
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            text = self._read_manifest()
        except OSError as error:
            self.close()
            if isinstance(error, errors.DistributeError):
                raise
            raise errors.CheckpointError(
                f"The {kind.name} {path} needs a readable {FILE_NAME}",
                f"reading it failed: {error.strerror or error}",
                f"Give the path of a {kind.name}.",
            ) from error
        try:
            self.manifest: Manifest = parse(text, path / FILE_NAME, kind)
        except BaseException:
            self.close()
            raise
        self.arrays = {entry.name: entry for entry in self.manifest.arrays}
        self.digest = hashlib.sha256(text).hexdigest()
        self.num_bytes = len(text) + sum(file.size for file in self.manifest.files.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files. Idempotent."""
        if self._directory >= 0:
            os.close(self._directory)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._directory, self._descriptors = -1, {}

    def is_replaced(self) -> bool:
        """Returns whether another bundle has taken the path meanwhile, or none has it any more."""
        try:
            return not os.path.samestat(os.fstat(self._directory), os.stat(self._path))
        except OSError:
            return True

    def contents(self, type_: type[_T]) -> _T:
        """Returns what the kind of bundle defines."""
        return decode_contents(self.manifest, type_, self._path / FILE_NAME, self._kind)

    def check_files(self) -> None:
        """Raises DataLossError if a file is missing, foreign, or has another size or header."""
        found = set(os.listdir(self._directory)) - {FILE_NAME}
        for name in sorted(found | self.manifest.files.keys()):
            if name not in found:
                raise self.damaged(name, "the file is missing")
            if name not in self.manifest.files:
                raise self.damaged(name, f"the {self._kind.name} was written without this file")
            stored = self.manifest.files[name]
            header = np.empty(stored.header_bytes, np.uint8)
            self._fill(_StoredPiece(name, 0, 0, header.size, stored.header_crc32), header, "header")

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads arrays, with several threads; each has memory of its own, aligned for JAX.

        Raises:
          DataLossError: A piece is not as it was written.
        """
        entries = [self.arrays[name] for name in names]
        for file in {part.file for entry in entries for part in entry.slices}:
            self._descriptor(file)
        found = {entry.name: aligned_memory(entry.nbytes) for entry in entries}
        with thread_pool() as pool:
            jobs = [
                pool.submit(
                    self._fill, piece, found[entry.name][piece.start :][: piece.size], entry.name
                )
                for entry in entries
                for piece in _pieces_of(entry)
            ]
            for job in jobs:
                job.result()
        return {
            entry.name: found[entry.name].view(dtype_named(entry.dtype)).reshape(entry.shape)
            for entry in entries
        }

    def pieces(self, name: str, rows: tuple[int, int] | None = None) -> Iterator[Piece]:
        """Yields the bytes of an array, or of some rows, in order; each piece until the next.

        Places are counted from the first of the rows.
        """
        entry = self.arrays[name]
        first, end = (0, entry.num_rows) if rows is None else rows
        first, end = first * entry.row_bytes, end * entry.row_bytes
        buffer = np.empty(0, np.uint8)
        for piece in _pieces_of(entry):
            if piece.start >= end or piece.start + piece.size <= first:
                continue
            if buffer.size < piece.size:
                buffer = aligned_memory(piece.size)
            octets = buffer[: piece.size]
            self._fill(piece, octets, name)
            skipped = max(first - piece.start, 0)
            yield piece.start + skipped - first, octets[skipped : end - piece.start]

    def damaged(self, file: str, found: str) -> errors.DataLossError:
        """Returns the error for a file that is not as it was written."""
        return damaged(self._path / file, found, self._kind)

    def _fill(self, piece: _StoredPiece, octets: np.ndarray, name: str) -> None:
        descriptor = self._descriptor(piece.file)
        filled = 0
        try:
            while filled < octets.size:
                count = os.preadv(descriptor, [octets[filled:].data], piece.offset + filled)
                if not count:
                    break
                filled += count
        except OSError as error:
            raise self.damaged(piece.file, f"it cannot be read ({error})") from error
        if filled < octets.size or zlib.crc32(octets.data) != piece.crc32:
            raise self.damaged(piece.file, f"the checksum of {name!r} differs")

    def _descriptor(self, file: str) -> int:
        """Opens a file, once, and compares its size with the manifest."""
        if file in self._descriptors:
            return self._descriptors[file]
        try:
            descriptor = os.open(file, _FLAGS, dir_fd=self._directory)
        except FileNotFoundError as error:
            raise self.damaged(file, "the file is missing") from error
        except OSError as error:
            raise self.damaged(file, f"it is not a regular file ({error.strerror})") from error
        self._descriptors[file] = descriptor
        status = os.fstat(descriptor)
        expected = self.manifest.files[file].size
        if not stat.S_ISREG(status.st_mode):
            raise self.damaged(file, "it is not a regular file")
        if status.st_size != expected:
            raise self.damaged(file, f"it has {status.st_size} bytes instead of {expected}")
        return descriptor

    def _read_manifest(self) -> bytes:
        descriptor = os.open(FILE_NAME, _FLAGS, dir_fd=self._directory)
        with open(descriptor, "rb") as file:
            return file.read(MAX_BYTES + 1)


class PackedBundle(Bundle):
    """A bundle in one file, as `publishing.write_packed` writes it.

    Args:
      file: The file, which stays open for as long as the bundle is used.
      kind: The kind that the bundle must be of.
      label: What errors call the file.

    Raises:
      DataLossError: It is not as it was written.
    """

    def __init__(self, file: IO[bytes], kind: Kind, label: str) -> None:
        self._path = Path(label)
        self._kind = kind
        self._directory = -1
        self.num_bytes = file.seek(0, os.SEEK_END)
        end = self.num_bytes - PACKED_LENGTH.size
        file.seek(max(end, 0))
        length = PACKED_LENGTH.unpack(file.read())[0] if end >= 0 else 0
        if not 0 < length <= min(end, MAX_BYTES):
            raise damaged(label, f"it has {self.num_bytes} bytes, without a manifest", kind)
        file.seek(end - length)
        self.manifest = parse(file.read(length), label, kind)
        stored = self.manifest.files.get(PACKED_FILE)
        if len(self.manifest.files) != 1 or stored is None or stored.size != end - length:
            raise damaged(label, "its size is not that of its data and its manifest", kind)
        self._descriptors = {PACKED_FILE: file.fileno()}
        self.arrays = {entry.name: entry for entry in self.manifest.arrays}

    @override
    def close(self) -> None:
        self._descriptors = {}


def _pieces_of(entry: ArrayEntry) -> Iterator[_StoredPiece]:
    for part in entry.slices:
        begin, size = part.start * entry.row_bytes, (part.stop - part.start) * entry.row_bytes
        for number, crc32 in enumerate(np.frombuffer(part.sums, "<u4").tolist()):
            start = number * part.piece_bytes
            length = min(part.piece_bytes, size - start)
            yield _StoredPiece(part.file, part.offset + start, begin + start, length, crc32)


def aligned_memory(size: int) -> np.ndarray:
    """Returns bytes that begin where JAX can use arrays in place, without a copy."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]
