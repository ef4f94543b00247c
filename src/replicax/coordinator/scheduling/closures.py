"""A closure: one call that a worker makes for the coordinator, from `schedule` to its result."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol


class ShippedFunction(Protocol):
    """A function as it travels: its bytes, and the name that they have everywhere."""

    @property
    def sha(self) -> str: ...

    @property
    def buffers(self) -> Sequence[Any]: ...


class State(enum.Enum):
    """Where a closure stands."""

    QUEUED = "queued"  # by `schedule`, and again when its worker was lost
    IN_FLIGHT = "in flight"  # in the window of a worker, or of one that is being fenced
    FINISHED = "finished"  # its result is here, its updates are acknowledged
    FAILED = "failed"  # with an error of its own
    CANCELLED = "cancelled"  # will not run, because another one failed


# Compared on hot paths, where looking up a member of an enum costs as much as the rest.
_QUEUED, _IN_FLIGHT = State.QUEUED, State.IN_FLIGHT


class Closure:
    """One call. Changed under the coordinator's lock, by the queue and the policy alone.

    Attributes:
      id: Grows, and is unique in the job; servers know updates by it.
      function: What to call.
      resources: Its arguments, if they are nothing but objects of the worker.
      buffers: Else: the pickled arguments.
      kept: What must stay alive until the closure is settled: per-worker objects that the
        function or its arguments hold are dropped on the workers with their last reference.
      pin: The only worker that may run it; None for all.
      deadline_s: How long it may run; None for as long as it likes.
      state: Where it stands.
      worker: The worker that it was given to last.
      attempt: How often it was given to a worker before.
      num_deaths: How many workers were lost while it ran, or may have.
      doubts: Lives of workers that gave it back because a server did not answer: what they sent
        may still be made there.
      num_misses: How often a worker did not know its function.
      is_recalled: Whether its worker was asked to give it back unstarted.
      is_awaited: Whether a thread waits for just this result.
      result: What the worker sent: the message and its buffers.
      error: Why there is no result.
    """

    __slots__ = (
        "attempt",
        "buffers",
        "deadline_s",
        "doubts",
        "error",
        "function",
        "id",
        "is_awaited",
        "is_recalled",
        "kept",
        "num_deaths",
        "num_misses",
        "pin",
        "resources",
        "result",
        "state",
        "worker",
    )

    def __init__(
        self,
        closure: int,
        function: ShippedFunction,
        resources: Sequence[int] = (),
        buffers: Sequence[Any] = (),
        kept: Any = None,
        pin: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.id = closure
        self.function: ShippedFunction | None = function
        self.resources = resources
        self.buffers = buffers
        self.kept = kept
        self.pin = pin
        self.deadline_s = deadline_s
        self.state = _QUEUED
        self.worker = -1
        self.attempt = -1
        self.num_deaths = 0
        self.num_misses = 0
        self.doubts: tuple[int, ...] = ()
        self.is_recalled = False
        self.is_awaited = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<closure {self.id}, {self.state.value}>"

    @property
    def is_settled(self) -> bool:
        """Whether nothing will change any more."""
        return self.state is not _QUEUED and self.state is not _IN_FLIGHT

    def give_to(self, worker: int) -> None:
        """Notes that a worker got it."""
        self.state = _IN_FLIGHT
        self.worker = worker
        self.attempt += 1
        self.is_recalled = False

    def settle(self, state: State, result: Any, error: BaseException | None) -> None:
        """Notes how it ended, and lets go of everything that was needed to run it."""
        self.result, self.error = result, error
        # Last: readers without the lock look at the state first.
        self.state = state
        self.function = self.kept = None
        self.buffers = self.resources = ()
