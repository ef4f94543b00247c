"""The manifest of a bundle: its arrays, their files, and the checksums of all bytes.

Note [The format of a bundle]
    A bundle is a directory of safetensors files and one `manifest.json`. All safetensors tools read
    the files; the names in them are the names of the arrays, and rows of an array
    that several writers share are named `name[first:end]`. The manifest adds what the files
    lack: CRC-32 checksums of every header and of every piece of every array, types that
    safetensors does not have, and the contents that the kind of bundle defines (`contents`).

    The text of a manifest begins with the checksum of the rest, so reading needs no second
    encoding. Sizes are compared with those of the files before memory is allocated.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import msgspec

from replicax.bundle.dtypes import dtype_named
from replicax.bundle.names import require_name
from replicax.foundation import errors

FILE_NAME = "manifest.json"
FORMAT = "replicax.bundle"
# Version 1 was the format of checkpoints that Orbax wrote as one array of bytes.
VERSION = 2
# No training program comes near; a larger file is damage or an attack.
MAX_BYTES = 64 << 20
# What NumPy can make an array of.
_MAX_DIMENSIONS = 32
_MAX_ARRAY_BYTES = 1 << 60
# A reader allocates a piece at a time.
_MAX_PIECE_BYTES = 64 << 20

# A bundle in one file: the data file, the manifest, and the length of the manifest.
PACKED_FILE = "data.safetensors"
PACKED_LENGTH = struct.Struct("<Q")

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,100}\.safetensors")
_CHECKSUM = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')

_T = TypeVar("_T")


class Kind(NamedTuple):
    """A kind of bundle.

    Attributes:
      name: Its name in manifests and errors.
      advice: What to do about a damaged one.
    """

    name: str
    advice: str


CHECKPOINT = Kind(
    "checkpoint",
    "Restore an older checkpoint; `CheckpointManager.restore_latest()` does so itself.",
)
SAVED_MODEL = Kind("saved model", "Restore it, or save the model again.")
SNAPSHOT = Kind("snapshot", "Use an older snapshot.")


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive rows of an array, in one file; an array without dimensions is one row.

    Attributes:
      file: The file.
      offset: Where the bytes of the rows begin in it.
      start: The first row.
      stop: The row behind the last.
      piece_bytes: The number of bytes that one checksum covers.
      sums: The CRC-32 of each piece, four bytes each, little endian.
    """

    file: str
    offset: int
    start: int
    stop: int
    piece_bytes: int
    sums: bytes


class ArrayEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array of a bundle, and the slices that hold its rows, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize

    @property
    def num_rows(self) -> int:
        """The number of its rows."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """The number of bytes of each row."""
        return self.nbytes // self.num_rows if self.num_rows else 0


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A safetensors file: its length, and length and CRC-32 of its header."""

    size: int
    header_bytes: int
    header_crc32: int


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one writer contributes to a bundle: its files, and the arrays or rows in them."""

    arrays: list[ArrayEntry]
    files: dict[str, StoredFile]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a bundle.

    Attributes:
      kind: The name of its `Kind`.
      arrays: Its arrays, in the order in which they were written.
      files: Its files, by name.
      contents: What the kind defines, as JSON.
    """

    kind: str
    arrays: list[ArrayEntry]
    files: dict[str, StoredFile]
    contents: msgspec.Raw
    format: str = FORMAT
    version: int = VERSION

    def encode(self) -> bytes:
        """Returns the text of the manifest, which begins with the checksum of the rest."""
        body = msgspec.json.encode(self)
        return b'{"crc32":"%08x",' % zlib.crc32(body) + body[1:]


def merge(parts: Iterable[Part]) -> Part:
    """Returns the parts of several writers as one; slices of one array are put in order."""
    arrays: dict[str, ArrayEntry] = {}
    files: dict[str, StoredFile] = {}
    for part in parts:
        files |= part.files
        for entry in part.arrays:
            known = arrays.get(entry.name)
            slices = (*known.slices, *entry.slices) if known is not None else entry.slices
            ordered = tuple(sorted(slices, key=lambda one: one.start))
            arrays[entry.name] = msgspec.structs.replace(entry, slices=ordered)
    return Part(list(arrays.values()), files)


def damaged(file: Path | str, found: str, kind: Kind) -> errors.DataLossError:
    """Returns the error for a file that is not as it was written."""
    return errors.DataLossError(f"{file} must hold what was saved", found, kind.advice)


