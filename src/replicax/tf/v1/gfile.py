"""`tf.compat.v1.gfile`: the files of `tf.io.gfile` under their older names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replicax.tf.arguments import PathValue
from replicax.tf.io import gfile

__all__ = [
    "Copy",
    "DeleteRecursively",
    "Exists",
    "FastGFile",
    "GFile",
    "Glob",
    "IsDirectory",
    "ListDirectory",
    "MakeDirs",
    "MkDir",
    "Open",
    "Remove",
    "Rename",
    "Stat",
    "Walk",
]

GFile = Open = FastGFile = gfile.GFile


def Copy(oldpath: PathValue, newpath: PathValue, overwrite: bool = False) -> None:
    """Copies a file."""
    gfile.copy(oldpath, newpath, overwrite)


def DeleteRecursively(dirname: PathValue) -> None:
    """Deletes a directory and everything in it."""
    gfile.rmtree(dirname)


def Exists(filename: PathValue) -> bool:
    """Tells whether a file or directory exists.

    >>> Exists("/no/such/file")
    False
    """
    return gfile.exists(filename)


def Glob(filename: PathValue) -> list[str]:
    """Returns the files that match a pattern.

    >>> Glob("/no/such/*")
    []
    """
    return gfile.glob(filename)


def IsDirectory(dirname: PathValue) -> bool:
    """Tells whether a path is a directory.

    >>> IsDirectory("/")
    True
    """
    return gfile.isdir(dirname)


def ListDirectory(dirname: PathValue) -> list[str]:
    """Returns the names in a directory."""
    return gfile.listdir(dirname)


def MakeDirs(dirname: PathValue) -> None:
    """Makes a directory and those above it."""
    gfile.makedirs(dirname)


def MkDir(dirname: PathValue) -> None:
    """Makes a directory, whose parent must exist."""
    gfile.mkdir(dirname)


def Remove(filename: PathValue) -> None:
    """Deletes a file."""
    gfile.remove(filename)


def Rename(oldname: PathValue, newname: PathValue, overwrite: bool = False) -> None:
    """Moves a file or directory."""
    gfile.rename(oldname, newname, overwrite)


def Stat(filename: PathValue) -> Any:
    """Returns length, time of the last change and kind of a file."""
    return gfile.stat(filename)


def Walk(top: PathValue, in_order: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields the path, directories and files of a directory and those below it."""
    return gfile.walk(top, in_order)
