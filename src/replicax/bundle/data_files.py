"""Writing safetensors files: from memory in parallel, or piece by piece as a stream.

The library's own writer needs all arrays in memory at once, has no checksums and syncs nothing, so
the files are laid out here: length of the header, header, and the bytes of all arrays end to end.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from replicax.bundle.dtypes import dtype_named, stored_form
from replicax.bundle.manifest import ArrayEntry, Part, Slice, StoredFile

# How many bytes one checksum covers, and one thread reads or writes at a time.
PIECE_BYTES = 8 << 20
# Arrays begin here in files, and in memory: JAX takes such memory over without a copy.
ALIGNMENT = 64
# Several threads are quicker with several files. At most about 16 files, none of them small.
_LEAST_FILE_BYTES = 32 << 20
_MOST_FILES = 16
_LENGTH = struct.Struct("<Q")

# Where bytes of an array begin, and the bytes.
Piece = tuple[int, np.ndarray]


@dataclass(frozen=True)
class Source:
    """An array, or consecutive rows of one, that is written piece by piece.

    Attributes:
      name: The name of the array.
      dtype: The name of its type.
      shape: The shape of the whole array.
      rows: The first row, and the row behind the last.
      piece_bytes: The size of all pieces but the last.
      pieces: Yields the pieces in order; each is valid until the next.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    piece_bytes: int
    pieces: Callable[[], Iterable[Piece]]

    @classmethod
    def of_array(cls, name: str, dtype: str, array: np.ndarray) -> Source:
        """Returns the source of an array in memory."""
        octets = as_octets(array)

        def pieces() -> Iterator[Piece]:
            for start in range(0, octets.size, PIECE_BYTES):
                yield start, octets[start : start + PIECE_BYTES]

        rows = 0, array.shape[0] if array.shape else 1
        return cls(name, dtype, array.shape, rows, PIECE_BYTES, pieces)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the rows that are written."""
        start, stop = self.rows
        return (stop - start, *self.shape[1:]) if self.shape else ()

    @property
    def nbytes(self) -> int:
        """The number of bytes that are written."""
        return math.prod(self.stored_shape) * dtype_named(self.dtype).itemsize

    @property
    def stored_name(self) -> str:
        """The name in the file."""
        is_whole = not self.shape or self.rows == (0, self.shape[0])
        return self.name if is_whole else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"


class Target(Protocol):
    """A file that is written forwards."""

    def seek(self, offset: int, /) -> object: ...
    def write(self, data: bytes | memoryview, /) -> object: ...
    def truncate(self, size: int, /) -> object: ...


@dataclass(frozen=True)
class _Layout:
    """A file to be: its sources in the order of their bytes, where each begins, the header."""

    sources: list[Source]
    offsets: list[int]
    header: bytes
    size: int

    @classmethod
    def of(cls, sources: Iterable[Source]) -> _Layout:
        # Readers map files: wide elements come first, so each array is aligned to its elements.
        ordered = sorted(sources, key=lambda one: -dtype_named(one.dtype).itemsize)
        entries: dict[str, object] = {"__metadata__": {"format": "replicax"}}
        ends: list[int] = [0]
        for source in ordered:
            code, shape = stored_form(source.dtype, source.stored_shape)
            if source.stored_name in entries:
                raise ValueError(f"two arrays are stored as {source.stored_name!r}")
            ends.append(ends[-1] + source.nbytes)
            entries[source.stored_name] = {
                "dtype": code,
                "shape": list(shape),
                "data_offsets": ends[-2:],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        # The format allows spaces behind the header.
        text += b" " * (-(len(text) + _LENGTH.size) % ALIGNMENT)
        header = _LENGTH.pack(len(text)) + text
        offsets = [len(header) + end for end in ends[:-1]]
        return cls(ordered, offsets, header, len(header) + ends[-1])

    def part(self, file: str, sums: Sequence[np.ndarray]) -> Part:
        """Returns what the manifest holds about the file, given the checksums of its pieces."""
        arrays = [
            ArrayEntry(
                source.name,
                source.dtype,
                source.shape,
                (Slice(file, offset, *source.rows, source.piece_bytes, one.tobytes()),),
            )
            for source, offset, one in zip(self.sources, self.offsets, sums, strict=True)
        ]
        stored = StoredFile(self.size, len(self.header), zlib.crc32(self.header))
        return Part(arrays, {file: stored})

    def empty_sums(self) -> list[np.ndarray]:
        """Returns room for the checksums of all pieces."""
        return [np.zeros(-(-one.nbytes // one.piece_bytes), "<u4") for one in self.sources]


def as_octets(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def thread_pool() -> ThreadPoolExecutor:
    """Returns threads for checksums and transfers, which both release the GIL."""
    return ThreadPoolExecutor(os.cpu_count(), "ThreadPoolExecutor-checkpoint")


def write_stream(
    target: Target,
    file: str,
    sources: Iterable[Source],
    on_progress: Callable[[float], None] = lambda _: None,
) -> Part:
    """Writes a safetensors file forwards, one piece in memory at a time.

    Pieces of zeros are skipped: they become holes of the file.

    Args:
      target: An empty file.
      file: Its name in the bundle.
      sources: The arrays.
      on_progress: Called before each piece with the share of the file that is written; what it
        raises stops the writing.
    """
    layout = _Layout.of(sources)
    sums = layout.empty_sums()
    target.seek(0)
    target.write(layout.header)
    for source, offset, own in zip(layout.sources, layout.offsets, sums, strict=True):
        for start, piece in source.pieces():
            on_progress((offset + start) / layout.size)
            found = zlib.crc32(piece.data)
            own[start // source.piece_bytes] = found
            if found != _sum_of_zeros(piece.size) or piece.any():
                target.seek(offset + start)
                target.write(piece.data)
    target.truncate(layout.size)
    return layout.part(file, sums)


@functools.lru_cache(maxsize=64)
def _sum_of_zeros(size: int) -> int:
    return zlib.crc32(bytes(size))


def write_arrays(
    directory: Path, prefix: str, arrays: Mapping[str, tuple[str, np.ndarray]]
) -> list[Part]:
    """Writes arrays in memory into new, synced files, with several threads.

    Args:
      directory: Where to.
      prefix: How the names of the files begin.
      arrays: Arrays with the names of their types, by name.
    """
    sources = [Source.of_array(name, *array) for name, array in arrays.items()]
    layouts = [_Layout.of(group) for group in _grouped(sources)]
    files = [f"{prefix}-{number:05d}.safetensors" for number in range(len(layouts))]
    sums = [layout.empty_sums() for layout in layouts]
    descriptors: list[int] = []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        for file in files:
            descriptors.append(os.open(directory / file, flags, 0o644))
        with thread_pool() as pool:
            jobs = [
                pool.submit(_write_piece, descriptor, offset, piece, own, number)
                for descriptor, layout, of_file in zip(descriptors, layouts, sums, strict=True)
                for descriptor, offset, piece, own, number in _jobs(descriptor, layout, of_file)
            ]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            for _ in pool.map(os.fsync, descriptors):
                pass
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    parts = zip(layouts, files, sums, strict=True)
    return [layout.part(file, own) for layout, file, own in parts]


def _grouped(sources: Sequence[Source]) -> list[list[Source]]:
    """Distributes arrays over files, in order; an array is never split."""
    limit = max(_LEAST_FILE_BYTES, sum(one.nbytes for one in sources) // _MOST_FILES)
    groups: list[list[Source]] = []
    filled = limit
    for source in sources:
        if filled >= limit:
            groups.append([])
            filled = 0
        groups[-1].append(source)
        filled += source.nbytes
    return groups


_Job = tuple[int, int, np.ndarray, np.ndarray | None, int]


def _jobs(descriptor: int, layout: _Layout, sums: Sequence[np.ndarray]) -> Iterator[_Job]:
    yield descriptor, 0, np.frombuffer(layout.header, np.uint8), None, 0
    for source, offset, own in zip(layout.sources, layout.offsets, sums, strict=True):
        for number, (start, piece) in enumerate(source.pieces()):
            yield descriptor, offset + start, piece, own, number


def _write_piece(
    descriptor: int, offset: int, piece: np.ndarray, sums: np.ndarray | None, number: int
) -> None:
    if sums is not None:
        sums[number] = zlib.crc32(piece.data)
    written = 0
    while written < piece.size:
        written += os.pwrite(descriptor, piece[written:].data, offset + written)
