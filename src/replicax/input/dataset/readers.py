"""Datasets that read files: text lines, fixed-length records, ArrayRecord and TFRecord."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input.dataset.dataset import Dataset
from replicax.input.dataset.elements import whole_number
from replicax.input.dataset.plan import UNKNOWN_CARDINALITY, Plan
from replicax.input.nodes import combined, indexed, streams
from replicax.input.nodes import files as file_nodes
from replicax.tensorflow_files.records import compression_of

if TYPE_CHECKING:
    from replicax.input.dataset.plan import MapNode, StreamIterator

Files: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
OpenFile: TypeAlias = "Callable[[str], StreamIterator]"


class _Reader(Dataset):
    """A dataset of the records of files, one file after the other."""

    def __init__(self, name: str, filenames: Files | Dataset, open_file: OpenFile) -> None:
        if isinstance(filenames, Dataset):

            def read(file: Tree) -> Dataset:
                return Dataset(_stream_plan(name, open_file, (str(file),)))

            super().__init__(filenames.flat_map(read)._plan)
        else:
            super().__init__(_stream_plan(name, open_file, _checked(name, filenames)))


class TextLineDataset(_Reader):
    r"""The lines of text files, as `bytes` without line endings.

    Args:
      filenames: A path, a list of paths, or a dataset of them.
      compression_type: "GZIP" or "ZLIB" for compressed files.

    Raises:
      NotFoundError: There is no such file.

    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name, "a.txt")
    >>> path.write_text("one\ntwo\n")
    8
    >>> list(TextLineDataset(path))
    [b'one', b'two']
    >>> folder.cleanup()
    """

    def __init__(self, filenames: Files | Dataset, compression_type: str | None = None) -> None:
        compression = compression_of(compression_type)
        super().__init__("TextLine", filenames, lambda path: file_nodes.Lines(path, compression))


class FixedLengthRecordDataset(_Reader):
    """Fixed-length records, as `bytes`.

    Args:
      filenames: A path, a list of paths, or a dataset of them.
      record_bytes: The length of a record.
      header_bytes: The number of bytes before the first record.
      footer_bytes: The number of bytes after the last one.
      compression_type: "GZIP" or "ZLIB" for compressed files.

    Raises:
      NotFoundError: There is no such file.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.bin"
    >>> _ = path.write_bytes(b"headaabbcc")
    >>> list(FixedLengthRecordDataset(path, record_bytes=2, header_bytes=4))
    [b'aa', b'bb', b'cc']
    """

    def __init__(
        self,
        filenames: Files | Dataset,
        record_bytes: int,
        header_bytes: int = 0,
        footer_bytes: int = 0,
        compression_type: str | None = None,
    ) -> None:
        length = whole_number("record_bytes", record_bytes, 1)
        header = whole_number("header_bytes", header_bytes, 0)
        footer = whole_number("footer_bytes", footer_bytes, 0)
        compression = compression_of(compression_type)
        super().__init__(
            "FixedLengthRecord",
            filenames,
            lambda path: file_nodes.FixedLength(path, compression, length, header, footer),
        )


class TFRecordDataset(_Reader):
    """The records of TFRecord files, as `bytes`, after comparing their checksums.

    Args:
      filenames: A path, a list of paths, or a dataset of them.
      compression_type: "GZIP" or "ZLIB" for compressed files.

    Raises:
      DataLossError: While elements are read: a record is cut, or a checksum differs.
      NotFoundError: There is no such file.

    >>> import tempfile
    >>> import replicax.tf as tf
    >>> path = tempfile.mkdtemp() + "/a.tfrecord"
    >>> with tf.io.TFRecordWriter(path) as writer:
    ...     writer.write(b"one")
    >>> list(TFRecordDataset(path))
    [b'one']
    """

    def __init__(self, filenames: Files | Dataset, compression_type: str | None = None) -> None:
        compression = compression_of(compression_type)
        super().__init__(
            "TFRecord", filenames, lambda path: file_nodes.TFRecords(path, compression)
        )


class ArrayRecordDataset(Dataset):
    """The records of ArrayRecord files, as `bytes`, with random access.

    Raises:
      NotFoundError: There is no such file.

    >>> import tempfile
    >>> from array_record.python.array_record_module import ArrayRecordWriter
    >>> path = tempfile.mkdtemp() + "/a.array_record"
    >>> writer = ArrayRecordWriter(path, "group_size:1")
    >>> _ = writer.write(b"one"), writer.write(b"two"), writer.close()
    >>> list(ArrayRecordDataset(path))
    [b'one', b'two']
    """

    def __init__(self, filenames: Files) -> None:
        super().__init__(_indexed_plan(_checked("ArrayRecord", filenames)))


def _stream_plan(
    name: str,
    open_file: OpenFile,
    files: tuple[str, ...],
    num_shards: int = 1,
    index: int = 0,
) -> Plan:
    def open_part(number: int) -> StreamIterator:
        records = open_file(files[number])
        if num_shards == 1:
            return records
        return streams.Sliced(records, index, sys.maxsize, num_shards)

    return Plan(
        name,
        lambda epoch: streams.Stream(lambda: combined.Chained(open_part, len(files))),
        False,
        UNKNOWN_CARDINALITY if files else 0,
        has_examples=True,
        details=(num_shards, index),
        files=files,
        with_files=lambda files: _stream_plan(name, open_file, files, num_shards, index),
        shard_records=lambda num, i: _stream_plan(
            name, open_file, files, num_shards * num, index + num_shards * i
        ),
    )


def _indexed_plan(files: tuple[str, ...], num_shards: int = 1, index: int = 0) -> Plan:
    # Files are opened once, for their lengths and for all passes.
    @functools.cache
    def opened() -> MapNode:
        parts = [file_nodes.ArrayRecords(path) for path in files]
        return indexed.Concatenated(
            [indexed.Sliced(part, index, sys.maxsize, num_shards) for part in parts]
        )

    return Plan(
        "ArrayRecord",
        lambda epoch: opened(),
        True,
        len(opened()),
        has_examples=True,
        details=(num_shards, index),
        files=files,
        with_files=lambda files: _indexed_plan(files, num_shards, index),
        shard_records=lambda num, i: _indexed_plan(files, num_shards * num, index + num_shards * i),
    )


def _checked(name: str, filenames: Files) -> tuple[str, ...]:
    given = [filenames] if isinstance(filenames, str | os.PathLike) else list(filenames)
    files = tuple(os.fspath(path) for path in given)
    for path in files:
        if not os.path.exists(path):
            raise errors.NotFoundError(
                f"{name}Dataset needs files that exist",
                f"there is no {path!r}",
                "Correct the path, or write the file first.",
            )
    return files
