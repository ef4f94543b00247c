"""Whole files as strings, numbers in strings, and the writer of TFRecord files."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.tensorflow_files import records
from replicax.tf import dtypes
from replicax.tf.arguments import PathValue, Value
from replicax.tf.io import gfile
from replicax.tf.io.images import content_bytes
from replicax.tf.tensor import Tensor, wrap

__all__ = [
    "TFRecordOptions",
    "TFRecordWriter",
    "decode_base64",
    "decode_compressed",
    "decode_csv",
    "encode_base64",
    "match_filenames_once",
    "matching_files",
    "read_file",
    "tf_record_iterator",
    "write_file",
]


def text_tensor(value: Value) -> Any:
    """Returns a tensor of strings.

    >>> text_tensor(b"ab").dtype
    tf.string
    """
    return wrap(np.array(value, dtype=object))


def read_file(filename: PathValue, name: str | None = None) -> Any:
    """Returns the contents of a file as a scalar string."""
    del name
    with gfile.GFile(filename, "rb") as file:
        return text_tensor(file.read())


def write_file(filename: PathValue, contents: Value, name: str | None = None) -> None:
    """Writes a scalar string to a file, and makes the directories above it."""
    del name
    path = gfile.path_text(filename)
    folder = path.rpartition("/")[0]
    if folder:
        gfile.makedirs(folder)
    with gfile.GFile(path, "wb") as file:
        file.write(content_bytes(contents))


def matching_files(pattern: PathValue, name: str | None = None) -> Any:
    """Returns the names of the files that match a pattern, or one of several."""
    del name
    given = pattern.numpy() if isinstance(pattern, Tensor) else pattern
    patterns = given.tolist() if isinstance(given, np.ndarray) else given
    return text_tensor([path.encode() for path in gfile.glob(patterns)])


match_filenames_once = matching_files


def _strings(value: Value) -> np.ndarray:
    array = np.asarray(value.numpy() if isinstance(value, Tensor) else value, dtype=object)
    encode = np.vectorize(lambda x: x.encode() if isinstance(x, str) else x, otypes=[object])
    return encode(array) if array.size else array


def decode_base64(input: Value, name: str | None = None) -> Any:
    """Decodes web-safe base64.

    >>> decode_base64(b"YWI").numpy()
    b'ab'
    """
    del name
    decode = np.vectorize(
        lambda x: base64.urlsafe_b64decode(x + b"=" * (-len(x) % 4)), otypes=[object]
    )
    return text_tensor(decode(_strings(input)))


def decode_compressed(bytes: Value, compression_type: str = "", name: str | None = None) -> Any:
    """Decompresses strings: "GZIP", "ZLIB", or "" for none.

    >>> decode_compressed(zlib.compress(b"ab"), "ZLIB").numpy()
    b'ab'
    """
    del name
    kind = records.compression_of(compression_type)
    # Both headers are recognized.
    decode = np.vectorize(lambda x: zlib.decompress(x, 47) if kind else x, otypes=[object])
    return text_tensor(decode(_strings(bytes)))


def encode_base64(input: Value, pad: bool = False, name: str | None = None) -> Any:
    """Encodes strings as web-safe base64.

    >>> encode_base64(b"ab").numpy()
    b'YWI'
    """
    del name

    def encode(value: bytes) -> bytes:
        found = base64.urlsafe_b64encode(value)
        return found if pad else found.rstrip(b"=")

    return text_tensor(np.vectorize(encode, otypes=[object])(_strings(input)))


def decode_csv(
    records: Value,
    record_defaults: Sequence[Any],
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    name: str | None = None,
) -> list[Any]:
    """Returns the columns of lines of comma-separated values.

    Args:
      records: Lines: a string, or several.
      record_defaults: For each column a value for empty fields, whose type the column has; a
        type, or an empty list of a type, for a column that must not be empty.
      field_delim: What separates fields.
      use_quote_delim: Whether quotes enclose fields.
      na_value: What counts as empty, too.
      select_cols: The columns to return.
      name: Accepted for portability.

    >>> [column.numpy() for column in decode_csv("1,,a", [0, 0.5, ""])]
    [np.int32(1), np.float32(0.5), b'a']
    """
    del name
    lines = _strings(records)
    rows = [
        _fields(line.decode("utf-8"), field_delim, use_quote_delim)
        for line in lines.reshape(-1).tolist()
    ]
    chosen = range(len(record_defaults)) if select_cols is None else select_cols
    for row in rows:
        if select_cols is None and len(row) != len(record_defaults):
            raise errors.InvalidArgumentError(
                f"Each line must have {len(record_defaults)} fields",
                f"one has {len(row)}",
                "Correct `record_defaults`, or pass select_cols=.",
            )
    columns = []
    for place, default in zip(chosen, record_defaults, strict=True):
        kind, fallback = _default(default)
        values = [_field(row[place], kind, fallback, na_value, place) for row in rows]
        column = np.array(values, dtype=object if kind.kind == "O" else kind)
        columns.append(wrap(column.reshape(lines.shape)))
    return columns


def _fields(line: str, delimiter: str, has_quotes: bool) -> list[str]:
    if not has_quotes:
        return line.split(delimiter)
    return next(csv.reader(io.StringIO(line), delimiter=delimiter), [""])


def _default(default: Value) -> tuple[np.dtype, Any]:
    """Returns the type of a column, and the value of its empty fields, or None."""
    if isinstance(default, dtypes.DType):
        return np.dtype(default.as_numpy_dtype), None
    if isinstance(default, str | bytes):
        return np.dtype(object), default
    array = np.asarray(default.numpy() if isinstance(default, Tensor) else default)
    if isinstance(default, float | list) and array.dtype == np.float64:
        array = array.astype(np.float32)
    if isinstance(default, int | list) and array.dtype == np.int64:
        array = array.astype(np.int32)
    if array.dtype.kind in "SU":
        array = array.astype(object)
    return array.dtype, array.reshape(-1)[0] if array.size else None


def _field(text: str, kind: np.dtype, fallback: Value, na_value: str, place: int) -> Any:
    if text == "" or text == na_value:
        if fallback is None:
            raise errors.InvalidArgumentError(
                f"Field {place} is required", "it is empty", "Give it a default value."
            )
        return fallback.encode() if isinstance(fallback, str) else fallback
    if kind.kind == "O":
        return text.encode("utf-8")
    try:
        return kind.type(int(text) if kind.kind in "iu" else float(text))
    except ValueError:
        raise errors.InvalidArgumentError(
            f"Field {place} must be a valid {kind.name}",
            f"it is {text!r}",
            "Correct `record_defaults`.",
        ) from None


@dataclasses.dataclass
class TFRecordOptions:
    """How a TFRecord file is compressed: "GZIP", "ZLIB" or "".

    >>> TFRecordOptions("GZIP").compression_type
    'GZIP'
    """

    compression_type: str | None = None
    flush_mode: int | None = None
    input_buffer_size: int | None = None
    output_buffer_size: int | None = None
    window_bits: int | None = None
    compression_level: int | None = None
    compression_method: int | None = None
    mem_level: int | None = None
    compression_strategy: int | None = None


class TFRecordWriter:
    """Writes records to a TFRecord file.

    Args:
      path: The file.
      options: "GZIP", "ZLIB" or `TFRecordOptions`.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with TFRecordWriter(folder.name + "/a.tfrecord") as writer:
    ...     writer.write(b"record")
    >>> list(tf_record_iterator(folder.name + "/a.tfrecord"))
    [b'record']
    >>> folder.cleanup()
    """

    def __init__(self, path: PathValue, options: TFRecordOptions | str | None = None) -> None:
        if not isinstance(options, TFRecordOptions):
            options = TFRecordOptions(options)
        level = -1 if options.compression_level is None else options.compression_level
        self._writer = records.RecordWriter(Path(_local(path)), options.compression_type, level)

    def write(self, record: Value) -> None:
        """Appends a record."""
        self._writer.write(content_bytes(record))

    def flush(self) -> None:
        """Writes what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tf_record_iterator(path: PathValue, options: TFRecordOptions | None = None) -> Any:
    """Yields the records of a TFRecord file, after comparing their checksums."""
    compression = None if options is None else options.compression_type
    return records.read_records(Path(_local(path)), compression)


def _local(path: PathValue) -> str:
    text = gfile.path_text(path)
    if "://" in text:
        raise errors.UnsupportedError(
            "TFRecord files are read and written on this machine",
            f"{text!r} is remote",
            "Copy it with tf.io.gfile.copy.",
        )
    return text
