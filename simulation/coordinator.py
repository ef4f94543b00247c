"""The simulated coordinator: the real core before a model of `transport/client_pool.py`."""

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
from simulation.labels import label_of
from simulation.line import Line
from simulation.network import Network
from simulation.plan import Plan
from simulation.process import Process
from simulation.service import ListeningProcess
from simulation.world import World

Setting = int | float | str | bool | None

_IDLE_S = 0.05
_QUEUE_LIMIT = 1_000
# Servers keep a job so long without a coordinator.
_LEASE_S = 60.0


class SimulatedCluster:
    """What the core knows of the cluster."""

    def __init__(
        self,
        servers: Sequence[ListeningProcess],
        workers: Sequence[ListeningProcess],
        life: int,
        plan: Plan,
        *,
        is_saved: bool,
    ) -> None:
        self.job, self.epoch = "simulated", 1
        self.me = Task("coordinator", 0)
        self.keys: Keys | None = None
        self.incarnation = life
        self.workers: Sequence[Location] = [location_of(worker) for worker in workers]
        self.servers: Sequence[Location] = [location_of(server) for server in servers]
        self.settings: Mapping[str, Setting] = {"lease": _LEASE_S}
        self._plan, self._is_saved = plan, is_saved
        self.fenced: set[int] = set()
        self._numbers = itertools.count(1)
        self._writes: set[int] = set()

    def resume(self, resumed: ResumedJob) -> None:
        """Goes on where another coordinator has ended."""
        self.epoch = resumed.epoch
        self._numbers = itertools.count(resumed.first_closure)

    def attach(self) -> None:
        """Servers are attached before the core begins."""

    def is_saved(self, server: int) -> bool:
        """Tells whether a server keeps snapshots."""
        return self._is_saved

    def attach_again(self, server: int) -> messages.Attach:
        """Returns what to say to a server that was attached before."""
        parts = [part for part, place in self._plan.servers.items() if place == server]
        return messages.Attach([], dict(self.settings), parts, sorted(self.fenced))

    def next_closure(self) -> int:
        """Returns the number of a new closure."""
        return next(self._numbers)

    def begin_write(self) -> int:
        """Returns the number of a change that the coordinator makes itself."""
        number = next(self._numbers)
        self._writes.add(number)
        return number

    def end_write(self, number: int) -> None:
        """Notes that such a change is made, or given up."""
        self._writes.discard(number)

    def oldest_write(self) -> int | None:
        """Returns the smallest number of such a change."""
        return min(self._writes, default=None)


class _Peer:
    """One task, as the hub sees it."""

    def __init__(self, coordinator: SimulatedCoordinator, process: ListeningProcess) -> None:
        self._coordinator, self._task = coordinator, process.task
        self.line = Line(
            coordinator.network, coordinator, process, lambda: coordinator.cluster.incarnation, self
        )
        self._life: int | None = None
        self._is_lost = False
        self._waiting: collections.deque[tuple[list[Any], str]] = collections.deque()

    def send(self, frames: list[Any], label: str) -> None:
        if self._is_lost:
            return
        if self.line.is_ready:
            self.line.send(frames, label)
        else:
            self._waiting.append((frames, label))

    # What the line says.

    def welcomed(self, welcome: messages.Welcome) -> None:
        if self._life is not None and self._life != welcome.incarnation:
            self._lose("it was restarted")
        self._life = welcome.incarnation
        self._is_lost = False
        while self._waiting:
            self.line.send(*self._waiting.popleft())
        coordinator = self._coordinator
        now = coordinator.world.now
        coordinator.core.connected(self._task, welcome, now)
        coordinator.observe()

    def answered(self, envelope: messages.Envelope, buffers: list[memoryview]) -> None:
        coordinator = self._coordinator
        coordinator.core.received(self._task, envelope, buffers, coordinator.world.now)
        coordinator.observe()

    def lost(self, reason: str) -> None:
        if self._life is not None:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._life = None
        self._is_lost = True
        self._waiting.clear()
        coordinator = self._coordinator
        coordinator.world.note(f"coordinator 0 has lost {self._task}: {reason}")
        coordinator.core.lost(self._task, reason, coordinator.world.now)
        coordinator.observe()


class SimulatedCoordinator(Process):
    """The process of the coordinator. It does nothing until it begins.

    Attributes:
      core: The real one.
      cluster: What it knows of the cluster.
      checks: What looks at it.
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
        self.cluster = SimulatedCluster(servers, workers, world.life(), plan, is_saved=is_saved)
        self.core: Core
        self._plan = plan
        self._servers, self._workers = list(servers), list(workers)
        self._timing = timing
        self._peers: dict[Task, _Peer] = {}

    def begin(self) -> None:
        """Calls all tasks; its servers are attached."""
        world = self.world
        self.core = Core(self.cluster, self, self._timing, _QUEUE_LIMIT, world.now)
        self.core.speculates = world.random.random() < 0.5
        if world.random.random() < 0.2:
            self.core.pool.set_pacing(BoundedStaleness(world.random.randint(0, 4)))
        tasks = (*self._servers, *self._workers)
        self._peers = {process.task: _Peer(self, process) for process in tasks}
        for peer in self._peers.values():
            peer.line.open()
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
        """Whether closures are on their way or run."""
        return bool(self.core.queue.in_flight)

    def observe(self) -> None:
        """Looks at what the core has decided."""
        if self.core.policy.server_policy.lost_server is not None:
            self.checks.lost_servers()
        self.checks.results_came(self._strangers())

    def _strangers(self) -> set[int]:
        """Returns the servers of which the coordinator does not know that they went away."""
        known = self.core.policy.servers
        return {
            server.task.index
            for server in self._servers
            if not server.is_up
            or known[server.task.index].is_away
            or known[server.task.index].incarnation not in (0, server.incarnation)
        }

    # What the core asks of a hub.

    def send(
        self, task: Task, body: messages.Body, buffers: Sequence[Any] = (), request: int = 0
    ) -> None:
        """Says something to a task."""
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
