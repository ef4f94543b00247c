"""TFRecord files: records of bytes, each with checksums of its length and of its data."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import struct
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Self, TypeAlias, cast

from typing_extensions import override

from replicax.foundation import errors
from replicax.tensorflow_files.checksums import crc32c, masked

Path: TypeAlias = str | os.PathLike[str]

# The length of a record and the checksum of these eight bytes; the checksum of the data.
_HEADER = struct.Struct("<QI")
_LENGTH = struct.Struct("<Q")
_FOOTER = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16
# The bytes of a record in a file besides its data.
FRAME_BYTES = _HEADER.size + _FOOTER.size

# The kinds of compression, which apply to a file as a whole.
GZIP = "GZIP"
ZLIB = "ZLIB"


def compression_of(compression_type: str | None) -> str:
    """Returns a kind of compression: "", "GZIP" or "ZLIB".

    >>> compression_of(None), compression_of("GZIP")
    ('', 'GZIP')
    """
    found = compression_type or ""
    if found not in ("", GZIP, ZLIB):
        raise errors.InvalidArgumentError(
            '`compression_type` must be "GZIP", "ZLIB" or None',
            f"it is {compression_type!r}",
            "Choose one of them.",
        )
    return found


class _ZlibFile(io.RawIOBase):
    """The decompressed bytes of a file that is one zlib stream."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._restart()

    def _restart(self) -> None:
        self._file.seek(0)
        self._stream = zlib.decompressobj()
        self._ready = b""
        self._offset = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._offset

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset if whence == io.SEEK_SET else self._offset + offset
        if target < self._offset:
            self._restart()
        while self._offset < target and self.read(min(target - self._offset, _CHUNK_BYTES)):
            pass
        return self._offset

    @override
    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready and not self._stream.eof:
            data = self._stream.unconsumed_tail or self._file.read(_CHUNK_BYTES)
            if not data:
                raise EOFError("the compressed data ends too early")
            self._ready = self._stream.decompress(data, _CHUNK_BYTES)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        self._offset += count
        return count

    @override
    def close(self) -> None:
        self._file.close()
        super().close()


def open_for_reading(path: Path, compression: str = "") -> IO[bytes]:
    """Opens a file, decompressed; see `compression_of`."""
    try:
        if compression == GZIP:
            return cast("IO[bytes]", gzip.open(path, "rb"))
        if compression == ZLIB:
            return cast("IO[bytes]", io.BufferedReader(_ZlibFile(path)))
        return open(path, "rb")
    except FileNotFoundError as error:
        raise errors.NotFoundError(
            f"{os.fspath(path)} must be a file of records",
            "it does not exist",
            "Correct the path, or write the file first.",
        ) from error


def read_record(file: IO[bytes], path: Path) -> bytes | None:
    """Returns the next record of an open file, or None at its end.

    Raises:
      DataLossError: The record is cut, or a checksum differs.
    """
    try:
        header = file.read(_HEADER.size)
        if not header:
            return None
        if len(header) < _HEADER.size:
            raise _damaged(path, f"it ends within the {_HEADER.size} bytes before a record")
        length, checksum = _HEADER.unpack(header)
        if masked(crc32c(header[: _LENGTH.size])) != checksum:
            raise _damaged(path, "the checksum of the length of a record differs")
        data = file.read(length)
        footer = file.read(_FOOTER.size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"it cannot be decompressed ({error})") from error
    except (OverflowError, MemoryError) as error:
        raise _damaged(path, "a record is longer than the memory") from error
    if len(data) < length or len(footer) < _FOOTER.size:
        raise _damaged(path, f"it ends within a record of {length} bytes")
    if masked(crc32c(data)) != _FOOTER.unpack(footer)[0]:
        raise _damaged(path, f"the checksum of a record of {length} bytes differs")
    return data


def read_records(path: Path, compression_type: str | None = None) -> Iterator[bytes]:
    """Yields the records of a file, after comparing their checksums.

    Raises:
      NotFoundError: There is no such file.
      DataLossError: A record is cut, or a checksum differs.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RecordWriter(folder.name + "/a.tfrecord", "GZIP") as writer:
    ...     writer.write(b"one")
    >>> list(read_records(folder.name + "/a.tfrecord", "GZIP"))
    [b'one']
    >>> folder.cleanup()
    """
    with contextlib.closing(open_for_reading(path, compression_of(compression_type))) as file:
        while (record := read_record(file, path)) is not None:
            yield record


def framed(record: bytes) -> bytes:
    """Returns a record as it is in a file.

    >>> len(framed(b"abc"))
    19
    """
    length = _LENGTH.pack(len(record))
    return b"".join(
        [
            length,
            _FOOTER.pack(masked(crc32c(length))),
            record,
            _FOOTER.pack(masked(crc32c(record))),
        ]
    )


class RecordWriter:
    """Writes a TFRecord file; the file is complete when the writer is closed.

    Args:
      path: The file; one that exists is replaced.
      compression_type: "GZIP", "ZLIB" or None.
      level: The level of compression, from 0 to 9; -1 for the default.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RecordWriter(folder.name + "/a.tfrecord") as writer:
    ...     writer.write(b"one")
    >>> list(read_records(folder.name + "/a.tfrecord"))
    [b'one']
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, compression_type: str | None = None, level: int = -1) -> None:
        compression = compression_of(compression_type)
        if not -1 <= level <= 9:
            raise errors.InvalidArgumentError(
                "The level of compression must be from 0 to 9, or -1",
                f"it is {level}",
                "Pass such a number, or leave it out.",
            )
        # 16 more window bits ask for the header and the footer of a gzip file.
        bits = zlib.MAX_WBITS + (16 if compression == GZIP else 0)
        self._compressor = zlib.compressobj(level, wbits=bits) if compression else None
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115

    def write(self, record: bytes) -> None:
        """Appends a record."""
        if self._file.closed:
            raise errors.ContextError(
                "Records are written to an open file",
                "this RecordWriter is closed",
                "Write before `close()`, and inside of the `with` block.",
            )
        if not isinstance(record, bytes | bytearray | memoryview):
            raise errors.ArgumentTypeError(
                "A record must be bytes",
                f"it is a {type(record).__name__}",
                "Pass `example.SerializeToString()`, or encode the text.",
            )
        data = framed(bytes(record))
        self._file.write(data if self._compressor is None else self._compressor.compress(data))

    def flush(self) -> None:
        """Passes everything that was written to the operating system."""
        if self._compressor is not None:
            self._file.write(self._compressor.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Completes the file and closes it. Idempotent."""
        if self._file.closed:
            return
        try:
            if self._compressor is not None:
                self._file.write(self._compressor.flush())
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


def _damaged(path: Path, found: str) -> errors.DataLossError:
    return errors.DataLossError(
        f"The records of {os.fspath(path)} must be as they were written",
        found,
        'Write the file again, or copy it again; if it is compressed, pass "GZIP" or "ZLIB".',
    )
