"""The queue of closures: what waits, what runs, what went wrong first.

Pure: no thread, no clock, no socket. The caller holds a lock around every call.

Note [One error at a time]
    The first closure that fails makes the error of the queue. Everything that waits is
    cancelled then, and what runs is waited for; its errors are not reported, since they may
    be caused by the cancellation. When nothing runs any more, `take_error` hands the error
    out, once, and the queue is as good as new. An error that cancels nothing waits for
    everything else to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from replicax.coordinator.scheduling.closures import Closure, State
from replicax.foundation import errors

LIMIT = 262_144


class ClosureQueue:
    """Closures between `schedule` and their results.

    Closures that are pinned to one worker never come here: they do not count.

    Attributes:
      limit: So many closures may wait.
      in_flight: Those that workers have, by id.
      error: The first error, until it was handed out.
      is_cancelling: Whether the error has cancelled what waited, and what runs is waited for.
      num_finished: How many have ended well, ever.
      doubted: Those in flight that nobody runs, and that are settled when nothing of them can
        be made any more. See Note [Closures in doubt].

    Note [Closures in doubt]
        A worker that gets no answer from a server gives its closure back. What it sent may lie
        with that server, and be made when it wakes up. If the closure is run again, servers see
        to it that it counts once. If it is given up, because of an error, then whoever is told
        must be able to rely on it: the lives that may have left something are fenced first.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 1:
            raise errors.InvalidArgumentError(
                "`queue_limit` must be at least 1", f"it is {limit}", "Choose a larger one."
            )
        self.limit = limit
        self.in_flight: dict[int, Closure] = {}
        self.doubted: dict[int, Closure] = {}
        self.error: BaseException | None = None
        self.is_cancelling = False
        self.num_finished = 0
        # In the order of ids.
        self._waiting: deque[Closure] = deque()
        # All that were ever put and might be unsettled, in the order of ids.
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
        """Whether nothing waits and nothing runs."""
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
        """Adds a closure; its id is larger than all before."""
        assert closure.id >= self._next_id, "ids grow"
        assert not self.is_cancelling, "the error comes first"
        self._next_id = closure.id + 1
        self._waiting.append(closure)
        self._ledger.append(closure)

    @property
    def is_next_suspect(self) -> bool:
        """Whether the closure that has waited longest is to run alone."""
        return bool(self._waiting) and self._waiting[0].num_deaths > 0

    def take(self, count: int, worker: int) -> list[Closure]:
        """Gives the closures that have waited longest to a worker; a suspect comes alone."""
        taken: list[Closure] = []
        is_alone = self.is_next_suspect
        for _ in range(1 if is_alone else min(count, len(self._waiting))):
            if not is_alone and self._waiting[0].num_deaths:
                break
            closure = self._waiting.popleft()
            closure.give_to(worker)
            self.in_flight[closure.id] = closure
            taken.append(closure)
        return taken

    def put_back(self, closures: Iterable[Closure]) -> list[Closure]:
        """Takes closures back, to their old places; returns those that are settled instead."""
        returned = sorted((c for c in closures if c.id in self.in_flight), key=_id)
        for closure in returned:
            del self.in_flight[closure.id]
            self.doubted.pop(closure.id, None)
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

    def finish(self, closure: Closure, result: Any) -> None:
        """Settles a closure that ended well."""
        del self.in_flight[closure.id]
        self.num_finished += 1
        closure.settle(State.FINISHED, result, None)

    def fail(
        self, closure: Closure, error: BaseException, *, cancels: bool = True
    ) -> list[Closure]:
        """Settles a closure with an error; returns all that are settled by that.

        Args:
          closure: One that is in flight.
          error: Why it failed.
          cancels: Whether the closures that wait are cancelled, too.
        """
        if closure.doubts:
            closure.error = error
            self.doubted[closure.id] = closure
            return self.report(error, cancels=cancels)
        del self.in_flight[closure.id]
        closure.settle(State.FAILED, None, error)
        return [closure, *self.report(error, cancels=cancels)]

    def report(self, error: BaseException, *, cancels: bool = True) -> list[Closure]:
        """Makes this the error of the queue, unless there is one; returns the cancelled."""
        if self.error is None:
            self.error = error
        if not cancels:
            return []
        self.is_cancelling = True
        return self.cancel_all()

    def abandon(self, closure: Closure, error: BaseException) -> None:
        """Settles a closure in flight with an error that nobody is told unless they ask."""
        del self.in_flight[closure.id]
        closure.settle(State.FAILED, None, error)

    def still_doubted(self) -> list[Closure]:
        """Returns the closures in doubt that another attempt has not settled meanwhile."""
        self.doubted = {i: c for i, c in self.doubted.items() if not c.is_settled}
        return list(self.doubted.values())

    def cancel_all(self) -> list[Closure]:
        """Cancels everything that waits, unless it is in doubt; returns it."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return self._cancel(waiting) if waiting else []

    def take_error(self) -> BaseException | None:
        """Returns the error, once, if nothing runs any more that has to end first."""
        if not self.is_error_ready:
            return None
        error, self.error = self.error, None
        self.is_cancelling = False
        self.doubted.clear()
        return error

    def _cancel(self, closures: Iterable[Closure]) -> list[Closure]:
        """Cancels closures that nobody has; returns all that are not in doubt."""
        held = {c.id: c for c in closures if c.doubts}
        self.in_flight.update(held)
        self.doubted.update(held)
        # One error for all: there may be very many of them.
        reason = errors.CancelledError(
            "A closure runs unless one before it fails",
            "an error came first" if self.error is None else _described(self.error),
            "Schedule it again.",
        )
        cancelled = [c for c in closures if not c.doubts]
        for closure in cancelled:
            closure.settle(State.CANCELLED, None, reason)
        return cancelled


def _id(closure: Closure) -> int:
    return closure.id


def _described(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__} came first: {line}"
