"""The simulated coordinator: the real core with a model of `transport/client_pool.py`."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from replicax.coordinator.core import Core
from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.pacing import BoundedStaleness
from replicax.coordinator.scheduling.timing import Timing
from replicax.protocol import codec, messages
from replicax.protocol.tasks import Task
from replicax.ps.client.cluster import ResumedJob
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from simulation.channel import location_of
from simulation.checks import Checks
from simulation.connection import Connection
from simulation.labels import label_of
from simulation.network import Network
from simulation.plan import Plan
from simulation.process import Process
from simulation.service import ListeningProcess
from simulation.world import World

Setting = int | float | str | bool | None

_IDLE_S = 0.05
_QUEUE_LIMIT = 1_000
# The lease of the job at the servers.
_LEASE_S = 60.0


class SimulatedCluster:
    """The core's view of the cluster."""

    def __init__(
        self,
        servers: Sequence[ListeningProcess],
        workers: Sequence[ListeningProcess],
        incarnation: int,
        plan: Plan,
        *,
        is_saved: bool,
    ) -> None:
        self.job, self.epoch = "simulated", 1
        self.me = Task("coordinator", 0)
        self.keys: Keys | None = None
        self.incarnation = incarnation
        self.workers: Sequence[Location] = [location_of(worker) for worker in workers]
        self.servers: Sequence[Location] = [location_of(server) for server in servers]
        self.settings: Mapping[str, Setting] = {"lease": _LEASE_S}
        self._plan, self._is_saved = plan, is_saved
        self.fenced: set[int] = set()
        self._numbers = itertools.count(1)
        self._writes: set[int] = set()

    def resume(self, job: ResumedJob) -> None:
        """Resumes the job of another coordinator."""
        self.epoch = job.epoch
        self._numbers = itertools.count(job.first_closure)

    def attach(self) -> None:
        """No effect: the servers are attached before."""

    def is_saved(self, server: int) -> bool:
        """Returns whether a server keeps snapshots."""
        return self._is_saved

    def attach_again(self, server: int) -> messages.Attach:
        """Returns the request that attaches a server again."""
        parts = [part for part, owner in self._plan.servers.items() if owner == server]
        return messages.Attach([], dict(self.settings), parts, sorted(self.fenced))

    def next_closure(self) -> int:
        """Returns a new closure id."""
        return next(self._numbers)

    def begin_write(self) -> int:
        """Returns the id of an update that the coordinator makes itself."""
        number = next(self._numbers)
        self._writes.add(number)
        return number

    def end_write(self, number: int) -> None:
        """Ends an update that the coordinator makes itself."""
        self._writes.discard(number)

    def oldest_write(self) -> int | None:
        """Returns the smallest id of such an update."""
        return min(self._writes, default=None)


class _Peer:
    """The client pool's record of one task."""

    def __init__(self, coordinator: SimulatedCoordinator, process: ListeningProcess) -> None:
        self._coordinator, self._task = coordinator, process.task
        self.connection = Connection(
            coordinator.network, coordinator, process, lambda: coordinator.cluster.incarnation, self
        )
        self._incarnation: int | None = None
        self._is_lost = False
        self._waiting: collections.deque[tuple[list[Any], str]] = collections.deque()

    def send(self, frames: list[Any], label: str) -> None:
        if self._is_lost:
            return
        if self.connection.is_ready:
            self.connection.send(frames, label)
        else:
            self._waiting.append((frames, label))

    # Events of the connection.

    def welcomed(self, welcome: messages.Welcome) -> None:
        if self._incarnation is not None and self._incarnation != welcome.incarnation:
            self._lose("it was restarted")
        self._incarnation = welcome.incarnation
        self._is_lost = False
        while self._waiting:
            self.connection.send(*self._waiting.popleft())
        coordinator = self._coordinator
        now = coordinator.world.now
        coordinator.core.connected(self._task, welcome, now)
        coordinator.observe()

    def answered(self, envelope: messages.Envelope, buffers: list[memoryview]) -> None:
        coordinator = self._coordinator
        coordinator.core.received(self._task, envelope, buffers, coordinator.world.now)
        coordinator.observe()

    def lost(self, reason: str) -> None:
        if self._incarnation is not None:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._incarnation = None
        self._is_lost = True
        self._waiting.clear()
        coordinator = self._coordinator
        coordinator.world.note(f"coordinator 0 has lost {self._task}: {reason}")
        coordinator.core.lost(self._task, reason, coordinator.world.now)
        coordinator.observe()


class SimulatedCoordinator(Process):
    """The process of the coordinator. It does nothing until `begin`.

    Attributes:
      core: The real core.
      cluster: Its view of the cluster.
      checks: Checks its results.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        servers: Sequence[ListeningProcess],
        workers: Sequence[ListeningProcess],
        timing: Timing,
        plan: Plan,
        checks: Checks,
    ) -> None:
        super().__init__(world, Task("coordinator", 0))
        self.network, self.checks = network, checks
        is_saved = bool(world.faults.saved_share)
        self.cluster = SimulatedCluster(
            servers, workers, world.new_incarnation(), plan, is_saved=is_saved
        )
        self.core: Core
        self._plan = plan
        self._servers, self._workers = list(servers), list(workers)
        self._timing = timing
        self._peers: dict[Task, _Peer] = {}

    def begin(self) -> None:
        """Connects to all tasks; the servers are attached."""
        world = self.world
        self.core = Core(self.cluster, self, self._timing, _QUEUE_LIMIT, world.now)
        self.core.speculates = world.random.random() < 0.5
        if world.random.random() < 0.2:
            self.core.pool.set_pacing(BoundedStaleness(world.random.randint(0, 4)))
        tasks = (*self._servers, *self._workers)
        self._peers = {process.task: _Peer(self, process) for process in tasks}
        for peer in self._peers.values():
            peer.connection.open()
        self.later(_IDLE_S, self._tick)

    @override
    def crash(self) -> None:
        super().crash()
        self.network.cut_off(self)

    def add(self, closure: Closure) -> None:
        """Schedules a closure."""
        self.world.note(f"the user schedules {closure.id}")
        self.checks.scheduled(self._plan.element_of(self.cluster.epoch, closure.id), closure)
        self.core.add(closure, self.world.now)

    @property
    def is_working(self) -> bool:
        """Whether closures are in flight."""
        return bool(self.core.queue.in_flight)

    def observe(self) -> None:
        """Checks the state of the core."""
        if self.core.policy.server_policy.lost_server is not None:
            self.checks.lost_servers()
        self.checks.check_results(self._unnoticed_losses())

    def _unnoticed_losses(self) -> set[int]:
        """Returns the servers that went away, before the coordinator uses them again."""
        known = self.core.policy.servers
        return {
            server.task.index
            for server in self._servers
            if not server.is_up
            or known[server.task.index].is_away
            or known[server.task.index].incarnation not in (0, server.incarnation)
        }

    # The sender of the core.

    def send(
        self, task: Task, body: messages.Body, buffers: Sequence[Any] = (), request: int = 0
    ) -> None:
        """Sends a message to a task."""
        if isinstance(body, messages.Ping):
            self.checks.pinged(body.settled)
        cluster = self.cluster
        frames = codec.encode(
            cluster.job, cluster.epoch, cluster.incarnation, request, body, buffers
        )
        self._peers[task].send(frames, label_of(body, request))

    def _tick(self) -> None:
        self.core.tick(self.world.now)
        self.observe()
        self.later(_IDLE_S, self._tick)
