"""The decisions of the policy, as values that the coordinator's core carries out."""

from __future__ import annotations

import dataclasses

from replicax.coordinator.scheduling.closures import Closure


@dataclasses.dataclass(frozen=True)
class RequestAttach:
    """Attach a connected worker to the job."""

    worker: int


@dataclasses.dataclass(frozen=True)
class Release:
    """Make a fenced worker drop the job and begin a new incarnation.

    With `is_dead`, its process exits instead: another one takes its place.
    """

    worker: int
    is_dead: bool = False


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Send closures to a worker, in order."""

    worker: int
    closures: list[Closure]


@dataclasses.dataclass(frozen=True)
class Resend:
    """Send all resources and closures of a worker again; the worker ignores duplicates."""

    worker: int


@dataclasses.dataclass(frozen=True)
class Recall:
    """Ask a worker to return closures that it has not started."""

    worker: int
    closures: list[int]


@dataclasses.dataclass(frozen=True)
class FenceAt:
    """Make servers reject every further update of a worker's incarnation."""

    servers: list[int]
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Rejoin:
    """Attach a server again, provided that it holds all variables it held."""

    server: int


@dataclasses.dataclass(frozen=True)
class Requeue:
    """Queue closures again whose worker is fenced everywhere."""

    closures: list[Closure]


@dataclasses.dataclass(frozen=True)
class Fail:
    """Fail a closure; with `cancels`, cancel the queued ones too."""

    closure: Closure
    error: BaseException
    cancels: bool


@dataclasses.dataclass(frozen=True)
class Abandon:
    """Fail running closures without reporting the error to the queue."""

    closures: list[Closure]
    error: BaseException


@dataclasses.dataclass(frozen=True)
class Raise:
    """Report an error that concerns all closures."""

    error: BaseException


Action = (
    RequestAttach
    | Release
    | Dispatch
    | Resend
    | Recall
    | FenceAt
    | Rejoin
    | Requeue
    | Fail
    | Abandon
    | Raise
)
