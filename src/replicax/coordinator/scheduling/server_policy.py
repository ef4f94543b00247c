"""What is done when something happens to a parameter server, and how workers are given up.

Pure: events come in as calls with the time as an argument, actions go out as values. The
caller holds a lock around every call.

Note [Fence before put back]
    A worker that does not answer may still be running. Before its closures are given to
    another, each server has confirmed that it takes nothing more from that life of the
    worker. So every update of a closure comes from one worker at a time, and when `join`
    returns nothing runs that could still change a variable.

Note [Who is to blame]
    The closure that a worker ran when it was lost may have ended it, and did so if that
    happens again and again. As a rule that is the first one that it had not reported. But a
    worker reports quick closures together, so that it may have been at any of them: then all
    count one loss. A closure that counts one runs alone from then on, so all further losses
    are its own, and no other is ever named.

Note [Servers that come back]
    A server that is lost and keeps snapshots is waited for. It may come back with values that
    are some seconds old, so whatever ran while it went away is run again: all workers are
    given up, not blamed, and begin new lives. What they had changed on other servers counts
    once there; what the lost server has forgotten, it gets again. Before it is used it must
    hold all parts that it had, and know all lives that were given up.

Note [Servers that come back in vain]
    A server may answer the coordinator and no worker, or end whenever it is used: it would come
    back for ever. If that goes on for as long as a server may be away, and no closure has ended
    in all that time, it is given up. So is one that says for so long that its mirror confirms
    nothing, though the mirror is there: it acknowledges no change, and some closures that only
    read may still end.
"""

from __future__ import annotations

from replicax.coordinator.scheduling import error_messages, speculation
from replicax.coordinator.scheduling.actions import (
    Abandon,
    Action,
    Fail,
    FenceAt,
    PutBack,
    Raise,
    Rejoin,
    Release,
)
from replicax.coordinator.scheduling.assignment import Crew
from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.servers import Fencing, Server
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.scheduling.workers import Worker, WorkerState
from replicax.foundation import errors

# A server that was lost more often, while no closure ended, may come back in vain.
_NUM_LOSSES = 3


