"""The workers and their pool, which assigns closures, rebalances them, and repeats stragglers.

Pure: the time is an argument, and decisions are returned as actions.

Note [Speculation]
    An idle worker may run a closure that another worker takes unusually long for, or that
    waits behind such a closure: a frozen worker does not return it. Servers apply the updates
    of the first attempt that sends them, and the first result counts. The slower attempt is
    not stopped: its later updates are rejected or ignored.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Iterator, Mapping

from replicax.coordinator.scheduling.actions import Action, Dispatch, Recall
from replicax.coordinator.scheduling.closures import Closure, ClosureQueue
from replicax.coordinator.scheduling.pacing import Pacing

# The number of assigned closures that hides the round trip to a worker. Very quick closures get a
# higher limit: as many as take `_TARGET_S` together.
DEFAULT_LIMIT = 8
_MAX_LIMIT = 64
_TARGET_S = 0.01
# Longer closures are assigned one by one, with one waiting, so that work spreads.
_LONG_S = 0.05
_VERY_LONG_S = 1.0
# Before its first result a worker may be compiling: few closures wait behind that.
_FIRST_LIMIT = 2
# The number of functions that the coordinator tracks per worker; the worker itself keeps more.
_NUM_FUNCTIONS = 900
# A worker reports a finished closure within this time. See Note [Poison closures].
_UNREPORTED_S = 0.5
_SMOOTHING = 0.5
_SLOW_SMOOTHING = 0.1
# The running time of the first closure after which those behind it may be recalled.
_RECALL_S = 0.02
# A closure is slow after this multiple of the usual duration, and at least this time.
_SLOW_FACTOR = 1.5
_SLOW_S = 0.05


class WorkerState(enum.Enum):
    """The state of a worker."""

    CONNECTING = "connecting"  # at the start, and after its process is gone
    ATTACHING = "attaching"  # connected, but not yet attached to the job
    READY = "ready"  # attached to the job; idle if nothing is assigned to it
    FENCED = "fenced"  # fenced while its process may be alive: waits for a new incarnation


class Worker:
    """One worker. Only the policy changes it.

    Attributes:
      index: Its index in the job "worker".
      state: Its state.
      incarnation: The incarnation that was last connected.
      assigned: Its closures, in the order in which it runs them.
      pinned_closures: Queued closures that only this worker may run.
      functions: The functions that this incarnation has, the last used at the end.
      last_seen_s: When its last message arrived.
      ready_s: When it was last ready.
      pinned_s: When a pinned closure was last queued for it.
      since_s: When the first assigned closure may have started.
      estimate_s: The estimated duration of its closures; None if unknown.
      pace_s: A slow moving average of the same, which one outlier does not change much.
      excluded_until_s: When it may get closures again, after it failed to reach a server that
        other workers can reach.
      must_reattach: Whether its attach request failed and has to be repeated.
      is_paced: Whether it may hold one closure only; see `pacing`.
      reported_idle: The closures that were assigned when it last reported to be idle.
      counters: The counters of its last heartbeat.
      num_done: The number of closures that all its incarnations have finished.
      num_restarts: The number of times it was lost.
      reason: Why it is not ready, for messages.
    """

    def __init__(self, index: int, now: float) -> None:
        self.index = index
        self.state = WorkerState.CONNECTING
        self.incarnation = 0
        self.assigned: dict[int, Closure] = {}
        self.pinned_closures: deque[Closure] = deque()
        self.functions: dict[str, None] = {}
        self.last_seen_s = now
        self.since_s = now
        self.ready_s = now
        self.pinned_s = now
        self.estimate_s: float | None = None
        self.pace_s = _TARGET_S
        self.excluded_until_s = 0.0
        self.must_reattach = False
        self.is_paced = False
        self.reported_idle: tuple[int, ...] = ()
        self.counters: Mapping[str, int | float] = {}
        self.num_done = 0
        self.num_restarts = 0
        self.reason = "it was never reached"

    def __str__(self) -> str:
        return f"/job:worker/task:{self.index}"

    @property
    def limit(self) -> int:
        """The number of closures that it may hold."""
        if self.is_paced or self._has_suspect:
            return 1
        if self.estimate_s is None:
            return _FIRST_LIMIT
        if self.estimate_s > _VERY_LONG_S:
            return 1
        if self.estimate_s > _LONG_S:
            return _FIRST_LIMIT
        return int(min(max(_TARGET_S / max(self.pace_s, 1e-6), DEFAULT_LIMIT), _MAX_LIMIT))

    @property
    def _has_suspect(self) -> bool:
        return len(self.assigned) == 1 and next(iter(self.assigned.values())).num_deaths > 0

    @property
    def is_in_use(self) -> bool:
        """Whether the job uses it, or attaches it."""
        return self.state in (WorkerState.ATTACHING, WorkerState.READY)

    @property
    def has_capacity(self) -> bool:
        """Whether it can take more closures; refilling waits until half of the limit is free."""
        return self.state is WorkerState.READY and len(self.assigned) <= self.limit // 2

    def assign(self, closures: list[Closure], now: float) -> None:
        """Records that closures were sent to it."""
        if not self.assigned:
            self.since_s = now
        for closure in closures:
            self.assigned[closure.id] = closure

    def suspects(self, now: float) -> list[Closure]:
        """Returns the closures that may have killed it. See Note [Poison closures]."""
        closures = list(self.assigned.values())
        return closures if now - self.since_s < _UNREPORTED_S else closures[:1]

    def record_finished(self, count: int, now: float) -> None:
        """Updates its estimates after `count` closures have finished since the last call."""
        spent_s = (now - self.since_s) / count
        self.since_s = now
        self.num_done += count
        old = self.estimate_s
        self.pace_s += _SLOW_SMOOTHING * (spent_s - self.pace_s)
        # Down at once: the first closure may have compiled. Up in steps: one may be an outlier.
        if old is None or spent_s < old:
            self.estimate_s = spent_s
        else:
            self.estimate_s = old + _SMOOTHING * (spent_s - old)

    def overdue_closure(self, now: float) -> Closure | None:
        """Returns the running closure if it has exceeded its deadline."""
        running = next(iter(self.assigned.values()), None)
        if running is None or running.deadline_s is None:
            return None
        return running if now - self.since_s > running.deadline_s else None

    def needs_function(self, sha: str) -> bool:
        """Returns whether a function has to be sent to it, and records it as sent."""
        functions = self.functions
        if sha in functions:
            if next(reversed(functions)) != sha:
                functions[sha] = functions.pop(sha)
            return False
        functions[sha] = None
        if len(functions) > _NUM_FUNCTIONS:
            del functions[next(iter(functions))]
        return True

    def begin_incarnation(self, incarnation: int, now: float) -> None:
        """Resets the record for a new process."""
        self.incarnation = incarnation
        self.state = WorkerState.ATTACHING
        self.functions.clear()
        self.must_reattach = False
        self.estimate_s = None
        self.pace_s = _TARGET_S
        self.last_seen_s = now
        self.reason = "it is not attached to the job yet"


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
