"""Datasets in a directory: ArrayRecord files of elements, and a manifest that names them.

ArrayRecord, a dependency of Grain, has random access, checksums and compression. The manifest is
replaced atomically after the files that it names are synced, so a directory always holds one
complete dataset, or none. Nothing is pickled.

The bytes of an element are the length of a header, the header, and the data of its leaves. The
header is JSON: per leaf its type, shape and size. The manifest holds the structure around the
leaves, once for all elements.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.foundation import durable_files, errors, exclusive_files, lazy, ordered_trees
from replicax.foundation.ordered_trees import Structure
from replicax.foundation.types import Tree
from replicax.tracing.signature import TensorSpec

if TYPE_CHECKING:
    array_record_module: Any
else:
    array_record_module = lazy.module("array_record.python.array_record_module")

_MANIFEST = "dataset.json"
_FORMAT = "replicax dataset"
_VERSION = 1
_LOCK = "writer.lock"
_DATA = "data-"
_LENGTH = struct.Struct("<I")
# Compressions by tf.data's names; ArrayRecord has no gzip.
_COMPRESSIONS = {None: "uncompressed", "": "uncompressed", "NONE": "uncompressed"}
_COMPRESSIONS |= {"AUTO": "snappy", "SNAPPY": "snappy", "GZIP": "zstd", "ZSTD": "zstd"}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a directory.

    Attributes:
      spec: The spec of elements; None if there are none.
      shards: Per shard: the file, relative to the directory, and its number of elements.
      facts: Attributes of the plan that was saved.
    """

    spec: Tree
    shards: tuple[tuple[str, int], ...]
    facts: dict[str, Any]


def read_manifest(directory: Path) -> Manifest | None:
    """Returns the manifest of a directory, or None if it holds no complete dataset."""
    file = directory / _MANIFEST
    try:
        document = json.loads(file.read_bytes())
        if document["format"] != _FORMAT or document["version"] != _VERSION:
            raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
        spec = document["spec"]
        shards = tuple((str(name), int(count)) for name, count in document["shards"])
        facts = dict(document["facts"])
        return Manifest(None if spec is None else decode_spec(spec), shards, facts)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise errors.DataLossError(
            f"{file} must describe a dataset of version {_VERSION}",
            f"it does not ({error!r})",
            "Save the dataset again.",
        ) from error


def writer_options(compression: str | None) -> str:
    """Returns ArrayRecord's options for a compression of tf.data, or raises."""
    if compression not in _COMPRESSIONS:
        raise errors.InvalidArgumentError(
            '`compression` must be None, "AUTO", "SNAPPY", "GZIP" or "ZSTD"',
            f"it is {compression!r}",
            "Choose one of them.",
        )
    # Groups of one element, so that each can be read by itself.
    return f"group_size:1,{_COMPRESSIONS[compression]}"


