"""Reads checkpoints without the program that wrote them."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from replicax.checkpointing import sources
from replicax.checkpointing.directory import steps_in
from replicax.checkpointing.manifest import ArrayEntry, SavedCheckpoint
from replicax.checkpointing.tensorflow_checkpoint import TensorFlowCheckpoint
from replicax.foundation import errors
from replicax.tensorflow_files import checkpoint_paths

_log = logging.getLogger(__name__)
# The seconds between two looks at a directory, and between two log messages of a long wait.
_POLL_S = 0.5
_REPORT_S = 60.0


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Returns the path of the newest checkpoint in a directory, by number; None if empty.

    In a directory of TensorFlow checkpoints, or of weights that `model.save_weights` wrote, it is
    the one that their state file names. Needs no lock: works beside a process that saves.

    >>> import tempfile
    >>> latest_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    own = next((str(path) for path in reversed(steps_in(Path(directory)).values())), None)
    if own is not None:
        return own
    named = checkpoint_paths.latest_named(directory)
    return next((str(path) for path in named if sources.file_of(path).is_file()), None)


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields each new checkpoint of a directory.

    For a program that evaluates what another one trains. Of the checkpoints that appear while the
    caller is busy, only the newest is yielded. Needs no lock.

    Args:
      checkpoint_dir: The directory of a CheckpointManager; it need not exist yet.
      min_interval_secs: The least time between two checkpoints.
      timeout: The seconds to wait for a new checkpoint; None for no limit.
      timeout_fn: Called after a timeout: ends the iteration if it returns True, else waits again.
        Without it, the iteration ends.

    >>> import tempfile
    >>> import replicax as rx
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = rx.train.Checkpoint(v=rx.Variable(1.0)).save(folder.name + "/ckpt")
    >>> list(checkpoints_iterator(folder.name, timeout=0)) == [path]
    True
    >>> folder.cleanup()
    """
    last: str | None = None
    while True:
        found = _wait_for_new(Path(checkpoint_dir), last, timeout)
        if found is None:
            if timeout_fn is None or timeout_fn():
                return
            continue
        last, start = found, time.monotonic()
        yield found
        time.sleep(max(start + min_interval_secs - time.monotonic(), 0))


def _wait_for_new(directory: Path, last: str | None, timeout: float | None) -> str | None:
    """Returns the newest checkpoint if it is another one than `last`; None after the timeout."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    reported = time.monotonic()
    while True:
        found = latest_checkpoint(directory)
        if found is not None and found != last:
            return found
        now = time.monotonic()
        if now >= end:
            return None
        if now - reported >= _REPORT_S:
            reported = now
            _log.info("Waiting for a new checkpoint in %s (last: %s)", directory, last)
        time.sleep(min(_POLL_S, end - now))


def list_variables(path: str | os.PathLike[str]) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns name, shape and dtype of every array in a checkpoint, by name.

    Reads the manifest only. Of a TensorFlow checkpoint (its prefix, or a directory with its state
    file) or a SavedModel, it lists the tensors by TensorFlow's names.

    >>> import replicax as rx, tempfile
    >>> path = rx.train.Checkpoint(v=rx.Variable([1.0, 2.0])).write(tempfile.mkdtemp() + "/a")
    >>> list_variables(path)
    [('v', (2,), 'float32')]
    """
    prefix = sources.tensorflow_prefix(Path(path))
    if prefix is not None:
        return TensorFlowCheckpoint(prefix).listed()
    with SavedCheckpoint(Path(path)) as saved:
        return [(entry.name, entry.shape, entry.dtype) for entry in saved.arrays]


def load_variable(path: str | os.PathLike[str], name: str) -> np.ndarray:
    """Returns one array of a checkpoint, after comparing its checksums.

    Reads the manifest and the bytes of this array only. Takes TensorFlow checkpoints and
    SavedModels as `list_variables` does; a name there may be the path of an object.

    Raises:
      CheckpointError: There is no such checkpoint, or it cannot be read.
      NotFoundError: There is no such array in it.

    >>> import replicax as rx, tempfile
    >>> path = rx.train.Checkpoint(v=rx.Variable([1.0, 2.0])).write(tempfile.mkdtemp() + "/a")
    >>> load_variable(path, "v")
    array([1., 2.], dtype=float32)
    """
    prefix = sources.tensorflow_prefix(Path(path))
    if prefix is not None:
        return TensorFlowCheckpoint(prefix)[name]
    with SavedCheckpoint(Path(path)) as saved:
        entry = saved.find(name)
        if not isinstance(entry, ArrayEntry):
            names = [entry.name for entry in saved.arrays]
            raise errors.NotFoundError(
                f"{name!r} must be an array in the checkpoint {os.fspath(path)}",
                f"it holds {', '.join(names[:10]) or 'no array'}",
                "Choose one of them; `rx.train.list_variables` lists all.",
            )
        return saved.read([entry.name])[entry.name]
