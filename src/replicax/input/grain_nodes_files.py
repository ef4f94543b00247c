"""Grain datasets that read records of files: lines, records of one length, ArrayRecord."""

from __future__ import annotations

import gzip
from typing import IO, Any

import grain

from replicax.foundation import errors
from replicax.input.grain_nodes import Indexed
from replicax.input.grain_nodes_streams import State


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
            errors.message(
                f"File {self._path!r} must hold a header of {self._header} bytes, records of "
                f"{self._length} bytes and a footer of {self._footer} bytes",
                f"{len(found)} bytes are left after the last whole record",
                "Correct `record_bytes`, `header_bytes` and `footer_bytes`.",
            )
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
