"""What is done when something happens to a task: who gets closures, who is given up, and when.

Pure: events come in as calls with the time as an argument, actions go out as values. The
caller holds a lock around every call.

Note [Fence before put back]
    A worker that does not answer may still be running. Before its closures are given to
    another, each server has confirmed that it takes nothing more from that life of the
    worker. So every update of a closure comes from one worker at a time, and when `join`
    returns nothing runs that could still change a variable.
"""

from __future__ import annotations

from replicax.coordinator import verdicts
from replicax.coordinator.actions import (
    Abandon,
    Action,
    Fail,
    FenceAt,
    Greet,
    PutBack,
    Raise,
    Release,
    Resend,
)
from replicax.coordinator.allotment import Crew
from replicax.coordinator.closures import Closure
from replicax.coordinator.queue import ClosureQueue
from replicax.coordinator.servers import Fencing, Server
from replicax.coordinator.timing import Timing
from replicax.coordinator.workers import Worker, WorkerState


class Policy:
    """Knows all tasks, and decides.

    Attributes:
      crew: All workers.
      servers: All parameter servers, by index.
    """

    def __init__(self, num_workers: int, num_servers: int, timing: Timing, now: float) -> None:
        self.crew = Crew(num_workers, now)
        self.servers = [Server(i, now) for i in range(num_servers)]
        self._timing = timing
        self._fencings: dict[int, Fencing] = {}
        # Lives that were given up; they are never used again.
        self._fenced: set[int] = set()
        self._last_tick_s = now
        # Since when closures wait while no worker is there.
        self._no_workers_s: float | None = None
        # Since when closures that run are waited for after an error.
        self._cancelling_s: float | None = None

    # Workers.

    def worker_connected(self, index: int, incarnation: int, now: float) -> list[Action]:
        """A worker was reached, or answers as another process than before."""
        worker = self.crew.workers[index]
        worker.heard_s = now
        actions: list[Action] = []
        if worker.state in (WorkerState.ATTACHING, WorkerState.READY):
            if incarnation == worker.incarnation:
                is_ready = worker.state is WorkerState.READY
                return [Resend(index) if is_ready else Greet(index)]
            actions = self._fence(worker, "it was restarted", now)
        if incarnation in self._fenced:
            worker.incarnation = incarnation
            worker.state = WorkerState.FENCED
            return [*actions, Release(index)]
        worker.begin_life(incarnation, now)
        return [*actions, Greet(index)]

    def worker_attached(self, index: int, now: float) -> None:
        """A worker has joined the job."""
        worker = self.crew.workers[index]
        if worker.state is WorkerState.ATTACHING:
            worker.state = WorkerState.READY
            worker.reason = ""
            worker.since_s = now
            self.crew.refresh(worker)

    def worker_refused(self, index: int, reason: str) -> None:
        """A worker will not join the job now; it is asked again with the next beat."""
        worker = self.crew.workers[index]
        if worker.state is WorkerState.ATTACHING:
            worker.reason = reason
            worker.is_refused = True

    def greet_again(self) -> list[Action]:
        """Asks the workers again that have refused to join; called with every beat."""
        refused = [w for w in self.crew.workers if w.is_refused]
        for worker in refused:
            worker.is_refused = False
        return [Greet(w.index) for w in refused if w.state is WorkerState.ATTACHING]

    def worker_lost(self, index: int, reason: str, now: float) -> list[Action]:
        """The connection to a worker is gone, and with it, most likely, its process."""
        worker = self.crew.workers[index]
        is_in_use = worker.state in (WorkerState.ATTACHING, WorkerState.READY)
        actions = self._fence(worker, reason, now) if is_in_use else []
        worker.state = WorkerState.CONNECTING
        return actions

    def worker_disowned(self, index: int, closure: Closure | None, now: float) -> list[Action]:
        """A worker has no part in the job any more: it says so, or servers refuse it.

        Args:
          index: The worker.
          closure: The one with which it was found out, taken from the worker's window.
          now: The time.
        """
        worker = self.crew.workers[index]
        if worker.state is not WorkerState.READY:
            return []
        if closure is not None:
            worker.window[closure.id] = closure
        actions = self._fence(worker, "it does not work for this job", now, is_blamed=False)
        return [*actions, self._release(worker)]

    def worker_reported(self, index: int, is_idle: bool) -> list[Action]:
        """A worker said, with a beat, whether it has closures.

        If it has none, twice, while its window has not changed, then the closures or their
        results were lost on the way.
        """
        worker = self.crew.workers[index]
        seen = tuple(worker.window) if is_idle else ()
        was_seen, worker.seen_idle = worker.seen_idle, seen
        if not seen or seen != was_seen or worker.state is not WorkerState.READY:
            return []
        worker.seen_idle = ()
        return [Resend(index)]

    def take_ended(self, index: int, incarnation: int, closure: int) -> Closure | None:
        """Takes a closure out of a worker's window; None if this life does not have it."""
        worker = self.crew.workers[index]
        if worker.incarnation != incarnation:
            return None
        return worker.window.pop(closure, None)

    def note_finished(self, index: int, count: int, now: float) -> None:
        """After `take_ended`: so many closures of a worker have run to their end."""
        worker = self.crew.workers[index]
        worker.heard_s = now
        if count:
            worker.note_finished(count, now)
        self.crew.refresh(worker)

    # Servers.

    def server_connected(self, index: int, incarnation: int, now: float) -> list[Action]:
        """A server was reached, or answers as another process than before."""
        server = self.servers[index]
        server.heard_s = now
        if server.incarnation not in (0, incarnation):
            server.has_lost_variables = True
            server.loss = verdicts.REPLACED
            return self._stop_for(server)
        server.incarnation = incarnation
        if not server.has_lost_variables:
            server.loss = None
        pending = {f.incarnation for f in self._fencings.values() if index in f.missing}
        return [FenceAt([index], i) for i in sorted(pending | server.owed)]

    def server_lost(self, index: int, reason: str) -> list[Action]:
        """A server does not answer any more: the job cannot go on."""
        server = self.servers[index]
        if server.loss is not None:
            return []
        server.loss = reason
        return self._stop_for(server)

    def server_blamed(
        self, worker: int, server: int, is_restarted: bool, now: float
    ) -> list[Action]:
        """A closure failed because its worker got no answer from a server."""
        blamed = self.servers[server]
        if is_restarted and blamed.loss is None:
            blamed.has_lost_variables = True
            return self.server_lost(server, verdicts.REPLACED)
        num_workers = sum(w.state is WorkerState.READY for w in self.crew.workers)
        if blamed.is_condemned(worker, num_workers, self._timing, now):
            return self.server_lost(server, "workers got no answer from it, three times in a row")
        if num_workers > 1 and blamed.has_accuser(worker):
            self.crew.workers[worker].benched_s = now + self._timing.dead_s
        return []

    def fence_acknowledged(self, server: int, incarnation: int, now: float) -> list[Action]:
        """A server has confirmed that it takes nothing more from some life of a worker."""
        self.servers[server].heard_s = now
        self.servers[server].owed.discard(incarnation)
        fencing = self._fencings.get(incarnation)
        if fencing is None:
            return []
        fencing.missing.discard(server)
        return [] if fencing.missing else self._end_fencing(fencing)

    @property
    def broken_server(self) -> Server | None:
        """A server that is lost, if there is one."""
        return next((s for s in self.servers if s.loss is not None), None)

    # Time.

    def tick(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Looks for what did not happen in time."""
        timing = self._timing
        pause_s = now - self._last_tick_s
        self._last_tick_s = now
        if pause_s > timing.beat_s:
            # This process was busy or stopped, and has heard nobody: that is nobody's fault.
            self._forgive(pause_s)
        actions: list[Action] = []
        for fencing in list(self._fencings.values()):
            if now > fencing.deadline_s:
                for server in sorted(fencing.missing):
                    actions += self.server_lost(server, verdicts.silent("a fence", timing.dead_s))
        for server in self.servers:
            if now - server.heard_s > timing.dead_s:
                actions += self.server_lost(server.index, verdicts.silent("beats", timing.dead_s))
        for worker in self.crew.workers:
            is_in_use = worker.state in (WorkerState.ATTACHING, WorkerState.READY)
            if is_in_use and now - worker.heard_s > timing.dead_s:
                actions += self._fence(worker, verdicts.silent("beats", timing.dead_s), now)
                actions.append(self._release(worker))
        actions += self._check_cancelling(queue, now)
        actions += self._check_workers(queue, now)
        return actions + self._check_errands(now)

    # How it is done.

    def _release(self, worker: Worker) -> Action:
        """For a worker that was fenced and whose connection may still be good."""
        worker.state = WorkerState.FENCED
        return Release(worker.index)

    def _fence(
        self,
        worker: Worker,
        reason: str,
        now: float,
        *,
        is_blamed: bool = True,
        error: BaseException | None = None,
    ) -> list[Action]:
        """Begins to give up a life of a worker. See Note [Fence before put back]."""
        closures = list(worker.window.values())
        worker.window.clear()
        worker.state = WorkerState.CONNECTING
        worker.reason = reason
        worker.num_restarts += 1
        self.crew.refresh(worker)
        if closures and is_blamed and error is None:
            closures[0].num_deaths += 1
        missing = [s.index for s in self.servers if s.loss is None]
        for server in self.servers:
            if server.loss is not None:
                server.owed.add(worker.incarnation)
        deadline_s = now + self._timing.dead_s
        fencing = Fencing(
            worker.index, worker.incarnation, closures, set(missing), deadline_s, error
        )
        self._fenced.add(worker.incarnation)
        self._fencings[worker.incarnation] = fencing
        if not missing:
            return self._end_fencing(fencing)
        return [FenceAt(missing, worker.incarnation)]

    def _end_fencing(self, fencing: Fencing) -> list[Action]:
        """The life of the worker can do no more harm: its closures are free."""
        del self._fencings[fencing.incarnation]
        if fencing.error is not None:
            return [Abandon(fencing.closures, fencing.error)] if fencing.closures else []
        actions: list[Action] = []
        free = []
        errands = self.crew.workers[fencing.worker].errands
        for closure in fencing.closures:
            if closure.num_deaths >= self._timing.poison_limit:
                actions.append(Fail(closure, verdicts.poison(closure), cancels=False))
            elif closure.pin is not None:
                errands.append(closure)
            else:
                free.append(closure)
        return [PutBack(free), *actions] if free else actions

    def _stop_for(self, server: Server) -> list[Action]:
        """Ends everything, since a server is lost; nothing that runs can succeed."""
        actions: list[Action] = [Raise(server.error())]
        running = [c for w in self.crew.workers for c in w.window.values()]
        for worker in self.crew.workers:
            worker.window.clear()
            self.crew.refresh(worker)
        for fencing in list(self._fencings.values()):
            if server.index in fencing.missing:
                server.owed.add(fencing.incarnation)
                fencing.missing.discard(server.index)
            running += fencing.closures
            fencing.closures = []
            if not fencing.missing:
                actions += self._end_fencing(fencing)
        if running:
            actions.append(Abandon(running, verdicts.aborted(f"{server} was lost")))
        return actions

    def _forgive(self, pause_s: float) -> None:
        for task in (*self.crew.workers, *self.servers):
            task.heard_s += pause_s
        for fencing in self._fencings.values():
            fencing.deadline_s += pause_s

    def _check_cancelling(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Gives up closures that have not ended long after an error."""
        if not queue.is_cancelling or not queue.in_flight:
            self._cancelling_s = None
            return []
        if self._cancelling_s is None:
            self._cancelling_s = now
        if now - self._cancelling_s < self._timing.cancel_s:
            return []
        error = verdicts.aborted(
            f"it still ran {self._timing.cancel_s:g} s after another had failed"
        )
        for fencing in self._fencings.values():
            fencing.error = error
        actions: list[Action] = []
        for worker in self.crew.workers:
            if worker.window:
                actions += self._fence(worker, "it did not stop after an error", now, error=error)
                actions.append(self._release(worker))
        return actions

    def _check_workers(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Gives up when closures wait and there is nobody to run them."""
        is_waiting = len(queue) > 0 and not queue.is_cancelling
        if not is_waiting or any(w.state is WorkerState.READY for w in self.crew.workers):
            self._no_workers_s = None
            return []
        if self._no_workers_s is None:
            self._no_workers_s = now
        if now - self._no_workers_s < self._timing.no_workers_s:
            return []
        self._no_workers_s = None
        error = verdicts.no_workers(len(queue), self.crew.workers, self._timing.no_workers_s)
        return [Raise(error)]

    def _check_errands(self, now: float) -> list[Action]:
        """Gives up errands of workers that have been away for too long."""
        actions: list[Action] = []
        limit_s = self._timing.no_workers_s
        for worker in self.crew.workers:
            if worker.state is WorkerState.READY:
                worker.ready_s = now
            elif worker.errands and now - max(worker.ready_s, worker.asked_s) > limit_s:
                error = verdicts.worker_gone(worker, limit_s)
                actions.append(Abandon(list(worker.errands), error))
                worker.errands.clear()
        return actions
