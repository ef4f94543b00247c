"""The outbox: the messages that the coordinator sends to its tasks, and sends again.

Resources, functions and closures that a worker has are sent again after a broken connection.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

from replicax.coordinator.scheduling.closures import Closure, ShippedFunction
from replicax.coordinator.scheduling.pool import Worker
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.protocol.tasks import Task
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys

_log = logging.getLogger(__name__)

Kind = Literal["value", "dataset", "iterator"]
Request = messages.Attach | messages.Fence

# Arguments with more bytes together are sent in separate messages.
_RUN_BYTES = 32 * 1024 * 1024


class Cluster(Protocol):
    """The coordinator's view of the cluster, which the strategy provides.

    Attributes:
      job: The name of the job.
      epoch: The epoch of this coordinator.
      me: The task of this process.
      keys: The keys that authenticate it.
      incarnation: The incarnation of this process.
      workers: The addresses of the workers.
      servers: The addresses of the parameter servers.
      settings: Options of the job, by name.
      fenced: Fenced incarnations of workers.
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
        """Attaches the parameter servers to the job, and waits for them. Idempotent."""
        ...

    def is_saved(self, server: int) -> bool:
        """Returns whether the variables of a server outlive its process."""
        ...

    def attach_again(self, server: int) -> messages.Attach:
        """Returns the request that attaches a server again."""
        ...

    def next_closure(self) -> int:
        """Returns a new closure id; updates of this process take theirs from the same sequence."""
        ...

    def oldest_write(self) -> int | None:
        """Returns the smallest id of an update that this process is making itself."""
        ...


class Sender(Protocol):
    """Sends messages to tasks, in order; implemented by the client pool."""

    def send(
        self, task: Task, body: messages.Body, buffers: Sequence[Buffer] = (), request: int = 0
    ) -> None: ...


@dataclasses.dataclass(frozen=True)
class Resource:
    """An object that every worker keeps: a dataset, an iterator or a value.

    Attributes:
      id: Its id, unique in the job.
      kind: Its kind.
      function: The function that creates it; None for an iterator.
      source: The id of an iterator's dataset; 0 for the others.
      keep_alive: Objects that must stay alive as long as it may have to be created again.
    """

    id: int
    kind: Kind
    function: ShippedFunction | None
    source: int
    keep_alive: object


