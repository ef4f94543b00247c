"""The pool of workers: assigns closures, rebalances them, and runs stragglers a second time.

Pure: the time is an argument, and decisions are returned as actions.

Note [Speculation]
    An idle worker may run a closure that another worker takes unusually long for, or that
    waits behind such a closure: a frozen worker does not return it. Servers apply the updates
    of the first attempt that sends them, and the first result counts. The slower attempt is
    not stopped: its later updates are rejected or ignored.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from replicax.coordinator.scheduling.actions import Action, Dispatch, Recall
from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.pacing import Pacing
from replicax.coordinator.scheduling.queue import ClosureQueue
from replicax.coordinator.scheduling.workers import Worker, WorkerState

# Closures behind one that has run for so long may be recalled.
_RECALL_S = 0.02
# A closure is slow when it has run for so many times the usual duration, and for so long.
_SLOW_FACTOR = 1.5
_SLOW_S = 0.05


class WorkerPool:
    """All workers.

    Attributes:
      workers: By index.
      available: The indices of workers with capacity.
      is_paused: Whether assignment is paused because a server is away.
      pacing: Limits how far workers run apart; None for no limit.
    """

    def __init__(self, num_workers: int, now: float) -> None:
        self.workers = [Worker(i, now) for i in range(num_workers)]
        self.available: set[int] = set()
        self.is_paused = False
        self.pacing: Pacing | None = None

    def set_pacing(self, pacing: Pacing | None) -> None:
        """Sets the pacing; with one, each worker holds one closure at a time."""
        self.pacing = pacing
        for worker in self.workers:
            worker.is_paced = pacing is not None

    @property
    def ready(self) -> list[Worker]:
        """The workers that are attached to the job."""
        return [w for w in self.workers if w.state is WorkerState.READY]

    @property
    def has_pinned_closures(self) -> bool:
        """Whether a closure waits that only one worker may run."""
        return any(w.pinned_closures for w in self.workers)

    def update(self, worker: Worker) -> None:
        """Updates `available` after a worker has changed."""
        if worker.has_capacity:
            self.available.add(worker.index)
        else:
            self.available.discard(worker.index)

    def remove_assigned(self) -> list[Closure]:
        """Removes all closures from their workers, and returns them."""
        removed = [c for w in self.workers for c in w.assigned.values()]
        for worker in self.workers:
            worker.assigned.clear()
            self.update(worker)
        return removed

    # Assignment.

    def dispatch(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Assigns queued closures to workers with capacity, to each its fair share."""
        actions: list[Action] = []
        ready = self.ready
        for worker in ready:
            if worker.pinned_closures:
                closures = list(worker.pinned_closures)
                worker.pinned_closures.clear()
                for closure in closures:
                    closure.assign_to(worker.index)
                actions.append(self._assign(worker, closures, now))
        if not len(queue) or not self.available or self.is_paused:
            return actions
        if self.pacing is not None:
            return [*actions, *self._dispatch_paced(self.pacing, queue, now)]
        total = len(queue) + sum(len(w.assigned) for w in ready)
        share = -(-total // len(ready))
        candidates = [self.workers[i] for i in self.available]
        for worker in sorted(candidates, key=lambda w: (len(w.assigned), w.index)):
            count = min(worker.limit, share) - len(worker.assigned)
            must_wait = worker.assigned and queue.is_next_suspect
            if count <= 0 or worker.excluded_until_s > now or must_wait:
                continue
            closures = queue.take(count, worker.index)
            if not closures:
                break
            actions.append(self._assign(worker, closures, now))
        return actions

    def _dispatch_paced(self, pacing: Pacing, queue: ClosureQueue, now: float) -> Iterator[Action]:
        """Assigns one closure to each idle worker that the pacing admits."""
        pacing.update()
        for index in pacing.order(self.available):
            worker = self.workers[index]
            if worker.excluded_until_s > now or not pacing.admits(index):
                continue
            closures = queue.take(1, index)
            if not closures:
                break
            pacing.record_assigned(index, closures[0])
            yield self._assign(worker, closures, now)

    def _assign(self, worker: Worker, closures: list[Closure], now: float) -> Dispatch:
        worker.assign(closures, now)
        self.update(worker)
        return Dispatch(worker.index, closures)

    # Rebalancing.

    def rebalance(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Recalls closures that slow workers have not started, while other workers are idle."""
        if len(queue) or queue.is_cancelling:
            return []
        num_idle = len(self._idle(now))
        actions: list[Action] = []
        for worker in sorted(self.workers, key=lambda w: -len(w.assigned)):
            if not num_idle or now - worker.since_s < _RECALL_S:
                continue
            unstarted = [c for c in list(worker.assigned.values())[1:] if _is_movable(c)]
            chosen = unstarted[-num_idle:]
            if chosen:
                num_idle -= len(chosen)
                actions.append(_recall(worker, chosen))
        return actions

    def recall_all(self) -> list[Action]:
        """Recalls all closures that no worker has started."""
        actions: list[Action] = []
        for worker in self.workers:
            chosen = [c for c in worker.assigned.values() if _is_movable(c)]
            if chosen:
                actions.append(_recall(worker, chosen))
        return actions

    def _idle(self, now: float) -> list[Worker]:
        available = [self.workers[i] for i in sorted(self.available)]
        return [w for w in available if not w.assigned and w.excluded_until_s <= now]

    # Speculation. See Note [Speculation].

    def speculate(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Assigns slow closures to idle workers as well."""
        if len(queue) or queue.is_cancelling or self.is_paused:
            return []
        idle, usual_s = self._idle(now), self._usual_s()
        if not idle or usual_s is None:
            return []
        limit_s = max(_SLOW_FACTOR * usual_s, _SLOW_S)
        busy = sorted((w for w in self.workers if w.assigned), key=lambda w: w.since_s)
        slow = [c for w in busy if now - w.since_s >= limit_s for c in w.assigned.values()]
        actions: list[Action] = []
        for closure in slow:
            if closure.is_settled or closure.pin is not None or self._num_holders(closure) > 1:
                continue
            if not idle:
                break
            worker = idle.pop(0)
            closure.assign_to(worker.index)
            actions.append(self._assign(worker, [closure], now))
        return actions

    def has_other_attempt(self, closure: Closure) -> bool:
        """Returns whether a worker holds a closure that another worker has lost or returned."""
        return closure.attempt > 0 and self._num_holders(closure) > 0

    def _num_holders(self, closure: Closure) -> int:
        return sum(closure.id in worker.assigned for worker in self.workers)

    def _usual_s(self) -> float | None:
        """Returns the median duration of closures; None if none is known."""
        known = [w.estimate_s for w in self.ready if w.estimate_s is not None]
        return statistics.median(known) if known else None


def _recall(worker: Worker, closures: list[Closure]) -> Recall:
    for closure in closures:
        closure.is_recalled = True
    return Recall(worker.index, [c.id for c in closures])


def _is_movable(closure: Closure) -> bool:
    return not closure.is_recalled and closure.pin is None
