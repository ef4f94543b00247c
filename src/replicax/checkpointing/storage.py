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
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator
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
# Arrays start at multiples of this: any type can be viewed in place.
ALIGNMENT = 64
TEMPORARY = ".tmp-"
_REPLACED = "old-"
_CHUNK_BYTES = 8 << 20
# Says how the stream is cut; all other files are chunks, named by their number.
_LAYOUT_FILE = ".zarray"
_MAX_LAYOUT_BYTES = 1 << 16
_DISCARD_S = 2.0


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
        files = _write_stream(temporary, stream) if stream.size else {}
        content = describe(files)
        _sync_tree(temporary)
        with durable_files.synced(temporary / manifests.FILE_NAME) as file:
            file.write(content.encode())
        durable_files.sync_directory(temporary)
        _move_into_place(temporary, path)
    except (OSError, ValueError, RuntimeError) as error:
        _discard(temporary)
        if isinstance(error, errors.DistributeError):
            raise
        raise cannot_write(path, error) from error
    except BaseException:
        _discard(temporary)
        raise


def _discard(temporary: Path) -> None:
    """Removes what was written, though some of Orbax's writers may not have noticed yet."""
    deadline = time.monotonic() + _DISCARD_S
    quiet = 0
    while quiet < 3 and time.monotonic() < deadline:
        shutil.rmtree(temporary, ignore_errors=True)
        quiet = 0 if temporary.exists() else quiet + 1
        time.sleep(0.02)


def cannot_write(path: Path, error: Exception) -> errors.CheckpointError:
    """The error for a checkpoint or directory that cannot be written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    wrapped = errors.CheckpointError(
        f"The checkpoint {path} must be written and synced to disk",
        f"that failed: {reason}",
        "Older checkpoints are untouched; make room or repair the disk, then save again.",
    )
    wrapped.errno = getattr(error, "errno", None)
    return wrapped


def _write_stream(checkpoint: Path, stream: np.ndarray) -> dict[str, StoredFile]:
    """Writes the stream through Orbax, and returns its files with their checksums."""
    # The stream is ours alone: no need for Orbax to copy it once more.
    handler = orbax.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    options = orbax.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
    chunks = np.split(stream, _num_chunks(stream.size))
    # Checksums are computed while the disk is busy; zlib lets go of the GIL.
    with _pool() as pool:
        sums = pool.map(zlib.crc32, [chunk.data for chunk in chunks])
        for written in _run(handler.serialize([stream], [_place_in(checkpoint)], [options])):
            written.result()
        files = {f"{ARRAYS}/{i}": StoredFile(chunks[i].size, s) for i, s in enumerate(sums)}
    layout = checkpoint / ARRAYS / _LAYOUT_FILE
    files[f"{ARRAYS}/{_LAYOUT_FILE}"] = StoredFile(
        layout.stat().st_size, zlib.crc32(layout.read_bytes())
    )
    return files


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "ThreadPoolExecutor-checkpoint")


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


def memory(size: int) -> np.ndarray:
    """Returns bytes that start where JAX can use arrays in place, without a copy."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def _num_chunks(size: int) -> int:
    return max(1, -(-size // _CHUNK_BYTES))


def padded_size(size: int) -> int:
    """Returns the next size that chunks of equal length make up; Orbax cuts no others."""
    count = _num_chunks(size)
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


def put_aside(path: Path) -> Path:
    """Takes a checkpoint out of the directory's list; what is left can be deleted at leisure."""
    aside = path.with_name(f"{path.name}{TEMPORARY}gone-{secrets.token_hex(4)}")
    os.rename(path, aside)
    return aside


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
    """Reads the bytes of all arrays; DataLossError if one is not as it was written.

    Orbax stores an array of bytes in chunks, each a plain file of its bytes. They are read
    straight into place, and checked while they are still in the processor's cache.
    """
    if not content.size:
        return np.empty(0, np.uint8)
    count = _check_files(path, content)
    stream = memory(content.size)
    chunks = np.split(stream, count)
    with _pool() as pool:
        jobs = [pool.submit(_read_chunk, path, i, chunks[i], content) for i in range(count)]
        for job in jobs:
            job.result()
    return stream


def _read_chunk(path: Path, number: int, chunk: np.ndarray, content: Manifest) -> None:
    name = f"{ARRAYS}/{number}"
    try:
        with open(path / name, "rb", buffering=0) as file:
            filled = 0
            while filled < chunk.size and (count := file.readinto(chunk[filled:].data)):
                filled += count
    except OSError as error:
        raise damaged(path / name, f"it cannot be read ({error})") from error
    if filled < chunk.size or zlib.crc32(chunk.data) != content.files[name].crc32:
        start = number * chunk.size
        arrays = [e for e in content.entries.values() if isinstance(e, ArrayEntry)]
        hit = [e.name for e in arrays if e.offset < start + chunk.size]
        hit = [e.name for e in arrays if e.name in hit and e.offset + e.nbytes > start]
        raise damaged(path / name, f"its checksum differs; it holds bytes of {hit[:5]}")


def _check_files(path: Path, content: Manifest) -> int:
    """Compares the files with the manifest; returns how many chunks there are."""
    try:
        found = {str(f.relative_to(path)): f.lstat() for f in _files_below(path / ARRAYS)}
    except OSError as error:
        raise damaged(path, f"its files cannot be listed ({error})") from error
    for name in sorted(found.keys() | content.files.keys()):
        wanted, file = content.files.get(name), path / name
        if name not in found:
            raise damaged(file, "the file is missing")
        if wanted is None:
            raise damaged(file, "the checkpoint was written without this file")
        if not stat.S_ISREG(found[name].st_mode):
            raise damaged(file, "it is not a regular file")
        if found[name].st_size != wanted.size:
            raise damaged(file, f"it has {found[name].st_size} bytes instead of {wanted.size}")
    return _check_layout(path, content)


def _check_layout(path: Path, content: Manifest) -> int:
    """Makes sure that the chunks are the stream that the manifest speaks of."""
    name = f"{ARRAYS}/{_LAYOUT_FILE}"
    file = path / name
    try:
        if content.files[name].size > _MAX_LAYOUT_BYTES:
            raise ValueError("it is too long")
        text = file.read_bytes()
        layout = json.loads(text)
        (chunk,) = layout["chunks"]
        expected = {"shape": [content.size], "dtype": "|u1", "compressor": None, "filters": None}
        is_as_written = all(layout[key] == value for key, value in expected.items())
        count = content.size // chunk
        chunks = [content.files[f"{ARRAYS}/{i}"].size for i in range(count)]
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise damaged(file, f"it does not describe the arrays ({error!r})") from error
    if zlib.crc32(text) != content.files[name].crc32:
        raise damaged(file, "its checksum differs")
    if not is_as_written or count * chunk != content.size or any(s != chunk for s in chunks):
        raise damaged(file, "it does not describe the arrays of the manifest")
    return count


def damaged(file: Path, found: str) -> errors.DataLossError:
    """The error for a checkpoint that is not as it was written."""
    return errors.DataLossError(
        f"{file} must hold what was saved",
        found,
        "Restore an older checkpoint; `CheckpointManager.restore_latest()` does so itself.",
    )


def array_in(stream: np.ndarray, entry: ArrayEntry) -> np.ndarray:
    """Returns an array of a stream, without a copy."""
    part = stream[entry.offset : entry.offset + entry.nbytes]
    return part.view(manifests.dtype_named(entry.dtype)).reshape(entry.shape)
