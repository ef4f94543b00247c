"""The scheduling policy: what to do when a task connects, replies, is lost or stays silent.

Pure: events are calls with the time as an argument, decisions are returned as actions. The
caller holds a lock around every call.

Note [Server recovery]
    The job waits for a lost server that keeps snapshots. The server may recover with values
    that are some seconds old, so everything that ran while it went away runs again: all
    workers are fenced, without counting a death, and begin new incarnations. Their updates on
    other servers are deduplicated; the recovered server gets the updates again that it has
    lost. Before it is used it must hold all its parts, and have all fences.

Note [Ineffective recovery]
    A server may reply to the coordinator and to no worker, or crash whenever it is used: it
    would recover forever. If that continues for as long as a server may be away, and no
    closure has ended in that time, it is lost. So is one whose mirror, though available, has
    confirmed no change for so long: it acknowledges no update, and closures that only read
    may still end.
"""

from __future__ import annotations

from collections.abc import Callable

from replicax.coordinator.scheduling import error_messages
from replicax.coordinator.scheduling.actions import (
    Abandon,
    Action,
    FenceAt,
    Raise,
    Rejoin,
    Release,
    RequestAttach,
    Requeue,
    Resend,
)
from replicax.coordinator.scheduling.closures import Closure, ClosureQueue
from replicax.coordinator.scheduling.fencing import Fencing
from replicax.coordinator.scheduling.pool import WorkerPool, WorkerState
from replicax.coordinator.scheduling.servers import Server
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors

# More losses than this while no closure ended make recovery ineffective.
_NUM_LOSSES = 3


