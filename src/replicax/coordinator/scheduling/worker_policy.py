"""Decisions about workers: which are attached, which are lost, and how long closures wait.

Pure: the time is an argument, and decisions are returned as actions.
"""

from __future__ import annotations

from collections.abc import Callable

from replicax.coordinator.scheduling import error_messages
from replicax.coordinator.scheduling.actions import (
    Abandon,
    Action,
    Raise,
    Release,
    RequestAttach,
    Requeue,
    Resend,
)
from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.fencing import Fencing
from replicax.coordinator.scheduling.pool import WorkerPool
from replicax.coordinator.scheduling.queue import ClosureQueue
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.scheduling.workers import WorkerState


class WorkerPolicy:
    """Decides what to do about events of workers.

    Args:
      pool: All workers.
      fencing: Fences workers.
      timing: The timeouts.
      on_progress: Called when closures have ended.
    """

    def __init__(
        self,
        pool: WorkerPool,
        fencing: Fencing,
        timing: Timing,
        on_progress: Callable[[], None],
    ) -> None:
        self._pool, self._fencing, self._timing = pool, fencing, timing
        self._on_progress = on_progress
        # When running closures were first waited for after an error.
        self._cancelling_since_s: float | None = None
        # When closures were first queued while no worker was ready.
        self._no_workers_since_s: float | None = None

    # Events.

    def connected(self, index: int, incarnation: int, now: float) -> list[Action]:
        """Handles a new connection to a worker, perhaps to a new incarnation."""
        worker = self._pool.workers[index]
        worker.last_seen_s = now
        actions: list[Action] = []
        if worker.is_in_use:
            if incarnation == worker.incarnation:
                is_ready = worker.state is WorkerState.READY
                return [Resend(index) if is_ready else RequestAttach(index)]
            actions = self._fencing.fence(worker, "it was restarted", now)
        if incarnation in self._fencing.fenced:
            worker.incarnation = incarnation
            worker.state = WorkerState.FENCED
            return [*actions, Release(index)]
        worker.begin_incarnation(incarnation, now)
        return [*actions, RequestAttach(index)]

    def attached(self, index: int, now: float) -> bool:
        """Handles that a worker has attached to the job; returns False if it already had."""
        worker = self._pool.workers[index]
        if worker.state is not WorkerState.ATTACHING:
            return False
        worker.state = WorkerState.READY
        worker.reason = ""
        worker.since_s = now
        self._pool.update(worker)
        return True

    def attach_failed(self, index: int, reason: str) -> None:
        """Handles that a worker cannot attach now; the next heartbeat repeats the request."""
        worker = self._pool.workers[index]
        if worker.state is WorkerState.ATTACHING:
            worker.reason = reason
            worker.must_reattach = True

    def retry_attach(self) -> list[Action]:
        """Repeats attach requests that failed; called with every heartbeat."""
        failed = [w for w in self._pool.workers if w.must_reattach]
        for worker in failed:
            worker.must_reattach = False
        return [RequestAttach(w.index) for w in failed if w.state is WorkerState.ATTACHING]

    def lost(self, index: int, reason: str, now: float) -> list[Action]:
        """Handles a lost connection: most likely the process is gone."""
        worker = self._pool.workers[index]
        actions = self._fencing.fence(worker, reason, now) if worker.is_in_use else []
        worker.state = WorkerState.CONNECTING
        return actions

    def detached(self, index: int, closure: Closure | None, now: float) -> list[Action]:
        """Handles that a worker has left the job, or that servers reject it.

        Args:
          index: The worker.
          closure: The closure whose error revealed it, already taken from the worker.
          now: The time.
        """
        worker = self._pool.workers[index]
        if worker.state is not WorkerState.READY:
            return []
        if closure is not None:
            worker.assigned[closure.id] = closure
        reason = "it is not attached to this job"
        return self._fencing.fence_and_release(worker, reason, now, counts_death=False)

    def heartbeat(self, index: int, is_idle: bool) -> list[Action]:
        """Handles a heartbeat that reports whether a worker has closures.

        If it has none, twice, while its assigned closures have not changed, then the closures
        or their results were lost on the way.
        """
        worker = self._pool.workers[index]
        reported = tuple(worker.assigned) if is_idle else ()
        before, worker.reported_idle = worker.reported_idle, reported
        if not reported or reported != before or worker.state is not WorkerState.READY:
            return []
        worker.reported_idle = ()
        return [Resend(index)]

    def take_ended(
        self, index: int, incarnation: int, closure: int, attempt: int = -1
    ) -> Closure | None:
        """Takes a closure from a worker; None if this incarnation does not hold it.

        Args:
          index: The worker.
          incarnation: The incarnation that sent the message.
          closure: The closure.
          attempt: The attempt that the worker returned unstarted; -1 if it has run.
        """
        worker = self._pool.workers[index]
        found = worker.assigned.get(closure)
        if worker.incarnation != incarnation or found is None:
            return None
        if 0 <= attempt < found.attempt:
            # A duplicate: it was requeued and assigned again since.
            return None
        return worker.assigned.pop(closure)

    def record_finished(self, index: int, count: int, now: float) -> None:
        """Records that `count` closures, which `take_ended` returned, have run to their end."""
        worker = self._pool.workers[index]
        worker.last_seen_s = now
        if count:
            worker.record_finished(count, now)
            self._on_progress()
        self._pool.update(worker)

    # Time.

    def check_timeouts(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Finds workers that did not reply or finish in time, and closures that waited too long."""
        return [
            *self._check_silence(now),
            *self._check_unconfirmed(queue, now),
            *self._check_cancelling(queue, now),
            *self._check_no_workers(queue, now),
            *self._check_pinned(now),
        ]

    def extend_timeouts(self, pause_s: float) -> None:
        """Extends all timeouts by the seconds for which this process was stopped."""
        for worker in self._pool.workers:
            worker.last_seen_s += pause_s
            worker.since_s += pause_s

    def _check_silence(self, now: float) -> list[Action]:
        """Fences workers that send nothing, or whose closure exceeds its deadline."""
        timing = self._timing
        actions: list[Action] = []
        for worker in self._pool.workers:
            if worker.is_in_use and now - worker.last_seen_s > timing.dead_s:
                reason = error_messages.silent("heartbeats", timing.dead_s)
            elif (late := worker.overdue_closure(now)) is not None:
                reason = error_messages.too_slow(late)
            else:
                continue
            actions += self._fencing.fence_and_release(worker, reason, now, is_dead=True)
        return actions

    def _check_unconfirmed(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Fences incarnations whose updates may still arrive. See Note [Unconfirmed closures]."""
        actions: list[Action] = []
        for closure in queue.list_unconfirmed() if queue.unconfirmed else ():
            for worker in self._pool.ready:
                if worker.incarnation in closure.unconfirmed:
                    reason = "a server that did not reply may still apply its updates"
                    actions += self._fencing.fence_and_release(
                        worker, reason, now, counts_death=False
                    )
            pending = self._fencing.pending
            closure.unconfirmed = tuple(i for i in closure.unconfirmed if i in pending)
            if not closure.unconfirmed:
                actions.append(Requeue([closure]))
        return actions

    def _check_cancelling(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Abandons closures that still run long after an error."""
        if not queue.is_cancelling or not queue.in_flight:
            self._cancelling_since_s = None
            return []
        if self._cancelling_since_s is None:
            self._cancelling_since_s = now
        if now - self._cancelling_since_s < self._timing.cancel_s:
            return []
        error = error_messages.aborted(
            f"it still ran {self._timing.cancel_s:g} s after another closure had failed"
        )
        for fence in self._fencing.pending.values():
            fence.error = error
        actions: list[Action] = []
        for worker in self._pool.workers:
            if worker.assigned:
                actions += self._fencing.fence_and_release(
                    worker, "it did not stop after an error", now, is_dead=True, error=error
                )
        return actions

    def _check_no_workers(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Fails queued closures if no worker was ready for too long."""
        limit_s = self._timing.no_workers_s
        is_waiting = len(queue) > 0 and not queue.is_cancelling and not self._pool.is_paused
        if not is_waiting or self._pool.ready:
            self._no_workers_since_s = None
            return []
        if self._no_workers_since_s is None:
            self._no_workers_since_s = now
        if now - self._no_workers_since_s < limit_s:
            return []
        self._no_workers_since_s = None
        return [Raise(error_messages.no_workers(len(queue), self._pool.workers, limit_s))]

    def _check_pinned(self, now: float) -> list[Action]:
        """Abandons pinned closures of workers that were not ready for too long."""
        limit_s = self._timing.no_workers_s
        actions: list[Action] = []
        for worker in self._pool.workers:
            if worker.state is WorkerState.READY:
                worker.ready_s = now
            elif worker.pinned_closures and now - max(worker.ready_s, worker.pinned_s) > limit_s:
                error = error_messages.worker_gone(worker, limit_s)
                actions.append(Abandon(list(worker.pinned_closures), error))
                worker.pinned_closures.clear()
        return actions
