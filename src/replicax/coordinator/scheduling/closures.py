"""A closure: one function call that a worker runs for the coordinator."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from replicax.protocol.codec import Buffer
from replicax.protocol.messages import Result


class ShippedFunction(Protocol):
    """A serialized function and its content hash."""

    @property
    def sha(self) -> str: ...

    @property
    def buffers(self) -> Sequence[Buffer]: ...


class State(enum.Enum):
    """The state of a closure."""

    QUEUED = "queued"  # after `schedule`, and again after its worker was lost
    IN_FLIGHT = "in flight"  # assigned to a worker, or to one that is being fenced
    FINISHED = "finished"  # its result arrived, its updates are acknowledged
    FAILED = "failed"  # with an error of its own
    CANCELLED = "cancelled"  # never runs, because another one failed


# Compared on hot paths, where looking up a member of an enum costs as much as the rest.
_QUEUED, _IN_FLIGHT = State.QUEUED, State.IN_FLIGHT


class Closure:
    """One function call. Only the queue and the policy change it, under the coordinator's lock.

    Attributes:
      id: Increasing and unique in the job; servers deduplicate updates by it.
      function: The function.
      resources: The ids of its arguments, if all of them are per-worker resources.
      buffers: The pickled arguments otherwise.
      keep_alive: Objects that must stay alive until the closure is settled: a per-worker
        resource is dropped on the workers with the last reference to it.
      pin: The only worker that may run it; None for any worker.
      deadline_s: The seconds it may run; None for no limit.
      state: Its state.
      worker: The worker that it was last assigned to.
      attempt: The number of earlier assignments.
      num_deaths: The number of workers that were lost while it ran, or may have run.
      unconfirmed: Incarnations of workers that returned it because a server did not reply: the
        server may still apply what they sent.
      num_function_misses: The number of times that a worker did not have its function.
      is_recalled: Whether its worker was asked to return it unstarted.
      is_awaited: Whether a thread waits for this result.
      result: The worker's message and its buffers.
      error: The error, if there is no result.
    """

    __slots__ = (
        "attempt",
        "buffers",
        "deadline_s",
        "error",
        "function",
        "id",
        "is_awaited",
        "is_recalled",
        "keep_alive",
        "num_deaths",
        "num_function_misses",
        "pin",
        "resources",
        "result",
        "state",
        "unconfirmed",
        "worker",
    )

    def __init__(
        self,
        closure: int,
        function: ShippedFunction | None,
        resources: Sequence[int] = (),
        buffers: Sequence[Buffer] = (),
        keep_alive: object = None,
        pin: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.id = closure
        self.function = function
        self.resources = resources
        self.buffers = buffers
        self.keep_alive = keep_alive
        self.pin = pin
        self.deadline_s = deadline_s
        self.state = _QUEUED
        self.worker = -1
        self.attempt = -1
        self.num_deaths = 0
        self.num_function_misses = 0
        self.unconfirmed: tuple[int, ...] = ()
        self.is_recalled = False
        self.is_awaited = False
        self.result: tuple[Result, Sequence[Buffer]] | None = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<closure {self.id}, {self.state.value}>"

    @property
    def is_settled(self) -> bool:
        """Whether its state is final."""
        return self.state is not _QUEUED and self.state is not _IN_FLIGHT

    def assign_to(self, worker: int) -> None:
        """Records that it was assigned to a worker."""
        self.state = _IN_FLIGHT
        self.worker = worker
        self.attempt += 1
        self.is_recalled = False

    def settle(
        self,
        state: State,
        result: tuple[Result, Sequence[Buffer]] | None,
        error: BaseException | None,
    ) -> None:
        """Records the outcome, and drops everything that was needed to run it."""
        self.result, self.error = result, error
        # Last: readers without the lock look at the state first.
        self.state = state
        self.function = self.keep_alive = None
        self.buffers = self.resources = ()
