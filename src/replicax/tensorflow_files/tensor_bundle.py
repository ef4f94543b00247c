"""Tensor bundles: the tensors of a TensorFlow 2 checkpoint, or of the variables of a SavedModel.

A bundle is an index file, which is a sorted string table from names to places and checksums, and
one or several data files: `ckpt-3.index`, `ckpt-3.data-00000-of-00001`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from replicax.foundation import errors
from replicax.tensorflow_files import dtypes, slice_keys, sstable, wire
from replicax.tensorflow_files.checksums import crc32c, masked
from replicax.tensorflow_files.slice_keys import Slice
from replicax.tensorflow_files.tensor_messages import decode_shape

INDEX_SUFFIX = ".index"
# A tensor that holds the object graph, as one text.
OBJECT_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"

# The version of the format that this code understands.
_VERSION = 1
_LITTLE_ENDIAN = 0


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor in the index.

    Attributes:
      number: The number of its type, see `dtypes`.
      shape: Its shape.
      shard: The number of its data file.
      offset: Where it begins there.
      size: The number of its bytes there.
      checksum: The masked checksum of these bytes.
      slices: If it is stored in parts, their places; each part has an entry of its own.
    """

    number: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: tuple[Slice, ...]

    @property
    def dtype(self) -> str:
        """The name of its type; "string" for text."""
        return dtypes.name_numbered(self.number)


