"""Writes the files of a starter project."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from replicax.foundation import errors

# The files of `project`, which is the project that is written.
FILES = ("train.py", "config.toml", "test_train.py")


def write_project(directory: Path) -> list[Path]:
    """Writes a program that trains under every strategy, its config and its test.

    Args:
      directory: Where to; made if it is missing. Files that are there are never overwritten.

    Returns:
      The files.

    Raises:
      InvalidArgumentError: One of the files is there already, or the directory is a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     [path.name for path in write_project(Path(directory) / "project")]
    ['train.py', 'config.toml', 'test_train.py']
    """
    paths = [directory / name for name in FILES]
    found = [path for path in (directory, *paths) if path.exists()]
    if any(path.is_file() for path in found):
        raise errors.InvalidArgumentError(
            "A new project needs a directory without files of its names",
            f"{found[-1]} is there already",
            "Choose another directory.",
        )
    directory.mkdir(parents=True, exist_ok=True)
    templates = importlib.resources.files("replicax.starter") / "project"
    for path in paths:
        path.write_text((templates / path.name).read_text(encoding="utf-8"), encoding="utf-8")
    return paths
