"""Grain datasets that read records of files: lines, records of one length, ArrayRecord."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import IO, Any, Protocol

import grain
import jax

from replicax.foundation import errors
from replicax.input import stored_elements
from replicax.input.grain_nodes import Indexed
from replicax.input.grain_nodes_streams import MakeIterator, State, read


class SnapshotWriter(Protocol):
    """Takes the elements of one pass."""

    def write(self, element: Any) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...


class _Records(grain.DatasetIterator[Any]):
    """Records of one file, opened when the first is read; the position is an offset."""

    def __init__(self, path: str, is_compressed: bool, start: int = 0) -> None:
        super().__init__()
        self._path, self._is_compressed = path, is_compressed
        self._offset = start
        self._file: IO[bytes] | None = None

    def read(self, file: IO[bytes]) -> bytes | None:
        """Returns the next record of an open file, or None at its end."""
        raise NotImplementedError

    def __next__(self) -> bytes:
        if self._file is None:
            opened = gzip.open(self._path) if self._is_compressed else open(self._path, "rb")  # noqa: SIM115
            self._file = opened  # type: ignore[assignment]
            assert self._file is not None
            self._file.seek(self._offset)
        record = self.read(self._file)
        if record is None:
            self._drop()
            raise StopIteration
        return record

    def get_state(self) -> State:
        return {"offset": self._offset}

    def set_state(self, state: State) -> None:
        self._drop()
        self._offset = state["offset"]

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        super().close()
        self._drop()


class Lines(_Records):
    """The lines of a text file, without what ends them."""

    def read(self, file: IO[bytes]) -> bytes | None:
        line = file.readline()
        self._offset += len(line)
        if not line:
            return None
        return line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")


class FixedLength(_Records):
    """Records of one length, between a header and a footer."""

    def __init__(
        self, path: str, is_compressed: bool, length: int, header: int, footer: int
    ) -> None:
        super().__init__(path, is_compressed, header)
        self._length, self._header, self._footer = length, header, footer

    def read(self, file: IO[bytes]) -> bytes | None:
        # One footer more is read, to see whether this is the footer.
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


def open_tf_records(path: str) -> grain.DatasetIterator[Any]:
    """Returns the records of a TFRecord file, read by Grain."""
    return iter(grain.experimental.TFRecordIterDataset(path))


class ArrayRecords(Indexed):
    """The records of one ArrayRecord file, with random access."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._source: Any = grain.sources.ArrayRecordDataSource([path])

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        return self._source[int(index % len(self._source))]


class StoredElements(ArrayRecords):
    """The elements of one shard of a stored dataset, with random access."""

    def __init__(self, path: str, count: int, structure: Any) -> None:
        self._path, self._structure = path, structure
        try:
            super().__init__(path)
            found = len(self._source)
        except (OSError, RuntimeError, ValueError) as error:
            raise self._damaged(str(error)) from error
        if found != count:
            raise self._damaged(f"it has {found} elements instead of {count}")

    def __getitem__(self, index: Any) -> Any:
        try:
            leaves = stored_elements.decode(super().__getitem__(index))
        except (OSError, RuntimeError, ValueError) as error:
            raise self._damaged(str(error)) from error
        return jax.tree.unflatten(self._structure, leaves)

    def _damaged(self, found: str) -> errors.DataLossError:
        return errors.DataLossError(
            f"File {self._path!r} of a saved dataset must be as it was written",
            found,
            "Save the dataset again.",
        )


class Snapshotted(grain.DatasetIterator[Any]):
    """Reads a stream and writes what it gives, or reads what an earlier pass has written.

    Args:
      make: Opens the stream.
      open_stored: Opens what was written; None if there is nothing whole.
      make_writer: Returns an object that takes elements; None if another is writing.
    """

    def __init__(
        self,
        make: MakeIterator,
        open_stored: Callable[[], grain.DatasetIterator[Any] | None],
        make_writer: Callable[[], SnapshotWriter | None],
    ) -> None:
        super().__init__()
        self._make, self._open_stored, self._make_writer = make, open_stored, make_writer
        self._stored = open_stored()
        self._begin()

    def _begin(self) -> None:
        self._stream: grain.DatasetIterator[Any] | None = None
        self._writer: SnapshotWriter | None = None
        self._count = 0

    def __next__(self) -> Any:
        if self._stored is not None:
            return next(self._stored)
        if self._stream is None:
            self._stream = self._make()
            # A whole snapshot stays: this pass was begun before it was there.
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
        self._drop()
        self._begin()
        self._stored = None
        if state["stored"] is None:
            read(self, state["count"])
            return
        self._stored = self._open_stored()
        if self._stored is None:
            raise errors.NotFoundError(
                "The saved position is one in a snapshot that was complete",
                "the snapshot is not there any more",
                "Restore its directory, or start from the first element.",
            )
        self._stored.set_state(state["stored"])

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.abort()
        for stream in (self._stream, self._stored):
            if stream is not None:
                stream.close()

    def close(self) -> None:
        super().close()
        self._drop()
        self._writer = None
