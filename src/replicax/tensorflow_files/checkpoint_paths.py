"""Where TensorFlow keeps checkpoints: prefixes, state files and SavedModels."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

from replicax.foundation import errors
from replicax.tensorflow_files.tensor_bundle import INDEX_SUFFIX

# In a directory of checkpoints: the text file that names the newest one.
STATE_FILE = "checkpoint"
_LATEST = re.compile(r'^\s*model_checkpoint_path:\s*(".*"|\'.*\')\s*$', re.MULTILINE)
_MAX_STATE_BYTES = 1 << 24


def find_prefix(path: str | os.PathLike[str]) -> Path | None:
    """Returns the prefix of the checkpoint that a path means, or None.

    Args:
      path: A prefix; a directory with a state file, whose newest checkpoint is meant; a
        SavedModel, or its directory of variables.
    """
    given = Path(path)
    for candidate in (given, given / "variables" / "variables", given / "variables"):
        if is_prefix(candidate):
            return candidate
    return latest_prefix(given)


def require_prefix(path: str | os.PathLike[str]) -> Path:
    """Returns the prefix of the checkpoint that a path means, or raises NotFoundError."""
    found = find_prefix(path)
    if found is None:
        raise errors.NotFoundError(
            f"{os.fspath(path)} must be the prefix of a TensorFlow checkpoint, a directory of "
            "them, or a SavedModel",
            f"there is neither {os.fspath(path)}{INDEX_SUFFIX} nor a state file "
            f"{STATE_FILE!r} nor variables/variables{INDEX_SUFFIX}",
            "Correct the path; a prefix has no `.index`, such as `run/ckpt-3`.",
        )
    return found


def is_prefix(path: Path) -> bool:
    """Returns whether a path is the prefix of a checkpoint."""
    return bool(path.name) and path.with_name(path.name + INDEX_SUFFIX).is_file()


def latest_prefix(directory: str | os.PathLike[str]) -> Path | None:
    """Returns the newest checkpoint that the state file of a directory names, if it exists.

    A state file with the paths of another place, from where the directory was copied, is
    understood.
    """
    return next(filter(is_prefix, latest_named(directory)), None)


def latest_named(directory: str | os.PathLike[str]) -> list[Path]:
    """Returns the paths that the state file of a directory may mean by its newest checkpoint."""
    folder = Path(directory)
    try:
        with open(folder / STATE_FILE, encoding="utf-8") as file:
            found = _LATEST.search(file.read(_MAX_STATE_BYTES))
        name = None if found is None else ast.literal_eval(found[1])
    except (OSError, UnicodeDecodeError, ValueError, SyntaxError):
        return []
    return [] if name is None else [folder / name, folder / Path(name).name]
