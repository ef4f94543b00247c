"""The manifest of a checkpoint: what is inside, where, and the checksums to prove it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from replicax.checkpointing import plain
from replicax.foundation import errors

FILE_NAME = "manifest.json"
FORMAT = 1
# Nothing that training programs save comes near; a larger file is damage or an attack.
MAX_BYTES = 64 << 20

_ML_DTYPES = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn int2 int4 uint2 uint4"
).split()
_NUMPY_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128"
).split()
_TEXT_DTYPE = re.compile(r"<U[0-9]{1,6}|\|S[0-9]{1,6}")
_ARRAY_KINDS = ("variable", "array", "key")
_PLAIN_KINDS = ("value", "state")


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """An array in the byte stream of a checkpoint.

    Attributes:
      name: Path of the object that it belongs to.
      kind: "variable", "array", or "key" (the data of a typed PRNG key).
      shape: Its shape.
      dtype: The name of its type.
      offset: Where it starts in the stream.
      key_impl: The PRNG implementation of a key, otherwise "".
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    key_impl: str = ""

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class PlainEntry:
    """A plain value, or the state of an iterator, kept in the manifest itself."""

    name: str
    kind: str
    encoded: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file that belongs to a checkpoint, and the checksum of its bytes."""

    size: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What one checkpoint holds.

    Attributes:
      step: The number of the checkpoint.
      saved_at: When it was saved, in seconds since 1970; says nothing about order.
      entries: Arrays and plain values by name.
      aliases: Further paths of objects (or of all below them) that are saved once.
      metrics: Numbers given to `CheckpointManager.save`.
      size: Length of the byte stream that holds all arrays.
      files: The files of the stream, by path inside the checkpoint.
    """

    step: int
    saved_at: float
    entries: dict[str, ArrayEntry | PlainEntry]
    aliases: dict[str, str]
    metrics: dict[str, float]
    size: int
    files: dict[str, StoredFile]

    def find(self, name: str) -> ArrayEntry | PlainEntry | None:
        """Returns the entry for a path of an object, which may be one of several."""
        found = self.entries.get(name)
        prefix, rest = name, ""
        while found is None and prefix:
            if prefix in self.aliases:
                found = self.entries.get(self.aliases[prefix] + rest)
            prefix, _, last = prefix.rpartition("/")
            rest = f"/{last}{rest}"
        return found

    def encode(self) -> bytes:
        """Returns the text of the manifest, which ends with its own checksum."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "saved_at": self.saved_at,
            "size": self.size,
            "arrays": [
                dataclasses.asdict(e) for e in self.entries.values() if isinstance(e, ArrayEntry)
            ],
            "values": [
                {"name": e.name, "kind": e.kind, **e.encoded}
                for e in self.entries.values()
                if isinstance(e, PlainEntry)
            ],
            "aliases": self.aliases,
            "metrics": self.metrics,
            "files": {path: dataclasses.asdict(file) for path, file in self.files.items()},
        }
        return _encode_with_checksum(document)


def _encode_with_checksum(document: dict[str, Any]) -> bytes:
    bare = {key: value for key, value in document.items() if key != "crc32"}
    return _as_text({**bare, "crc32": zlib.crc32(_as_text(bare))})


def _as_text(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def dtype_named(name: str) -> np.dtype:
    """Returns the type of a name that a manifest may hold; ValueError for others.

    >>> dtype_named("bfloat16").itemsize
    2
    """
    if name in _ML_DTYPES and hasattr(jnp, name):
        return np.dtype(getattr(jnp, name))
    if name in _NUMPY_DTYPES or _TEXT_DTYPE.fullmatch(name):
        return np.dtype(name)
    # Never np.dtype of unknown text: an array of objects would turn bytes into pointers.
    raise ValueError(f"unknown type {name[:40]!r}")


def name_of_dtype(dtype: np.dtype) -> str | None:
    """Returns the name under which a type is saved, or None if it cannot be saved."""
    native = dtype.newbyteorder("=")
    name = native.str if native.kind in "US" else native.name
    try:
        return name if dtype_named(name) == native else None
    except ValueError:
        return None


def require_name(name: Any) -> str:
    """Returns a path of an object unchanged; ValueError if it could not have been saved.

    >>> require_name("model/dense/w")
    'model/dense/w'
    """
    if not isinstance(name, str) or not 0 < len(name) <= 4096:
        raise ValueError("a name is missing, or too long")
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
        raise ValueError(f"the name {name[:80]!r} is not a plain path")
    if not name.isprintable():
        raise ValueError(f"the name {name[:80]!r} has characters that cannot be printed")
    return name


def read(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint at `path`, and checks every part of it."""
    file = path / FILE_NAME
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise errors.CheckpointError(
            f"The checkpoint {path} needs a readable {FILE_NAME}",
            f"reading it failed: {error.strerror or error}",
            "Choose a checkpoint that `rx.train.latest_checkpoint` or "
            "`replicax checkpoint show` lists.",
        ) from error
    return parse(text, file)


