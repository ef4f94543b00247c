"""The tasks of a group: those of a cluster that train in lock step, in order."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import socket

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.foundation import errors
from replicax.protocol.tasks import Task, library_version

# The jobs whose tasks are members, in the order of their indices.
_JOBS = ("chief", "worker")
# Packages whose versions must be the same: programs are compiled by each task for itself.
_PACKAGES = ("jax", "jaxlib")


@dataclasses.dataclass(frozen=True)
class Members:
    """The tasks of a group, by index.

    Attributes:
      tasks: The tasks; the first one is the chief.
      addresses: Their addresses.

    Example:
      >>> members = Members.of(ClusterSpec({"worker": ["a:1", "b:1"], "chief": ["c:1"]}))
      >>> [str(task) for task in members.tasks]
      ['/job:chief/task:0', '/job:worker/task:0', '/job:worker/task:1']
      >>> members.index_of("worker", 1)
      2
    """

    tasks: tuple[Task, ...]
    addresses: tuple[str, ...]

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Members:
        """Returns the members of a cluster."""
        found = [
            (Task(job, index), cluster.task_address(job, index))
            for job in _JOBS
            if job in cluster.jobs
            for index in cluster.task_indices(job)
        ]
        if not found:
            raise errors.InvalidArgumentError(
                "The cluster must have the job 'worker'",
                f"its jobs are {', '.join(map(repr, cluster.jobs)) or 'none'}",
                "Add the addresses of the workers.",
            )
        return cls(tuple(task for task, _ in found), tuple(where for _, where in found))

    @property
    def count(self) -> int:
        """The number of members."""
        return len(self.tasks)

    @property
    def digest(self) -> str:
        """A digest of all tasks and addresses."""
        rows = [[task.job, task.index, where] for task, where in self._rows()]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def _rows(self) -> list[tuple[Task, str]]:
        return list(zip(self.tasks, self.addresses, strict=True))

    def index_of(self, job: str, index: int) -> int:
        """Returns the index in the group of a task of the cluster."""
        try:
            return self.tasks.index(Task(job, index))
        except ValueError:
            raise errors.InvalidArgumentError(
                "A task that trains must be one of the group",
                f"{Task(job, index)} is not one of {', '.join(map(str, self.tasks))}",
                "Correct the task type and id; an evaluator uses a strategy of its own.",
            ) from None

    def name(self, index: int) -> str:
        """Returns the name of a member for messages."""
        return str(self.tasks[index])

    def place(self, index: int) -> str:
        """Returns the name of a member with its address."""
        return f"{self.tasks[index]} at {self.addresses[index]}"

    def names(self, indices: list[int]) -> str:
        """Returns the names of several members, the first ten of many."""
        shown = ", ".join(self.place(i) for i in indices[:10])
        return shown if len(indices) <= 10 else f"{shown} and {len(indices) - 10} more"

    def host(self, index: int) -> str:
        """Returns the host of a member, as other members reach it."""
        found = address.parse(self.addresses[index], self.name(index))
        return "127.0.0.1" if found.is_local else found.host


def versions() -> dict[str, str]:
    """Returns the versions that all members must have in common."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "replicax": library_version(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **found,
    }


def this_process() -> str:
    """Returns the host and the id of this process, for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"
