"""One checkpoint on disk: written all or not at all, and proved whole before it is used.

Note [What is on disk]
    All arrays of a checkpoint lie end to end in one stream of bytes, which Orbax writes and
    reads as a single uint8 array in chunk files. A file per array costs 2 ms each to write
    and 1 ms to read, one file for all is written by one thread only: 256 MB take 0.13 s in
    chunks of 8 MiB, 0.4 s as 64 arrays, 1.1 s as one. Names, shapes, types
    and checksums are in `manifest.json`, which is written last.

Note [The order of a save]
    chunk files and their directories -> fsync -> manifest -> fsync -> fsync of the temporary
    directory -> rename to the final name -> fsync of the directory around it. Whoever sees
    the final name sees a whole checkpoint, after a crash of the process or of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.checkpointing import manifest as manifests
from replicax.checkpointing.manifest import ArrayEntry, Manifest, StoredFile
from replicax.foundation import durable_files, errors, lazy

if TYPE_CHECKING:
    import orbax.checkpoint as orbax
    from etils import epath
else:
    orbax = lazy.module("orbax.checkpoint")
    epath = lazy.module("etils.epath")

ARRAYS = "arrays"
TEMPORARY = ".tmp-"
_REPLACED = "old-"
_CHUNK_BYTES = 8 << 20
# Says how the stream is cut; all other files are chunks, named by their number.
_LAYOUT_FILE = ".zarray"
_MAX_LAYOUT_BYTES = 1 << 16


def write(
    path: Path, stream: np.ndarray, describe: Callable[[dict[str, StoredFile]], Manifest]
) -> None:
    """Writes a checkpoint to `path`; a checkpoint that is there already is replaced.

    Args:
      path: The directory to make.
      stream: The bytes of all arrays.
      describe: Makes the manifest, given the files that hold the stream.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(temporary)
        if stream.size:
            _write_stream(temporary, stream)
        content = describe(_list_files(temporary))
        _sync_tree(temporary)
        with durable_files.synced(temporary / manifests.FILE_NAME) as file:
            file.write(content.encode())
        durable_files.sync_directory(temporary)
        _move_into_place(temporary, path)
    except (OSError, ValueError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, errors.DistributeError):
            raise
        raise cannot_write(path, error) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def cannot_write(path: Path, error: Exception) -> errors.CheckpointError:
    """The error for a checkpoint or directory that cannot be written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    wrapped = errors.CheckpointError(
        errors.message(
            f"The checkpoint {path} must be written and synced to disk",
            f"that failed: {reason}",
            "Older checkpoints are untouched; make room or repair the disk, then save again.",
        )
    )
    wrapped.errno = getattr(error, "errno", None)
    return wrapped


def _write_stream(checkpoint: Path, stream: np.ndarray) -> None:
    # The stream is ours alone: no need for Orbax to copy it once more.
    handler = orbax.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    options = orbax.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
    for written in _run(handler.serialize([stream], [_place_in(checkpoint)], [options])):
        written.result()


def _place_in(checkpoint: Path) -> Any:
    """Tells Orbax where the stream of a checkpoint is, and how it is stored."""
    kinds = orbax.type_handlers
    return kinds.ParamInfo(
        name=ARRAYS,
        parent_dir=epath.Path(checkpoint),
        is_ocdbt_checkpoint=False,
        use_compression=False,
        use_zarr3=False,
        ts_context=kinds.get_ts_context(use_ocdbt=False),
    )


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # Called from code that asyncio runs, as in a notebook: a loop of our own, next door.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _list_files(checkpoint: Path) -> dict[str, StoredFile]:
    found: dict[str, StoredFile] = {}
    for file in _files_below(checkpoint / ARRAYS):
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{file} is not a regular file")
        name = str(file.relative_to(checkpoint))
        found[name] = StoredFile(status.st_size, None)
        if file.name == _LAYOUT_FILE and status.st_size <= _MAX_LAYOUT_BYTES:
            found[name] = StoredFile(status.st_size, zlib.crc32(file.read_bytes()))
    return found


def padded_size(size: int) -> int:
    """Returns the next size that chunks of equal length make up; Orbax cuts no others."""
    count = max(1, -(-size // _CHUNK_BYTES))
    return -(-size // count) * count


def _files_below(directory: Path) -> Iterator[Path]:
    for parent, names, files in os.walk(directory):
        names.sort()
        for name in sorted(files):
            yield Path(parent, name)


def _sync_tree(directory: Path) -> None:
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            durable_files.sync_file(os.path.join(parent, name))
        durable_files.sync_directory(parent)


def _move_into_place(temporary: Path, path: Path) -> None:
    aside = path.with_name(f"{path.name}{TEMPORARY}{_REPLACED}{secrets.token_hex(4)}")
    if path.exists():
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
        durable_files.sync_directory(path.parent)
    except OSError:
        # Not safe on disk, so not there at all: everything back to where it was.
        if path.exists():
            os.rename(path, temporary)
        if aside.exists():
            os.rename(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """Deletes a checkpoint; a crash on the way leaves no half of it under its name."""
    aside = path.with_name(f"{path.name}{TEMPORARY}gone-{secrets.token_hex(4)}")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Cleans up after writers that died; only for the one who holds the directory's lock."""
    for entry in sorted(directory.glob(f"*{TEMPORARY}*")):
        target, _, rest = entry.name.rpartition(TEMPORARY)
        # The writer died between moving the old checkpoint away and the new one in.
        if rest.startswith(_REPLACED) and not (directory / target).exists():
            os.rename(entry, directory / target)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def read(path: Path, content: Manifest) -> np.ndarray:
    """Reads the bytes of all arrays; DataLossError if one is not as it was written."""
    if not content.size:
        return np.empty(0, np.uint8)
    _check_files(path, content)
    stream = _read_stream(path)
    _verify(path, stream, [e for e in content.entries.values() if isinstance(e, ArrayEntry)])
    return stream


