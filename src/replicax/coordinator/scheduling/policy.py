"""The scheduling policy: what to do when a task connects, replies, is lost or stays silent.

Pure: events are calls with the time as an argument, decisions are returned as actions. The
caller holds a lock around every call.
"""

from __future__ import annotations

from replicax.coordinator.scheduling import error_messages
from replicax.coordinator.scheduling.actions import Abandon, Action, Raise
from replicax.coordinator.scheduling.fencing import Fencing
from replicax.coordinator.scheduling.pool import WorkerPool
from replicax.coordinator.scheduling.queue import ClosureQueue
from replicax.coordinator.scheduling.server_policy import ServerPolicy
from replicax.coordinator.scheduling.servers import Server
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.scheduling.worker_policy import WorkerPolicy
from replicax.foundation import errors


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
