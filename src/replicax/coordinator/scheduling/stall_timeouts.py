"""How long closures wait for workers that are not there. Pure, like the policy, which asks."""

from __future__ import annotations

from replicax.coordinator.scheduling import error_messages
from replicax.coordinator.scheduling.actions import Abandon, Action, Raise
from replicax.coordinator.scheduling.assignment import Crew
from replicax.coordinator.scheduling.queue import ClosureQueue
from replicax.coordinator.scheduling.workers import WorkerState


class Patience:
    """Gives up what nobody can run, after the seconds that were agreed."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # Since when closures wait while no worker is there.
        self._since_s: float | None = None

    def check_queue(self, crew: Crew, queue: ClosureQueue, now: float) -> list[Action]:
        """Gives up when closures wait and there is nobody to run them."""
        is_waiting = len(queue) > 0 and not queue.is_cancelling and not crew.is_paused
        if not is_waiting or any(w.state is WorkerState.READY for w in crew.workers):
            self._since_s = None
            return []
        if self._since_s is None:
            self._since_s = now
        if now - self._since_s < self._limit_s:
            return []
        self._since_s = None
        return [Raise(error_messages.no_workers(len(queue), crew.workers, self._limit_s))]

    def check_errands(self, crew: Crew, now: float) -> list[Action]:
        """Gives up errands of workers that have been away for too long."""
        actions: list[Action] = []
        for worker in crew.workers:
            if worker.state is WorkerState.READY:
                worker.ready_s = now
            elif worker.errands and now - max(worker.ready_s, worker.asked_s) > self._limit_s:
                error = error_messages.worker_gone(worker, self._limit_s)
                actions.append(Abandon(list(worker.errands), error))
                worker.errands.clear()
        return actions