class TensorBundle:
    """A bundle, open for reading; each tensor is read when it is asked for.

    Args:
      prefix: The path of the index file without its suffix.

    Attributes:
      entries: The tensors by name; parts of tensors are left out.
      digest: The SHA-256 of the index, which contains the checksums of all tensors.

    Raises:
      NotFoundError: There is no index file.
      DataLossError: The index is damaged.
      UnsupportedError: It is compressed, or of a newer version.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = Path(prefix)
        index = _read_index(self.prefix)
        self.digest = hashlib.sha256(index).hexdigest()
        found = self._parse(index)
        self._num_shards = _num_shards(found.pop(b"", None), self.prefix)
        self._parts: dict[bytes, TensorEntry] = {}
        self.entries: dict[str, TensorEntry] = {}
        for key, data in found.items():
            try:
                entry = _decode_entry(data)
                # Keys of parts begin with a zero byte, which no name has.
                if key.startswith(b"\x00"):
                    self._parts[key] = entry
                else:
                    self.entries[wire.as_text(key)] = entry
            except wire.WireError as error:
                raise self._damaged_index(f"the entry {key[:80]!r} is not readable: {error}") from (
                    error
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Does nothing: files are open only while they are read."""

    def _parse(self, index: bytes) -> dict[bytes, bytes]:
        try:
            return dict(sstable.read_table(index))
        except sstable.CompressedTableError as error:
            raise errors.UnsupportedError(
                f"The index {self._index} must not be compressed",
                str(error),
                "TensorFlow writes it without compression: restore and save it once there.",
            ) from error
        except sstable.TableError as error:
            raise self._damaged_index(str(error)) from error

    @property
    def _index(self) -> str:
        return str(self.prefix) + INDEX_SUFFIX

    def check_files(self) -> None:
        """Raises DataLossError if a data file is missing, or shorter than it was written."""
        ends: dict[int, int] = {}
        for entry in (*self.entries.values(), *self._parts.values()):
            if not entry.slices:
                ends[entry.shard] = max(ends.get(entry.shard, 0), entry.offset + entry.size)
        for shard, end in ends.items():
            path = self._data_file(shard)
            try:
                size = os.stat(path).st_size
            except OSError as error:
                raise _damaged(path, f"it cannot be read ({error.strerror})") from error
            if size < end:
                raise _damaged(path, f"it has {size} bytes instead of {end} or more")

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor, after comparing its checksum; text as an array of bytes objects.

        Raises:
          NotFoundError: There is no such tensor.
          DataLossError: Its bytes are not those that were written.
          UnsupportedError: Its type has no values, such as a resource.
        """
        if name not in self.entries:
            raise errors.NotFoundError(
                f"{name!r} must be a tensor in {self.prefix}",
                f"it holds {', '.join(list(self.entries)[:10]) or 'none'}",
                "Choose one of them.",
            )
        entry = self.entries[name]
        if not entry.slices:
            return self._read_entry(name, entry)
        return self._read_slices(name, entry)

    def _read_slices(self, name: str, entry: TensorEntry) -> np.ndarray:
        whole = np.zeros(entry.shape, self._dtype(name, entry))
        filled = 0
        for one in entry.slices:
            part = self._parts.get(slice_keys.key_of_slice(name, one))
            try:
                places = slice_keys.places_of(one, entry.shape)
            except wire.WireError as error:
                raise self._damaged_index(f"{name!r}: {error}") from error
            shape = tuple(place.stop - place.start for place in places)
            if part is None or part.shape != shape or part.number != entry.number:
                raise self._damaged_index(f"a part of {name!r} is missing, or of another shape")
            whole[places] = self._read_entry(name, part)
            filled += math.prod(shape)
        if filled != whole.size:
            raise self._damaged_index(f"the parts of {name!r} are {filled} of {whole.size} values")
        return whole

    def _read_entry(self, name: str, entry: TensorEntry) -> np.ndarray:
        dtype = self._dtype(name, entry)
        octets = self._read_bytes(name, entry)
        if entry.number == dtypes.STRING:
            return self._texts(name, entry, octets.tobytes())
        if entry.size != math.prod(entry.shape) * dtype.itemsize:
            raise self._damaged_index(
                f"{name!r} of shape {entry.shape} and type {entry.dtype} has {entry.size} bytes"
            )
        if masked(crc32c(octets)) != entry.checksum:
            raise self._damaged_tensor(name, entry)
        return octets.view(dtype).reshape(entry.shape)

    def _texts(self, name: str, entry: TensorEntry, data: bytes) -> np.ndarray:
        """Returns texts: their lengths as varints, the checksum of these, then all bytes."""
        count = math.prod(entry.shape)
        lengths: list[int] = []
        offset = checksum = 0
        try:
            for _ in range(min(count, len(data))):
                length, offset = wire.read_varint(data, offset)
                lengths.append(length)
                # The checksum is that of the lengths as whole numbers.
                width = 4 if length < 1 << 32 else 8
                checksum = crc32c(length.to_bytes(width, "little"), checksum)
        except wire.WireError as error:
            raise self._damaged_tensor(name, entry) from error
        stored = data[offset : offset + 4]
        texts = data[offset + 4 :]
        is_whole = len(lengths) == count and sum(lengths) == len(texts)
        if not is_whole or stored != masked(checksum).to_bytes(4, "little"):
            raise self._damaged_tensor(name, entry)
        checksum = crc32c(texts, crc32c(stored, checksum))
        if masked(checksum) != entry.checksum:
            raise self._damaged_tensor(name, entry)
        found = np.empty(count, object)
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        for index, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            found[index] = texts[end - length : end]
        return found.reshape(entry.shape)

    def _read_bytes(self, name: str, entry: TensorEntry) -> np.ndarray:
        path = self._data_file(entry.shard)
        try:
            with open(path, "rb") as file:
                if file.seek(0, os.SEEK_END) < entry.offset + entry.size:
                    raise _damaged(path, f"it ends within the tensor {name!r}")
                file.seek(entry.offset)
                octets = np.empty(entry.size, np.uint8)
                file.readinto(octets.data)
        except FileNotFoundError as error:
            raise _damaged(path, "the file is missing") from error
        return octets

    def _dtype(self, name: str, entry: TensorEntry) -> np.dtype:
        dtype = dtypes.dtype_numbered(entry.number)
        if dtype is None:
            raise errors.UnsupportedError(
                f"The tensor {name!r} needs a type of NumPy",
                f"it is a {entry.dtype}",
                "Read the other tensors; this one has no array of numbers.",
            )
        return dtype

    def _data_file(self, shard: int) -> Path:
        name = f"{self.prefix.name}.data-{shard:05d}-of-{self._num_shards:05d}"
        return self.prefix.with_name(name)

    def _damaged_index(self, found: str) -> errors.DataLossError:
        return _damaged(self._index, found)

    def _damaged_tensor(self, name: str, entry: TensorEntry) -> errors.DataLossError:
        return _damaged(self._data_file(entry.shard), f"the checksum of {name!r} differs")


def _read_index(prefix: Path) -> bytes:
    path = f"{prefix}{INDEX_SUFFIX}"
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        raise errors.NotFoundError(
            f"{prefix} must be the prefix of a TensorFlow checkpoint",
            f"there is no file {path}",
            "Give the path without `.index` and `.data-...`, such as `run/ckpt-3`.",
        ) from error
    except OSError as error:
        raise errors.CheckpointError(
            f"The checkpoint {prefix} needs a readable index",
            f"reading {path} failed: {error.strerror}",
            "Check the path and the permissions.",
        ) from error


def _num_shards(header: bytes | None, prefix: Path) -> int:
    """Returns the number of data files, after checking that the format is known."""
    index = f"{prefix}{INDEX_SUFFIX}"
    if header is None:
        raise _damaged(index, "it has no header")
    shards, endianness, least_version = 0, _LITTLE_ENDIAN, 0
    try:
        for number, _, value in wire.fields(header):
            if number == 1:
                shards = wire.as_unsigned(value)
            elif number == 2:
                endianness = wire.as_unsigned(value)
            elif number == 3:
                for part, _, inner in wire.fields(wire.as_bytes(value)):
                    least_version = wire.as_unsigned(inner) if part == 2 else least_version
    except wire.WireError as error:
        raise _damaged(index, f"its header is not readable: {error}") from error
    if endianness != _LITTLE_ENDIAN or least_version > _VERSION:
        raise errors.UnsupportedError(
            f"{index} must be little-endian and of version {_VERSION}",
            f"its byte order is {endianness} and its version {least_version}",
            "Restore it in the TensorFlow that wrote it, and save it on another machine.",
        )
    return shards


def _decode_entry(data: bytes) -> TensorEntry:
    number = shard = offset = size = checksum = 0
    shape: Sequence[int] = ()
    slices: list[Slice] = []
    for field, _, value in wire.fields(data):
        if field == 1:
            number = wire.as_unsigned(value)
        elif field == 2:
            shape = decode_shape(wire.as_bytes(value))
        elif field == 3:
            shard = wire.as_unsigned(value)
        elif field == 4:
            offset = wire.as_unsigned(value)
        elif field == 5:
            size = wire.as_unsigned(value)
        elif field == 6:
            checksum = wire.as_unsigned(value)
        elif field == 7:
            slices.append(slice_keys.decode_slice(wire.as_bytes(value)))
    return TensorEntry(number, tuple(shape), shard, offset, size, checksum, tuple(slices))


def _damaged(path: str | Path, found: str) -> errors.DataLossError:
    return errors.DataLossError(
        f"{path} must be as TensorFlow wrote it",
        found,
        "Copy the checkpoint again, or take another one.",
    )
