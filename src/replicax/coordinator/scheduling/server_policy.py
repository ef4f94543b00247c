"""Decisions about parameter servers: whether the job waits for one, or cannot continue.

Pure: the time is an argument, and decisions are returned as actions.

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

from replicax.coordinator.scheduling import error_messages
from replicax.coordinator.scheduling.actions import Abandon, Action, FenceAt, Raise, Rejoin
from replicax.coordinator.scheduling.fencing import Fencing
from replicax.coordinator.scheduling.pool import WorkerPool
from replicax.coordinator.scheduling.servers import Server
from replicax.coordinator.scheduling.timing import Timing

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
