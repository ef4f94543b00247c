"""Reading and writing of programs: encodings, notebooks, directories; nothing is lost.

A file is written to a temporary file beside it, which then takes its place. A byte order mark,
the encoding and the ends of lines stay as they are.
"""

from __future__ import annotations

import codecs
import io
import os
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from replicax.foundation import errors
from replicax.porting import notebooks
from replicax.porting.findings import PortedSource
from replicax.porting.program import port_text

SUFFIXES = (".py", ".ipynb")
# Directories with the code of others.
_SKIPPED = frozenset(
    (
        "__pycache__",
        "node_modules",
        "site-packages",
        "dist-packages",
        "venv",
        "env",
        "build",
        "dist",
    )
)


@dataclass
class PortedFile:
    """A file after the port.

    Attributes:
      path: The file.
      sources: The program, or the cells of a notebook, by their numbers (None for a program).
      problem: Why the file was not ported; empty if it was.
      is_changed: Whether its text changes.
      is_written: Whether it was written.
    """

    path: Path
    sources: list[tuple[int | None, PortedSource]] = field(default_factory=list)
    problem: str = ""
    is_changed: bool = False
    is_written: bool = False


def find_files(path: Path) -> list[Path]:
    """Returns the programs and notebooks of a directory, or the one that is given.

    Raises:
      NotFoundError: There is no such file or directory.
      InvalidArgumentError: It is neither a Python program nor a notebook.
    """
    if path.is_dir():
        return list(_walk(path))
    if not path.exists():
        raise errors.NotFoundError(
            "`replicax port` needs a file or a directory",
            f"{path} does not exist",
            "Give a .py file, a .ipynb file, or a directory with some.",
        )
    if path.suffix not in SUFFIXES:
        raise errors.InvalidArgumentError(
            "`replicax port` reads .py and .ipynb files",
            f"{path} is neither",
            "Give one of these, or a directory with some.",
        )
    return [path]


def port_file(path: Path, *, tape: bool = False, write: bool = False) -> PortedFile:
    """Ports one file.

    Args:
      path: A program or a notebook.
      tape: Whether tapes become `rx.value_and_grad`.
      write: Whether to write what changes.
    """
    result = PortedFile(path)
    try:
        data = path.read_bytes()
        ported = _port_bytes(data, result, tape)
        result.is_changed = ported != data
        if write and result.is_changed:
            _replace(path, ported)
            result.is_written = True
    except OSError as error:
        result.problem = f"cannot be read or written: {error.strerror or error}"
    return result


def _port_bytes(data: bytes, result: PortedFile, tape: bool) -> bytes:
    """Returns the ported file; the same bytes if it cannot be ported."""
    if b"\0" in data:
        result.problem = "a binary file"
        return data
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    is_notebook = result.path.suffix == ".ipynb"
    try:
        encoding = "utf-8" if is_notebook else _encoding(data)
        text = data[len(mark) :].decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        result.problem = f"cannot be decoded: {error}"
        return data
    if is_notebook:
        try:
            ported, cells = notebooks.port_notebook(text, tape=tape)
        except ValueError as error:
            result.problem = f"not a notebook: {error}"
            return data
        result.sources = [(number, source) for number, source in cells]
    else:
        source = port_text(text, tape=tape)
        result.sources = [(None, source)]
        result.problem = source.problem
        ported = source.text
    try:
        return mark + ported.encode(encoding)
    except UnicodeEncodeError as error:
        result.problem = f"cannot be encoded: {error}"
        return data


def _encoding(data: bytes) -> str:
    """Returns the encoding that a program declares."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return "utf-8" if encoding == "utf-8-sig" else encoding


def _replace(path: Path, data: bytes) -> None:
    """Writes a file at once: readers see the old one or the new one."""
    path = path.resolve()
    mode = path.stat().st_mode & 0o7777
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _walk(directory: Path) -> Iterator[Path]:
    """Yields the files below a directory in order, without hidden ones and virtual environments."""
    try:
        children = sorted(directory.iterdir())
    except OSError:
        # Reading it as a file fails too, and is reported.
        yield directory
        return
    for child in children:
        if child.name.startswith("."):
            continue
        if child.is_dir() and not child.is_symlink():
            is_environment = (child / "pyvenv.cfg").exists()
            if child.name not in _SKIPPED and not is_environment:
                yield from _walk(child)
        elif child.suffix in SUFFIXES and child.is_file():
            yield child
