"""Fencing: takes closures from a worker only after no server accepts its updates any more.

Pure: the time is an argument, and decisions are returned as actions.

Note [Fence before requeue]
    A worker that does not reply may still be running. Before its closures are assigned to
    another worker, each server has confirmed that it rejects updates of that incarnation. So
    the updates of a closure come from one worker at a time, and when `join` returns, nothing
    is running that could still change a variable.

Note [Poison closures]
    The closure that a worker ran when it was lost may have killed it, and did so if that
    happens repeatedly. As a rule that is the first one that it had not reported. But a worker
    reports quick closures together, so any of them may have been running: then all count one
    death. A closure that counts one runs alone from then on, so that all further deaths are
    its own, and no other closure is ever named.
"""

from __future__ import annotations

import dataclasses

from replicax.coordinator.scheduling import error_messages
from replicax.coordinator.scheduling.actions import (
    Abandon,
    Action,
    Fail,
    FenceAt,
    Release,
    Requeue,
)
from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.pool import Worker, WorkerPool, WorkerState
from replicax.coordinator.scheduling.servers import Server
from replicax.coordinator.scheduling.timing import Timing


@dataclasses.dataclass
class PendingFence:
    """A worker's incarnation that some servers have not fenced yet.

    Attributes:
      worker: The index of the worker.
      incarnation: The incarnation.
      closures: Its closures, in order; the first may have killed it.
      missing: The servers that have not confirmed yet.
      deadline_s: A server that has not confirmed by then is lost itself.
      error: The error of the closures, if they are not to run again.
    """

    worker: int
    incarnation: int
    closures: list[Closure]
    missing: set[int]
    deadline_s: float
    error: BaseException | None = None


class Fencing:
    """Fences incarnations of workers at all servers. See Note [Fence before requeue].

    Args:
      pool: All workers.
      servers: All servers.
      timing: The timeouts.
      fenced: Collects all fenced incarnations; they are never used again.

    Attributes:
      pending: Fences that are not confirmed everywhere, by incarnation.
      fenced: All fenced incarnations.
    """

    def __init__(
        self, pool: WorkerPool, servers: list[Server], timing: Timing, fenced: set[int]
    ) -> None:
        self._pool, self._servers, self._timing = pool, servers, timing
        self.fenced = fenced
        self.pending: dict[int, PendingFence] = {}

    def fence(
        self,
        worker: Worker,
        reason: str,
        now: float,
        *,
        counts_death: bool = True,
        error: BaseException | None = None,
    ) -> list[Action]:
        """Begins to fence the incarnation of a worker that is lost.

        Args:
          worker: The worker.
          reason: Why it is lost.
          now: The time.
          counts_death: Whether a closure may have killed it. See Note [Poison closures].
          error: The error of its closures, if they are not to run again.
        """
        closures, suspects = list(worker.assigned.values()), worker.suspects(now)
        worker.assigned.clear()
        worker.state = WorkerState.CONNECTING
        worker.reason = reason
        worker.num_restarts += 1
        self._pool.update(worker)
        if counts_death and error is None:
            limit = self._timing.poison_limit
            for closure in suspects:
                # Only the first may reach the limit: another one may be the cause.
                closure.num_deaths += closure is suspects[0] or closure.num_deaths + 1 < limit
        missing = [s.index for s in self._servers if s.is_available]
        for server in self._servers:
            if not server.is_available:
                server.pending_fences.add(worker.incarnation)
        deadline_s = now + self._timing.dead_s
        fence = PendingFence(
            worker.index, worker.incarnation, closures, set(missing), deadline_s, error
        )
        self.fenced.add(worker.incarnation)
        self.pending[worker.incarnation] = fence
        if not missing:
            return self._complete(fence)
        return [FenceAt(missing, worker.incarnation)]

    def fence_and_release(
        self,
        worker: Worker,
        reason: str,
        now: float,
        *,
        is_dead: bool = False,
        counts_death: bool = True,
        error: BaseException | None = None,
    ) -> list[Action]:
        """Fences a worker that may still be connected, and releases it; see `fence`."""
        actions = self.fence(worker, reason, now, counts_death=counts_death, error=error)
        worker.state = WorkerState.FENCED
        return [*actions, Release(worker.index, is_dead)]

    def confirm(self, server: int, incarnation: int) -> list[Action]:
        """Records that a server rejects an incarnation from now on."""
        fence = self.pending.get(incarnation)
        if fence is None:
            return []
        fence.missing.discard(server)
        return [] if fence.missing else self._complete(fence)

    def postpone(self, server: Server) -> list[Action]:
        """Continues without a server's confirmations; it has to fence before it is used again."""
        actions: list[Action] = []
        for fence in list(self.pending.values()):
            if server.index in fence.missing:
                server.pending_fences.add(fence.incarnation)
                actions += self.confirm(server.index, fence.incarnation)
        return actions

    def has_other_attempt(self, closure: Closure) -> bool:
        """Returns whether a worker runs a closure that another one has lost or returned.

        So may a lost worker until all servers have fenced it.
        """
        is_unfenced = any(closure in fence.closures for fence in self.pending.values())
        return is_unfenced or self._pool.has_other_attempt(closure)

    def remove_closures(self) -> list[Closure]:
        """Removes and returns all closures of workers, also of fenced ones."""
        removed = self._pool.remove_assigned()
        for fence in self.pending.values():
            removed += fence.closures
            fence.closures = []
        return removed

    def _complete(self, fence: PendingFence) -> list[Action]:
        """Frees the closures of an incarnation that is fenced everywhere."""
        del self.pending[fence.incarnation]
        if fence.error is not None:
            return [Abandon(fence.closures, fence.error)] if fence.closures else []
        failed: list[Action] = []
        free = []
        pinned = self._pool.workers[fence.worker].pinned_closures
        for closure in fence.closures:
            if closure.is_settled or self.has_other_attempt(closure):
                # The other attempt decides.
                continue
            if closure.num_deaths >= self._timing.poison_limit:
                failed.append(Fail(closure, error_messages.poison(closure), cancels=False))
            elif closure.pin is not None:
                pinned.append(closure)
            else:
                free.append(closure)
        return [Requeue(free), *failed] if free else failed
