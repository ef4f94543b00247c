"""Decides who may ask a parameter server for something: its job, its epoch, who is fenced.

Pure: time is a parameter. A server belongs to at most one job. The coordinator holds it by a
lease that its requests renew; when the lease runs out, the job and all that it kept are gone
from memory. Snapshots of it stay: a server that is started again restores them, for a
coordinator that comes back late.

Note [A coordinator without a successor]
    A job without a name ends with its coordinator: no other process can name it. So the next job
    need not wait for the lease. It gets the server once the coordinator's process has no connection
    to it any more, which the kernel closes when a process ends, and has been silent for
    `GONE_S`, in which a living coordinator would have connected again. One that is stopped, or
    busy, keeps its connections and its server. Should a living one be replaced all the same, it is
    refused from then on, because its job is not the server's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from typing import Self

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.ps.store.master_record import Promise

# RELIABILITY: longer than that of workers, so that a restarted coordinator finds its variables.
DEFAULT_LEASE_S = 300.0
# A living coordinator connects again within a fraction of this. See the note above.
GONE_S = 1.5
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
      owner: The process of the coordinator, for people.
      is_kept: Whether it waits for its next coordinator when this one is gone.
      heard_s: When the coordinator was last heard.
    """

    __slots__ = (
        "_expires",
        "_lease_s",
        "coordinator",
        "epoch",
        "fenced",
        "heard_s",
        "is_kept",
        "is_restored",
        "is_waiting",
        "name",
        "owner",
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
        self.owner = "a process that did not say which"
        self.is_kept = True
        self.heard_s = 0.0
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
        self.heard_s = now
        self._lease_s = lease_s
        self._expires = now + lease_s

    def renew(self, now: float) -> None:
        """Starts the lease again; a request that was answered late does not shorten it."""
        self.heard_s = max(self.heard_s, now)
        self._expires = max(self._expires, now + self._lease_s)

    def is_expired(self, now: float) -> bool:
        """Tells whether the coordinator has been silent for too long."""
        return now >= self._expires

    def remaining_s(self, now: float) -> float:
        """Returns the seconds until the lease runs out."""
        return max(self._expires - now, 0.0)

    def fence(self, incarnations: Iterable[int]) -> None:
        """Shuts out processes."""
        self.fenced.update(incarnations)


def require_free(
    held: Job | None, name: str, now: float, task: str, is_connected: Callable[[int], bool]
) -> None:
    """Raises if another job holds the server; one that no coordinator has come for does not.

    Args:
      held: The job of the server.
      name: The job that wants it.
      now: The time.
      task: The server, for messages.
      is_connected: Tells whether a coordinator process has a connection to the server. See
        Note [A coordinator without a successor].

    Raises:
      PermissionDeniedError: Another job holds the server.
      UnavailableError: One holds it whose coordinator seems to be gone; to be asked again soon.
    """
    if held is None or held.name == name or held.is_waiting or held.is_expired(now):
        return
    if held.is_kept:
        raise taken(held, name, task, now)
    if is_connected(held.coordinator):
        raise _taken_by_living(held, name, task)
    silent_s = now - held.heard_s
    if silent_s < GONE_S:
        raise errors.UnavailableError(
            f"{task} was held by job {held.name!r} of {held.owner}, which has closed its "
            f"connection and was heard {silent_s:.1f} s ago. It is free in "
            f"{GONE_S - silent_s:.1f} s unless that process connects again."
        )


def taken(held: Job, name: str, task: str, now: float) -> errors.PermissionDeniedError:
    """The error for a server that another job holds until its lease runs out."""
    return errors.PermissionDeniedError(
        f"Job {name!r} needs {task} for itself",
        f"job {held.name!r} holds it, for its coordinator {held.owner} or the next one of "
        "that name",
        f"Pass job={held.name!r} to take that job over, end it, or wait until its lease has "
        f"run out in {held.remaining_s(now):.0f} s.",
    )


def _taken_by_living(held: Job, name: str, task: str) -> errors.PermissionDeniedError:
    return errors.PermissionDeniedError(
        f"Job {name!r} needs {task} for itself",
        f"job {held.name!r} holds it, and its coordinator, {held.owner}, is connected",
        "End that process, or use another cluster.",
    )


def require_newer(held: Job, epoch: int, incarnation: int, task: str) -> None:
    """Raises unless a coordinator may take over, or has already taken, a job that it shares."""
    newest, coordinator = held.master
    if epoch < newest:
        raise _outdated(held, epoch, task)
    if epoch == newest and incarnation != coordinator:
        raise errors.PermissionDeniedError(
            f"A coordinator that takes job {held.name!r} over needs an epoch above "
            f"{newest} on {task}",
            f"another process holds it in epoch {epoch}",
            "Attach with a higher epoch, or under the name of another job.",
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
        f"{task} must hold all variables that job {name!r} has made on it",
        found,
        "Make the variables anew under another job, and restore them from a checkpoint.",
    )


def require_member(held: Job | None, name: str, epoch: int, incarnation: int, task: str) -> Job:
    """Returns the job if the sender of a request belongs to it, and raises otherwise."""
    if held is None:
        raise errors.PSIncarnationError(
            f"{task} needs to be attached to a job first",
            f"it belongs to none when job {name!r} asks",
            "Attach it. If it was attached before, it was restarted, or its lease ran out: its "
            "variables are gone.",
        )
    if held.is_waiting:
        raise errors.PSIncarnationError(
            f"{task} needs a coordinator that attaches it again before anything else",
            f"job {held.name!r} is restored, waiting for its coordinator, when job {name!r} asks",
            "Attach it, with the parts that it must hold.",
        )
    if held.name != name:
        raise errors.FencedError(
            f"{task} answers job {held.name!r} only",
            f"job {name!r} asked",
            "Attach to a server of that job; what it kept here before is gone.",
        )
    if epoch < held.epoch:
        raise _outdated(held, epoch, task)
    if epoch > held.epoch:
        raise errors.PermissionDeniedError(
            f"{task} must be attached in epoch {epoch} of job {name!r} first",
            f"it is in epoch {held.epoch}",
            "Attach it again.",
        )
    if incarnation in held.fenced:
        raise errors.FencedError(
            f"{task} answers processes that job {name!r} counts as alive",
            f"incarnation {incarnation} was declared dead",
            "Drop the work at hand and join the job again as a new process.",
        )
    return held


def ended_meanwhile(task: str) -> errors.FencedError:
    """The error for something that was made for a job that is over."""
    return errors.FencedError(
        f"{task} must keep its job while it makes something for it",
        "the job ended meanwhile",
        "Attach the server again, and create its variables again.",
    )


def not_for(role: str, body: messages.Body, task: str) -> errors.PermissionDeniedError:
    """The error for a question that only coordinators may ask."""
    return errors.PermissionDeniedError(
        f"{type(body).__name__} is for coordinators to ask of {task}",
        f"a {role} asked",
        "Send it from the coordinator.",
    )


def unknown(body: messages.Body, task: str) -> errors.ProtocolError:
    """The error for a question that is nothing for parameter servers."""
    return errors.ProtocolError(
        f"{task} must know what it is asked",
        f"{type(body).__name__} is nothing for parameter servers",
        "Ask another task.",
    )


def lease_of(attach: messages.Attach) -> float:
    """Returns the seconds of the lease that a coordinator asks for."""
    return _seconds(attach, "lease", DEFAULT_LEASE_S)


def owner_of(attach: messages.Attach) -> str:
    """Returns which process a coordinator says that it is."""
    found = attach.settings.get("owner")
    return found[:200] if isinstance(found, str) else "a process that did not say which"


def is_kept(attach: messages.Attach) -> bool:
    """Tells whether a job waits for its next coordinator when this one is gone."""
    return attach.settings.get("is_kept", True) is not False


def mirror_answer_of(attach: messages.Attach) -> float:
    """Returns the seconds by which a mirror must have answered."""
    return _seconds(attach, "mirror_answer", DEFAULT_MIRROR_ANSWER_S)


def is_mirrored(attach: messages.Attach) -> bool:
    """Tells whether a coordinator wants each server to keep a copy of another."""
    wanted = attach.settings.get("mirror", False)
    if isinstance(wanted, bool) and (not wanted or len(attach.servers) > 1):
        return wanted
    raise errors.InvalidArgumentError(
        "The setting 'mirror' must be a bool, and needs two servers or more",
        f"it is {wanted!r} with {len(attach.servers)} servers",
        "Correct the setting.",
    )


def _seconds(attach: messages.Attach, name: str, default_s: float) -> float:
    found = attach.settings.get(name, default_s)
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 < found < math.inf:
        return float(found)
    raise errors.InvalidArgumentError(
        f"The setting {name!r} must be a number of seconds above 0",
        f"it is {found!r}",
        "Correct the setting.",
    )


def _outdated(held: Job, epoch: int, task: str) -> errors.FencedError:
    return errors.FencedError(
        f"{task} answers epoch {held.master[0]} of job {held.name!r}",
        f"a request of epoch {epoch} came",
        "Another coordinator has taken the job over; end this one.",
    )
