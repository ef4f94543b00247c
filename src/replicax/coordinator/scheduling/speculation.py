"""Runs closures a second time that a worker takes unusually long for. Pure, like the policy.

That goes for those that wait behind such a closure, too: a worker that is frozen does not give
them back.

Their updates count once, whichever attempt sends them first, and the first result that comes
is the result. The slower attempt is not stopped: what it still sends is refused or passed over.
"""

from __future__ import annotations

import statistics

from replicax.coordinator.scheduling.actions import Action, Dispatch
from replicax.coordinator.scheduling.assignment import Crew
from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.queue import ClosureQueue
from replicax.coordinator.scheduling.workers import Worker, WorkerState

# A closure counts as slow when it has run for so many times what others need, and so long.
_FACTOR = 1.5
_LEAST_S = 0.05


def copies(crew: Crew, queue: ClosureQueue, now: float) -> list[Action]:
    """Gives closures that run for long to workers that have nothing to do."""
    if len(queue) or queue.is_cancelling or crew.is_paused:
        return []
    idle = [crew.workers[i] for i in sorted(crew.hungry) if not crew.workers[i].window]
    idle = [worker for worker in idle if worker.benched_s <= now]
    usual_s = _usual_s(crew)
    if not idle or usual_s is None:
        return []
    limit_s = max(_FACTOR * usual_s, _LEAST_S)
    busy = sorted((w for w in crew.workers if w.window), key=lambda w: w.since_s)
    late = [c for w in busy if now - w.since_s >= limit_s for c in w.window.values()]
    actions: list[Action] = []
    for closure in late:
        if closure.is_settled or closure.pin is not None or _num_holders(crew, closure) > 1:
            continue
        if not idle:
            break
        worker = idle.pop(0)
        closure.give_to(worker.index)
        worker.assign([closure], now)
        crew.refresh(worker)
        actions.append(Dispatch(worker.index, [closure]))
    return actions


def runs_elsewhere(crew: Crew, closure: Closure) -> bool:
    """Tells whether a worker has a closure that another one has lost."""
    return closure.attempt > 0 and _num_holders(crew, closure) > 0


def _num_holders(crew: Crew, closure: Closure) -> int:
    return sum(closure.id in worker.window for worker in crew.workers)


def _usual_s(crew: Crew) -> float | None:
    """Returns what closures usually take; None if nothing is known yet."""
    known = [w.estimate_s for w in crew.workers if _is_known(w)]
    return statistics.median(s for s in known if s is not None) if known else None


def _is_known(worker: Worker) -> bool:
    return worker.state is WorkerState.READY and worker.estimate_s is not None
