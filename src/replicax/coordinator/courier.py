"""What the coordinator says to its tasks: decisions and resources, put into messages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from replicax.coordinator.resources import Resource
from replicax.coordinator.scheduling.closures import Closure, ShippedFunction
from replicax.coordinator.scheduling.workers import Worker
from replicax.foundation import errors
from replicax.protocol import limits, messages
from replicax.protocol.tasks import Task
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys

# Arguments that are larger together travel in messages of their own.
_RUN_BYTES = 32 * 1024 * 1024


class Cluster(Protocol):
    """What the coordinator needs to know of the cluster; the strategy has it.

    Attributes:
      job: The name of the job.
      epoch: Which coordinator of the job this is.
      me: The task of this process.
      keys: What it proves that with.
      incarnation: The life of this process.
      workers: Where the workers listen.
      servers: Where the parameter servers listen.
      settings: Plain options of the job, by name.
      fenced: Lives of workers that were given up.
    """

    job: str
    epoch: int
    me: Task
    keys: Keys | None
    incarnation: int
    workers: Sequence[Location]
    servers: Sequence[Location]
    settings: Mapping[str, int | float | str | bool | None]
    fenced: set[int]

    def attach(self) -> None:
        """Takes the parameter servers into the job, if they are not; waits for them."""
        ...

    def is_saved(self, server: int) -> bool:
        """Tells whether what a server holds outlives its process."""
        ...

    def attach_again(self, server: int) -> messages.Attach:
        """Returns what to say to a server that was attached before."""
        ...

    def next_closure(self) -> int:
        """Returns a new id; updates of this process take theirs from the same row."""
        ...

    def oldest_write(self) -> int | None:
        """Returns the smallest id under which this process itself is updating a variable."""
        ...


class Sender(Protocol):
    """The part of a hub that says things."""

    def send(
        self, task: Task, body: messages.Body, buffers: Sequence[Any] = (), request: int = 0
    ) -> None: ...


class Courier:
    """Makes messages and hands them to the hub; remembers which questions are open.

    The caller holds a lock, so what is said to one task arrives in the order of the calls.
    """

    def __init__(
        self, cluster: Cluster, hub: Sender, orphan_s: float, data_s: float = limits.DEADLINE
    ) -> None:
        self._cluster = cluster
        self._settings = {"orphan": orphan_s, "deadline": data_s}
        self._hub = hub
        self._requests = itertools.count(1)
        # Which worker is asked to join, or which life a server is asked to fence.
        self._questions: dict[int, tuple[Task, messages.Attach | messages.Fence]] = {}

    def take_question(self, task: Task, request: int) -> messages.Attach | messages.Fence | None:
        """Returns what a task was asked under a number, when it answers."""
        asked = self._questions.get(request)
        if asked is None or asked[0] != task:
            return None
        del self._questions[request]
        return asked[1]

    def forget_questions(self, task: Task) -> None:
        """Drops what a task that is gone was asked."""
        self._questions = {r: q for r, q in self._questions.items() if q[0] != task}

    def greet(self, worker: int) -> None:
        """Asks a worker to join the job."""
        servers = [location.url for location in self._cluster.servers]
        settings = {**self._settings, **self._cluster.settings}
        self._ask(Task("worker", worker), messages.Attach(servers, settings))

    def release(self, worker: int, is_dead: bool = False) -> None:
        """Tells a worker to drop the job, or to end."""
        self._hub.send(Task("worker", worker), messages.Detach(is_dead))

    def rejoin(self, server: int) -> None:
        """Asks a server that was away whether it still holds what it must."""
        self._ask(Task("ps", server), self._cluster.attach_again(server))

    def fence(self, servers: Sequence[int], incarnation: int) -> None:
        """Asks servers to take nothing more from a life of a worker."""
        for server in servers:
            self._ask(Task("ps", server), messages.Fence([incarnation]))

    def ping(self, task: Task, settled: int) -> None:
        """Asks a task for a sign of life."""
        self._hub.send(task, messages.Ping(settled), (), next(self._requests))

    def cancel(self, worker: int, closures: list[int]) -> None:
        """Asks a worker to drop closures that it has not started."""
        self._hub.send(Task("worker", worker), messages.Cancel(closures))

    def run(self, worker: Worker, closures: Sequence[Closure]) -> None:
        """Sends closures to a worker, and first what it needs for them."""
        task = Task("worker", worker.index)
        calls: list[messages.ClosureCall] = []
        buffers: list[Any] = []
        num_bytes = 0
        for closure in closures:
            function = closure.function
            assert function is not None, "a settled closure does not run"
            self._ship(worker, task, function)
            size = sum(memoryview(b).nbytes for b in closure.buffers) if closure.buffers else 0
            if calls and num_bytes + size > _RUN_BYTES:
                self._hub.send(task, messages.Run(calls), buffers)
                calls, buffers, num_bytes = [], [], 0
            calls.append(
                messages.ClosureCall(
                    closure.id,
                    closure.attempt,
                    function.sha,
                    list(closure.resources),
                    len(closure.buffers),
                )
            )
            buffers += closure.buffers
            num_bytes += size
        self._hub.send(task, messages.Run(calls), buffers)

    def make(self, worker: Worker, resource: Resource) -> None:
        """Lets a worker make a resource; closures sent later find it."""
        task = Task("worker", worker.index)
        if resource.function is not None:
            self._ship(worker, task, resource.function)
        body = messages.CreateResource(
            resource.id,
            resource.kind,
            "" if resource.function is None else resource.function.sha,
            resource.source,
            len(resource.buffers),
        )
        self._hub.send(task, body, resource.buffers)

    def drop(self, worker: int, resources: list[int]) -> None:
        """Lets a worker drop resources."""
        self._hub.send(Task("worker", worker), messages.DropResources(resources))

    def _ship(self, worker: Worker, task: Task, function: ShippedFunction) -> None:
        if not worker.needs_function(function.sha):
            return
        try:
            self._hub.send(task, messages.ShipFunction(function.sha), function.buffers)
        except errors.DistributeError:
            worker.functions.pop(function.sha, None)
            raise

    def _ask(self, task: Task, body: messages.Attach | messages.Fence) -> None:
        request = next(self._requests)
        self._questions[request] = (task, body)
        self._hub.send(task, body, (), request)
