"""`tf.io.gfile`: files of this machine, and of remote stores through fsspec."""

from __future__ import annotations

import dataclasses
import glob as local_glob
import io
import os
import shutil
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

from replicax.foundation import errors, lazy
from replicax.tf import namespaces
from replicax.tf.arguments import Ignored, PathValue, Value
from replicax.tf.errors import AlreadyExistsError

if TYPE_CHECKING:
    import fsspec
else:
    fsspec = lazy.module("fsspec")

__all__ = [
    "GFile",
    "copy",
    "exists",
    "get_registered_schemes",
    "glob",
    "isdir",
    "join",
    "listdir",
    "makedirs",
    "mkdir",
    "remove",
    "rename",
    "rmtree",
    "stat",
    "walk",
]


def path_text(path: PathValue) -> str:
    """Returns a path as text; it may be text, bytes, a `Path` or a tensor of them.

    >>> import pathlib
    >>> path_text(b"a/b"), path_text(pathlib.PurePosixPath("a/b"))
    ('a/b', 'a/b')
    """
    if hasattr(path, "numpy"):
        path = path.numpy()
    if hasattr(path, "item") and not isinstance(path, str | bytes):
        path = path.item()
    return os.fsdecode(path).removeprefix("file://")


def _remote(path: str) -> Any:
    """Returns the fsspec file system of a path such as "gs://bucket/file"; None for local ones."""
    return fsspec.core.url_to_fs(path)[0] if "://" in path else None


def _missing(path: str) -> errors.NotFoundError:
    return errors.NotFoundError(
        "The file must exist", f"there is no {path!r}", "Correct the path, or write it first."
    )


class GFile:
    r"""A file that is read as text, or as bytes if the mode has a "b".

    Args:
      name: The path; with a scheme such as "gs://" for a remote file.
      mode: "r", "w", "a", with "+" or "b".

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with GFile(folder.name + "/a.txt", "w") as file:
    ...     file.write("one\ntwo\n")
    >>> with GFile(folder.name + "/a.txt") as file:
    ...     list(file), file.size()
    (['one\n', 'two\n'], 8)
    >>> folder.cleanup()
    """

    def __init__(self, name: Ignored, mode: str = "r") -> None:
        self.name = path_text(name)
        self.mode = mode
        if set(mode) - set("rwab+x") or not mode:
            raise errors.InvalidArgumentError(
                "The mode of a file is 'r', 'w' or 'a', with '+' or 'b'",
                f"it is {mode!r}",
                "Correct the mode.",
            )
        try:
            self._file = self._open()
        except FileNotFoundError:
            raise _missing(self.name) from None
        except PermissionError as error:
            raise errors.PermissionDeniedError(
                f"{self.name!r} must be accessible in mode {mode!r}", str(error), "Check its owner."
            ) from None

    def _open(self) -> IO[Any]:
        if "://" in self.name:
            opened: Any = fsspec.open(self.name, self.mode if "b" in self.mode else f"{self.mode}t")
            return opened.open()
        if "b" in self.mode:
            return open(self.name, self.mode)
        return open(self.name, self.mode, encoding="utf-8", newline="")

    def __enter__(self) -> GFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def read(self, n: int = -1) -> Any:
        """Returns `n` bytes or characters; all that are left for -1."""
        return self._file.read(n)

    def readline(self) -> Any:
        """Returns the next line with its end; empty at the end of the file."""
        return self._file.readline()

    def readlines(self) -> list[Any]:
        """Returns the lines that are left."""
        return list(self)

    def write(self, file_content: Value) -> None:
        """Appends text, or bytes; text is encoded as UTF-8 in a binary file."""
        if "b" in self.mode and isinstance(file_content, str):
            file_content = file_content.encode("utf-8")
        elif "b" not in self.mode and isinstance(file_content, bytes):
            file_content = file_content.decode("utf-8")
        self._file.write(file_content)

    def size(self) -> int:
        """Returns the length of the file in bytes."""
        if self.writable():
            self.flush()
        return stat(self.name).length

    def seek(self, offset: int | None = None, whence: int = io.SEEK_SET) -> None:
        """Moves to a position."""
        self._file.seek(offset or 0, whence)

    def tell(self) -> int:
        """Returns the position."""
        return self._file.tell()

    def seekable(self) -> bool:
        """Returns True."""
        return self._file.seekable()

    def readable(self) -> bool:
        """Tells whether the file can be read."""
        return self._file.readable()

    def writable(self) -> bool:
        """Tells whether the file can be written."""
        return self._file.writable()

    def flush(self) -> None:
        """Writes what is buffered."""
        self._file.flush()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._file.close()


def exists(path: PathValue) -> bool:
    """Tells whether a file or directory exists.

    >>> exists("/no/such/file")
    False
    """
    name = path_text(path)
    remote = _remote(name)
    return os.path.exists(name) if remote is None else bool(remote.exists(name))


def isdir(path: PathValue) -> bool:
    """Tells whether a path is a directory.

    >>> isdir("/no/such/directory")
    False
    """
    name = path_text(path)
    remote = _remote(name)
    return os.path.isdir(name) if remote is None else bool(remote.isdir(name))