class ServerPolicy:
    """Knows all tasks, and decides about servers; `Policy` adds workers and time.

    Attributes:
      crew: All workers.
      servers: All parameter servers, by index.

    Args:
      num_workers: How many workers there are.
      num_servers: How many servers there are.
      timing: How long to wait for what.
      now: The time.
      fenced: Where to note lives that were given up; they are never used again.
    """

    def __init__(
        self, num_workers: int, num_servers: int, timing: Timing, now: float, fenced: set[int]
    ) -> None:
        self.crew = Crew(num_workers, now)
        self.servers = [Server(i, now) for i in range(num_servers)]
        self._timing = timing
        self._fencings: dict[int, Fencing] = {}
        self._fenced = fenced
        # By server: since when it was lost again and again while no closure ended, and how often.
        self._losses: dict[int, tuple[float, int]] = {}

    def server_connected(self, index: int, incarnation: int, now: float) -> list[Action]:
        """A server was reached, or answers as another process than before."""
        server = self.servers[index]
        server.heard_s = now
        if server.incarnation not in (0, incarnation):
            return self.server_restarted(index, now)
        server.incarnation = incarnation
        if server.is_away:
            return [Rejoin(index)]
        if not server.has_lost_variables:
            server.loss = None
        pending = {f.incarnation for f in self._fencings.values() if index in f.missing}
        return [FenceAt([index], i) for i in sorted(pending | server.owed)]

    def server_restarted(self, index: int, now: float) -> list[Action]:
        """A server is not the process that was attached: it must be attached again."""
        server = self.servers[index]
        if not server.is_saved:
            if server.has_lost_variables and server.loss is not None:
                # It says so with every beat.
                return []
            server.has_lost_variables = True
            server.loss = error_messages.REPLACED
            return self._stop_for(server)
        actions = self.server_lost(index, error_messages.REPLACED, now)
        return [*actions, Rejoin(index)] if server.is_away else actions

    def server_lost(self, index: int, reason: str, now: float) -> list[Action]:
        """A server does not answer any more: the job waits for it, or cannot go on."""
        server = self.servers[index]
        if server.loss is not None or server.is_away:
            return []
        if not server.is_saved:
            server.loss = reason
            return self._stop_for(server)
        if server.is_seeding:
            # It acknowledges nothing for as long as that takes, which has an end.
            self._note_progress()
        since_s, num_losses = self._losses.get(index, (now, 0))
        self._losses[index] = since_s, num_losses + 1
        if num_losses >= _NUM_LOSSES and now - since_s > self._timing.return_s:
            server.loss = error_messages.in_vain(reason, num_losses, now - since_s)
            if server.lonely_s is not None:
                server.loss += f"; {self._alone(server)}"
            return self._stop_for(server)
        return self._wait_for(server, reason, now)

    def server_heard(self, index: int, now: float) -> list[Action]:
        """A server has answered a beat; its figures are those of this beat."""
        server = self.servers[index]
        server.heard_s = now
        is_mirror_there = not self._mirror_of(server).is_missed(self._timing, now)
        if server.note_mirror(is_mirror_there) > self._timing.return_s:
            server.away_s = None
            server.loss = self._alone(server)
            return self._stop_for(server)
        if not server.is_away or now - server.asked_s < self._timing.beat_s:
            return []
        # It was frozen, not gone, or its answer to the last question was lost.
        server.asked_s = now
        return [Rejoin(index)]

    def server_rejoined(self, index: int, incarnation: int, now: float) -> list[Action]:
        """A server holds what it must. See Note [Servers that come back]."""
        server = self.servers[index]
        if server.incarnation != incarnation:
            # Another process: it may not know fences that the one before has confirmed.
            server.owed |= self._fenced
        server.incarnation = incarnation
        if not server.is_away:
            return []
        if server.owed:
            return [FenceAt([index], i) for i in sorted(server.owed)]
        return self._use_again(server, now)

    def server_emptied(self, index: int, text: str) -> list[Action]:
        """A server came back without what it held."""
        server = self.servers[index]
        server.away_s = None
        server.has_lost_variables = True
        server.loss = text
        return self._stop_for(server)

    def server_blamed(
        self, worker: int, server: int, is_restarted: bool, now: float
    ) -> list[Action]:
        """A closure failed because its worker got no answer from a server."""
        blamed = self.servers[server]
        if is_restarted and blamed.loss is None:
            blamed.has_lost_variables = not blamed.is_saved
            return self.server_lost(server, error_messages.REPLACED, now)
        num_workers = sum(w.state is WorkerState.READY for w in self.crew.workers)
        if blamed.is_condemned(worker, num_workers, self._timing, now):
            reason = "workers got no answer from it, three times in a row"
            return self.server_lost(server, reason, now)
        if num_workers > 1 and blamed.has_accuser(worker):
            self.crew.workers[worker].benched_s = now + self._timing.dead_s
        return []

    def job_lost(self, error: errors.FencedError) -> list[Action]:
        """Another coordinator has taken the job over: whatever runs is its business now."""
        running = self._take_running()
        self._fencings.clear()
        ended = [Abandon(running, error_messages.replaced())]
        return [Raise(error), *(ended if running else [])]

    def fence_acknowledged(self, server: int, incarnation: int, now: float) -> list[Action]:
        """A server has confirmed that it takes nothing more from some life of a worker."""
        told = self.servers[server]
        told.heard_s = now
        told.owed.discard(incarnation)
        actions = self._use_again(told, now) if told.is_away and not told.owed else []
        fencing = self._fencings.get(incarnation)
        if fencing is not None:
            fencing.missing.discard(server)
            if not fencing.missing:
                actions += self._end_fencing(fencing)
        return actions

    @property
    def broken_server(self) -> Server | None:
        """A server that is lost, if there is one."""
        return next((s for s in self.servers if s.loss is not None), None)

    # How it is done.

    def _note_progress(self) -> None:
        """A closure has ended, or there is none. See Note [Servers that come back in vain]."""
        self._losses.clear()

    def _mirror_of(self, server: Server) -> Server:
        return self.servers[(server.index + 1) % len(self.servers)]

    def _alone(self, server: Server) -> str:
        return error_messages.alone(self._mirror_of(server), server.figures["mirror_unconfirmed_s"])

    def _release(self, worker: Worker, *, is_dead: bool = False) -> Action:
        """For a worker that was fenced and whose connection may still be good."""
        worker.state = WorkerState.FENCED
        return Release(worker.index, is_dead)

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
        closures, suspects = list(worker.window.values()), worker.suspects(now)
        worker.window.clear()
        worker.state = WorkerState.CONNECTING
        worker.reason = reason
        worker.num_restarts += 1
        self.crew.refresh(worker)
        if is_blamed and error is None:
            limit = self._timing.poison_limit
            for closure in suspects:
                # Nobody is condemned for what another may have done.
                closure.num_deaths += closure is suspects[0] or closure.num_deaths + 1 < limit
        missing = [s.index for s in self.servers if s.is_there]
        for server in self.servers:
            if not server.is_there:
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
            if closure.is_settled or speculation.runs_elsewhere(self.crew, closure):
                # Another worker runs it as well, and decides.
                continue
            if closure.num_deaths >= self._timing.poison_limit:
                actions.append(Fail(closure, error_messages.poison(closure), cancels=False))
            elif closure.pin is not None:
                errands.append(closure)
            else:
                free.append(closure)
        return [PutBack(free), *actions] if free else actions

    def _wait_for(self, server: Server, reason: str, now: float) -> list[Action]:
        """Stops everything until a server is back. See Note [Servers that come back]."""
        server.away_s = server.asked_s = now
        server.reason = reason
        self.crew.is_paused = True
        actions = self._owe_fences(server)
        for worker in self.crew.workers:
            if worker.state is WorkerState.READY:
                actions += self._fence(worker, f"{server} is away", now, is_blamed=False)
                actions.append(self._release(worker))
        return actions

    def _use_again(self, server: Server, now: float) -> list[Action]:
        server.away_s = None
        server.reason = ""
        server.heard_s = now
        server.num_returns += 1
        self.crew.is_paused = any(s.is_away for s in self.servers)
        return []

    def _give_up(self, server: Server) -> list[Action]:
        """Ends the job: a server that was waited for did not come back in time."""
        server.away_s = None
        server.loss = f"{server.reason}, and it was not back in {self._timing.return_s:g} s"
        return self._stop_for(server)

    def _stop_for(self, server: Server) -> list[Action]:
        """Ends everything, since a server is lost; nothing that runs can succeed."""
        self.crew.is_paused = any(s.is_away for s in self.servers)
        actions: list[Action] = [Raise(server.error())]
        running = self._take_running()
        actions += self._owe_fences(server)
        if running:
            actions.append(Abandon(running, error_messages.aborted(f"{server} was lost")))
        return actions

    def _owe_fences(self, server: Server) -> list[Action]:
        """Goes on without a server's word; it hears of the fences when it is back."""
        actions: list[Action] = []
        for fencing in list(self._fencings.values()):
            if server.index in fencing.missing:
                server.owed.add(fencing.incarnation)
                fencing.missing.discard(server.index)
                if not fencing.missing:
                    actions += self._end_fencing(fencing)
        return actions

    def _take_running(self) -> list[Closure]:
        """Takes all closures from those that have them."""
        running = [c for w in self.crew.workers for c in w.window.values()]
        for worker in self.crew.workers:
            worker.window.clear()
            self.crew.refresh(worker)
        for fencing in self._fencings.values():
            running += fencing.closures
            fencing.closures = []
        return running