class ServerPolicy:
    """Decides what to do about events of servers.

    Args:
      pool: All workers.
      servers: All servers.
      fencing: Fences workers.
      timing: The timeouts.
    """

    def __init__(
        self, pool: WorkerPool, servers: list[Server], fencing: Fencing, timing: Timing
    ) -> None:
        self._pool, self._servers = pool, servers
        self._fencing, self._timing = fencing, timing
        # By server: the first loss since a closure has ended, and the number of losses.
        self._losses: dict[int, tuple[float, int]] = {}

    @property
    def lost_server(self) -> Server | None:
        """A server that is lost, if there is one."""
        return next((s for s in self._servers if s.loss is not None), None)

    # Events.

    def connected(self, index: int, incarnation: int, now: float) -> list[Action]:
        """Handles a new connection to a server, perhaps to a new incarnation."""
        server = self._servers[index]
        server.last_seen_s = now
        if server.incarnation not in (0, incarnation):
            return self.restarted(index, now)
        server.incarnation = incarnation
        if server.is_away:
            return [Rejoin(index)]
        if not server.has_lost_variables:
            server.loss = None
        pending = {f.incarnation for f in self._fencing.pending.values() if index in f.missing}
        return [FenceAt([index], i) for i in sorted(pending | server.pending_fences)]

    def restarted(self, index: int, now: float) -> list[Action]:
        """Handles that a server is not the incarnation that was attached."""
        server = self._servers[index]
        if not server.is_saved:
            if server.has_lost_variables and server.loss is not None:
                # Every heartbeat reports it.
                return []
            server.has_lost_variables = True
            server.loss = error_messages.REPLACED
            return self._stop_for(server)
        actions = self.lost(index, error_messages.REPLACED, now)
        return [*actions, Rejoin(index)] if server.is_away else actions

    def lost(self, index: int, reason: str, now: float) -> list[Action]:
        """Handles that a server does not reply: the job waits for it, or cannot continue."""
        server = self._servers[index]
        if server.loss is not None or server.is_away:
            return []
        if not server.is_saved:
            server.loss = reason
            return self._stop_for(server)
        if server.is_seeding:
            # It acknowledges nothing for as long as that takes, which is bounded.
            self.record_progress()
        since_s, num_losses = self._losses.get(index, (now, 0))
        self._losses[index] = since_s, num_losses + 1
        if num_losses >= _NUM_LOSSES and now - since_s > self._timing.return_s:
            server.loss = error_messages.recovered_repeatedly(reason, num_losses, now - since_s)
            if server.unmirrored_s is not None:
                server.loss += f"; {self._unmirrored(server)}"
            return self._stop_for(server)
        return self._wait_for(server, reason, now)

    def heartbeat(self, index: int, now: float) -> list[Action]:
        """Handles the heartbeat of a server whose counters were updated."""
        server = self._servers[index]
        server.last_seen_s = now
        is_mirror_available = not self._mirror_of(server).is_silent(self._timing, now)
        if server.update_unmirrored(is_mirror_available) > self._timing.return_s:
            server.away_since_s = None
            server.loss = self._unmirrored(server)
            return self._stop_for(server)
        if not server.is_away or now - server.rejoin_sent_s < self._timing.beat_s:
            return []
        # It was frozen, not gone, or its reply to the last request was lost.
        server.rejoin_sent_s = now
        return [Rejoin(index)]

    def rejoined(self, index: int, incarnation: int, now: float) -> list[Action]:
        """Handles that a server holds all its parts. See Note [Server recovery]."""
        server = self._servers[index]
        if server.incarnation != incarnation:
            # The new process may lack fences that the one before has confirmed.
            server.pending_fences |= self._fencing.fenced
        server.incarnation = incarnation
        if not server.is_away:
            return []
        if server.pending_fences:
            return [FenceAt([index], i) for i in sorted(server.pending_fences)]
        self._resume(server, now)
        return []

    def lost_variables(self, index: int, text: str) -> list[Action]:
        """Handles that a server recovered without its variables."""
        server = self._servers[index]
        server.away_since_s = None
        server.has_lost_variables = True
        server.loss = text
        return self._stop_for(server)

    def reported_unreachable(
        self, worker: int, server: int, is_restarted: bool, now: float
    ) -> list[Action]:
        """Handles that a closure failed because its worker got no reply from a server."""
        reported = self._servers[server]
        if is_restarted and reported.loss is None:
            reported.has_lost_variables = not reported.is_saved
            return self.lost(server, error_messages.REPLACED, now)
        num_workers = len(self._pool.ready)
        if reported.add_report(worker, num_workers, self._timing, now):
            reason = "workers got no reply from it, three times in a row"
            return self.lost(server, reason, now)
        if num_workers > 1 and reported.has_repeated_reporter(worker):
            self._pool.workers[worker].excluded_until_s = now + self._timing.dead_s
        return []

    def fence_confirmed(self, index: int, incarnation: int, now: float) -> list[Action]:
        """Handles that a server rejects an incarnation of a worker from now on."""
        server = self._servers[index]
        server.last_seen_s = now
        server.pending_fences.discard(incarnation)
        if server.is_away and not server.pending_fences:
            self._resume(server, now)
        return self._fencing.confirm(index, incarnation)

    def record_progress(self) -> None:
        """Records that a closure has ended, or that none is open.

        See Note [Ineffective recovery].
        """
        self._losses.clear()

    # Time.

    def check_timeouts(self, now: float) -> list[Action]:
        """Finds servers that did not reply in time."""
        timing = self._timing
        actions: list[Action] = []
        for fence in list(self._fencing.pending.values()):
            if now > fence.deadline_s:
                for server in sorted(fence.missing):
                    reason = error_messages.silent("a fence", timing.dead_s)
                    actions += self.lost(server, reason, now)
        for server in self._servers:
            if server.is_overdue(timing, now):
                server.away_since_s = None
                server.loss = f"{server.reason}, and it did not recover in {timing.return_s:g} s"
                actions += self._stop_for(server)
            elif now - server.last_seen_s > timing.dead_s:
                reason = error_messages.silent("heartbeats", timing.dead_s)
                actions += self.lost(server.index, reason, now)
        return actions

    def extend_timeouts(self, pause_s: float) -> None:
        """Extends all timeouts by the seconds for which this process was stopped."""
        for server in self._servers:
            server.last_seen_s += pause_s
            if server.away_since_s is not None:
                server.away_since_s += pause_s
        self._losses = {i: (since_s + pause_s, n) for i, (since_s, n) in self._losses.items()}
        for fence in self._fencing.pending.values():
            fence.deadline_s += pause_s

    def _mirror_of(self, server: Server) -> Server:
        return self._servers[(server.index + 1) % len(self._servers)]

    def _unmirrored(self, server: Server) -> str:
        seconds = server.counters["mirror_unconfirmed_s"]
        return error_messages.unmirrored(self._mirror_of(server), seconds)

    def _wait_for(self, server: Server, reason: str, now: float) -> list[Action]:
        """Pauses the job until a server has recovered. See Note [Server recovery]."""
        server.away_since_s = server.rejoin_sent_s = now
        server.reason = reason
        self._pool.is_paused = True
        actions = self._fencing.postpone(server)
        for worker in self._pool.ready:
            actions += self._fencing.fence_and_release(
                worker, f"{server} is away", now, counts_death=False
            )
        return actions

    def _resume(self, server: Server, now: float) -> None:
        """Uses a server again that has recovered."""
        server.away_since_s = None
        server.reason = ""
        server.last_seen_s = now
        server.num_returns += 1
        self._pool.is_paused = any(s.is_away for s in self._servers)

    def _stop_for(self, server: Server) -> list[Action]:
        """Fails all closures, since a server is lost."""
        self._pool.is_paused = any(s.is_away for s in self._servers)
        actions: list[Action] = [Raise(server.error())]
        running = self._fencing.remove_closures()
        actions += self._fencing.postpone(server)
        if running:
            actions.append(Abandon(running, error_messages.aborted(f"{server} was lost")))
        return actions


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


