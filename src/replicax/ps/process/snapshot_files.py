"""Snapshots on disk: a directory of numbered bundles; see Note [The format of a bundle].

The value of each part is an array of its own, `parts/<number>/<name>`; programs of optimizers and
sums of gradients are arrays of bytes, `blobs/<index>`. The rest of the state is in the manifest.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import jax.numpy as jnp

from replicax.bundle import names, publishing
from replicax.bundle.data_files import Source, Target, write_stream
from replicax.bundle.dtypes import name_of_dtype
from replicax.bundle.manifest import PACKED_FILE, SNAPSHOT
from replicax.bundle.publishing import BundleWriter
from replicax.bundle.reading import Bundle, PackedBundle
from replicax.foundation import durable_files, errors, exclusive_files, uncached_files
from replicax.ps.store.snapshot import Cut, Loaded, Piece, State

_NUMBERED = re.compile(r"snapshot-(?P<number>[0-9]{1,18})")
# Single files were the format before bundles.
_OLD_FORMAT = "*.rxs"
_LOCK_FILE = ".writer.lock"

_log = logging.getLogger(__name__)


class GivenUpError(Exception):
    """Raised when a snapshot is no longer wanted while it is written."""


class Saved(NamedTuple):
    """A snapshot on disk: its number, and its size."""

    number: int
    num_bytes: int


class SnapshotDirectory:
    """The snapshots of one server. One process at a time holds it.

    Args:
      path: The directory; created if it does not exist.

    Raises:
      CheckpointError: Another process holds it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: int | None = None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = exclusive_files.hold(path / _LOCK_FILE)
            publishing.remove_leftovers(path)
            self._next = max(self._bundles(), default=0) + 1
        except exclusive_files.HeldError as error:
            raise errors.CheckpointError(
                f"One parameter server may keep its snapshots in {path}",
                f"that of process {error.holder or 'unknown'} does so",
                "End that process, or use another directory.",
            ) from error
        except OSError as error:
            self.close()
            raise publishing.cannot_write(path, error, SNAPSHOT) from error

    def close(self) -> None:
        """Releases the directory. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def save(
        self, cut: Cut, *, num_kept: int = 2, is_wanted: Callable[[float], bool] = lambda _: True
    ) -> Saved:
        """Writes a snapshot, and removes all but the newest.

        Args:
          cut: What to write; it is not closed.
          num_kept: How many snapshots to keep, this one included.
          is_wanted: Called before each piece with the share of all bytes that is written.

        Raises:
          CheckpointError: It could not be written; the older ones are unchanged.
          GivenUpError: `is_wanted` returned False.
        """
        number = self._next
        on_progress = functools.partial(_check_wanted, is_wanted)
        with BundleWriter(self._path / f"snapshot-{number:012d}", SNAPSHOT) as writer:
            with uncached_files.synced(writer.directory / PACKED_FILE) as file:
                writer.add(write_stream(file, PACKED_FILE, _sources(cut), on_progress))
            num_bytes = writer.publish(cut.state)
        self._next += 1
        # One that stays for now is no failure of the save; the next one tries again.
        with contextlib.suppress(OSError):
            _remove(list(self._bundles().values())[:-num_kept])
        return Saved(number, num_bytes)

    def load(self, use: Callable[[Loaded], None]) -> Saved | None:
        """Passes the newest good snapshot to a function; returns None if there is none.

        If the function raises an error of ours, the snapshot before is used, with a warning.

        Raises:
          ResourceExhaustedError: There is not enough memory; an older one would not help.
        """
        failures = [
            f"{path.name} cannot be used: an older, unreleased replicax wrote it in format RXPSSNAP"
            for path in self._path.glob(_OLD_FORMAT)
        ]
        bundles = self._bundles()
        newest = bundles[max(bundles)] if bundles else self._path
        for number, path in reversed(bundles.items()):
            try:
                with Bundle(path, SNAPSHOT) as bundle:
                    bundle.check_files()
                    use(_loaded(bundle))
                    num_bytes = bundle.num_bytes
            except errors.ResourceExhaustedError:
                raise
            except (errors.DistributeError, OSError) as error:
                failures.append(f"{path.name} cannot be used: {error}")
                continue
            if failures:
                # For people: the times of files decide nothing.
                older_s = max(0.0, newest.stat().st_mtime - path.stat().st_mtime)
                text = "%s is used, which is %.1f s older, because newer snapshots are lost: %s"
                _log.warning(text, path, older_s, "; ".join(failures))
            return Saved(number, num_bytes)
        if failures:
            text = "there is no snapshot left to start from in %s: %s"
            _log.warning(text, self._path, "; ".join(failures))
        return None

    def clear(self) -> None:
        """Removes all snapshots, when their job has ended.

        Raises:
          CheckpointError: They cannot be removed.
        """
        try:
            _remove(list(self._bundles().values()))
            durable_files.sync_directory(self._path)
        except OSError as error:
            raise publishing.cannot_write(self._path, error, SNAPSHOT) from error

    def _bundles(self) -> dict[int, Path]:
        """Returns the snapshots by number, the newest last; the times of files decide nothing."""
        found = {
            int(match["number"]): entry
            for entry in self._path.iterdir()
            if (match := _NUMBERED.fullmatch(entry.name))
        }
        return dict(sorted(found.items()))


def _remove(paths: list[Path]) -> None:
    for aside in [publishing.put_aside(path) for path in paths]:
        shutil.rmtree(aside, ignore_errors=True)


def _check_wanted(is_wanted: Callable[[float], bool], share: float) -> None:
    if not is_wanted(share):
        raise GivenUpError


def write(file: Target, cut: Cut, is_wanted: Callable[[float], bool] = lambda _: True) -> int:
    """Writes a snapshot into one empty file, to be sent; returns its length."""
    on_progress = functools.partial(_check_wanted, is_wanted)
    return publishing.write_packed(file, _sources(cut), cut.state, SNAPSHOT, on_progress)


def read(file: IO[bytes], label: str) -> tuple[Loaded, int]:
    """Returns the snapshot in one file, which stays open for as long as it is used, and its length.

    Raises:
      DistributeError: It cannot be used.
    """
    bundle = PackedBundle(file, SNAPSHOT, label)
    return _loaded(bundle), bundle.num_bytes


def _array_names(state: State) -> list[str]:
    """Returns the name of the array of each section."""
    parts = [names.child_name(f"parts/{p.spec.part}", p.spec.name) for p in state.parts]
    return parts + [f"blobs/{index}" for index in range(len(state.blobs))]


def _shapes(state: State) -> list[tuple[str | None, tuple[int, ...]]]:
    """Returns type and shape of the array of each section."""
    parts = [(name_of_dtype(jnp.dtype(p.spec.dtype)), p.spec.shape) for p in state.parts]
    return parts + [("uint8", (size,)) for size in state.blobs]


def _sources(cut: Cut) -> Iterator[Source]:
    forms = zip(_array_names(cut.state), _shapes(cut.state), cut.state.sections(), strict=True)
    for section, (name, (dtype, shape), (_, piece_bytes)) in enumerate(forms):
        assert dtype is not None, name
        rows = 0, shape[0] if shape else 1
        pieces = functools.partial(cut.pieces, section)
        yield Source(name, dtype, shape, rows, piece_bytes, pieces)


def _loaded(bundle: Bundle) -> Loaded:
    state = bundle.contents(State)
    found = _array_names(state)
    try:
        expected = dict(zip(found, _shapes(state), strict=True))
    except TypeError as error:
        raise bundle.damaged("", f"a part has an unknown type ({error})") from error
    stored = {name: (entry.dtype, entry.shape) for name, entry in bundle.arrays.items()}
    if expected != stored or len(expected) != len(found):
        raise bundle.damaged("", "its arrays are not those of its state")

    def pieces(section: int) -> Iterator[Piece]:
        return bundle.pieces(found[section])

    return Loaded(state, pieces)
