"""Who gets which closures: each worker its fair share, and none that another could run sooner.

Pure, like the policy, which owns the workers.
"""

from __future__ import annotations

from replicax.coordinator.scheduling.actions import Action, Dispatch, Recall
from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.pacing import Pacing
from replicax.coordinator.scheduling.queue import ClosureQueue
from replicax.coordinator.scheduling.workers import Worker, WorkerState

# A worker that has been at its first closure for so long may be asked for the others.
_RECALL_S = 0.02


class Crew:
    """All workers.

    Attributes:
      workers: By index.
      hungry: Those that could take closures now.
      is_paused: Whether nobody gets closures now, because a server is away.
      pacing: Says how far workers may run apart; None for as far as they like.
    """

    def __init__(self, num_workers: int, now: float) -> None:
        self.workers = [Worker(i, now) for i in range(num_workers)]
        self.hungry: set[int] = set()
        self.is_paused = False
        self.pacing: Pacing | None = None

    def pace(self, pacing: Pacing | None) -> None:
        """Keeps workers together: each holds one closure at a time."""
        self.pacing = pacing
        for worker in self.workers:
            worker.is_paced = pacing is not None

    @property
    def has_errands(self) -> bool:
        """Whether a closure waits that only one worker may run."""
        return any(w.errands for w in self.workers)

    def refresh(self, worker: Worker) -> None:
        """Looks again whether a worker could take closures, after it has changed."""
        if worker.is_hungry:
            self.hungry.add(worker.index)
        else:
            self.hungry.discard(worker.index)

    def dispatch(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Gives closures that wait to workers that have room, each its fair share."""
        actions: list[Action] = []
        ready = [w for w in self.workers if w.state is WorkerState.READY]
        for worker in ready:
            if worker.errands:
                actions.append(Dispatch(worker.index, self._take_errands(worker, now)))
        if not len(queue) or not self.hungry or self.is_paused:
            return actions
        if self.pacing is not None:
            return [*actions, *self._dispatch_paced(self.pacing, queue, now)]
        total = len(queue) + sum(len(w.window) for w in ready)
        share = -(-total // len(ready))
        hungry = [self.workers[i] for i in self.hungry]
        for worker in sorted(hungry, key=lambda w: (len(w.window), w.index)):
            room = min(worker.limit, share) - len(worker.window)
            if room <= 0 or worker.benched_s > now or (worker.window and queue.is_next_suspect):
                continue
            closures = queue.take(room, worker.index)
            if not closures:
                break
            worker.assign(closures, now)
            self.refresh(worker)
            actions.append(Dispatch(worker.index, closures))
        return actions

    def _dispatch_paced(self, pacing: Pacing, queue: ClosureQueue, now: float) -> list[Action]:
        """Gives closures to idle workers, one to each, as far as the pacing admits."""
        actions: list[Action] = []
        pacing.look()
        for index in pacing.order(self.hungry):
            worker = self.workers[index]
            if worker.benched_s > now or not pacing.admits(index):
                continue
            closures = queue.take(1, index)
            if not closures:
                break
            pacing.hand_out(index, closures[0])
            worker.assign(closures, now)
            self.refresh(worker)
            actions.append(Dispatch(index, closures))
        return actions

    def recalls(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Asks slow workers for closures they have not started, when others have none."""
        if len(queue) or queue.is_cancelling:
            return []
        hungry = [self.workers[i] for i in self.hungry]
        num_idle = sum(not w.window and w.benched_s <= now for w in hungry)
        actions: list[Action] = []
        for worker in sorted(self.workers, key=lambda w: -len(w.window)):
            if not num_idle or now - worker.since_s < _RECALL_S:
                continue
            behind = [c for c in list(worker.window.values())[1:] if _is_movable(c)]
            chosen = behind[-num_idle:]
            if chosen:
                num_idle -= len(chosen)
                actions.append(_recall(worker, chosen))
        return actions

    def recall_all(self) -> list[Action]:
        """Asks all workers to drop what they have not started."""
        actions: list[Action] = []
        for worker in self.workers:
            chosen = [c for c in worker.window.values() if _is_movable(c)]
            if chosen:
                actions.append(_recall(worker, chosen))
        return actions

    def _take_errands(self, worker: Worker, now: float) -> list[Closure]:
        closures = list(worker.errands)
        worker.errands.clear()
        for closure in closures:
            closure.give_to(worker.index)
        worker.assign(closures, now)
        self.refresh(worker)
        return closures


def _recall(worker: Worker, closures: list[Closure]) -> Recall:
    for closure in closures:
        closure.is_recalled = True
    return Recall(worker.index, [c.id for c in closures])


def _is_movable(closure: Closure) -> bool:
    return not closure.is_recalled and closure.pin is None
