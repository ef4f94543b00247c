"""Tasks of a cluster: their names, roles, incarnations and versions."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import sys
from typing import Literal, cast

from replicax.foundation import device_names, errors, runtime

# The role of a process in a parameter-server cluster; with keys it is authenticated.
Role = Literal["coordinator", "worker", "ps"]
ROLES: tuple[Role, ...] = ("coordinator", "worker", "ps")


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Task:
    """One task of a cluster.

    Example:
      >>> task = Task("ps", 1)
      >>> str(task), task.full_name
      ('/job:ps/task:1', '/job:ps/replica:0/task:1')
      >>> task.device("CPU", 0)
      '/job:ps/replica:0/task:1/device:CPU:0'
      >>> Task.parse("/job:worker/task:2")
      Task(job='worker', index=2)
    """

    job: str
    index: int

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.index}"

    @property
    def full_name(self) -> str:
        """The name with the replica, as TensorFlow writes it."""
        return f"/job:{self.job}/replica:0/task:{self.index}"

    @property
    def role(self) -> Role:
        """The job, which must be a role of a parameter-server cluster."""
        assert self.job in ROLES, self
        return cast("Role", self.job)

    def device(self, kind: str, index: int) -> str:
        """Returns the name of one of the task's devices."""
        return f"{self.full_name}/device:{kind.upper()}:{index}"

    @classmethod
    def parse(cls, name: str) -> Task:
        """Parses the name of a task, or of one of its devices."""
        spec = device_names.parse(name)
        if spec.job is None or spec.task is None or spec.replica not in (None, 0):
            raise errors.InvalidArgumentError(
                "The name of a task must have a job and a task",
                f"{name!r} was given",
                "Write '/job:worker/replica:0/task:1' or '/job:worker/task:1'.",
            )
        return cls(spec.job, spec.task)


def new_incarnation() -> int:
    """Returns a random id, never 0, for one incarnation of a process.

    Example:
      >>> new_incarnation() > 0
      True
    """
    return runtime.random_bits(62) + 1


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