def parse(text: bytes, file: Path | str, kind: Kind) -> Manifest:
    """Returns the manifest that a text holds.

    Raises:
      DataLossError: The text is damaged.
      CheckpointError: It has another format, or is of another kind.
    """
    if len(text) > MAX_BYTES:
        raise damaged(file, f"it is larger than {MAX_BYTES >> 20} MiB", kind)
    checksum = _CHECKSUM.match(text)
    if checksum is None:
        _refuse_other_format(text, file, kind)
    body = b"{" + text[checksum.end() :]
    if zlib.crc32(body) != int(checksum[1], 16):
        raise damaged(file, "its checksum differs", kind)
    try:
        head = msgspec.json.decode(body, type=_Head)
        if (head.format, head.version) != (FORMAT, VERSION):
            raise _other_format(file, head.format, head.version)
        found = msgspec.json.decode(body, type=Manifest)
        _check(found)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(file, f"it breaks the format ({str(error)[:200]})", kind) from error
    if found.kind != kind.name:
        raise errors.CheckpointError(
            f"{file} must be that of a {kind.name}", f"it is of a {found.kind}", "Correct the path."
        )
    return found


def decode_contents(found: Manifest, type_: type[_T], file: Path | str, kind: Kind) -> _T:
    """Returns the contents of a manifest; DataLossError if they are of another type."""
    try:
        return msgspec.json.decode(found.contents, type=type_)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(file, f"its contents break the format ({str(error)[:200]})", kind) from error


class _Head(msgspec.Struct):
    format: str
    version: int


def _refuse_other_format(text: bytes, file: Path | str, kind: Kind) -> NoReturn:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it is not JSON ({str(error)[:100]})", kind) from error
    if isinstance(document, dict) and document.get("format") == 1:
        raise _other_format(file, "a byte stream written through Orbax", 1)
    raise damaged(file, "it does not begin with its checksum", kind)


def _other_format(file: Path | str, name: str, version: int) -> errors.CheckpointError:
    age = "a newer" if version > VERSION else "an older, unreleased"
    return errors.CheckpointError(
        f"{file} must have the format {FORMAT} {VERSION}",
        f"its format is {name[:80]} {version}",
        f"It was written by {age} replicax: use that one to read it.",
    )


def _check(found: Manifest) -> None:
    """Raises ValueError unless the arrays and files of a manifest fit together."""
    for name, file in found.files.items():
        if _FILE_NAME.fullmatch(name) is None:
            raise ValueError(f"{name[:80]!r} is not the name of a data file")
        if not 0 <= file.header_bytes <= min(file.size, MAX_BYTES):
            raise ValueError(f"{name!r} has {file.size} bytes and {file.header_bytes} of header")
    if len({entry.name for entry in found.arrays}) != len(found.arrays):
        raise ValueError("two arrays have the same name")
    for entry in found.arrays:
        _check_array(entry, found.files)


def _check_array(entry: ArrayEntry, files: dict[str, StoredFile]) -> None:
    require_name(entry.name)
    itemsize = dtype_named(entry.dtype).itemsize
    # Also an array without elements must be one that NumPy can make.
    extent = math.prod(max(size, 1) for size in entry.shape[:_MAX_DIMENSIONS]) * max(itemsize, 1)
    is_small = len(entry.shape) <= _MAX_DIMENSIONS and extent <= _MAX_ARRAY_BYTES
    if not is_small or any(size < 0 for size in entry.shape):
        raise ValueError(f"{entry.name!r} has the shape {str(entry.shape)[:80]}")
    row = 0
    for part in entry.slices:
        size = (part.stop - part.start) * entry.row_bytes
        if part.start != row or part.stop < part.start:
            raise ValueError(f"the slices of {entry.name!r} do not follow each other")
        if not 0 < part.piece_bytes <= _MAX_PIECE_BYTES:
            raise ValueError(f"the pieces of {entry.name!r} have {part.piece_bytes} bytes")
        if part.file not in files or not 0 <= part.offset <= files[part.file].size - size:
            raise ValueError(f"{entry.name!r} is not within its file")
        if len(part.sums) != 4 * -(-size // part.piece_bytes):
            raise ValueError(f"the checksums of {entry.name!r} do not cover it")
        row = part.stop
    if row != entry.num_rows:
        raise ValueError(f"{entry.name!r} has {row} of {entry.num_rows} rows")
