"""Datasets in a directory: ArrayRecord files of elements, and a manifest that names them.

ArrayRecord, which Grain brings, has random access, checksums and compression. The manifest is
replaced in one step after everything that it names is on the disk, so a directory always holds
one whole dataset, or none. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax.foundation import durable_files, errors, exclusive_files, lazy
from replicax.input import stored_elements
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
# What the names of tf.data stand for here; ArrayRecord has no gzip.
_COMPRESSIONS = {None: "uncompressed", "": "uncompressed", "NONE": "uncompressed"}
_COMPRESSIONS |= {"AUTO": "snappy", "SNAPPY": "snappy", "GZIP": "zstd", "ZSTD": "zstd"}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a directory holds.

    Attributes:
      spec: What elements look like; None if there are none.
      shards: Per shard: the file, relative to the directory, and how many elements it has.
      facts: Facts of the plan that was saved, by their names there.
    """

    spec: Any
    shards: tuple[tuple[str, int], ...]
    facts: dict[str, Any]


def read_manifest(directory: Path) -> Manifest | None:
    """Returns what a directory holds, or None if it does not hold a whole dataset."""
    file = directory / _MANIFEST
    try:
        document = json.loads(file.read_bytes())
        if document["format"] != _FORMAT or document["version"] != _VERSION:
            raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
        spec = document["spec"]
        shards = tuple((str(name), int(count)) for name, count in document["shards"])
        facts = dict(document["facts"])
        return Manifest(None if spec is None else stored_elements.decode_spec(spec), shards, facts)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise errors.DataLossError(
            f"{file} must describe a dataset of version {_VERSION}",
            f"it does not ({error!r})",
            "Save the dataset again.",
        ) from error


def writer_options(compression: str | None) -> str:
    """Returns the options of ArrayRecord for a name of tf.data, or raises."""
    if compression not in _COMPRESSIONS:
        raise errors.InvalidArgumentError(
            '`compression` must be None, "AUTO", "SNAPPY", "GZIP" or "ZSTD"',
            f"it is {compression!r}",
            "Choose one of them.",
        )
    # One element to a group: each can be read without its neighbours.
    return f"group_size:1,{_COMPRESSIONS[compression]}"


class Writer:
    """Writes one dataset into a directory, in place of the one that is there.

    One writer at a time: `exclusive_files.HeldError` is raised if there is another. Use
    `commit` after the last element; `abort` leaves what was there before.
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
        self._structure: Any = None
        self._dtypes: list[Any] = []
        try:
            self._remove_others()
            self._data.mkdir()
        except BaseException:
            self._release()
            raise

    def describe(self, spec: Any) -> None:
        """Says what elements look like; sizes that turn out to differ become unknown."""
        # Only what can be stored is accepted, before anything is written.
        stored_elements.encode_spec(spec)
        leaves, self._structure = jax.tree.flatten(spec)
        self._shapes = [leaf.shape for leaf in leaves]
        self._dtypes = [leaf.dtype for leaf in leaves]

    def write(self, element: Any, shard: int) -> None:
        """Adds an element to a shard."""
        leaves, structure = jax.tree.flatten(element)
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
        self._shards[shard][1].write(stored_elements.encode(leaves))
        self._counts[shard] = self._counts.get(shard, 0) + 1

    def commit(self, facts: dict[str, Any]) -> None:
        """Makes the dataset the one that the directory holds."""
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
            spec = stored_elements.encode_spec(jax.tree.unflatten(self._structure, found))
        document = {"format": _FORMAT, "version": _VERSION, "spec": spec}
        document |= {"shards": shards, "facts": facts}
        new = self._data / _MANIFEST
        with durable_files.synced(new) as file:
            file.write(json.dumps(document, indent=1).encode("ascii"))
        os.replace(new, self._directory / _MANIFEST)
        durable_files.sync_directory(self._directory)
        self._remove_others(self._data.name)
        self._release()

    def abort(self) -> None:
        """Removes what was written. Idempotent, and without effect after `commit`."""
        if self._lock is None:
            return
        for _, writer in self._shards.values():
            writer.close()
        self._shards = {}
        shutil.rmtree(self._data, ignore_errors=True)
        self._release()

    def _remove_others(self, keep: str | None = None) -> None:
        """Removes data that the manifest does not name: of writers that did not finish."""
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
