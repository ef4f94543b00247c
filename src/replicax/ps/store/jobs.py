"""The job that holds a parameter server, and which requests it accepts: job, epoch, fencing.

Pure: time is a parameter. A server belongs to at most one job. The coordinator holds it by a lease
that its requests renew. When the lease expires, the server drops the job and its variables from
memory. Snapshots remain: a restarted server restores them for a coordinator that returns late.

Note [A coordinator without a successor]
    A job without a name ends with its coordinator, because no other process can name it. The next
    job therefore need not wait for the lease. It gets the server when the previous coordinator has
    no connection to the server (the kernel closes connections when a process ends) and has sent
    nothing for `DISCONNECTED_S`, within which a running coordinator would have reconnected. A
    coordinator that is stopped or busy keeps its connections, and so its server. A running one that
    is replaced regardless is fenced, because its job no longer holds the server.

Note [The master record]
    A coordinator that resumed a job must not lose a server to the coordinator before it. A snapshot
    names the coordinator at the time it was taken, and the server may be killed before the next
    snapshot; restored from it, the server would obey a replaced coordinator. So a server with a
    disk writes its master, the newest coordinator it obeys, before it acknowledges `Attach`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from typing import Protocol, Self

import msgspec

from replicax.foundation import errors
from replicax.protocol import messages

# RELIABILITY: longer than that of workers, so that a restarted coordinator finds its variables.
DEFAULT_LEASE_S = 300.0
# A running coordinator reconnects within a fraction of this. See the note above.
DISCONNECTED_S = 1.5
# A mirror may have to load a snapshot before it replies.
DEFAULT_MIRROR_REPLY_S = 60.0
_UNNAMED_OWNER = "an unnamed process"


class Master(msgspec.Struct, frozen=True):
    """The coordinator that a server obeys, and the oldest one that it accepts.

    Attributes:
      job: The name of the job.
      epoch: The epoch of the coordinator.
      coordinator: The incarnation of the coordinator.
    """

    job: str
    epoch: int
    coordinator: int


class MasterRecord(Protocol):
    """Stores the master of a server across restarts; see Note [The master record].

    Attributes:
      master: The last one written.
    """

    master: Master | None

    def write(self, master: Master) -> None:
        """Stores the master durably before it returns."""
        ...

    def clear(self) -> None:
        """Removes the record when the job ends."""
        ...


class Job:
    """The job that holds a server.

    Attributes:
      name: Its id.
      epoch: Grows with each coordinator process of the job.
      coordinator: The incarnation of the current one.
      fenced: Incarnations that may neither change nor read anything.
      is_restored: Whether it was restored from a snapshot or a mirror.
      awaits_coordinator: Whether it was restored and no coordinator has attached it since. Until
        then it has no lease, and any other job may replace it.
      recorded_master: The master record that was found with the snapshot; its coordinator may be
        newer than that of the snapshot.
      owner: A description of the coordinator process, for error messages.
      is_kept: Whether the job outlives its coordinator.
      last_request_s: The time of the coordinator's last request.
    """

    __slots__ = (
        "_expires",
        "_lease_s",
        "awaits_coordinator",
        "coordinator",
        "epoch",
        "fenced",
        "is_kept",
        "is_restored",
        "last_request_s",
        "name",
        "owner",
        "recorded_master",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = -1
        self.coordinator = 0
        self.fenced: set[int] = set()
        self.is_restored = False
        self.awaits_coordinator = False
        self.recorded_master: Master | None = None
        self.owner = _UNNAMED_OWNER
        self.is_kept = True
        self.last_request_s = 0.0
        self._lease_s = DEFAULT_LEASE_S
        self._expires = 0.0

    @classmethod
    def restored(cls, name: str, epoch: int, coordinator: int, fenced: Iterable[int]) -> Self:
        """Returns a job as it was saved by another process."""
        job = cls(name)
        job.epoch = epoch
        job.coordinator = coordinator
        job.fenced.update(fenced)
        job.is_restored = job.awaits_coordinator = True
        job._expires = math.inf
        return job

    @property
    def master(self) -> tuple[int, int]:
        """The epoch and incarnation of the newest coordinator that the server obeys."""
        recorded = self.recorded_master
        if recorded is not None and recorded.epoch > self.epoch:
            return recorded.epoch, recorded.coordinator
        return self.epoch, self.coordinator

    def attach(self, epoch: int, coordinator: int, lease_s: float, now: float) -> None:
        """Assigns the job to a coordinator process."""
        self.epoch = epoch
        self.coordinator = coordinator
        self.awaits_coordinator = False
        self.last_request_s = now
        self._lease_s = lease_s
        self._expires = now + lease_s

    def renew(self, now: float) -> None:
        """Renews the lease; a request that was handled late does not shorten it."""
        self.last_request_s = max(self.last_request_s, now)
        self._expires = max(self._expires, now + self._lease_s)

    def is_expired(self, now: float) -> bool:
        """Returns whether the lease has expired."""
        return now >= self._expires

    def remaining_s(self, now: float) -> float:
        """Returns the seconds until the lease expires."""
        return max(self._expires - now, 0.0)

    def fence(self, incarnations: Iterable[int]) -> None:
        """Rejects all further requests of the given incarnations."""
        self.fenced.update(incarnations)


def require_free(
    held: Job | None, name: str, now: float, task: str, is_connected: Callable[[int], bool]
) -> None:
    """Raises if another job holds the server; a restored one that awaits a coordinator does not.

    Args:
      held: The job of the server.
      name: The job that requests the server.
      now: The time.
      task: The name of the server, for messages.
      is_connected: Returns whether a coordinator incarnation has a connection to the server. See
        Note [A coordinator without a successor].

    Raises:
      PermissionDeniedError: Another job holds the server.
      UnavailableError: The job that holds it seems to have ended; to be retried soon.
    """
    if held is None or held.name == name or held.awaits_coordinator or held.is_expired(now):
        return
    if held.is_kept:
        raise held_by_other(held, name, task, now)
    if is_connected(held.coordinator):
        raise errors.PermissionDeniedError(
            f"Job {name!r} needs {task} for itself",
            f"job {held.name!r} holds it, and its coordinator, {held.owner}, is connected",
            "Stop that process, or use another cluster.",
        )
    silent_s = now - held.last_request_s
    if silent_s < DISCONNECTED_S:
        raise errors.UnavailableError(
            f"{task} is held by job {held.name!r} of {held.owner}, which disconnected and sent "
            f"its last request {silent_s:.1f} s ago. The server becomes free in "
            f"{DISCONNECTED_S - silent_s:.1f} s unless that process reconnects."
        )


def held_by_other(held: Job, name: str, task: str, now: float) -> errors.PermissionDeniedError:
    """Returns the error for a server that another job holds until its lease expires."""
    return errors.PermissionDeniedError(
        f"Job {name!r} needs {task} for itself",
        f"job {held.name!r} holds it, for its coordinator {held.owner} or the next one of "
        "that name",
        f"Pass job={held.name!r} to resume that job, end it, or wait until its lease expires in "
        f"{held.remaining_s(now):.0f} s.",
    )


def require_newer(held: Job, epoch: int, incarnation: int, task: str) -> None:
    """Raises unless a coordinator may resume the job, or has already attached it."""
    newest, coordinator = held.master
    if epoch < newest:
        raise _outdated(held, epoch, task)
    if epoch == newest and incarnation != coordinator:
        raise errors.PermissionDeniedError(
            f"A coordinator that resumes job {held.name!r} needs an epoch above {newest} on {task}",
            f"another process holds it in epoch {epoch}",
            "Attach with a higher epoch, or under the name of another job.",
        )


def require_parts(
    held: Job | None, name: str, wanted: Iterable[int], kept: Container[int], task: str
) -> None:
    """Raises unless the server still holds the parts that the coordinator created on it."""
    if held is None or held.name != name:
        found = "no job" if held is None else f"job {held.name!r}"
        why = "it was restarted, or the lease of the job has expired"
        raise parts_lost(name, f"it holds {found}: {why}", task)
    missing = [number for number in wanted if number not in kept]
    if missing:
        some = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise parts_lost(name, f"it restarted without {len(missing)} parts: {some}", task)


def parts_lost(name: str, found: str, task: str) -> errors.PSIncarnationError:
    """Returns the error for a server without the parts that it must hold."""
    return errors.PSIncarnationError(
        f"{task} must hold all variables that job {name!r} created on it",
        found,
        "Create the variables under another job, and restore them from a checkpoint.",
    )


def require_member(held: Job | None, name: str, epoch: int, incarnation: int, task: str) -> Job:
    """Returns the job if the sender of a request belongs to it, and raises otherwise."""
    if held is None:
        raise errors.PSIncarnationError(
            f"{task} needs to be attached to a job first",
            f"it has none when a request of job {name!r} arrives",
            "Attach it. If it was attached before, it restarted or its lease expired, and its "
            "variables are lost.",
        )
    if held.awaits_coordinator:
        raise errors.PSIncarnationError(
            f"{task} needs a coordinator that attaches it again before anything else",
            f"job {held.name!r} is restored, waiting for its coordinator, when a request of job "
            f"{name!r} arrives",
            "Attach it, with the parts that it must hold.",
        )
    if held.name != name:
        raise errors.FencedError(
            f"{task} accepts requests of job {held.name!r} only",
            f"this one is of job {name!r}",
            "Attach to a server of that job; its former variables on this server are lost.",
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
            f"{task} accepts requests of live processes of job {name!r} only",
            f"incarnation {incarnation} was declared dead",
            "Drop the current work, and join the job again as a new process.",
        )
    return held


def job_ended(task: str) -> errors.FencedError:
    """Returns the error for a part or optimizer whose job ended during its creation."""
    return errors.FencedError(
        f"The job of {task} ended while a request of it was handled. Attach the server again, and "
        "create its variables again."
    )


def coordinator_only(role: str, body: messages.Body, task: str) -> errors.PermissionDeniedError:
    """Returns the error for a request that only coordinators may send."""
    return errors.PermissionDeniedError(
        f"Only a coordinator may send {type(body).__name__} to {task}",
        f"the sender is a {role}",
        "Send it from the coordinator.",
    )


def unknown_request(body: messages.Body, task: str) -> errors.ProtocolError:
    """Returns the error for a request that parameter servers do not handle."""
    return errors.ProtocolError(
        f"A request to {task} must be one that parameter servers handle",
        f"it is {type(body).__name__}",
        "Send it to another task.",
    )


def lease_of(attach: messages.Attach) -> float:
    """Returns the duration of the lease that a coordinator requests, in seconds."""
    return _seconds(attach, "lease", DEFAULT_LEASE_S)


def owner_of(attach: messages.Attach) -> str:
    """Returns the coordinator's description of its process."""
    found = attach.settings.get("owner")
    return found[:200] if isinstance(found, str) else _UNNAMED_OWNER


def is_kept(attach: messages.Attach) -> bool:
    """Returns whether the job outlives its coordinator."""
    return attach.settings.get("is_kept", True) is not False


def mirror_reply_timeout_of(attach: messages.Attach) -> float:
    """Returns the seconds within which a mirror must reply."""
    return _seconds(attach, "mirror_answer", DEFAULT_MIRROR_REPLY_S)


def is_mirrored(attach: messages.Attach) -> bool:
    """Returns whether each server of the job keeps a copy of another."""
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
        f"{task} accepts epoch {held.master[0]} of job {held.name!r}",
        f"this request is of epoch {epoch}",
        "Another coordinator has resumed the job; stop this one.",
    )
