"""Small disks, and full ones."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from replicax.foundation import errors

_SECONDS = 30.0
_PIECE = bytes(1 << 20)


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[Path]:
    """A disk of a given size, which is removed at the end of the block.

        with rx.testing.small_disk(1 << 20) as disk:
            manager = rx.train.CheckpointManager(checkpoint, disk, max_to_keep=1)

    Args:
      num_bytes: Its size; the system rounds it up to whole pages.

    Yields:
      Its directory.

    Raises:
      InvalidArgumentError: The size is none.
      PermissionDeniedError: This process may not mount file systems.

    >>> import contextlib
    >>> import replicax as rx
    >>> with contextlib.suppress(rx.errors.PermissionDeniedError):  # only root may mount
    ...     with rx.testing.small_disk(1 << 20) as disk:
    ...         _ = (disk / "a").write_bytes(b"x")
    """
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or num_bytes < 1:
        raise errors.InvalidArgumentError(
            "A disk has a positive number of bytes", f"it is {num_bytes!r}", "Pass an int."
        )
    directory = Path(tempfile.mkdtemp(prefix="rx-disk-"))
    try:
        _mount(directory, num_bytes)
        try:
            yield directory
        finally:
            # Lazily: open files keep it until they are closed.
            _run("umount", "--lazy", str(directory))
    finally:
        directory.rmdir()


def _mount(directory: Path, num_bytes: int) -> None:
    options = f"size={num_bytes},mode=0700"
    try:
        done = _run("mount", "-t", "tmpfs", "-o", options, "replicax-test", str(directory))
        reason = done.stderr.strip()
    except OSError as error:
        done, reason = None, str(error)
    if done is None or done.returncode:
        raise errors.PermissionDeniedError(
            "A small disk is a tmpfs, which this process must be allowed to mount",
            f"it is not: {reason}",
            "Run as root, or in a container with the capability SYS_ADMIN.",
        )


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)


@contextlib.contextmanager
def fill(path: str | os.PathLike[str], spare: int = 0) -> Iterator[int]:
    """Fills the disk of a directory, and frees it at the end of the block.

        with rx.testing.small_disk(1 << 20) as disk, rx.testing.fill(disk):
            ...  # Every write to it fails with ENOSPC.

    Take a small disk: others share a large one.

    Args:
      path: A directory on it.
      spare: How many bytes stay free, about.

    Yields:
      How many bytes it took.

    >>> import contextlib
    >>> import replicax as rx
    >>> with contextlib.suppress(rx.errors.PermissionDeniedError):  # only root may mount
    ...     with rx.testing.small_disk(1 << 20) as disk, rx.testing.fill(disk):
    ...         with contextlib.suppress(OSError):  # No space left on device
    ...             _ = (disk / "a").write_bytes(bytes(8192))
    """
    with tempfile.TemporaryFile(prefix="rx-fill-", dir=path, buffering=0) as file:
        size = len(_PIECE)
        while size:
            try:
                written = os.write(file.fileno(), _PIECE[:size])
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                written = 0
            if written < size:
                size //= 2
        taken = file.tell()
        if spare:
            os.ftruncate(file.fileno(), max(0, taken - spare))
        yield taken