class Writer:
    """Writes one dataset into a directory, and replaces the one that it holds.

    Call `commit` after the last element; `abort` keeps the earlier dataset.

    Raises:
      exclusive_files.HeldError: Another process is writing to the directory.
    """

    def __init__(self, directory: Path, compression: str | None) -> None:
        self._options = writer_options(compression)
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._lock: int | None = exclusive_files.hold(directory / _LOCK)
        self._data = directory / f"{_DATA}{secrets.token_hex(8)}"
        self._shards: dict[int, tuple[Path, Any]] = {}
        self._counts: dict[int, int] = {}
        self._shapes: list[tuple[int | None, ...] | None] | None = None
        self._structure: Structure = ordered_trees.structure(None)
        self._dtypes: list[np.dtype] = []
        try:
            self._remove_unnamed()
            self._data.mkdir()
        except BaseException:
            self._release()
            raise

    def set_spec(self, spec: Tree) -> None:
        """Sets the spec of elements; sizes that differ between elements become unknown."""
        # Raises for what cannot be stored, before anything is written.
        encode_spec(spec)
        leaves, self._structure = ordered_trees.flatten(spec)
        self._shapes = [leaf.shape for leaf in leaves]
        self._dtypes = [leaf.dtype for leaf in leaves]

    def write(self, element: Tree, shard: int) -> None:
        """Adds an element to a shard."""
        leaves, structure = ordered_trees.flatten(element)
        assert self._shapes is not None
        if structure != self._structure:
            raise errors.StructureError(
                f"Elements of one dataset must have one structure, {self._structure}",
                f"there is {structure}",
                "Return the same structure from `map` for every element.",
            )
        self._shapes = [
            _wider(known, np.shape(leaf)) for known, leaf in zip(self._shapes, leaves, strict=True)
        ]
        if shard not in self._shards:
            path = self._data / f"{len(self._shards):05d}.arrayrecord"
            writer = array_record_module.ArrayRecordWriter(str(path), self._options)
            self._shards[shard] = path, writer
        self._shards[shard][1].write(encode(leaves))
        self._counts[shard] = self._counts.get(shard, 0) + 1

    def commit(self, facts: dict[str, Any]) -> None:
        """Publishes the dataset."""
        shards = []
        for shard in sorted(self._shards):
            path, writer = self._shards[shard]
            writer.close()
            durable_files.sync_file(path)
            shards.append((str(path.relative_to(self._directory)), self._counts[shard]))
        self._shards = {}
        durable_files.sync_directory(self._data)
        spec = None
        if self._shapes is not None:
            pairs = zip(self._shapes, self._dtypes, strict=True)
            found = [TensorSpec(shape, dtype) for shape, dtype in pairs]
            spec = encode_spec(ordered_trees.unflatten(self._structure, found))
        document = {"format": _FORMAT, "version": _VERSION, "spec": spec}
        document |= {"shards": shards, "facts": facts}
        new = self._data / _MANIFEST
        with durable_files.synced(new) as file:
            file.write(json.dumps(document, indent=1).encode("ascii"))
        os.replace(new, self._directory / _MANIFEST)
        durable_files.sync_directory(self._directory)
        self._remove_unnamed(self._data.name)
        self._release()

    def abort(self) -> None:
        """Removes what was written. Idempotent; does nothing after `commit`."""
        if self._lock is None:
            return
        for _, writer in self._shards.values():
            writer.close()
        self._shards = {}
        shutil.rmtree(self._data, ignore_errors=True)
        self._release()

    def _remove_unnamed(self, keep: str | None = None) -> None:
        """Removes data that the manifest does not name, left by interrupted writers."""
        if keep is None:
            with contextlib.suppress(errors.DataLossError):
                found = read_manifest(self._directory)
                keep = found.shards[0][0].partition("/")[0] if found and found.shards else None
        for path in self._directory.glob(f"{_DATA}*"):
            if path.name != keep:
                shutil.rmtree(path, ignore_errors=True)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _wider(
    known: tuple[int | None, ...] | None, found: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    if known is None or len(known) != len(found):
        return None
    return tuple(a if a == b else None for a, b in zip(known, found, strict=True))


def encode(leaves: Sequence[object]) -> bytes:
    """Returns the leaves of an element as bytes.

    >>> decode(encode([np.arange(2), b"record", "text"]))
    [array([0, 1]), b'record', 'text']
    """
    described = [_encode_leaf(leaf) for leaf in leaves]
    header = json.dumps([facts for facts, _ in described]).encode("ascii")
    return b"".join([_LENGTH.pack(len(header)), header, *(data for _, data in described)])


def decode(record: bytes) -> list[object]:
    """Returns the leaves of an element; raises ValueError if the bytes are damaged."""
    try:
        (length,) = _LENGTH.unpack_from(record)
        offset = _LENGTH.size + length
        leaves = []
        for facts in json.loads(record[_LENGTH.size : offset]):
            size = facts["size"]
            leaves.append(_decode_leaf(facts, record[offset : offset + size]))
            offset += size
    except (struct.error, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not an element: {error!r}") from None
    if offset != len(record):
        raise ValueError(f"not an element: {len(record)} bytes instead of {offset}")
    return leaves


def digest(element: Tree) -> str:
    """Returns the SHA-256 of the content of an element."""
    found = hashlib.sha256()
    for leaf in ordered_trees.leaves(element):
        facts, data = _encode_leaf(leaf)
        found.update(json.dumps(facts).encode("ascii"))
        found.update(data)
    return found.hexdigest()


def as_text(leaves: Sequence[object]) -> str:
    """Returns the leaves of an element as ASCII text, for the state of an iterator."""
    return base64.b64encode(encode(leaves)).decode("ascii")


def from_text(text: str) -> list[object]:
    """Returns the leaves that `as_text` encoded."""
    return decode(base64.b64decode(text))


def _encode_leaf(leaf: object) -> tuple[dict[str, Any], bytes]:
    if isinstance(leaf, bytes | str):
        data = leaf.encode("utf-8") if isinstance(leaf, str) else leaf
        return {"type": type(leaf).__name__, "size": len(data)}, data
    array = np.asarray(leaf)
    shape = list(array.shape)
    if array.dtype == object:
        # A batch of text or records: each is encoded as a leaf.
        data = encode(array.reshape(-1).tolist())
        return {"type": "objects", "shape": shape, "size": len(data)}, data
    data = np.ascontiguousarray(array).tobytes()
    return {"type": _name_of(array.dtype), "shape": shape, "size": len(data)}, data


def _decode_leaf(facts: Mapping[str, Any], data: bytes) -> object:
    kind = facts["type"]
    if kind == "bytes":
        return data
    if kind == "str":
        return data.decode("utf-8")
    if kind == "objects":
        array = np.empty(int(np.prod(facts["shape"], dtype=np.int64)), object)
        array[:] = decode(data)
        return array.reshape(facts["shape"])
    # A copy, because elements are mutable and bytes are not.
    return np.frombuffer(data, np.dtype(kind)).reshape(facts["shape"]).copy()


def _name_of(dtype: np.dtype) -> str:
    """Returns a name that `np.dtype` accepts, also of extension types such as bfloat16."""
    return dtype.name if dtype.kind == "V" else dtype.str


def encode_spec(spec: Tree) -> dict[str, Any]:
    """Returns the structure and the `TensorSpec`s of elements as JSON."""
    if spec is None:
        return {"none": True}
    if isinstance(spec, TensorSpec):
        shape = None if spec.shape is None else list(spec.shape)
        return {"shape": shape, "dtype": _name_of(spec.dtype)}
    if isinstance(spec, tuple) and hasattr(spec, "_fields"):
        parts = zip(spec._fields, spec, strict=True)  # type: ignore[attr-defined]
        fields = {key: encode_spec(part) for key, part in parts}
        return {"namedtuple": type(spec).__name__, "fields": fields}
    if type(spec) in (tuple, list):
        return {type(spec).__name__: [encode_spec(part) for part in spec]}
    if type(spec) is dict and all(isinstance(key, str) for key in spec):
        return {"dict": {key: encode_spec(part) for key, part in spec.items()}}
    raise errors.ArgumentTypeError(
        "Elements on disk must be arrays, text and records in tuples, named tuples, lists, and "
        "dicts with text keys",
        f"there is a {type(spec).__name__}",
        "Convert them with `map` first.",
    )


def decode_spec(encoded: Mapping[str, Any]) -> Tree:
    """Returns the spec that `encode_spec` encoded; a named tuple gets a new class."""
    if "none" in encoded:
        return None
    if "shape" in encoded:
        shape = None if encoded["shape"] is None else tuple(encoded["shape"])
        return TensorSpec(shape, np.dtype(encoded["dtype"]))
    if "namedtuple" in encoded:
        fields = {key: decode_spec(part) for key, part in encoded["fields"].items()}
        return collections.namedtuple(encoded["namedtuple"], fields)(**fields)  # type: ignore[misc]
    if "dict" in encoded:
        return {key: decode_spec(part) for key, part in encoded["dict"].items()}
    kind = tuple if "tuple" in encoded else list
    return kind(decode_spec(part) for part in encoded[kind.__name__])