def listdir(path: PathValue) -> list[str]:
    """Returns the names in a directory, sorted; those of remote directories end with a slash.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     makedirs(join(folder, "a", "b"))
    ...     listdir(folder)
    ['a']
    """
    name = path_text(path)
    if not isdir(name):
        raise errors.NotFoundError(
            "`listdir` needs a directory", f"there is none at {name!r}", "Correct the path."
        )
    remote = _remote(name)
    if remote is None:
        return sorted(os.listdir(name))
    found = remote.ls(name, detail=True)
    ends = {"directory": "/", "file": ""}
    return sorted(
        os.path.basename(entry["name"].rstrip("/")) + ends.get(entry["type"], "") for entry in found
    )


def glob(pattern: PathValue) -> list[str]:
    """Returns the files that match a pattern, or one of several, sorted.

    >>> glob("/no/such/*.file")
    []
    """
    given = pattern if isinstance(pattern, list | tuple) else [pattern]
    found: set[str] = set()
    for name in map(path_text, given):
        remote = _remote(name)
        if remote is None:
            found.update(local_glob.glob(name))
        else:
            found.update(map(remote.unstrip_protocol, remote.glob(name)))
    return sorted(found)


def makedirs(path: PathValue) -> None:
    """Makes a directory and those above it; idempotent."""
    name = path_text(path)
    remote = _remote(name)
    if remote is None:
        os.makedirs(name, exist_ok=True)
    else:
        remote.makedirs(name, exist_ok=True)


def mkdir(path: PathValue) -> None:
    """Makes a directory, whose parent must exist."""
    name = path_text(path)
    if exists(name):
        raise _existing(name, "Use `makedirs`, which accepts an existing directory.")
    remote = _remote(name)
    if remote is not None:
        remote.mkdir(name)
        return
    try:
        os.mkdir(name)
    except FileNotFoundError:
        raise _missing(os.path.dirname(name)) from None


def remove(path: PathValue) -> None:
    """Deletes a file."""
    name = path_text(path)
    if not exists(name):
        raise _missing(name)
    remote = _remote(name)
    if remote is None:
        os.remove(name)
    else:
        remote.rm_file(name)


def rmtree(path: PathValue) -> None:
    """Deletes a directory and everything in it."""
    name = path_text(path)
    if not exists(name):
        raise _missing(name)
    remote = _remote(name)
    if remote is not None:
        remote.rm(name, recursive=True)
    elif os.path.isdir(name):
        shutil.rmtree(name)
    else:
        os.remove(name)


def copy(src: PathValue, dst: PathValue, overwrite: bool = False) -> None:
    """Copies a file, also between stores."""
    source, target = _checked_pair(src, dst, overwrite)
    if "://" not in source and "://" not in target:
        shutil.copyfile(source, target)
        return
    with GFile(source, "rb") as reader, GFile(target, "wb") as writer:
        while chunk := reader.read(1 << 20):
            writer.write(chunk)


def rename(src: PathValue, dst: PathValue, overwrite: bool = False) -> None:
    """Moves a file or directory."""
    source, target = _checked_pair(src, dst, overwrite)
    remote = _remote(source)
    if remote is None:
        os.replace(source, target)
    else:
        remote.mv(source, target, recursive=isdir(source))


def _checked_pair(src: PathValue, dst: PathValue, overwrite: bool) -> tuple[str, str]:
    source, target = path_text(src), path_text(dst)
    if not exists(source):
        raise _missing(source)
    if not overwrite and exists(target):
        raise _existing(target, "Pass overwrite=True to replace it.")
    return source, target


def _existing(name: str, advice: str) -> AlreadyExistsError:
    return AlreadyExistsError("The target must not exist", f"{name!r} exists", advice)


@dataclasses.dataclass(frozen=True)
class FileStatistics:
    """What `stat` returns.

    >>> FileStatistics(3, 0, False).length
    3
    """

    length: int
    mtime_nsec: int
    is_directory: bool


def stat(path: PathValue) -> FileStatistics:
    """Returns length, time of the last change and kind of a file."""
    name = path_text(path)
    if not exists(name):
        raise _missing(name)
    remote = _remote(name)
    if remote is None:
        found = os.stat(name)
        return FileStatistics(found.st_size, found.st_mtime_ns, os.path.isdir(name))
    about = remote.info(name)
    changed: Any = about.get("mtime") or about.get("created") or 0
    seconds = changed.timestamp() if hasattr(changed, "timestamp") else float(changed)
    return FileStatistics(
        int(about.get("size") or 0), int(seconds * 1e9), about["type"] == "directory"
    )


def walk(
    top: PathValue, topdown: bool = True, onerror: Callable[[OSError], Any] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields the path, directories and files of a directory and those below it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     makedirs(join(folder, "a"))
    ...     [below for _, below, _ in walk(folder)]
    [['a'], []]
    """
    name = path_text(top)
    remote = _remote(name)
    if remote is None:
        yield from os.walk(name, topdown=topdown, onerror=onerror)
        return
    for folder, directories, files in remote.walk(name, topdown=topdown):
        yield remote.unstrip_protocol(folder), list(directories), list(files)


def join(path: PathValue, *paths: Any) -> str:
    """Returns a path of several parts.

    >>> join("gs://bucket", "folder", "file")
    'gs://bucket/folder/file'
    """
    return os.path.join(path_text(path), *map(path_text, paths))


def get_registered_schemes() -> list[str]:
    """Returns the schemes of paths that can be opened.

    >>> "file" in get_registered_schemes()
    True
    """
    return sorted({"", "file", *fsspec.available_protocols()})


__getattr__ = namespaces.refusing(__name__)
