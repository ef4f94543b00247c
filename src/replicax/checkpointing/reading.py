"""Looking into checkpoints without the program that wrote them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from replicax.checkpointing import manifest as manifests
from replicax.checkpointing import storage
from replicax.checkpointing.directory import steps_in
from replicax.checkpointing.manifest import ArrayEntry
from replicax.foundation import errors


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Returns the path of the newest checkpoint in a directory, by number; None if empty.

    Needs no lock: works beside a process that saves.

    >>> import tempfile
    >>> latest_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    return next((str(path) for path in reversed(steps_in(Path(directory)).values())), None)


def list_variables(path: str | os.PathLike[str]) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns name, shape and dtype of every array in a checkpoint, by name.

    >>> import replicax as rx, tempfile
    >>> path = rx.train.Checkpoint(v=rx.Variable([1.0, 2.0])).write(tempfile.mkdtemp() + "/a")
    >>> list_variables(path)
    [('v', (2,), 'float32')]
    """
    entries = manifests.read(Path(path)).entries.values()
    found = [(e.name, e.shape, e.dtype) for e in entries if isinstance(e, ArrayEntry)]
    return sorted(found)


def load_variable(path: str | os.PathLike[str], name: str) -> np.ndarray:
    """Returns one array of a checkpoint, which is read and checked whole.

    >>> import replicax as rx, tempfile
    >>> path = rx.train.Checkpoint(v=rx.Variable([1.0, 2.0])).write(tempfile.mkdtemp() + "/a")
    >>> load_variable(path, "v")
    array([1., 2.], dtype=float32)
    """
    content = manifests.read(Path(path))
    entry = content.find(name)
    if not isinstance(entry, ArrayEntry):
        names = [n for n, _, _ in list_variables(path)]
        raise errors.NotFoundError(
            errors.message(
                f"{name!r} must be an array in the checkpoint {os.fspath(path)}",
                f"it holds {', '.join(names[:10]) or 'no array'}",
                "Choose one of them; `rx.train.list_variables` lists all.",
            )
        )
    return storage.array_in(storage.read(Path(path), content), entry).copy()


def verify(path: Path) -> None:
    """Reads a whole checkpoint and raises DataLossError if anything is not as it was saved."""
    storage.read(path, manifests.read(path))
