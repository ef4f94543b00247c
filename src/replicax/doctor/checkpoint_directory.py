"""The directory of checkpoints: whether it can be written, how fast, and its clock."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from replicax.doctor.findings import Check, Finding, Level

_NAME = "checkpoints"
_PIECE = os.urandom(1 << 20) * 4
# It writes at most so much, and stops earlier on slow disks.
_MOST_BYTES = 256 << 20
_WRITE_S = 3.0
# The seconds that the check may take, on a disk that hangs in `fsync`.
_TIMEOUT_S = 30.0
# A model of a GiB takes a minute at this speed.
_SLOW_BYTES_PER_S = 20 << 20
_SLOW_SYNC_S = 0.5
_LITTLE_SPACE, _TOO_LITTLE_SPACE = 10 << 30, 1 << 30
# How much the clock of a file server may differ.
_CLOCK_S = 2.0


def checks(directory: Path) -> list[Check]:
    """Returns the checks of a directory of checkpoints."""
    return [Check(_NAME, lambda: check(directory), _TIMEOUT_S)]


def check(directory: Path) -> Iterator[Finding]:
    """Writes and syncs a file, as a checkpoint does, and measures it."""
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        text = f"{str(existing)!r} is a file"
        yield Finding(_NAME, Level.PROBLEM, text, "Choose a directory.")
        return
    free = shutil.disk_usage(existing).free
    path = existing / f".replicax-doctor-{secrets.token_hex(8)}"
    try:
        size, seconds, sync_s, skew_s = _measure(path, min(_MOST_BYTES, free // 2))
    except OSError as error:
        text = f"{str(existing)!r} cannot be written: {error.strerror or error}"
        advice = "Choose a directory that this user can write, with free space."
        yield Finding(_NAME, Level.PROBLEM, text, advice)
        return
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    speed = size / max(seconds, 1e-9)
    text = (
        f"{existing}: {speed / 2**20:,.0f} MiB/s with fsync, {sync_s * 1000:.1f} ms for a small "
        f"file, {free / 2**30:,.1f} GiB free"
    )
    is_slow = speed < _SLOW_BYTES_PER_S or sync_s > _SLOW_SYNC_S
    if free < _TOO_LITTLE_SPACE:
        advice = "Free some, or choose another directory."
        yield Finding(_NAME, Level.PROBLEM, f"{text}: too little space", advice)
    elif is_slow or free < _LITTLE_SPACE:
        what = "slow" if is_slow else "little space"
        advice = (
            "Save less often, or on a faster disk; saving happens in the background."
            if is_slow
            else "Set `max_to_keep` of the CheckpointManager, or free some."
        )
        yield Finding(_NAME, Level.WARNING, f"{text}: {what}", advice)
    else:
        yield Finding(_NAME, Level.OK, text)
    if abs(skew_s) > _CLOCK_S:
        text = f"the clock of {existing} differs by {skew_s:+.1f} s from that of this host"
        yield Finding(_NAME, Level.WARNING, text, "Synchronize the clock of the file server.")


def _measure(path: Path, most: int) -> tuple[int, float, float, float]:
    """Returns bytes, seconds, the seconds to sync a small file, and the skew of its clock."""
    with path.open("xb", buffering=0) as file:
        started_s = time.monotonic()
        file.write(b"x" * 512)
        os.fsync(file.fileno())
        sync_s = time.monotonic() - started_s
        skew_s = os.fstat(file.fileno()).st_mtime - time.time()
        size, started_s = 0, time.monotonic()
        while size < most and time.monotonic() - started_s < _WRITE_S:
            size += file.write(_PIECE)
        os.fsync(file.fileno())
        return size, time.monotonic() - started_s, sync_s, skew_s
