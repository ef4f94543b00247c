"""Closures, which are function calls that workers run for the coordinator, and their queue.

Pure: no thread, no clock, no socket. The caller holds a lock around every call.

Note [One error at a time]
    The first closure that fails sets the error of the queue. All queued closures are then
    cancelled, and running ones are waited for; their errors are not reported, since the
    cancellation may have caused them. When none runs any more, `take_error` returns the error
    once, and the queue can be used again. An error that cancels nothing is returned after all
    other closures have ended.

Note [Unconfirmed closures]
    A worker that gets no reply from a server returns its closure. The server may still have
    the request, and apply it later. If the closure runs again, the servers deduplicate. If it
    is abandoned because of an error, the user must be able to rely on that: the incarnations
    that may have sent something are fenced first.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from replicax.foundation import errors
from replicax.protocol.codec import Buffer
from replicax.protocol.messages import Result

LIMIT = 262_144


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


class ClosureQueue:
    """Closures between `schedule` and their results.

    Closures that are pinned to one worker are not queued here, and do not count.

    Attributes:
      limit: The maximum number of queued closures.
      in_flight: Those that are assigned to workers, by id.
      error: The first error, until `take_error` has returned it.
      is_cancelling: Whether the error has cancelled the queued closures, and running ones are
        waited for.
      num_finished: The total number of closures that finished.
      unconfirmed: Those in flight that no worker runs, and that are settled once no server can
        apply their updates any more. See Note [Unconfirmed closures].
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 1:
            raise errors.InvalidArgumentError(
                "`queue_limit` must be at least 1", f"it is {limit}", "Choose a larger one."
            )
        self.limit = limit
        self.in_flight: dict[int, Closure] = {}
        self.unconfirmed: dict[int, Closure] = {}
        self.error: BaseException | None = None
        self.is_cancelling = False
        self.num_finished = 0
        # Ordered by id.
        self._waiting: deque[Closure] = deque()
        # All closures that may be unsettled, ordered by id.
        self._ledger: deque[Closure] = deque()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether the next `put` has to wait."""
        return len(self._waiting) >= self.limit

    @property
    def is_idle(self) -> bool:
        """Whether no closure is queued or in flight."""
        return not self._waiting and not self.in_flight

    @property
    def is_error_ready(self) -> bool:
        """Whether there is an error that can be raised now."""
        return self.error is not None and self.is_idle

    @property
    def settled(self) -> int:
        """The watermark: every closure with a smaller id is settled."""
        ledger = self._ledger
        while ledger and ledger[0].is_settled:
            ledger.popleft()
        return ledger[0].id if ledger else self._next_id

    def put(self, closure: Closure) -> None:
        """Appends a closure, whose id is larger than all before."""
        assert closure.id >= self._next_id, "ids grow"
        assert not self.is_cancelling, "the error comes first"
        self._next_id = closure.id + 1
        self._waiting.append(closure)
        self._ledger.append(closure)

    @property
    def is_next_suspect(self) -> bool:
        """Whether the first queued closure has to run alone. See Note [Poison closures]."""
        return bool(self._waiting) and self._waiting[0].num_deaths > 0

    def take(self, count: int, worker: int) -> list[Closure]:
        """Assigns the first queued closures to a worker; a suspect comes alone."""
        taken: list[Closure] = []
        is_alone = self.is_next_suspect
        for _ in range(1 if is_alone else min(count, len(self._waiting))):
            if not is_alone and self._waiting[0].num_deaths:
                break
            closure = self._waiting.popleft()
            closure.assign_to(worker)
            self.in_flight[closure.id] = closure
            taken.append(closure)
        return taken

    def requeue(self, closures: Iterable[Closure]) -> list[Closure]:
        """Queues closures again, ordered by id; returns those that are settled instead."""
        returned = sorted((c for c in closures if c.id in self.in_flight), key=_id)
        for closure in returned:
            del self.in_flight[closure.id]
            self.unconfirmed.pop(closure.id, None)
        failed = [c for c in returned if c.error is not None]
        for closure in failed:
            closure.settle(State.FAILED, None, closure.error)
        if failed:
            returned = [c for c in returned if not c.is_settled]
        if self.is_cancelling:
            return [*failed, *self._cancel(returned)]
        if not returned:
            return failed
        front = []
        while self._waiting and self._waiting[0].id < returned[-1].id:
            front.append(self._waiting.popleft())
        for closure in returned:
            closure.state = State.QUEUED
        self._waiting.extendleft(sorted([*front, *returned], key=_id, reverse=True))
        return failed

    def finish(self, closure: Closure, result: tuple[Result, Sequence[Buffer]] | None) -> None:
        """Settles a closure with its result."""
        del self.in_flight[closure.id]
        self.num_finished += 1
        closure.settle(State.FINISHED, result, None)

    def fail(
        self, closure: Closure, error: BaseException, *, cancels: bool = True
    ) -> list[Closure]:
        """Settles a closure in flight with an error; returns all closures settled by that.

        With `cancels`, the queued closures are cancelled too.
        """
        if closure.unconfirmed:
            closure.error = error
            self.unconfirmed[closure.id] = closure
            return self.report(error, cancels=cancels)
        del self.in_flight[closure.id]
        closure.settle(State.FAILED, None, error)
        return [closure, *self.report(error, cancels=cancels)]

    def report(self, error: BaseException, *, cancels: bool = True) -> list[Closure]:
        """Sets the error of the queue, unless there is one; returns the cancelled closures."""
        if self.error is None:
            self.error = error
        if not cancels:
            return []
        self.is_cancelling = True
        return self.cancel_all()

    def abandon(self, closure: Closure, error: BaseException) -> None:
        """Settles a closure in flight with an error that only its own `fetch` raises."""
        del self.in_flight[closure.id]
        closure.settle(State.FAILED, None, error)

    def list_unconfirmed(self) -> list[Closure]:
        """Returns the unconfirmed closures, without those that another attempt has settled."""
        self.unconfirmed = {i: c for i, c in self.unconfirmed.items() if not c.is_settled}
        return list(self.unconfirmed.values())

    def cancel_all(self) -> list[Closure]:
        """Cancels all queued closures except unconfirmed ones; returns the cancelled ones."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return self._cancel(waiting) if waiting else []

    def take_error(self) -> BaseException | None:
        """Returns the error once, as soon as no closure is in flight."""
        if not self.is_error_ready:
            return None
        error, self.error = self.error, None
        self.is_cancelling = False
        self.unconfirmed.clear()
        return error

    def _cancel(self, closures: Iterable[Closure]) -> list[Closure]:
        """Cancels closures that no worker holds; returns those that are not unconfirmed."""
        held = {c.id: c for c in closures if c.unconfirmed}
        self.in_flight.update(held)
        self.unconfirmed.update(held)
        # One error for all: there may be very many of them.
        reason = errors.CancelledError(
            "A closure runs unless one before it fails",
            "an error came first" if self.error is None else _described(self.error),
            "Schedule it again.",
        )
        cancelled = [c for c in closures if not c.unconfirmed]
        for closure in cancelled:
            closure.settle(State.CANCELLED, None, reason)
        return cancelled


def _id(closure: Closure) -> int:
    return closure.id


def _described(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__} came first: {line}"
