"""The files of a saved model: what is where, and what makes a write whole.

Note [When a saved model is complete]
    Data files have names that no earlier save used; the manifest names them, with their
    checksums. A new model is written into a directory next to its place and renamed. Over
    an existing model, the new data files are written next to the old ones, and replacing
    the manifest, one atomic step, makes them the model. A crash leaves the old model or
    the new one, never a mixture; the next save removes what nobody names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from replicax.foundation import durable_files, errors

MANIFEST = "saved_model.json"
_FORMAT = "replicax.saved_model"
_VERSION = 1
_MAX_MANIFEST_BYTES = 64 << 20
_DATA_NAME = re.compile(r"(variables|functions)\.[0-9a-f]{16}\.bin")
# Rows of 64 bytes: what XLA wants to take an array over without a copy.
_ALIGNMENT = 64
# How often a read starts again because another save replaced the model meanwhile.
_MAX_READS = 3


@dataclasses.dataclass
class Contents:
    """A saved model as it is on disk: a manifest, and the bytes that it names."""

    manifest: dict[str, Any]
    variables: list[np.ndarray]
    functions: list[bytes]


def contains(export_dir: str | os.PathLike[str]) -> bool:
    """Tells whether a directory holds a saved model."""
    return (Path(export_dir) / MANIFEST).is_file()


def write(
    export_dir: str | os.PathLike[str],
    manifest: dict[str, Any],
    variables: Iterable[np.ndarray],
    functions: Iterable[bytes],
) -> None:
    """Writes a saved model, whole or not at all.

    Args:
      export_dir: A directory that does not exist, is empty, or holds a saved model.
      manifest: Lists of `variables` and `functions`, which get places and checksums here,
        and anything else that JSON can hold.
      variables: The array of each variable of the manifest.
      functions: The bytes of each function of the manifest.
    """
    target = Path(export_dir)
    require_target(target)
    try:
        if contains(target):
            _write_files(target, manifest, variables, functions)
            _remove_unnamed(target, manifest)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
        hidden.mkdir()
        try:
            _write_files(hidden, manifest, variables, functions)
            hidden.rename(target)
            durable_files.sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except errors.DistributeError:
        raise
    except OSError as error:
        raise errors.CheckpointError(
            f"A model must be written to {str(target)!r}",
            f"that failed: {error}",
            "What was there before is unchanged. Free space or choose another directory.",
        ) from error


def require_target(target: Path) -> None:
    """Raises if saving there would destroy something that is not a saved model."""
    found = ""
    if target.exists() and not target.is_dir():
        found = "it is a file"
    elif target.is_dir() and not contains(target):
        with contextlib.suppress(OSError):
            found = "it holds other files" if any(target.iterdir()) else ""
    if found:
        raise errors.InvalidArgumentError(
            f"{str(target)!r} must be a new or empty directory, or hold a saved model",
            found,
            "Choose another directory.",
        )


def read(export_dir: str | os.PathLike[str]) -> Contents:
    """Reads a saved model and checks every byte of it."""
    folder = Path(export_dir)
    for attempt in range(_MAX_READS):
        manifest = _read_manifest(folder)
        try:
            return Contents(
                manifest,
                [_as_array(folder, e, b) for e, b in _read_data(folder, manifest, "variables")],
                [bytes(b) for _, b in _read_data(folder, manifest, "functions")],
            )
        except FileNotFoundError as error:
            if attempt + 1 == _MAX_READS:
                raise _loss(Path(error.filename), "it is missing") from error
    raise AssertionError("unreachable")


def _write_files(
    folder: Path,
    manifest: dict[str, Any],
    variables: Iterable[np.ndarray],
    functions: Iterable[bytes],
) -> None:
    token = secrets.token_hex(8)
    names = {kind: f"{kind}.{token}.bin" for kind in ("variables", "functions")}
    staged = folder / f"{MANIFEST}.{token}.tmp"
    try:
        arrays = (np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in variables)
        _write_data(folder / names["variables"], manifest["variables"], arrays)
        blobs = (memoryview(blob) for blob in functions)
        _write_data(folder / names["functions"], manifest["functions"], blobs)
        manifest.update(format=_FORMAT, version=_VERSION, files=names)
        manifest["crc32"] = _checksum_of(manifest)
        with durable_files.synced(staged) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        os.replace(staged, folder / MANIFEST)
        durable_files.sync_directory(folder)
    except BaseException:
        for name in (*names.values(), staged.name):
            (folder / name).unlink(missing_ok=True)
        raise


def _write_data(path: Path, entries: list[dict[str, Any]], pieces: Iterable[memoryview]) -> None:
    with durable_files.synced(path) as file:
        for entry, piece in zip(entries, pieces, strict=True):
            file.write(bytes(-file.tell() % _ALIGNMENT))
            entry.update(offset=file.tell(), bytes=piece.nbytes, crc32=zlib.crc32(piece))
            file.write(piece)


def _remove_unnamed(folder: Path, manifest: dict[str, Any]) -> None:
    """Removes the data of models that were replaced, or never finished."""
    named = set(manifest["files"].values())
    for path in folder.iterdir():
        is_data = _DATA_NAME.fullmatch(path.name) is not None
        is_staged = path.name.startswith(MANIFEST + ".")
        if (is_data and path.name not in named) or is_staged:
            path.unlink(missing_ok=True)


def _checksum_of(manifest: dict[str, Any]) -> int:
    body = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        size = path.stat().st_size
        if size > _MAX_MANIFEST_BYTES:
            raise _loss(path, f"it has {size} bytes, more than any manifest")
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise errors.NotFoundError(
            f"A saved model must be in {str(folder)!r}",
            f"there is no {MANIFEST}",
            "Pass the directory that `rx.saved_model.save` wrote.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _loss(path, f"it is not JSON: {error}") from error
    except errors.DistributeError:
        raise
    except OSError as error:
        raise errors.CheckpointError(
            f"{str(path)!r} must be readable", f"{error}", "Check its permissions."
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise _loss(path, f"it is not the manifest of a {_FORMAT}")
    version = manifest.get("version")
    if version != _VERSION:
        raise errors.CheckpointError(
            f"This release reads version {_VERSION} of saved models",
            f"{str(path)!r} has version {version!r}",
            "Upgrade replicax, or save the model again.",
        )
    if manifest.get("crc32") != _checksum_of(manifest):
        raise _loss(path, "its checksum does not match")
    return manifest


def _read_data(
    folder: Path, manifest: dict[str, Any], kind: str
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    name = manifest["files"][kind]
    if _DATA_NAME.fullmatch(name) is None:
        raise _loss(folder / MANIFEST, f"it names a file {name!r}")
    path = folder / name
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        for number, entry in enumerate(manifest[kind]):
            offset, count = entry["offset"], entry["bytes"]
            if offset < 0 or count < 0 or offset + count > total:
                raise _loss(path, f"it is shorter than its entry {number} says")
            piece = np.empty(count, np.uint8)
            file.seek(offset)
            if file.readinto(piece) != count or zlib.crc32(piece.data) != entry["crc32"]:
                raise _loss(path, f"the checksum of its entry {number} does not match")
            yield entry, piece


def _as_array(folder: Path, entry: dict[str, Any], piece: np.ndarray) -> np.ndarray:
    try:
        dtype = np.dtype(entry["stored_dtype"])
        if dtype.hasobject:
            raise TypeError(f"{dtype} is no type of numbers")
        return piece.view(dtype).reshape(entry["stored_shape"])
    except (TypeError, ValueError) as error:
        path = folder / MANIFEST
        raise _loss(path, f"variable {entry.get('path')!r} does not fit: {error}") from error


def _loss(path: Path, found: str) -> errors.DataLossError:
    return errors.DataLossError(
        f"{str(path)!r} must hold what was saved", found, "Restore it, or save the model again."
    )
