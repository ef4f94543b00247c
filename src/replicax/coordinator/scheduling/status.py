"""`Status`: a snapshot of the workers, the parameter servers and the queue."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from replicax.coordinator.scheduling.closures import ClosureQueue
from replicax.coordinator.scheduling.policy import Policy
from replicax.coordinator.scheduling.pool import Worker, WorkerState
from replicax.coordinator.scheduling.servers import Server
from replicax.foundation.notebook import html_table


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """The status of one worker.

    Attributes:
      task: Its name.
      state: "connecting", "attaching", "idle", "busy" or "fenced".
      num_closures: The number of closures assigned to it.
      num_done: The number of closures it has finished.
      rate: The closures it finished per second, since the last heartbeat.
      num_restarts: The number of times it was lost.
      reason: Why it is not used; empty if it is.

    >>> status = WorkerStatus("/job:worker/task:1", "connecting", 0, 40, 0.0, 1, "nothing listens")
    >>> workers = [status]  # `coordinator.status().workers`
    >>> [status.task for status in workers if status.num_restarts]
    ['/job:worker/task:1']
    """

    task: str
    state: str
    num_closures: int
    num_done: int
    rate: float
    num_restarts: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """The status of one parameter server.

    Attributes:
      task: Its name.
      state: "connecting", "ready", "away" while the job waits for it, or "lost".
      num_bytes: The size of the values of its variables.
      rate: The requests it answered per second, since the last heartbeat.
      reason: Why it is lost or away; empty if it is neither.
      mean_staleness: The mean number of steps of others that arriving gradients lacked.
      max_staleness: The maximum number of such steps.
      counters: What it counts, as of its last heartbeat, by name.
    """

    task: str
    state: str
    num_bytes: int
    rate: float
    reason: str
    mean_staleness: float = 0.0
    max_staleness: int = 0
    counters: Mapping[str, int | float] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class Status:
    """The status of a cluster; `print` it.

    Attributes:
      workers: The workers.
      servers: The parameter servers.
      num_queued: The number of closures that wait for a worker.
      num_running: The number of closures that are assigned to workers.
      num_finished: The number of closures that have finished.
      mean_staleness: The mean number of steps of others that gradients lacked when they arrived
        at a server, as of its last heartbeat.
      max_staleness: The maximum number of such steps.
    """

    workers: tuple[WorkerStatus, ...]
    servers: tuple[ServerStatus, ...]
    num_queued: int
    num_running: int
    num_finished: int
    mean_staleness: float = 0.0
    max_staleness: int = 0

    @property
    def summary(self) -> str:
        """One line with the numbers of tasks and closures."""
        num_used = sum(worker.state in ("idle", "busy") for worker in self.workers)
        num_ready = sum(server.state == "ready" for server in self.servers)
        return (
            f"{num_used} of {len(self.workers)} workers and {num_ready} of {len(self.servers)} "
            f"parameter servers ready, {self.num_queued} closures queued, {self.num_running} "
            f"running, {self.num_finished} finished"
        )

    def _repr_html_(self) -> str:
        rows = [
            (w.task, w.state, f"{w.num_closures} closures, {w.num_done} done", w.rate, w.reason)
            for w in self.workers
        ]
        rows += [
            (s.task, s.state, f"{s.num_bytes:,} bytes", s.rate, s.reason) for s in self.servers
        ]
        return html_table(
            self.summary,
            [(*row[:3], f"{row[3]:.1f}", row[4]) for row in rows],
            header=("task", "state", "holds", "per second", "reason"),
        )

    def __str__(self) -> str:
        lines = [
            f"closures: {self.num_queued} queued, {self.num_running} running, "
            f"{self.num_finished} finished"
        ]
        for worker in self.workers:
            reason = f" ({worker.reason})" if worker.reason else ""
            lines.append(
                f"{worker.task}: {worker.state}{reason}, {worker.num_closures} closures, "
                f"{worker.num_done} done, {worker.rate:.1f}/s, {worker.num_restarts} restarts"
            )
        for server in self.servers:
            reason = f" ({server.reason})" if server.reason else ""
            lines.append(
                f"{server.task}: {server.state}{reason}, {server.num_bytes:,} bytes, "
                f"{server.rate:.1f} requests/s"
            )
        if self.max_staleness:
            lines.append(
                f"staleness: {self.mean_staleness:.1f} steps on average, "
                f"{self.max_staleness} at most"
            )
        return "\n".join(lines)


class Meter:
    """Computes rates from counters, with one sample per heartbeat."""

    def __init__(self, now: float) -> None:
        self._sampled_s = now
        self._counts: dict[str, float] = {}
        self._rates: dict[str, float] = {}

    def sample(self, policy: Policy, now: float) -> None:
        """Updates the rates since the last sample."""
        spent_s = now - self._sampled_s
        if spent_s <= 0:
            return
        counts = {str(w): float(w.num_done) for w in policy.pool.workers}
        for server in policy.servers:
            counts[str(server)] = float(server.counters.get("requests", 0))
        for name, count in counts.items():
            # A new process counts from zero again.
            grown = max(count - self._counts.get(name, 0.0), 0.0)
            self._rates[name] = grown / spent_s
        self._counts = counts
        self._sampled_s = now

    def status(self, policy: Policy, queue: ClosureQueue) -> Status:
        """Returns a snapshot."""
        servers = []
        for server in policy.servers:
            servers.append(
                ServerStatus(
                    str(server),
                    _server_state(server),
                    int(server.counters.get("bytes", 0)),
                    self._rates.get(str(server), 0.0),
                    server.loss or server.reason,
                    *_staleness([server.counters]),
                    dict(server.counters),
                )
            )
        workers = [
            WorkerStatus(
                str(worker),
                _state(worker),
                len(worker.assigned),
                worker.num_done,
                self._rates.get(str(worker), 0.0),
                worker.num_restarts,
                worker.reason,
            )
            for worker in policy.pool.workers
        ]
        return Status(
            tuple(workers),
            tuple(servers),
            len(queue),
            len(queue.in_flight),
            queue.num_finished,
            *_staleness([server.counters for server in policy.servers]),
        )


def _staleness(counters: Sequence[Mapping[str, int | float]]) -> tuple[float, int]:
    """Returns the mean and the maximum staleness over servers."""
    total, count = (
        sum(c.get(name, 0) for c in counters) for name in ("staleness_sum", "staleness_count")
    )
    largest = max((int(c.get("staleness_max", 0)) for c in counters), default=0)
    return total / count if count else 0.0, largest


def _server_state(server: Server) -> str:
    if server.loss is not None:
        return "lost"
    if server.is_away:
        return "away"
    return "ready" if server.incarnation else "connecting"


def _state(worker: Worker) -> str:
    if worker.state is not WorkerState.READY:
        return worker.state.value
    return "busy" if worker.assigned else "idle"
