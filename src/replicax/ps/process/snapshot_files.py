"""Snapshots on disk: written all or not at all, and proved whole before they are used.

Note [What is in a snapshot file]
    magic, number of the format, length and SHA-256 of the header | header | zeros up to a whole
    block of the disk | sections, end to end.
    The header is a `State` and, for each piece of each section, its CRC-32. Nothing in a file is
    code, and its word is not trusted: no memory is taken before sizes agree with that of the file.

Note [The order of a save]
    temporary file -> its content -> fsync -> rename -> fsync of the directory. Then older
    snapshots go. Whoever sees a snapshot sees a whole one, after a crash of the process or of
    the machine; and whatever fails, the one before is there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import msgspec
import numpy as np

from replicax.foundation import durable_files, errors, exclusive_files, uncached_files
from replicax.ps.store.snapshot import Cut, Loaded, Piece, State

# Raised whenever `State`, or a message that is part of it, changes.
FORMAT = 2
_MAGIC = b"RXPSSNAP"
_PREAMBLE = struct.Struct("<8sIQ32s")
_MAX_HEADER_BYTES = 64 << 20
# What NumPy can make an array of.
_MAX_DIMENSIONS = 32
_MAX_ARRAY_BYTES = 1 << 60

_NUMBERED = re.compile(r"snapshot-(?P<number>[0-9]{1,18})\.rxs")
_TEMPORARY = ".tmp"
_LOCK_FILE = ".writer.lock"

_log = logging.getLogger(__name__)


class GivenUpError(Exception):
    """Raised when a snapshot is not wanted any more while it is written."""


class Saved(NamedTuple):
    """A snapshot on disk: its number, and how long it is."""

    number: int
    num_bytes: int


class _Target(Protocol):
    """A file that a snapshot is written to."""

    def seek(self, offset: int, /) -> object: ...
    def write(self, data: bytes | memoryview, /) -> object: ...
    def truncate(self, size: int, /) -> object: ...


class _Header(msgspec.Struct, frozen=True):
    """What a file says of itself; `sums` are the checksums of pieces, by section."""

    state: State
    sums: list[bytes]


class SnapshotDirectory:
    """The snapshots of one server; one process at a time may have it.

    Args:
      path: The directory; it is made if need be.

    Raises:
      CheckpointError: Another process has it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: int | None = None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = exclusive_files.hold(path / _LOCK_FILE)
            for leftover in path.glob(f"*{_TEMPORARY}"):
                leftover.unlink()
            self._next = max(self._files(), default=0) + 1
        except exclusive_files.HeldError as error:
            raise errors.CheckpointError(
                f"One parameter server may keep its snapshots in {path}",
                f"that of process {error.holder or 'unknown'} does so",
                "End that process, or use another directory.",
            ) from error
        except OSError as error:
            self.close()
            raise _cannot_write(path, error) from error

    def close(self) -> None:
        """Lets another process have it; again is harmless."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def save(
        self, cut: Cut, *, num_kept: int = 2, is_wanted: Callable[[float], bool] = lambda _: True
    ) -> Saved:
        """Writes a snapshot, and removes all but the newest.

        Args:
          cut: What to write; it is not closed.
          num_kept: How many snapshots stay, with this one.
          is_wanted: Asked before each piece, with the share of all bytes that is written.

        Raises:
          CheckpointError: It could not be written; those that were there before still are.
          GivenUpError: It is not wanted any more.
        """
        number = self._next
        path = self._path / f"snapshot-{number:012d}.rxs"
        temporary = path.with_suffix(_TEMPORARY)
        try:
            with uncached_files.synced(temporary) as file:
                num_bytes = write(file, cut, is_wanted)
            os.rename(temporary, path)
            try:
                durable_files.sync_directory(self._path)
            except OSError:
                # Not safe on disk, so not there at all.
                path.unlink()
                raise
        except BaseException as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and not isinstance(error, errors.DistributeError):
                raise _cannot_write(path, error) from error
            raise
        self._next += 1
        self._remove_all_but(num_kept)
        return Saved(number, num_bytes)

    def load(self, use: Callable[[Loaded], None]) -> Saved | None:
        """Gives the newest good snapshot to a function; None if there is none.

        Should that raise an error of ours, the one before is tried, and a warning names both.

        Raises:
          ResourceExhaustedError: There is not enough memory; an older one would not help.
        """
        failures: list[str] = []
        files = self._files()
        newest = files[max(files)] if files else self._path
        for number, path in reversed(files.items()):
            try:
                with _opened(path) as (loaded, num_bytes):
                    use(loaded)
            except errors.ResourceExhaustedError:
                raise
            except (errors.DistributeError, OSError) as error:
                failures.append(f"{path.name} cannot be used: {error}")
                continue
            if failures:
                # For people: the times of files are not relied on.
                older_s = max(0.0, newest.stat().st_mtime - path.stat().st_mtime)
                text = "%s is used, which is %.1f s older, because newer snapshots are lost: %s"
                _log.warning(text, path, older_s, "; ".join(failures))
            return Saved(number, num_bytes)
        if failures:
            text = "there is no snapshot left to start from in %s: %s"
            _log.warning(text, self._path, "; ".join(failures))
        return None

    def clear(self) -> None:
        """Removes all snapshots: their job is over.

        Raises:
          CheckpointError: They cannot be removed.
        """
        try:
            for file in self._files().values():
                file.unlink()
            durable_files.sync_directory(self._path)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def _files(self) -> dict[int, Path]:
        """Returns the snapshots by number, the newest last; the time of a file does not count."""
        found = {
            int(match["number"]): entry
            for entry in self._path.iterdir()
            if (match := _NUMBERED.fullmatch(entry.name))
        }
        return dict(sorted(found.items()))

    def _remove_all_but(self, num_kept: int) -> None:
        # One that stays for now is no failure of the save; the next one tries again.
        with contextlib.suppress(OSError):
            for file in list(self._files().values())[:-num_kept]:
                file.unlink()


def write(file: _Target, cut: Cut, is_wanted: Callable[[float], bool] = lambda _: True) -> int:
    """Writes a snapshot into an empty file; returns its length."""
    sections = cut.state.sections()
    sums = [np.zeros(-(-size // piece), "<u4") for size, piece in sections]
    # Its length does not depend on the checksums, which are known last.
    first = _first_section(len(_encoded(cut.state, sums)))
    if first > _MAX_HEADER_BYTES:
        found = f"that of job {cut.state.job!r} has {first} bytes"
        required = f"The header of a snapshot has at most {_MAX_HEADER_BYTES} bytes"
        todo = "Use fewer variables on each parameter server."
        raise errors.CheckpointError(required, found, todo)
    offset, end = first, first + sum(size for size, _ in sections)
    for section, (size, piece_size) in enumerate(sections):
        for start, piece in cut.pieces(section):
            if not is_wanted((offset + start) / end):
                raise GivenUpError
            found_sum = zlib.crc32(piece.data)
            sums[section][start // piece_size] = found_sum
            # What is zero stays a hole in the file, as it is one in memory.
            if found_sum != _sum_of_zeros(piece.size) or piece.any():
                file.seek(offset + start)
                file.write(piece.data)
        offset += size
    file.truncate(offset)
    header = _encoded(cut.state, sums)
    file.seek(0)
    digest = hashlib.sha256(header).digest()
    file.write(_PREAMBLE.pack(_MAGIC, FORMAT, len(header), digest) + header)
    return offset


def _first_section(header_bytes: int) -> int:
    """Returns where what follows the header begins: it can be written apart from the header."""
    block = uncached_files.BLOCK_BYTES
    return -(-(_PREAMBLE.size + header_bytes) // block) * block


def _encoded(state: State, sums: list[np.ndarray]) -> bytes:
    return msgspec.msgpack.encode(_Header(state, [one.tobytes() for one in sums]))


@functools.lru_cache(maxsize=64)
def _sum_of_zeros(size: int) -> int:
    return zlib.crc32(bytes(size))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Loaded, int]]:
    """Opens a snapshot for as long as the block takes, and yields its length with it."""
    with path.open("rb", buffering=0) as file:
        yield read(file, path)


def read(file: IO[bytes], path: Path | str) -> tuple[Loaded, int]:
    """Returns the snapshot in a file, which stays open for as long as it is used, and its length.

    Raises:
      DistributeError: It is none that can be used; errors call the file `path`.
    """
    num_bytes = os.fstat(file.fileno()).st_size
    file.seek(0)
    header, first = _read_header(file, num_bytes, path)
    sections = header.state.sections()
    ends = np.cumsum([first, *(size for size, _ in sections)]).tolist()

    def pieces(section: int) -> Iterator[Piece]:
        size, piece_size = sections[section]
        buffer = np.empty(min(size, piece_size), np.uint8)
        for number, found in enumerate(np.frombuffer(header.sums[section], "<u4").tolist()):
            start = number * piece_size
            piece = buffer[: min(piece_size, size - start)]
            file.seek(ends[section] + start)
            if _fill(file, piece) != piece.size or zlib.crc32(piece.data) != found:
                raise _damaged(path, f"piece {number} of section {section} differs")
            yield start, piece

    return Loaded(header.state, pieces), num_bytes


def _fill(file: IO[bytes], piece: np.ndarray) -> int:
    filled = 0
    while filled < piece.size and (count := file.readinto(piece[filled:].data)):  # type: ignore[attr-defined]
        filled += count
    return filled


def _read_header(file: IO[bytes], num_bytes: int, path: Path | str) -> tuple[_Header, int]:
    """Returns the header, once it agrees with the length of the file, and where it ends."""
    preamble = file.read(_PREAMBLE.size)
    if len(preamble) < _PREAMBLE.size:
        raise _damaged(path, f"it has {num_bytes} bytes")
    magic, number, length, digest = _PREAMBLE.unpack(preamble)
    if magic != _MAGIC:
        raise _damaged(path, "it is no snapshot")
    if number != FORMAT:
        raise errors.UnsupportedError(
            f"{path} must be of format {FORMAT}, which this version of replicax reads",
            f"it is of format {number}",
            "Use the version that wrote it.",
        )
    if length > min(_MAX_HEADER_BYTES, num_bytes - _PREAMBLE.size):
        raise _damaged(path, f"its header has {length} bytes, and the file {num_bytes}")
    encoded = file.read(length)
    if hashlib.sha256(encoded).digest() != digest:
        raise _damaged(path, "the checksum of its header differs")
    try:
        header = msgspec.msgpack.decode(encoded, type=_Header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is of another kind ({error})") from error
    first = _first_section(length)
    if any(file.read(first - _PREAMBLE.size - length)):
        raise _damaged(path, "there is something between its header and its sections")
    _check(header, num_bytes - first, path)
    return header, first


def _check(header: _Header, num_bytes: int, path: Path | str) -> None:
    """Raises unless the sections that a header speaks of are what follows it."""
    sections = header.state.sections()
    if any(size < 0 for size, _ in sections) or sum(size for size, _ in sections) != num_bytes:
        raise _damaged(path, f"{num_bytes} bytes follow its header, which speaks of others")
    if [len(one) for one in header.sums] != [4 * -(-size // piece) for size, piece in sections]:
        raise _damaged(path, "its checksums are not those of its sections")
    for part in header.state.parts:
        shape = part.spec.shape
        # Also a part without elements must be one that NumPy can make.
        extent = math.prod(max(size, 1) for size in shape[:_MAX_DIMENSIONS])
        if len(shape) > _MAX_DIMENSIONS or extent > _MAX_ARRAY_BYTES // 16:
            raise _damaged(path, f"part {part.spec.part} has the shape {shape}"[:200])


def _damaged(path: Path | str, found: str) -> errors.DataLossError:
    return errors.DataLossError(f"{path} must hold what was saved", found, "Use an older snapshot.")


def _cannot_write(path: Path, error: OSError) -> errors.CheckpointError:
    wrapped = errors.CheckpointError(
        f"The snapshot {path} must be written and synced to disk",
        f"that failed: {error.strerror or error}",
        "Those before are untouched; make room or repair the disk.",
    )
    wrapped.errno = error.errno
    return wrapped
