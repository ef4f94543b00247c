"""Reading one checkpoint on several workers: all of them restore it, or none does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from replicax.bundle.writers import Writers
from replicax.checkpointing import sources
from replicax.foundation import errors

_T = TypeVar("_T")

# A network file system may show what another host has written only after a while.
_VISIBLE_S = 5.0
_POLL_S = 0.1


def require_same_path(path: Path | None, writers: Writers) -> None:
    """Raises on all workers unless they restore checkpoints of the same name, or none."""
    if writers.is_alone:
        return
    own = "no checkpoint" if path is None else path.name
    _require_same(
        "a checkpoint of one name", writers.together("restore", lambda: own, str), writers
    )


def read(
    path: Path, reader: Callable[[], _T], digest_of: Callable[[_T], str], writers: Writers
) -> _T:
    """Reads a checkpoint on all workers, after which nothing but `set_state` can fail.

    Args:
      path: The checkpoint.
      reader: Reads it and compares it with the objects of the program.
      digest_of: Returns the digest of the manifest that was read.
      writers: The workers.

    Raises:
      NotFoundError: Some workers do not have the checkpoint that others have.
      InvalidArgumentError: They have different ones, or objects that it does not fit.
      CheckpointError: One of them could not read it.
    """
    if writers.is_alone:
        return reader()
    _require_shared(path, writers)
    found: list[_T] = []

    def attempt() -> str:
        found.append(reader())
        return digest_of(found[0])

    digests = writers.together("restore: read", attempt, str)
    _require_same("the same checkpoint", digests, writers)
    return found[0]


def _require_shared(path: Path, writers: Writers) -> None:
    """Raises on all workers if some have a checkpoint that others do not have."""
    file = sources.file_of(path)
    if not any(writers.together("restore: look", file.is_file, bool)):
        # The reader says what is missing.
        return
    seen = writers.together("restore: look again", lambda: _appears(file), bool)
    if all(seen):
        return
    without = [writers.name_of(i) for i, is_there in enumerate(seen) if not is_there]
    raise errors.NotFoundError(
        f"All workers must be able to read the checkpoint {path}",
        f"{', '.join(without)} cannot find it, and {writers.name_of(seen.index(True))} can",
        "Save to a directory that all workers share, such as one of a network file system, under "
        "the same path; the chief is the only one that writes.",
    )


def _appears(file: Path) -> bool:
    end = time.monotonic() + _VISIBLE_S
    while not file.is_file():
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def _require_same(what: str, everywhere: Sequence[str], writers: Writers) -> None:
    if len(set(everywhere)) == 1:
        return
    first = everywhere[0]
    other = next(index for index, one in enumerate(everywhere) if one != first)
    raise errors.InvalidArgumentError(
        f"All workers must restore {what}",
        f"{writers.name_of(0)} has {first}, {writers.name_of(other)} has {everywhere[other]}",
        "Nothing was restored. Use `CheckpointManager.restore_or_initialize`, in which the chief "
        "chooses, and a directory that all workers share.",
    )