class Outbox:
    """Sends messages to tasks, and records requests without a reply.

    The caller holds a lock, so that messages to one task arrive in the order of the calls.
    """

    def __init__(self, cluster: Cluster, sender: Sender, timing: Timing) -> None:
        self._cluster = cluster
        self._sender = sender
        self._settings = {"orphan": timing.worker_orphan_s, "deadline": timing.data_s}
        self._request_ids = itertools.count(1)
        self._requests: dict[int, tuple[Task, Request]] = {}
        self._resource_ids = itertools.count(1)
        # In the order in which workers must create them.
        self._resources: dict[int, Resource] = {}

    # Requests.

    def take_request(self, task: Task, request: int) -> Request | None:
        """Returns the request that a task replies to, once."""
        found = self._requests.get(request)
        if found is None or found[0] != task:
            return None
        del self._requests[request]
        return found[1]

    def drop_requests(self, task: Task) -> None:
        """Forgets the requests to a task whose connection is new or lost."""
        self._requests = {r: q for r, q in self._requests.items() if q[0] != task}

    def attach_worker(self, worker: int) -> None:
        """Requests that a worker attaches to the job."""
        servers = [location.url for location in self._cluster.servers]
        settings = {**self._settings, **self._cluster.settings}
        self._request(Task("worker", worker), messages.Attach(servers, settings))

    def attach_server(self, server: int) -> None:
        """Requests that a server attaches again, if it still holds its parts."""
        self._request(Task("ps", server), self._cluster.attach_again(server))

    def fence(self, servers: Iterable[int], incarnation: int) -> None:
        """Requests that servers reject all updates of a worker's incarnation."""
        for server in servers:
            self._request(Task("ps", server), messages.Fence([incarnation]))

    def _request(self, task: Task, body: Request) -> None:
        request = next(self._request_ids)
        self._requests[request] = (task, body)
        self._sender.send(task, body, (), request)

    # Messages.

    def ping(self, task: Task, settled: int) -> None:
        """Sends a heartbeat."""
        self._sender.send(task, messages.Ping(settled), (), next(self._request_ids))

    def release(self, worker: int, is_dead: bool = False) -> None:
        """Makes a worker drop the job, or exit."""
        self._sender.send(Task("worker", worker), messages.Detach(is_dead))

    def recall(self, worker: int, closures: list[int]) -> None:
        """Makes a worker return closures that it has not started."""
        self._sender.send(Task("worker", worker), messages.Cancel(closures))

    # Closures.

    def run(
        self, worker: Worker, closures: Sequence[Closure]
    ) -> list[tuple[Closure, errors.DistributeError]]:
        """Sends closures to a worker; returns those that cannot be sent, with the error."""
        try:
            self._send_closures(worker, closures)
            return []
        except errors.DistributeError:
            # One by one, to find the cause; the worker ignores duplicates.
            failed = []
            for closure in closures:
                try:
                    self._send_closures(worker, [closure])
                except errors.DistributeError as error:
                    del worker.assigned[closure.id]
                    failed.append((closure, error))
            return failed

    def resend(self, worker: Worker) -> None:
        """Sends everything again to a worker whose connection broke."""
        worker.functions.clear()
        self.create_resources(worker)
        # The worker does not report closures again that another worker has settled meanwhile.
        for closure in [c for c in worker.assigned.values() if c.is_settled]:
            del worker.assigned[closure.id]
        closures = list(worker.assigned.values())
        if closures:
            self._send_closures(worker, closures)
        recalled = [c.id for c in closures if c.is_recalled]
        if recalled:
            self.recall(worker.index, recalled)

    def _send_closures(self, worker: Worker, closures: Sequence[Closure]) -> None:
        """Sends closures, and before them the functions that the worker lacks."""
        task = Task("worker", worker.index)
        calls: list[messages.ClosureCall] = []
        buffers: list[Buffer] = []
        num_bytes = 0
        for closure in closures:
            function = closure.function
            assert function is not None, "a settled closure does not run"
            self._send_function(worker, function)
            size = sum(memoryview(b).nbytes for b in closure.buffers) if closure.buffers else 0
            if calls and num_bytes + size > _RUN_BYTES:
                self._sender.send(task, messages.Run(calls), buffers)
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
        self._sender.send(task, messages.Run(calls), buffers)

    def _send_function(self, worker: Worker, function: ShippedFunction) -> None:
        if not worker.needs_function(function.sha):
            return
        try:
            task = Task("worker", worker.index)
            self._sender.send(task, messages.ShipFunction(function.sha), function.buffers)
        except errors.DistributeError:
            worker.functions.pop(function.sha, None)
            raise

    # Resources.

    def add_resource(
        self, kind: Kind, function: ShippedFunction | None, source: int, keep_alive: object
    ) -> Resource:
        """Adds a resource with a new id; `create_resource` sends it."""
        number = next(self._resource_ids)
        resource = self._resources[number] = Resource(number, kind, function, source, keep_alive)
        return resource

    def resource(self, resource: int) -> Resource | None:
        """Returns a resource that is in use."""
        return self._resources.get(resource)

    def create_resource(self, worker: Worker, resource: Resource) -> None:
        """Makes a worker create a resource before the closures that are sent later."""
        body = messages.CreateResource(
            resource.id,
            resource.kind,
            "" if resource.function is None else resource.function.sha,
            resource.source,
            0,
        )
        try:
            if resource.function is not None:
                self._send_function(worker, resource.function)
            self._sender.send(Task("worker", worker.index), body)
        except errors.DistributeError as error:
            # Closures that use it fail, as if the worker had failed to create it.
            _log.warning("A per-worker %s cannot be sent to %s: %s", resource.kind, worker, error)

    def create_resources(self, worker: Worker) -> None:
        """Makes a worker create all resources."""
        for resource in self._resources.values():
            self.create_resource(worker, resource)

    def drop_resources(self, workers: Iterable[Worker], resources: Iterable[int]) -> None:
        """Removes resources that are in use, and makes workers drop them."""
        dropped = [r for r in resources if self._resources.pop(r, None) is not None]
        if dropped:
            for worker in workers:
                task = Task("worker", worker.index)
                self._sender.send(task, messages.DropResources(dropped))
