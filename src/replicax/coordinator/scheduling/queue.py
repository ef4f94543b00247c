"""The queue of closures: those that wait, those in flight, and the first error.

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
    is given up because of an error, the user must be able to rely on that: the incarnations
    that may have sent something are fenced first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from replicax.coordinator.scheduling.closures import Closure, State
from replicax.foundation import errors
from replicax.protocol.codec import Buffer
from replicax.protocol.messages import Result

LIMIT = 262_144


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
