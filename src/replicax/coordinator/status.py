"""`Status`: a snapshot of how the workers, the parameter servers and the queue are doing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from replicax.coordinator.policy import Policy
from replicax.coordinator.queue import ClosureQueue
from replicax.coordinator.workers import Worker, WorkerState


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """How one worker is doing.

    Attributes:
      task: Its name.
      state: "connecting", "attaching", "idle", "busy" or "fenced".
      num_closures: How many closures it has now.
      num_done: How many it has finished.
      rate: How many it finished per second of late.
      num_restarts: How often it was lost.
      reason: Why it is not used, if it is not.
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
    """How one parameter server is doing.

    Attributes:
      task: Its name.
      state: "connecting", "ready" or "lost".
      num_bytes: How much the values of variables take there.
      rate: How many requests it answered per second of late.
      reason: Why it is lost, if it is.
      figures: All that it counted, as of its last beat, by name.
    """

    task: str
    state: str
    num_bytes: int
    rate: float
    reason: str
    figures: Mapping[str, int | float] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class Status:
    """How everything is doing; `print` it.

    Attributes:
      workers: The workers.
      servers: The parameter servers.
      num_queued: How many closures wait.
      num_running: How many closures workers have.
      num_finished: How many have ended well.
    """

    workers: tuple[WorkerStatus, ...]
    servers: tuple[ServerStatus, ...]
    num_queued: int
    num_running: int
    num_finished: int

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
        return "\n".join(lines)


class Meter:
    """Turns counters into rates, with one sample per beat."""

    def __init__(self, now: float) -> None:
        self._sampled_s = now
        self._counts: dict[str, float] = {}
        self._rates: dict[str, float] = {}

    def sample(self, policy: Policy, now: float) -> None:
        """Compares all counters with those of the last sample."""
        spent_s = now - self._sampled_s
        if spent_s <= 0:
            return
        counts = {str(w): float(w.num_done) for w in policy.crew.workers}
        for server in policy.servers:
            counts[str(server)] = float(server.figures.get("requests", 0))
        for name, count in counts.items():
            # A process that was replaced counts from zero again.
            grown = max(count - self._counts.get(name, 0.0), 0.0)
            self._rates[name] = grown / spent_s
        self._counts = counts
        self._sampled_s = now

    def status(self, policy: Policy, queue: ClosureQueue) -> Status:
        """Returns a snapshot."""
        servers = []
        for server in policy.servers:
            state = "ready" if server.incarnation else "connecting"
            servers.append(
                ServerStatus(
                    str(server),
                    state if server.loss is None else "lost",
                    int(server.figures.get("bytes", 0)),
                    self._rates.get(str(server), 0.0),
                    server.loss or "",
                    dict(server.figures),
                )
            )
        workers = [
            WorkerStatus(
                str(worker),
                _state(worker),
                len(worker.window),
                worker.num_done,
                self._rates.get(str(worker), 0.0),
                worker.num_restarts,
                worker.reason,
            )
            for worker in policy.crew.workers
        ]
        return Status(
            tuple(workers), tuple(servers), len(queue), len(queue.in_flight), queue.num_finished
        )


def _state(worker: Worker) -> str:
    if worker.state is not WorkerState.READY:
        return worker.state.value
    return "busy" if worker.window else "idle"
