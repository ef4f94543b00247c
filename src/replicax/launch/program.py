"""The program that every task of a group runs: a function, a script or a command."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from replicax.coordinator.shipping import serialization
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.launch.function_files import FunctionCall

# A function that is called in each process, the path of a Python script, or a command.
Program: TypeAlias = Callable[..., object] | str | os.PathLike[str] | Sequence[str]


@dataclasses.dataclass(frozen=True)
class PreparedProgram:
    """A program that can be started any number of times.

    Attributes:
      command: The command that each task runs, without the file of the result.
      name: What it is called in messages.
      is_function: Whether the tasks return values.
    """

    command: tuple[str, ...]
    name: str
    is_function: bool

    def command_for(self, result: Path) -> list[str]:
        """Returns the command of one task.

        Args:
          result: The file for what a function returns or raises.
        """
        return [*self.command, str(result)] if self.is_function else list(self.command)


def prepare(
    program: Program,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    *,
    directory: Path,
    num_devices: int = 0,
) -> PreparedProgram:
    """Prepares a program; a function is pickled into a file.

    Args:
      program: A function; the path of a Python script; or a command, as a list of strings.
      args: The positional arguments of the function; the command line of a script or command.
      kwargs: The keyword arguments of the function.
      directory: A directory that only this user can access.
      num_devices: The number of CPU devices of each task; 0 for JAX's own default.

    Raises:
      ArgumentTypeError: The program is none of these, or cannot be pickled.
      NotFoundError: There is no such script or command.
    """
    if callable(program):
        return _function(program, args, kwargs, directory, num_devices)
    if kwargs:
        raise errors.ArgumentTypeError(
            "A script or a command takes no keyword arguments",
            f"{', '.join(map(repr, kwargs))} were given",
            "Pass them in `args`, as they are written on a command line.",
        )
    words = [os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in args]
    if isinstance(program, str | os.PathLike):
        return _script(Path(program), words)
    is_command = isinstance(program, Sequence) and all(isinstance(word, str) for word in program)
    if not is_command or not program:
        raise errors.ArgumentTypeError(
            "A program must be a function, the path of a Python script, or a list of strings",
            f"it is {program!r} of type {type(program).__name__}",
            "Pass a function such as `train`, or ['python', '-c', 'print(1)'].",
        )
    return _command([*program, *words])


def _function(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    directory: Path,
    num_devices: int,
) -> PreparedProgram:
    name = str(getattr(function, "__qualname__", None) or type(function).__name__)
    pickled: Tree = (function, tuple(args), dict(kwargs or {}))
    shipped = serialization.ship(pickled)
    call = FunctionCall([bytes(b) for b in shipped.buffers], list(sys.path), num_devices)
    path = directory / f"{shipped.sha[:16]}.function"
    if not path.exists():
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(call))
        new.rename(path)
    command = (sys.executable, "-m", "replicax.launch.run_function", str(path))
    return PreparedProgram(command, name, is_function=True)


def _script(path: Path, words: Sequence[str]) -> PreparedProgram:
    if not path.is_file():
        raise errors.NotFoundError(
            "The program of a group must be a Python script that exists",
            f"there is no file {str(path)!r}",
            "Correct the path; a command is a list of strings.",
        )
    return PreparedProgram((sys.executable, str(path), *words), path.name, is_function=False)


def _command(words: Sequence[str]) -> PreparedProgram:
    first = sys.executable if words[0] in ("python", "python3") else words[0]
    if shutil.which(first) is None:
        raise errors.NotFoundError(
            "The program of a group must be a command that exists",
            f"there is no {first!r}",
            "Correct the first word, or PATH.",
        )
    return PreparedProgram((first, *words[1:]), Path(words[0]).name, is_function=False)