class Policy:
    """The records of all tasks, and the two policies that decide about them.

    Args:
      num_workers: The number of workers.
      num_servers: The number of parameter servers.
      timing: The timeouts.
      now: The time.
      fenced: Collects fenced incarnations of workers; they are never used again.

    Attributes:
      pool: All workers.
      servers: All parameter servers, by index.
      worker_policy: Handles events of workers.
      server_policy: Handles events of servers.
      fencing: Fences workers, for both.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        timing: Timing,
        now: float,
        fenced: set[int] | None = None,
    ) -> None:
        self.pool = WorkerPool(num_workers, now)
        self.servers = [Server(i, now) for i in range(num_servers)]
        self.fencing = Fencing(self.pool, self.servers, timing, set() if fenced is None else fenced)
        self.server_policy = ServerPolicy(self.pool, self.servers, self.fencing, timing)
        self.worker_policy = WorkerPolicy(
            self.pool, self.fencing, timing, self.server_policy.record_progress
        )
        self._timing = timing
        self._last_tick_s = now

    def tick(self, queue: ClosureQueue, now: float) -> list[Action]:
        """Finds tasks that did not reply in time, and closures that waited too long."""
        pause_s = now - self._last_tick_s
        self._last_tick_s = now
        if pause_s > self._timing.beat_s:
            # This process was busy or stopped, and has received nothing.
            self.worker_policy.extend_timeouts(pause_s)
            self.server_policy.extend_timeouts(pause_s)
        if queue.is_idle:
            self.server_policy.record_progress()
        return [
            *self.server_policy.check_timeouts(now),
            *self.worker_policy.check_timeouts(queue, now),
        ]

    def job_lost(self, error: errors.FencedError) -> list[Action]:
        """Handles that another coordinator runs the job now: all closures end."""
        running = self.fencing.remove_closures()
        self.fencing.pending.clear()
        ended = [Abandon(running, error_messages.replaced())]
        return [Raise(error), *(ended if running else [])]
