"""Decides who may ask a parameter server for something: its job, its epoch, who is fenced.

Pure: time is a parameter. A server belongs to at most one job. The coordinator holds it by a
lease that its requests renew; when the lease runs out, the job and all that it kept are gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from replicax.foundation import errors
from replicax.transport import messages

# RELIABILITY: longer than that of workers, so that a restarted coordinator finds its variables.
DEFAULT_LEASE_S = 300.0


class Job:
    """The job that holds a server.

    Attributes:
      name: Its id.
      epoch: Grows when another coordinator process takes it over.
      coordinator: The incarnation of that process.
      fenced: Incarnations that may neither change nor read anything.
    """

    __slots__ = ("_expires", "_lease_s", "coordinator", "epoch", "fenced", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = -1
        self.coordinator = 0
        self.fenced: set[int] = set()
        self._lease_s = DEFAULT_LEASE_S
        self._expires = 0.0

    def take(self, epoch: int, coordinator: int, lease_s: float, now: float) -> None:
        """Puts the job into the hands of a coordinator process."""
        self.epoch = epoch
        self.coordinator = coordinator
        self._lease_s = lease_s
        self._expires = now + lease_s

    def renew(self, now: float) -> None:
        """Starts the lease anew; a request that was answered late does not shorten it."""
        self._expires = max(self._expires, now + self._lease_s)

    def is_expired(self, now: float) -> bool:
        """Tells whether the coordinator has been silent for too long."""
        return now >= self._expires

    def fence(self, incarnations: Iterable[int]) -> None:
        """Shuts out processes."""
        self.fenced.update(incarnations)


def require_free(held: Job | None, name: str, now: float, task: str) -> None:
    """Raises if another job holds the server."""
    if held is not None and held.name != name and not held.is_expired(now):
        raise errors.PermissionDeniedError(
            errors.message(
                f"Job {name!r} needs {task} for itself",
                f"job {held.name!r} holds it",
                "End that job, wait until its lease has run out, or use another server.",
            )
        )


def require_newer(held: Job, epoch: int, incarnation: int, task: str) -> None:
    """Raises unless a coordinator may take over, or has already taken, a job that it shares."""
    if epoch < held.epoch:
        raise _outdated(held, epoch, task)
    if epoch == held.epoch and incarnation != held.coordinator:
        raise errors.PermissionDeniedError(
            errors.message(
                f"A coordinator that takes job {held.name!r} over needs an epoch above "
                f"{held.epoch} on {task}",
                f"another process holds it in epoch {epoch}",
                "Attach with a higher epoch, or under the name of another job.",
            )
        )


def require_member(held: Job | None, name: str, epoch: int, incarnation: int, task: str) -> Job:
    """Returns the job if the sender of a request belongs to it, and raises otherwise."""
    if held is None:
        raise errors.PermissionDeniedError(
            errors.message(
                f"{task} needs to be attached to a job first",
                f"it belongs to none when job {name!r} asks",
                "Attach it. If it was attached before, its lease ran out: its variables are gone.",
            )
        )
    if held.name != name:
        raise errors.FencedError(
            errors.message(
                f"{task} answers job {held.name!r} only",
                f"job {name!r} asked",
                "Attach to a server of that job; what it kept here before is gone.",
            )
        )
    if epoch < held.epoch:
        raise _outdated(held, epoch, task)
    if epoch > held.epoch:
        raise errors.PermissionDeniedError(
            errors.message(
                f"{task} must be attached in epoch {epoch} of job {name!r} first",
                f"it is in epoch {held.epoch}",
                "Attach it again.",
            )
        )
    if incarnation in held.fenced:
        raise errors.FencedError(
            errors.message(
                f"{task} answers processes that job {name!r} counts as alive",
                f"incarnation {incarnation} was declared dead",
                "Drop the work at hand and join the job again as a new process.",
            )
        )
    return held


def lease_of(attach: messages.Attach) -> float:
    """Returns the seconds of the lease that a coordinator asks for."""
    lease = attach.settings.get("lease", DEFAULT_LEASE_S)
    if isinstance(lease, (int, float)) and not isinstance(lease, bool) and 0 < lease < math.inf:
        return float(lease)
    raise errors.InvalidArgumentError(
        errors.message(
            "The setting 'lease' must be a number of seconds above 0",
            f"it is {lease!r}",
            "Correct the setting.",
        )
    )


def _outdated(held: Job, epoch: int, task: str) -> errors.FencedError:
    return errors.FencedError(
        errors.message(
            f"{task} answers epoch {held.epoch} of job {held.name!r}",
            f"a request of epoch {epoch} came",
            "Another coordinator has taken the job over; end this one.",
        )
    )
