"""Decides who may ask a parameter server for something: its job, its epoch, who is fenced.

Pure: time is a parameter. A server belongs to at most one job. The coordinator holds it by a
lease that its requests renew; when the lease runs out, the job and all that it kept are gone
from memory. Snapshots of it stay: a server that is started again restores them, for a
coordinator that comes back late.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Self

from replicax.foundation import errors
from replicax.parameter_server.promises import Promise
from replicax.transport import messages

# RELIABILITY: longer than that of workers, so that a restarted coordinator finds its variables.
DEFAULT_LEASE_S = 300.0
# A mirror may have a snapshot to load before it answers.
DEFAULT_MIRROR_ANSWER_S = 60.0


class Job:
    """The job that holds a server.

    Attributes:
      name: Its id.
      epoch: Grows when another coordinator process takes it over.
      coordinator: The incarnation of that process.
      fenced: Incarnations that may neither change nor read anything.
      is_restored: Whether another process has left it here.
      is_waiting: Whether it was restored, and no coordinator has taken it since. Until then it
        has no lease that could run out, and gives way to any other job.
      promise: Whom the process that has left it had promised to obey; that may be a later
        coordinator than the one that was saved.
    """

    __slots__ = (
        "_expires",
        "_lease_s",
        "coordinator",
        "epoch",
        "fenced",
        "is_restored",
        "is_waiting",
        "name",
        "promise",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = -1
        self.coordinator = 0
        self.fenced: set[int] = set()
        self.is_restored = False
        self.is_waiting = False
        self.promise: Promise | None = None
        self._lease_s = DEFAULT_LEASE_S
        self._expires = 0.0

    @classmethod
    def restored(cls, name: str, epoch: int, coordinator: int, fenced: Iterable[int]) -> Self:
        """Returns a job as another process has left it."""
        job = cls(name)
        job.epoch = epoch
        job.coordinator = coordinator
        job.fenced.update(fenced)
        job.is_restored = job.is_waiting = True
        job._expires = math.inf
        return job

    @property
    def master(self) -> tuple[int, int]:
        """The newest coordinator that it obeys: the epoch, and the life of the process."""
        if self.promise is not None and self.promise.epoch > self.epoch:
            return self.promise.epoch, self.promise.coordinator
        return self.epoch, self.coordinator

    def take(self, epoch: int, coordinator: int, lease_s: float, now: float) -> None:
        """Puts the job into the hands of a coordinator process."""
        self.epoch = epoch
        self.coordinator = coordinator
        self.is_waiting = False
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
    """Raises if another job holds the server; one that nobody has come for does not."""
    if held is None or held.name == name or held.is_waiting:
        return
    if not held.is_expired(now):
        raise taken(held, name, task)


def taken(held: Job, name: str, task: str) -> errors.PermissionDeniedError:
    """The error for a server that another job holds."""
    return errors.PermissionDeniedError(
        errors.message(
            f"Job {name!r} needs {task} for itself",
            f"job {held.name!r} holds it",
            "End that job, wait until its lease has run out, or use another server.",
        )
    )


def require_newer(held: Job, epoch: int, incarnation: int, task: str) -> None:
    """Raises unless a coordinator may take over, or has already taken, a job that it shares."""
    newest, coordinator = held.master
    if epoch < newest:
        raise _outdated(held, epoch, task)
    if epoch == newest and incarnation != coordinator:
        raise errors.PermissionDeniedError(
            errors.message(
                f"A coordinator that takes job {held.name!r} over needs an epoch above "
                f"{newest} on {task}",
                f"another process holds it in epoch {epoch}",
                "Attach with a higher epoch, or under the name of another job.",
            )
        )


def require_kept(
    held: Job | None, name: str, wanted: Iterable[int], kept: Container[int], task: str
) -> None:
    """Raises unless the server still holds what a coordinator had made on it.

    A server that came back without its variables must never pass for the one that had them.
    """
    if held is None or held.name != name:
        found = "it holds nothing" if held is None else f"it holds job {held.name!r}"
        raise came_back_empty(name, f"{found} since it came back", task)
    missing = [number for number in wanted if number not in kept]
    if missing:
        some = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise came_back_empty(name, f"it came back without {len(missing)} parts: {some}", task)


def came_back_empty(name: str, found: str, task: str) -> errors.PSIncarnationError:
    """The error for a server that does not hold what it must."""
    return errors.PSIncarnationError(
        errors.message(
            f"{task} must hold all variables that job {name!r} has made on it",
            found,
            "Make the variables anew under another job, and restore them from a checkpoint.",
        )
    )


def require_member(held: Job | None, name: str, epoch: int, incarnation: int, task: str) -> Job:
    """Returns the job if the sender of a request belongs to it, and raises otherwise."""
    if held is None:
        raise errors.PSIncarnationError(
            errors.message(
                f"{task} needs to be attached to a job first",
                f"it belongs to none when job {name!r} asks",
                "Attach it. If it was attached before, it was restarted, or its lease ran out: its "
                "variables are gone.",
            )
        )
    if held.is_waiting:
        raise errors.PSIncarnationError(
            errors.message(
                f"{task} needs a coordinator that attaches it again before anything else",
                f"job {held.name!r} is restored, waiting for its coordinator, when job {name!r} "
                "asks",
                "Attach it, with the parts that it must hold.",
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


def ended_meanwhile(task: str) -> errors.FencedError:
    """The error for something that was made for a job that is over."""
    return errors.FencedError(
        errors.message(
            f"{task} must keep its job while it makes something for it",
            "the job ended meanwhile",
            "Attach the server again, and create its variables again.",
        )
    )


def not_for(role: str, body: messages.Body, task: str) -> errors.PermissionDeniedError:
    """The error for a question that only coordinators may ask."""
    return errors.PermissionDeniedError(
        errors.message(
            f"{type(body).__name__} is for coordinators to ask of {task}",
            f"a {role} asked",
            "Send it from the coordinator.",
        )
    )


def unknown(body: messages.Body, task: str) -> errors.ProtocolError:
    """The error for a question that is nothing for parameter servers."""
    return errors.ProtocolError(
        errors.message(
            f"{task} must know what it is asked",
            f"{type(body).__name__} is nothing for parameter servers",
            "Ask another task.",
        )
    )


def lease_of(attach: messages.Attach) -> float:
    """Returns the seconds of the lease that a coordinator asks for."""
    return _seconds(attach, "lease", DEFAULT_LEASE_S)


def mirror_answer_of(attach: messages.Attach) -> float:
    """Returns the seconds by which a mirror must have answered."""
    return _seconds(attach, "mirror_answer", DEFAULT_MIRROR_ANSWER_S)


def is_mirrored(attach: messages.Attach) -> bool:
    """Tells whether a coordinator wants each server to keep a copy of another."""
    wanted = attach.settings.get("mirror", False)
    if isinstance(wanted, bool) and (not wanted or len(attach.servers) > 1):
        return wanted
    raise errors.InvalidArgumentError(
        errors.message(
            "The setting 'mirror' must be a bool, and needs two servers or more",
            f"it is {wanted!r} with {len(attach.servers)} servers",
            "Correct the setting.",
        )
    )


def _seconds(attach: messages.Attach, name: str, default_s: float) -> float:
    found = attach.settings.get(name, default_s)
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 < found < math.inf:
        return float(found)
    raise errors.InvalidArgumentError(
        errors.message(
            f"The setting {name!r} must be a number of seconds above 0",
            f"it is {found!r}",
            "Correct the setting.",
        )
    )


def _outdated(held: Job, epoch: int, task: str) -> errors.FencedError:
    return errors.FencedError(
        errors.message(
            f"{task} answers epoch {held.master[0]} of job {held.name!r}",
            f"a request of epoch {epoch} came",
            "Another coordinator has taken the job over; end this one.",
        )
    )