def parse(text: bytes, file: Path) -> Manifest:
    """Turns the text of a manifest into what it means; DataLossError if it is damaged."""

    def damaged(found: str) -> NoReturn:
        raise errors.DataLossError(
            f"{file} must be as it was written",
            found,
            "Restore an older checkpoint, or copy this one again from where it came.",
        )

    if len(text) > MAX_BYTES:
        damaged(f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        damaged(f"it is not JSON ({str(error)[:100]})")
    version = document.get("format") if isinstance(document, dict) else None
    if type(version) is int and version > FORMAT:
        raise errors.CheckpointError(
            f"{file} must have a format up to {FORMAT}",
            f"its format is {version}",
            "It was written by a newer replicax: install that one to read it.",
        )
    try:
        if version != FORMAT or _encode_with_checksum(document) != text:
            damaged("its checksum does not fit its content")
        return _from_document(document)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        damaged(f"its content breaks the format ({type(error).__name__}: {str(error)[:200]})")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _from_document(document: dict[str, Any]) -> Manifest:
    size = _number(document["size"])
    entries: dict[str, ArrayEntry | PlainEntry] = {}
    for raw in document["arrays"]:
        _add(entries, _array_entry(raw, size))
    for raw in document["values"]:
        encoded = {key: raw[key] for key in raw if key not in ("name", "kind")}
        plain.decode(encoded)
        kind = _one_of(raw["kind"], _PLAIN_KINDS)
        _add(entries, PlainEntry(require_name(raw["name"]), kind, encoded))
    return Manifest(
        step=_number(document["step"]),
        saved_at=float(document["saved_at"]),
        entries=entries,
        aliases=_checked_dict(document["aliases"], require_name),
        metrics=_checked_dict(document["metrics"], float),
        size=size,
        files=_checked_dict(document["files"], _stored_file),
    )


def _checked_dict(raw: Any, check: Callable[[Any], Any]) -> dict[str, Any]:
    return {require_name(name): check(value) for name, value in raw.items()}


def _array_entry(raw: dict[str, Any], size: int) -> ArrayEntry:
    shape = tuple(map(_number, raw["shape"]))
    entry = ArrayEntry(
        require_name(raw["name"]),
        _one_of(raw["kind"], _ARRAY_KINDS),
        shape,
        raw["dtype"],
        _number(raw["offset"]),
        raw["key_impl"],
    )
    if not isinstance(entry.key_impl, str):
        raise TypeError("key_impl is not text")
    if entry.offset + entry.nbytes > size:
        raise ValueError(f"{entry.name!r} ends behind the end of the data")
    return entry


def _stored_file(raw: dict[str, Any]) -> StoredFile:
    return StoredFile(_number(raw["size"]), _number(raw["crc32"]))


def _add(entries: dict[str, Any], entry: ArrayEntry | PlainEntry) -> None:
    if entry.name in entries:
        raise ValueError(f"two entries are named {entry.name!r}")
    entries[entry.name] = entry


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number from 0 up")
    return value


def _one_of(value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{str(value)[:40]!r} is none of {choices}")
    return value
