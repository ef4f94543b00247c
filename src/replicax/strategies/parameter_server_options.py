"""What users may pass to ParameterServerStrategy, checked before anything is reached."""

from __future__ import annotations

import math
from typing import Any

from replicax.cluster_resolver.base import ClusterResolver
from replicax.foundation import errors

# It travels with every message.
_LONGEST_JOB = 128


def require_resolver(resolver: Any) -> None:
    """Raises unless it is a ClusterResolver."""
    if not isinstance(resolver, ClusterResolver):
        raise errors.ArgumentTypeError(
            "`cluster_resolver` must be a ClusterResolver",
            f"it is {resolver!r}",
            "Pass e.g. rx.cluster_resolver.TFConfigClusterResolver().",
        )


def require_partitioner(partitioner: Any) -> None:
    """Raises unless it is None or can be called."""
    if partitioner is not None and not callable(partitioner):
        raise errors.ArgumentTypeError(
            "`variable_partitioner` must be callable",
            f"it is {partitioner!r}",
            "Pass one of rx.experimental.partitioners, or a function of shape and dtype.",
        )


def checked_job(name: Any) -> str | None:
    """Returns the name of a job, or raises."""
    if name is None or (isinstance(name, str) and 0 < len(name) <= _LONGEST_JOB):
        return name
    raise errors.InvalidArgumentError(
        f"`job` must be a name of 1 to {_LONGEST_JOB} characters, or None",
        f"it is {name!r}",
        "Choose a name that no other job on these servers has.",
    )


def checked_lease(seconds: Any) -> float:
    """Returns a number of seconds, or raises."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if is_number and 0 < seconds < math.inf:
        return float(seconds)
    raise errors.InvalidArgumentError(
        "`lease` must be a positive number of seconds",
        f"it is {seconds!r}",
        "Choose how long servers are to wait for a coordinator that was lost.",
    )


def checked_replicas(count: Any) -> int | None:
    """Returns a number of replicas, or raises."""
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count > 0):
        return count
    raise errors.InvalidArgumentError(
        "`replicas_per_worker` must be a positive int or None",
        f"it is {count!r}",
        "Leave it out to use every accelerator of a worker.",
    )


def checked_mirror(mirror: Any, num_servers: int) -> bool:
    """Returns whether servers are to keep copies of each other, or raises."""
    if isinstance(mirror, bool) and (not mirror or num_servers > 1):
        return mirror
    raise errors.InvalidArgumentError(
        "`mirror` must be True or False, and True needs two parameter servers or more",
        f"it is {mirror!r} in a cluster with {num_servers}",
        "Add a parameter server, or leave it out.",
    )
