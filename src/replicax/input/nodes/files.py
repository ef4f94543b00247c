"""Grain datasets that read records of files: lines, fixed lengths, TFRecord, ArrayRecord."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import IO, Protocol

import grain

from replicax.foundation import errors, ordered_trees
from replicax.foundation.ordered_trees import Structure
from replicax.foundation.types import Tree
from replicax.input.dataset import stored_format
from replicax.input.nodes.indexed import Indexed
from replicax.input.nodes.streams import Iterator, OpenIterator, State, read
from replicax.tensorflow_files import records


class SnapshotWriter(Protocol):
    """Writes the elements of one pass."""

    def write(self, element: Tree) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...


class _Records(grain.DatasetIterator[bytes]):
    """Records of one file, opened at the first read; the position is an offset."""

    def __init__(self, path: str, compression: str, start: int = 0) -> None:
        super().__init__()
        self._path, self._compression = path, compression
        self._offset = start
        self._file: IO[bytes] | None = None

    def read(self, file: IO[bytes]) -> bytes | None:
        """Returns the next record of an open file, or None at its end."""
        raise NotImplementedError

    def __next__(self) -> bytes:
        if self._file is None:
            self._file = records.open_for_reading(self._path, self._compression)
            self._file.seek(self._offset)
        record = self.read(self._file)
        if record is None:
            self._close_file()
            raise StopIteration
        return record

    def get_state(self) -> State:
        return {"offset": self._offset}

    def set_state(self, state: State) -> None:
        self._close_file()
        self._offset = state["offset"]

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        super().close()
        self._close_file()


class Lines(_Records):
    """The lines of a text file, without line endings."""

    def read(self, file: IO[bytes]) -> bytes | None:
        line = file.readline()
        self._offset += len(line)
        if not line:
            return None
        return line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")


class FixedLength(_Records):
    """Records of one length, between a header and a footer."""

    def __init__(self, path: str, compression: str, length: int, header: int, footer: int) -> None:
        super().__init__(path, compression, header)
        self._length, self._header, self._footer = length, header, footer

    def read(self, file: IO[bytes]) -> bytes | None:
        # Reads one footer more, because the footer itself may be all that is left.
        found = file.read(self._length + self._footer)
        if len(found) == self._length + self._footer:
            self._offset += self._length
            file.seek(self._offset)
            return found[: self._length]
        if len(found) == self._footer:
            return None
        raise errors.InvalidArgumentError(
            f"File {self._path!r} must hold a header of {self._header} bytes, records of "
            f"{self._length} bytes and a footer of {self._footer} bytes",
            f"{len(found)} bytes are left after the last whole record",
            "Correct `record_bytes`, `header_bytes` and `footer_bytes`.",
        )


class TFRecords(_Records):
    """The records of a TFRecord file; checksums are compared."""

    def read(self, file: IO[bytes]) -> bytes | None:
        record = records.read_record(file, self._path)
        if record is not None:
            self._offset += len(record) + records.FRAME_BYTES
        return record


class ArrayRecords(Indexed):
    """The records of one ArrayRecord file, with random access."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._source: Sequence[bytes] = grain.sources.ArrayRecordDataSource([path])  # type: ignore[assignment]
        self._length = len(self._source)

    def element(self, index: int) -> Tree:
        return self._source[int(index % self._length)]


class StoredElements(ArrayRecords):
    """The elements of one shard of a stored dataset, with random access."""

    def __init__(self, path: str, count: int, structure: Structure) -> None:
        self._path, self._structure = path, structure
        try:
            super().__init__(path)
        except (OSError, RuntimeError, ValueError) as error:
            raise self._damaged(str(error)) from error
        if self._length != count:
            raise self._damaged(f"it has {self._length} elements instead of {count}")

    def element(self, index: int) -> Tree:
        try:
            leaves = stored_format.decode(super().element(index))
        except (OSError, RuntimeError, ValueError) as error:
            raise self._damaged(str(error)) from error
        return ordered_trees.unflatten(self._structure, leaves)

    def _damaged(self, found: str) -> errors.DataLossError:
        return errors.DataLossError(
            f"File {self._path!r} of a saved dataset must be as it was written",
            found,
            "Save the dataset again.",
        )


class Snapshotted(grain.DatasetIterator[Tree]):
    """Reads a stream and writes its elements, or reads what an earlier pass has written.

    Args:
      open_stream: Opens the stream.
      open_stored: Opens the complete snapshot; None if there is none.
      make_writer: Returns a writer; None if another process is writing.
    """

    def __init__(
        self,
        open_stream: OpenIterator,
        open_stored: Callable[[], Iterator | None],
        make_writer: Callable[[], SnapshotWriter | None],
    ) -> None:
        super().__init__()
        self._open_stream, self._open_stored = open_stream, open_stored
        self._make_writer = make_writer
        self._stored = open_stored()
        self._begin()

    def _begin(self) -> None:
        self._stream: Iterator | None = None
        self._writer: SnapshotWriter | None = None
        self._count = 0

    def __next__(self) -> Tree:
        if self._stored is not None:
            return next(self._stored)
        if self._stream is None:
            self._stream = self._open_stream()
            # Another process may have completed the snapshot after this pass began.
            existing = self._open_stored()
            self._writer = self._make_writer() if existing is None else None
        try:
            element = next(self._stream)
        except StopIteration:
            if self._writer is not None:
                self._writer.commit()
                self._writer = None
            raise
        if self._writer is not None:
            self._writer.write(element)
        self._count += 1
        return element

    def get_state(self) -> State:
        stored = None if self._stored is None else self._stored.get_state()
        return {"count": self._count, "stored": stored}

    def set_state(self, state: State) -> None:
        self._close_streams()
        self._begin()
        self._stored = None
        if state["stored"] is None:
            read(self, state["count"])
            return
        self._stored = self._open_stored()
        if self._stored is None:
            raise errors.NotFoundError(
                "The saved position is in a complete snapshot",
                "the snapshot does not exist any more",
                "Restore its directory, or start from the first element.",
            )
        self._stored.set_state(state["stored"])

    def _close_streams(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        for stream in (self._stream, self._stored):
            if stream is not None:
                stream.close()

    def close(self) -> None:
        super().close()
        self._close_streams()