def _read_stream(path: Path) -> np.ndarray:
    try:
        handler = orbax.type_handlers.NumpyHandler()
        (stream,) = _run(handler.deserialize([_place_in(path)]))
    except Exception as error:  # Whatever Orbax makes of damaged files.
        raise damaged(path / ARRAYS, f"Orbax cannot read it ({str(error)[:200]})") from error
    return stream


def _check_files(path: Path, content: Manifest) -> None:
    """Compares the files with the manifest before Orbax opens any of them."""
    try:
        found = _list_files(path)
    except (OSError, ValueError) as error:
        raise damaged(path, f"its files cannot be read ({error})") from error
    for name in sorted(found.keys() | content.files.keys()):
        wanted, file = content.files.get(name), path / name
        if name not in found:
            raise damaged(file, "the file is missing")
        if wanted is None:
            raise damaged(file, "the checkpoint was written without this file")
        if found[name].size != wanted.size:
            raise damaged(file, f"it has {found[name].size} bytes instead of {wanted.size}")
        if found[name].crc32 != wanted.crc32:
            raise damaged(file, "its checksum differs")
    _check_layout(path / ARRAYS / _LAYOUT_FILE, content)


def _check_layout(file: Path, content: Manifest) -> None:
    """Makes sure that reading allocates what the files hold, and nothing more."""
    try:
        layout = json.loads(file.read_bytes())
        (chunk,) = layout["chunks"]
        expected = {"shape": [content.size], "dtype": "|u1", "compressor": None, "filters": None}
        is_as_written = all(layout[key] == value for key, value in expected.items())
        count = -(-content.size // chunk)
        chunks = [content.files[f"{ARRAYS}/{i}"].size for i in range(count)]
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise damaged(file, f"it does not describe the arrays ({error!r})") from error
    if not is_as_written or any(size != chunk for size in chunks):
        raise damaged(file, "it does not describe the arrays of the manifest")


def damaged(file: Path, found: str) -> errors.DataLossError:
    """The error for a checkpoint that is not as it was written."""
    return errors.DataLossError(
        errors.message(
            f"{file} must hold what was saved",
            found,
            "Restore an older checkpoint; `CheckpointManager.restore_latest()` does so itself.",
        )
    )


def array_in(stream: np.ndarray, entry: ArrayEntry) -> np.ndarray:
    """Returns an array of a stream, without a copy."""
    part = stream[entry.offset : entry.offset + entry.nbytes]
    return part.view(manifests.dtype_named(entry.dtype)).reshape(entry.shape)


def _verify(path: Path, stream: np.ndarray, entries: Sequence[ArrayEntry]) -> None:
    parts = [stream[entry.offset : entry.offset + entry.nbytes] for entry in entries]
    for entry, found in zip(entries, checksums(parts), strict=True):
        if found != entry.crc32:
            raise damaged(path, f"the bytes of {entry.name!r} have another checksum")
    end = 0
    for offset, nbytes in [*sorted((e.offset, e.nbytes) for e in entries), (stream.size, 0)]:
        if stream[end:offset].any():
            raise damaged(path, "the bytes between the arrays are not empty")
        end = max(end, offset + nbytes)


def checksums(parts: Sequence[np.ndarray]) -> list[int]:
    """Returns the CRC-32 of each array of bytes; zlib lets go of the GIL meanwhile."""
    if sum(part.nbytes for part in parts) < _CHUNK_BYTES:
        return [zlib.crc32(part.data) for part in parts]
    with ThreadPoolExecutor(os.cpu_count(), "ThreadPoolExecutor-checksum") as pool:
        return list(pool.map(zlib.crc32, [part.data for part in parts]))
