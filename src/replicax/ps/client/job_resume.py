"""How a coordinator goes on with a job that servers hold already. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task


@dataclasses.dataclass(frozen=True)
class ResumedJob:
    """What the next coordinator of a job begins with.

    Attributes:
      epoch: Its epoch, above all that there were.
      first_closure: The number of its first closure, above all that have changed something.
      is_resumed: Whether the servers hold the variables of the job.
      parts: By server, the parts that it holds.
    """

    epoch: int
    first_closure: int
    is_resumed: bool
    parts: tuple[frozenset[int], ...]


def of_job(job: str, found: Sequence[messages.Body]) -> ResumedJob | None:
    """Returns how to take a job over; None if no server holds it.

    Args:
      job: The name of the job.
      found: What each server says of itself.

    Raises:
      PSIncarnationError: Some hold variables of the job, and others have lost theirs.
    """
    held = [f for f in found if isinstance(f, messages.JobInfo) and f.job == job]
    if not held:
        return None
    is_resumed = len(held) == len(found)
    if not is_resumed and any(f.parts for f in held):
        empty = next(i for i, f in enumerate(found) if f not in held)
        raise errors.PSIncarnationError(
            f"Every parameter server must hold its part of job {job!r}",
            f"{Task('ps', empty)} does not, while others do",
            "Start a job of another name, and restore the variables from a checkpoint.",
        )
    return ResumedJob(
        epoch=max(f.epoch for f in held) + 1,
        first_closure=max(max(f.newest + 1, f.settled, 1) for f in held),
        is_resumed=is_resumed,
        parts=tuple(frozenset(f.parts) for f in held) if is_resumed else (),
    )
