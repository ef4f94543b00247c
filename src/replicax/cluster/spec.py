"""ClusterSpec: the jobs, tasks and addresses of a cluster."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from replicax.cluster import address
from replicax.foundation import errors
from replicax.protocol.tasks import Task

_JOB_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
# `job_tasks` makes a list as long as the largest index.
_MAX_INDEX = 1_000_000


class ClusterSpec:
    """The tasks of a cluster and their addresses; immutable.

    Args:
      cluster: A dict from jobs to either a list of addresses, or a dict from task index to
        address, which may omit indices. Or another ClusterSpec, or the result of
        `as_cluster_def()`.

    Addresses must be unique, unless the server selects the port (0) itself.

    Raises:
      ArgumentTypeError: A job, its tasks or an address has another type.
      InvalidArgumentError: A job or a task occurs twice, or two tasks share an address; or a method
        names a job or task that is not there.

    >>> cluster = ClusterSpec({"worker": ["a:2222", "b:2222"], "ps": {1: "c:2222"}})
    >>> cluster.jobs, cluster.num_tasks("worker"), cluster.task_address("ps", 1)
    (['worker', 'ps'], 2, 'c:2222')
    >>> cluster.job_tasks("ps")
    [None, 'c:2222']
    """

    def __init__(self, cluster: object) -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs = cluster._jobs
            return
        self._jobs = {_job_name(job): _tasks(job, tasks) for job, tasks in _job_items(cluster)}
        _check_addresses(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the jobs as lists of addresses; as dicts if indices are omitted."""
        return {
            job: list(tasks.values()) if _is_dense(tasks) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> list[dict[str, Any]]:
        """Returns the cluster as plain lists and dicts, which JSON preserves.

        One entry per job, sorted by name. `ClusterSpec` reads it back.

        >>> ClusterSpec({"ps": ["a:1", "b:1"]}).as_cluster_def()
        [{'name': 'ps', 'tasks': {'0': 'a:1', '1': 'b:1'}}]
        """
        return [
            {"name": job, "tasks": {str(index): text for index, text in self._jobs[job].items()}}
            for job in sorted(self._jobs)
        ]

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the given order."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks in a job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of the tasks in a job, in ascending order."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise errors.InvalidArgumentError(
                f"Job {job_name!r} must have a task {task_index!r}",
                f"its tasks are {_indices_text(tasks)}",
                "Name one of those, or add the task to the cluster.",
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job by task index, with None for omitted ones."""
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    def _job(self, name: str) -> dict[int, str]:
        if isinstance(name, str) and name in self._jobs:
            return self._jobs[name]
        near = difflib.get_close_matches(str(name), self._jobs, n=1)
        raise errors.InvalidArgumentError(
            f"The cluster must have the job {name!r}",
            f"its jobs are {', '.join(map(repr, self._jobs)) or 'none'}",
            f"Did you mean {near[0]!r}?" if near else "Name one of those, or add the job.",
        )


def _job_items(cluster: object) -> list[tuple[Any, Any]]:
    if isinstance(cluster, Mapping):
        return list(cluster.items())
    if isinstance(cluster, list | tuple) and all(
        isinstance(job, Mapping) and set(job) == {"name", "tasks"} for job in cluster
    ):
        names = [job["name"] for job in cluster]
        for name in names:
            if names.count(name) > 1:
                raise errors.InvalidArgumentError(
                    "Each job must be described once",
                    f"{name!r} occurs {names.count(name)} times",
                    "Put all tasks of the job into one entry.",
                )
        return [(job["name"], job["tasks"]) for job in cluster]
    raise errors.ArgumentTypeError(
        "`cluster` must be a dict from job names to addresses, or a ClusterSpec",
        f"it is of type {type(cluster).__name__}",
        "Write {'worker': ['host:2222']}.",
    )


def _job_name(job: object) -> str:
    if not isinstance(job, str):
        raise errors.ArgumentTypeError(
            "The name of a job must be a string",
            f"{job!r} of type {type(job).__name__} was given",
            "Write it as text, such as 'worker'.",
        )
    if not _JOB_NAME.fullmatch(job):
        raise errors.InvalidArgumentError(
            "The name of a job must be letters, digits, '_', '.' and '-'",
            f"it is {job[:100]!r}",
            "Choose a name such as 'worker'.",
        )
    return job


def _tasks(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        items = [(_index(job, index), text) for index, text in tasks.items()]
    elif isinstance(tasks, list | tuple):
        items = list(enumerate(tasks))
    else:
        raise errors.ArgumentTypeError(
            f"The tasks of job {job!r} must be a list of addresses, or a dict from index to "
            "address",
            f"they are of type {type(tasks).__name__}",
            f"Write {{{job!r}: ['host:2222']}}.",
        )
    found: dict[int, str] = {}
    for index, text in sorted(items, key=lambda item: item[0]):
        label = str(Task(job, index))
        if index in found:
            raise errors.InvalidArgumentError(
                f"{label} must have one address",
                f"it has {found[index]!r} and {text!r}",
                "Give each task its own index.",
            )
        if not isinstance(text, str):
            raise errors.ArgumentTypeError(
                f"The address of {label} must be a string",
                f"it is {text!r} of type {type(text).__name__}",
                "Write 'host:2222'.",
            )
        found[index] = text
    return found


def _index(job: str, index: object) -> int:
    # The keys of JSON objects are text.
    if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 19:
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool):
        raise errors.ArgumentTypeError(
            f"The task indices of job {job!r} must be numbers",
            f"{index!r} of type {type(index).__name__} is one of them",
            f"Write {{{job!r}: {{0: 'host:2222'}}}}.",
        )
    if not 0 <= index <= _MAX_INDEX:
        raise errors.InvalidArgumentError(
            f"The task indices of job {job!r} must be from 0 to {_MAX_INDEX}",
            f"{index} is one of them",
            "Number the tasks from 0.",
        )
    return index


def _check_addresses(jobs: Mapping[str, Mapping[int, str]]) -> None:
    owners: dict[tuple[str, int | None], Task] = {}
    for job, tasks in jobs.items():
        for index, text in tasks.items():
            task = Task(job, index)
            endpoint = address.parse(text, str(task)).endpoint
            if endpoint is None:
                continue
            other = owners.setdefault(endpoint, task)
            if other != task:
                raise errors.InvalidArgumentError(
                    "Each task must have an address of its own",
                    f"{other} and {task} both have {text!r}",
                    "Change one of them; port 0 lets the server choose.",
                )


def _is_dense(tasks: Mapping[int, str]) -> bool:
    return all(index == position for position, index in enumerate(tasks))


def _indices_text(tasks: Mapping[int, str]) -> str:
    if not tasks:
        return "none"
    if _is_dense(tasks) and len(tasks) > 2:
        return f"0 to {len(tasks) - 1}"
    shown = ", ".join(str(index) for index in list(tasks)[:20])
    return shown if len(tasks) <= 20 else f"{shown}, ..."
