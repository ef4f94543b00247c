"""What is done when something happens to a task: who gets closures, who is given up, and when.

Pure: events come in as calls with the time as an argument, actions go out as values. The
caller holds a lock around every call.
"""

from __future__ import annotations

from replicax.coordinator.scheduling import error_messages
from replicax.coordinator.scheduling.actions import Action, Greet, PutBack, Release, Resend
from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.queue import ClosureQueue
from replicax.coordinator.scheduling.server_policy import ServerPolicy
from replicax.coordinator.scheduling.stall_timeouts import Patience
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.scheduling.workers import WorkerState


class Policy(ServerPolicy):
    """Knows all tasks, and decides.

    Attributes:
      crew: All workers.
      servers: All parameter servers, by index.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        timing: Timing,
        now: float,
        fenced: set[int] | None = None,
    ) -> None:
        super().__init__(num_workers, num_servers, timing, now, set() if fenced is None else fenced)
        self._last_tick_s = now
        self._patience = Patience(timing.no_workers_s)
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

    def take_ended(
        self, index: int, incarnation: int, closure: int, attempt: int = -1
    ) -> Closure | None:
        """Takes a closure out of a worker's window; None if this life does not have it.

        Args:
          index: The worker.
          incarnation: The life that speaks.
          closure: The closure.
          attempt: Which attempt the worker gave back unstarted; -1 if it has run.
        """
        worker = self.crew.workers[index]
        found = worker.window.get(closure)
        if worker.incarnation != incarnation or found is None:
            return None
        if 0 <= attempt < found.attempt:
            # Said twice, after a break: it was put back and given out again since.
            return None
        return worker.window.pop(closure)

    def note_finished(self, index: int, count: int, now: float) -> None:
        """After `take_ended`: so many closures of a worker have run to their end."""
        worker = self.crew.workers[index]
        worker.heard_s = now
        if count:
            worker.note_finished(count, now)
            self._note_progress()
        self.crew.refresh(worker)

    # Time.

    def tick(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Looks for what did not happen in time."""
        timing = self._timing
        pause_s = now - self._last_tick_s
        self._last_tick_s = now
        if pause_s > timing.beat_s:
            # This process was busy or stopped, and has heard nobody: that is nobody's fault.
            self._forgive(pause_s)
        if queue.is_idle:
            self._note_progress()
        actions = [*self._check_servers(now), *self._check_silence(now)]
        actions += [*self._check_doubts(queue, now), *self._check_cancelling(queue, now)]
        actions += self._patience.check_queue(self.crew, queue, now)
        return actions + self._patience.check_errands(self.crew, now)

    # How it is done.

    def _check_servers(self, now: float) -> list[Action]:
        timing = self._timing
        actions: list[Action] = []
        for fencing in list(self._fencings.values()):
            if now > fencing.deadline_s:
                for server in sorted(fencing.missing):
                    reason = error_messages.silent("a fence", timing.dead_s)
                    actions += self.server_lost(server, reason, now)
        for server in self.servers:
            if server.is_overdue(timing, now):
                actions += self._give_up(server)
            elif now - server.heard_s > timing.dead_s:
                reason = error_messages.silent("beats", timing.dead_s)
                actions += self.server_lost(server.index, reason, now)
        return actions

    def _check_silence(self, now: float) -> list[Action]:
        """Gives up workers that say nothing, or that do not come to an end."""
        timing = self._timing
        actions: list[Action] = []
        for worker in self.crew.workers:
            is_in_use = worker.state in (WorkerState.ATTACHING, WorkerState.READY)
            if is_in_use and now - worker.heard_s > timing.dead_s:
                actions += self._fence(worker, error_messages.silent("beats", timing.dead_s), now)
                actions.append(self._release(worker, is_dead=True))
            elif (late := worker.late_closure(now)) is not None:
                actions += self._fence(worker, error_messages.too_slow(late), now)
                actions.append(self._release(worker, is_dead=True))
        return actions

    def _forgive(self, pause_s: float) -> None:
        for task in (*self.crew.workers, *self.servers):
            task.heard_s += pause_s
        for server in self.servers:
            if server.away_s is not None:
                server.away_s += pause_s
        self._losses = {i: (since_s + pause_s, n) for i, (since_s, n) in self._losses.items()}
        for worker in self.crew.workers:
            worker.since_s += pause_s
        for fencing in self._fencings.values():
            fencing.deadline_s += pause_s

    def _check_doubts(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Gives up lives that may have left something. See Note [Closures in doubt]."""
        actions: list[Action] = []
        for closure in queue.still_doubted() if queue.doubted else ():
            for worker in self.crew.workers:
                if worker.incarnation in closure.doubts and worker.state is WorkerState.READY:
                    reason = "a server that did not answer it may still have what it sent"
                    actions += self._fence(worker, reason, now, is_blamed=False)
                    actions.append(self._release(worker))
            closure.doubts = tuple(life for life in closure.doubts if life in self._fencings)
            if not closure.doubts:
                actions.append(PutBack([closure]))
        return actions

    def _check_cancelling(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Gives up closures that have not ended long after an error."""
        if not queue.is_cancelling or not queue.in_flight:
            self._cancelling_s = None
            return []
        if self._cancelling_s is None:
            self._cancelling_s = now
        if now - self._cancelling_s < self._timing.cancel_s:
            return []
        error = error_messages.aborted(
            f"it still ran {self._timing.cancel_s:g} s after another had failed"
        )
        for fencing in self._fencings.values():
            fencing.error = error
        actions: list[Action] = []
        for worker in self.crew.workers:
            if worker.window:
                actions += self._fence(worker, "it did not stop after an error", now, error=error)
                actions.append(self._release(worker, is_dead=True))
        return actions
