"""Names of tasks, and of the devices that belong to them."""

from __future__ import annotations

import dataclasses

from replicax.foundation import devices, errors


@dataclasses.dataclass(frozen=True, order=True)
class TaskName:
    """One task of a cluster.

    >>> task = TaskName("ps", 1)
    >>> str(task), task.label
    ('/job:ps/replica:0/task:1', '/job:ps/task:1')
    >>> task.device("CPU", 0)
    '/job:ps/replica:0/task:1/device:CPU:0'
    >>> TaskName.parse("/job:worker/task:2")
    TaskName(job='worker', index=2)
    """

    job: str
    index: int

    def __str__(self) -> str:
        """Returns the full name of the task."""
        return f"/job:{self.job}/replica:0/task:{self.index}"

    @property
    def label(self) -> str:
        """The short name, as in messages for people."""
        return f"/job:{self.job}/task:{self.index}"

    def device(self, kind: str, index: int) -> str:
        """Returns the name of one of the task's devices."""
        return f"{self}/device:{kind.upper()}:{index}"

    @classmethod
    def parse(cls, name: str) -> TaskName:
        """Reads the name of a task, or of one of its devices."""
        spec = devices.parse(name)
        if spec.job is None or spec.task is None or spec.replica not in (None, 0):
            raise errors.InvalidArgumentError(
                "The name of a task must have a job and a task",
                f"{name!r} was given",
                "Write '/job:worker/replica:0/task:1' or '/job:worker/task:1'.",
            )
        return cls(spec.job, spec.task)
