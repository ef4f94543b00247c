"""Datasets of the records of files, with TensorFlow's arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import grain
import numpy as np

from replicax.input.dataset import dataset as rx_dataset
from replicax.input.dataset import readers as rx_readers
from replicax.tensorflow_files import records
from replicax.tf.arguments import PathValue, Value
from replicax.tf.data.dataset import Dataset, plain
from replicax.tf.io.gfile import path_text
from replicax.tf.tensor import Tensor


class TextLineDataset(Dataset):
    r"""The lines of text files, as strings without line endings.

    Args:
      filenames: A path, a list or tensor of paths, or a dataset of them.
      compression_type: "GZIP" for compressed files.
      buffer_size: Accepted for portability.
      num_parallel_reads: Accepted for portability; files are read in turn.
      name: Accepted for portability.
    """

    def __init__(
        self,
        filenames: PathValue,
        compression_type: Value = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        kind = _compression(compression_type)
        super().__init__(rx_readers.TextLineDataset(_names(filenames), kind)._plan)


class FixedLengthRecordDataset(Dataset):
    """Fixed-length records, as strings.

    Args:
      filenames: A path, a list or tensor of paths, or a dataset of them.
      record_bytes: The length of a record.
      header_bytes: The number of bytes before the first record.
      footer_bytes: The number of bytes after the last one.
      buffer_size: Accepted for portability.
      compression_type: "GZIP" for compressed files.
      num_parallel_reads: Accepted for portability; files are read in turn.
      name: Accepted for portability.
    """

    def __init__(
        self,
        filenames: PathValue,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: Value = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        found = rx_readers.FixedLengthRecordDataset(
            _names(filenames),
            record_bytes,
            header_bytes or 0,
            footer_bytes or 0,
            _compression(compression_type),
        )
        super().__init__(found._plan)


class TFRecordDataset(Dataset):
    """The records of TFRecord files, as strings, after comparing their checksums.

    Args:
      filenames: A path, a list or tensor of paths, or a dataset of them.
      compression_type: "GZIP" or "ZLIB" for compressed files.
      buffer_size: Accepted for portability.
      num_parallel_reads: Accepted for portability; files are read in turn.
      name: Accepted for portability.

    >>> import tempfile
    >>> from replicax.tf.io.files import TFRecordWriter
    >>> folder = tempfile.TemporaryDirectory()
    >>> with TFRecordWriter(folder.name + "/a") as writer:
    ...     writer.write(b"record")
    >>> [record.numpy() for record in TFRecordDataset(folder.name + "/a")]
    [b'record']
    >>> folder.cleanup()
    """

    def __init__(
        self,
        filenames: PathValue,
        compression_type: Value = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        kind = records.compression_of(_compression(compression_type))
        reader = rx_readers._Reader(
            "TFRecord", _names(filenames), lambda path: CheckedRecords(path, kind)
        )
        super().__init__(reader._plan)


class CheckedRecords(grain.DatasetIterator[bytes]):
    """The records of one file; the position is the number of records before."""

    def __init__(self, path: str, compression: str) -> None:
        super().__init__()
        self._path, self._compression = Path(path), compression
        self._offset = 0
        self._file: IO[bytes] | None = None

    def __next__(self) -> bytes:
        if self._file is None:
            self._file = records.open_for_reading(self._path, self._compression)
            self._file.seek(self._offset)
        record = records.read_record(self._file, self._path)
        if record is None:
            self._close_file()
            raise StopIteration
        self._offset = self._file.tell()
        return record

    def get_state(self) -> dict[str, Any]:
        """Returns the offset of the next record."""
        return {"offset": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at an offset."""
        self._close_file()
        self._offset = state["offset"]

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Closes the file."""
        super().close()
        self._close_file()


def _compression(value: Value) -> str | None:
    if isinstance(value, Tensor):
        value = value.numpy()
    return value.decode() if isinstance(value, bytes) else value


def _names(filenames: PathValue) -> Any:
    """Returns paths as text, or a dataset of them."""
    if isinstance(filenames, rx_dataset.Dataset):
        return plain(filenames)
    if isinstance(filenames, Tensor):
        filenames = filenames.numpy()
    if isinstance(filenames, str | bytes | os.PathLike):
        return path_text(filenames)
    if isinstance(filenames, np.ndarray):
        filenames = filenames.reshape(-1).tolist()
    if isinstance(filenames, Iterable):
        return [path_text(name) for name in filenames]
    return path_text(filenames)
