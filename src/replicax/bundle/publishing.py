"""Publishing a bundle: all of it becomes visible at once, or nothing does.

Note [The order of publication]
    data files -> fsync of each -> manifest -> fsync -> fsync of the temporary directory -> rename
    to the final name -> fsync of the parent directory. A bundle under its final name is complete,
    also after a crash of the process or of the machine. A bundle that is replaced is exchanged
    with the new one in one step where the system can do that; where it cannot, a crash between two
    renames leaves the old one under a temporary name, and `remove_leftovers` moves it back.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from replicax.bundle import data_files
from replicax.bundle.manifest import (
    FILE_NAME,
    MAX_BYTES,
    PACKED_FILE,
    PACKED_LENGTH,
    Kind,
    Manifest,
    Part,
    merge,
)
from replicax.foundation import durable_files, errors

TEMPORARY = ".tmp-"
_REPLACED = "old-"
_REMOVED = "gone-"


class BundleWriter:
    """A bundle that is being written; leaving its context discards it unless it was published.

    Args:
      path: The directory that the bundle will be; one that exists is replaced.
      kind: Its kind.

    Attributes:
      directory: The temporary directory that writers put their files into.

    Raises:
      CheckpointError: The directory cannot be made.
    """

    def __init__(self, path: Path, kind: Kind) -> None:
        self._path = path
        self._kind = kind
        self._parts: list[Part] = []
        token = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.directory = path.with_name(f"{path.name}{TEMPORARY}{token}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mkdir(self.directory)
        except OSError as error:
            raise self._cannot_write(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, errors.DistributeError):
            raise self._cannot_write(error) from error

    def add(self, part: Part) -> None:
        """Adds files that are in the directory already, synced."""
        self._parts.append(part)

    def write_arrays(self, arrays: Mapping[str, tuple[str, np.ndarray]]) -> None:
        """Writes arrays, given with the names of their types, by name."""
        self._parts += data_files.write_arrays(self.directory, "data", arrays)

    def publish(self, contents: msgspec.Struct) -> int:
        """Writes the manifest and makes the bundle visible; returns its size in bytes."""
        merged = merge(self._parts)
        manifest = encoded_manifest(merged, contents, self._kind)
        with durable_files.synced(self.directory / FILE_NAME) as file:
            file.write(manifest)
        durable_files.sync_directory(self.directory)
        _move_into_place(self.directory, self._path)
        return len(manifest) + sum(file.size for file in merged.files.values())

    def _cannot_write(self, error: OSError) -> errors.CheckpointError:
        return cannot_write(self._path, error, self._kind)


def encoded_manifest(part: Part, contents: msgspec.Struct, kind: Kind) -> bytes:
    """Returns the text of a manifest.

    Raises:
      CheckpointError: It is longer than readers accept.
    """
    encoded = msgspec.Raw(msgspec.json.encode(contents))
    text = Manifest(kind.name, part.arrays, part.files, encoded).encode()
    if len(text) > MAX_BYTES:
        raise errors.CheckpointError(
            f"The manifest of a {kind.name} must have at most {MAX_BYTES} bytes",
            f"it has {len(text)}",
            "Save fewer variables, or smaller plain values and iterator states.",
        )
    return text


def write_packed(
    target: data_files.Target,
    sources: Iterable[data_files.Source],
    contents: msgspec.Struct,
    kind: Kind,
    on_progress: Callable[[float], None] = lambda _: None,
) -> int:
    """Writes a bundle into one file, to be sent: data file, manifest, length of the manifest.

    Returns:
      The number of bytes.
    """
    part = data_files.write_stream(target, PACKED_FILE, sources, on_progress)
    text = encoded_manifest(part, contents, kind)
    start = part.files[PACKED_FILE].size
    target.seek(start)
    target.write(text + PACKED_LENGTH.pack(len(text)))
    return start + len(text) + PACKED_LENGTH.size


def cannot_write(path: Path, error: OSError, kind: Kind) -> errors.CheckpointError:
    """Returns the error for a bundle, or a directory of bundles, that cannot be written."""
    wrapped = errors.CheckpointError(
        f"The {kind.name} {path} must be written and synced to disk",
        f"that failed: {error.strerror or error}",
        f"Every older {kind.name} is unchanged; free space or repair the disk, then save again.",
    )
    wrapped.errno = error.errno
    return wrapped


def _move_into_place(temporary: Path, path: Path) -> None:
    """Renames a bundle; one that it replaces is then under the temporary name."""
    is_new = not path.exists()

    def move(source: Path, target: Path) -> None:
        if is_new:
            os.rename(source, target)
        else:
            aside = path.with_name(f"{path.name}{TEMPORARY}{_REPLACED}{secrets.token_hex(4)}")
            durable_files.exchange(source, target, aside)

    move(temporary, path)
    try:
        durable_files.sync_directory(path.parent)
    except OSError:
        # Not durable, so not published: everything back to where it was.
        move(path, temporary)
        raise


def put_aside(path: Path) -> Path:
    """Hides a bundle from readers; returns what is left of it, to be deleted later."""
    aside = path.with_name(f"{path.name}{TEMPORARY}{_REMOVED}{secrets.token_hex(4)}")
    os.rename(path, aside)
    return aside


def remove_leftovers(directory: Path) -> None:
    """Removes what writers left that died; the caller holds the lock of the directory."""
    for entry in sorted(directory.glob(f"*{TEMPORARY}*")):
        target, _, rest = entry.name.rpartition(TEMPORARY)
        # The writer died between moving the old bundle away and the new one in.
        if rest.startswith(_REPLACED) and not (directory / target).exists():
            os.rename(entry, directory / target)
        else:
            shutil.rmtree(entry, ignore_errors=True)
