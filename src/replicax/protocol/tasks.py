"""Who takes part in a cluster: a role and a number."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import secrets
import sys

from replicax.protocol import messages

ROLES: tuple[messages.Role, ...] = ("coordinator", "worker", "ps")


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One process of a cluster.

    Example:
      >>> str(Task("ps", 1))
      '/job:ps/task:1'
    """

    role: messages.Role
    index: int

    def __str__(self) -> str:
        return f"/job:{self.role}/task:{self.index}"


def new_incarnation() -> int:
    """Returns a random number for one life of a process; never 0.

    Example:
      >>> new_incarnation() > 0
      True
    """
    return secrets.randbits(62) + 1


@functools.cache
def library_version() -> str:
    """Returns the version of this library."""
    try:
        return importlib.metadata.version("replicax")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"


def python_version() -> str:
    """Returns the version of Python as far as two tasks must agree on it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
