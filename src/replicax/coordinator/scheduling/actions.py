"""What the policy asks to be done, as values: who carries them out is not its business."""

from __future__ import annotations

import dataclasses

from replicax.coordinator.scheduling.closures import Closure


@dataclasses.dataclass(frozen=True)
class Greet:
    """Take a worker into the job: it is there, and holds nothing yet."""

    worker: int


@dataclasses.dataclass(frozen=True)
class Release:
    """Tell a worker that was fenced to drop everything and to begin a new life.

    If it counts as dead, its process is to end: another one takes its place.
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
    """Say everything again to a worker whose connection broke: what came twice does no harm."""

    worker: int


@dataclasses.dataclass(frozen=True)
class Recall:
    """Ask a worker to give closures back, or to drop them, if it has not started them."""

    worker: int
    closures: list[int]


@dataclasses.dataclass(frozen=True)
class FenceAt:
    """Forbid a process every further update, at some servers."""

    servers: list[int]
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Rejoin:
    """Take a server into the job again, if it holds all that it held."""

    server: int


@dataclasses.dataclass(frozen=True)
class PutBack:
    """Closures of a worker that can do no more harm: queue them again."""

    closures: list[Closure]


@dataclasses.dataclass(frozen=True)
class Fail:
    """A closure failed; `cancels` says whether those that wait are cancelled, too."""

    closure: Closure
    error: BaseException
    cancels: bool


@dataclasses.dataclass(frozen=True)
class Abandon:
    """Closures that are given up while they run."""

    closures: list[Closure]
    error: BaseException


@dataclasses.dataclass(frozen=True)
class Raise:
    """Something that concerns all closures went wrong."""

    error: BaseException


Action = (
    Greet
    | Release
    | Dispatch
    | Resend
    | Recall
    | FenceAt
    | Rejoin
    | PutBack
    | Fail
    | Abandon
    | Raise
)
