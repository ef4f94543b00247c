"""Checks that a cluster can be used by ParameterServerStrategy."""

from __future__ import annotations

from replicax.cluster.spec import ClusterSpec
from replicax.foundation import errors
from replicax.protocol.tasks import Task

JOBS = ("chief", "worker", "ps", "evaluator")
_NEEDED = {"ps": "parameter server", "worker": "worker"}
_ALLOWED = f"The jobs can be {', '.join(map(repr, JOBS))}."
_SINGLE = ("chief", "evaluator")


def check(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Raises InvalidArgumentError if ParameterServerStrategy cannot run on a cluster.

    Args:
      spec: The cluster.
      task_type: The job of this task. None, and a "chief" or "evaluator" that the cluster
        does not list, mean a process outside the cluster.
      task_id: The index of this task in its job.

    >>> check(ClusterSpec({"ps": ["a:1"], "worker": ["b:1", "c:1"]}), "chief", 0)
    """
    if not spec:
        raise _unusable(
            "the cluster is empty",
            "Describe it in TF_CONFIG, or pass a resolver with a ClusterSpec.",
        )
    for job in spec.jobs:
        if job not in JOBS:
            raise _unusable(f"the cluster has the job {job!r}", _ALLOWED)
    for job, role in _NEEDED.items():
        if job not in spec.jobs or not spec.num_tasks(job):
            raise _unusable(
                f"the cluster has no {role}", f"Add at least one task to the job {job!r}."
            )
        _check_numbering(spec, job)
    for job in _SINGLE:
        if job in spec.jobs and spec.num_tasks(job) > 1:
            raise _unusable(
                f"the job {job!r} has {spec.num_tasks(job)} tasks", "It can have one task only."
            )
    _check_own_task(spec, task_type, task_id)


def _check_numbering(spec: ClusterSpec, job: str) -> None:
    indices = spec.task_indices(job)
    for expected, index in enumerate(indices):
        if index != expected:
            raise _unusable(
                f"{Task(job, expected)} is missing, while {Task(job, index)} is there",
                f"Number the tasks of {job!r} from 0 without gaps.",
            )


def _check_own_task(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    if task_type is None:
        return
    if task_type not in JOBS:
        raise _unusable(f"this task is of type {task_type!r}", _ALLOWED)
    is_alone = task_type in _SINGLE
    if task_id is None and not is_alone:
        raise _unusable(
            f"this task is of type {task_type!r} and has no index",
            "Set `task_id`, or the index of the task in TF_CONFIG.",
        )
    index = task_id or 0
    known = spec.task_indices(task_type) if task_type in spec.jobs else []
    if index not in (known or [0]):
        raise _unusable(
            f"this task is {Task(task_type, index)}, and the job has "
            f"{len(known) or 1} task{'s' if len(known) > 1 else ''}",
            f"The index must be from 0 to {max(len(known), 1) - 1}.",
        )


def _unusable(found: str, todo: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        "ParameterServerStrategy needs a cluster of parameter servers and workers",
        found,
        todo,
    )
