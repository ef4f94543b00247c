"""The core of the coordinator: routes events to the policy and turns its actions into messages.

No thread, lock or clock: the engine holds its lock around every call and passes the time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from replicax.coordinator.outbox import Cluster, Kind, Outbox, Request, Sender
from replicax.coordinator.scheduling import actions as act
from replicax.coordinator.scheduling import error_messages, pacing
from replicax.coordinator.scheduling.closures import Closure, ClosureQueue, ShippedFunction, State
from replicax.coordinator.scheduling.policy import Policy
from replicax.coordinator.scheduling.pool import WorkerState
from replicax.coordinator.scheduling.status import Meter, Status
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.shipping.remote_errors import rebuild_error
from replicax.foundation import errors, spans
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import expected_exits

_log = logging.getLogger(__name__)
_FENCED = errors.FencedError.__name__
_RESTARTED = errors.PSIncarnationError.__name__
# The number of reports that a worker lacks its function after which a closure fails.
_NUM_FUNCTION_MISSES = 3


class Core:
    """Owns the queue, the policy and the outbox.

    Attributes:
      queue: The closures.
      policy: The scheduling policy.
      pool: The workers.
      released: Ids of per-worker resources without references. Finalizers append to it, which may
        run anywhere: they take no lock.
      has_awaited_result: Whether a closure was settled that a thread waits for.
      replaced: The reason, if another coordinator runs the job now.
      speculates: Whether idle workers run slow closures a second time.
    """

    def __init__(
        self, cluster: Cluster, sender: Sender, timing: Timing, queue_limit: int, now: float
    ) -> None:
        self._cluster = cluster
        self._timing = timing
        self.queue = ClosureQueue(queue_limit)
        counts = len(cluster.workers), len(cluster.servers)
        self.policy = Policy(*counts, timing, now, cluster.fenced)
        for server in self.policy.servers:
            server.is_saved = cluster.is_saved(server.index)
        self.pool = self.policy.pool
        self.pool.set_pacing(pacing.make(cluster.settings, len(cluster.workers)))
        self.released: deque[int] = deque()
        self.has_awaited_result = False
        self.replaced: str | None = None
        self.speculates = False
        self._outbox = Outbox(cluster, sender, timing)
        self._meter = Meter(now)
        # Tasks that are gone because they were asked to exit.
        self._exited: set[Task] = set()
        self._heartbeat_s = now - timing.beat_s

    # Calls of the user.

    def add(self, closure: Closure, now: float) -> None:
        """Queues a closure, and assigns it if a worker has capacity."""
        if closure.pin is None:
            self.queue.put(closure)
            if not self.pool.available:
                return
        else:
            worker = self.pool.workers[closure.pin]
            worker.pinned_closures.append(closure)
            worker.pinned_s = now
        self._perform(self.pool.dispatch(self.queue, now))

    def add_resource(
        self, kind: Kind, function: ShippedFunction | None, source: int, keep_alive: object
    ) -> int:
        """Creates an object on all workers, now and when they recover; returns its id."""
        resource = self._outbox.add_resource(kind, function, source, keep_alive)
        for worker in self.pool.ready:
            self._outbox.create_resource(worker, resource)
        return resource.id

    def pending_error(self) -> BaseException | None:
        """Returns the error to raise now: that of the queue once, that of the cluster always."""
        error = self.queue.take_error()
        if error is not None or self.queue.error is not None:
            return error
        if self.replaced is not None:
            return errors.FencedError(self.replaced)
        server = self.policy.server_policy.lost_server
        return None if server is None else server.error()

    def status(self) -> Status:
        """Returns a snapshot of the cluster."""
        return self._meter.status(self.policy, self.queue)

    def close(self) -> None:
        """Cancels all closures and releases the workers."""
        error = error_messages.closed()
        self._record_settled(self.queue.report(error))
        workers = self.pool.workers
        pinned = [c for w in workers for c in (*w.pinned_closures, *w.assigned.values())]
        left = [*self.queue.in_flight.values(), *(c for c in pinned if c.pin is not None)]
        self._abandon(act.Abandon(left, error))
        for worker in workers:
            if worker.is_in_use:
                self._outbox.release(worker.index)

    # Events.

    def connected(self, task: Task, welcome: messages.Welcome, now: float) -> None:
        """Handles a new connection to a task."""
        self._exited.discard(task)
        self._outbox.drop_requests(task)
        incarnation, policy = welcome.incarnation, self.policy
        if task.job == "worker":
            _log.info("%s connected (incarnation %x)", task, incarnation)
            self._perform(policy.worker_policy.connected(task.index, incarnation, now))
        else:
            self._perform(policy.server_policy.connected(task.index, incarnation, now))

    def lost(self, task: Task, reason: str, now: float) -> None:
        """Handles the loss of a connection."""
        locations = self._cluster.servers if task.job == "ps" else self._cluster.workers
        if expected_exits.is_expected(locations[task.index]):
            self._exited.add(task)
            _log.info("%s has exited, as requested", task)
        else:
            _log.warning("%s was lost: %s", task, reason)
        self._outbox.drop_requests(task)
        if task.job == "worker":
            self._perform(self.policy.worker_policy.lost(task.index, reason, now))
        else:
            self._perform(self.policy.server_policy.lost(task.index, reason, now))

    def received(
        self, task: Task, envelope: messages.Envelope, buffers: list[memoryview], now: float
    ) -> None:
        """Handles a message of a task."""
        body = envelope.body
        if task.job == "ps":
            server = self.policy.servers[task.index]
            if isinstance(body, messages.Pong):
                server.counters = body.counters
                self._perform(self.policy.server_policy.heartbeat(task.index, now))
                return
            server.last_seen_s = now
        else:
            self.pool.workers[task.index].last_seen_s = now
            if isinstance(body, messages.Finished):
                self._handle_results(task, envelope.incarnation, body, buffers, now)
                return
            if isinstance(body, messages.ResourceCreated):
                self._handle_resource(task.index, body)
                return
            if isinstance(body, messages.Pong):
                self._handle_worker_heartbeat(task.index, body.counters, now)
                return
        self._handle_reply(task, envelope, now)

    def tick(self, now: float) -> None:
        """Checks timeouts, sends heartbeats and rebalances; called every few milliseconds."""
        released = [self.released.popleft() for _ in range(len(self.released))]
        if released:
            self._outbox.drop_resources(self.pool.ready, released)
        if self.replaced is not None:
            return
        self._perform(self.policy.tick(self.queue, now))
        if now - self._heartbeat_s >= self._timing.beat_s:
            self._heartbeat_s = now
            self._send_heartbeats(now)
        self._perform(self.pool.rebalance(self.queue, now))
        if self.speculates:
            self._perform(self.pool.speculate(self.queue, now))
        if len(self.queue) or self.pool.has_pinned_closures:
            self._perform(self.pool.dispatch(self.queue, now))

    def _send_heartbeats(self, now: float) -> None:
        settled, oldest = self.queue.settled, self._cluster.oldest_write()
        settled = settled if oldest is None else min(settled, oldest)
        for server in self.policy.servers:
            if server.incarnation:
                self._outbox.ping(Task("ps", server.index), settled)
        for worker in self.pool.workers:
            if worker.state is not WorkerState.CONNECTING:
                self._outbox.ping(Task("worker", worker.index), settled)
        self._perform(self.policy.worker_policy.retry_attach())
        self._meter.sample(self.policy, now)

    # Messages of workers.

    def _handle_results(
        self,
        task: Task,
        incarnation: int,
        body: messages.Finished,
        buffers: list[memoryview],
        now: float,
    ) -> None:
        for text in body.warnings:
            # A single line, whatever the worker sent.
            _log.warning("%s: %s", task, " ".join(text.split()))
        policy, worker = self.policy.worker_policy, task.index
        began = spans.now()
        position = num_run = 0
        for result in body.results:
            own = buffers[position : position + result.num_buffers]
            position += result.num_buffers
            closure = policy.take_ended(worker, incarnation, result.closure, result.attempt)
            if closure is None:
                # Of a fenced incarnation, or of an abandoned closure.
                continue
            if closure.is_settled:
                num_run += 1  # another worker, which ran it as well, was faster
                continue
            if result.error is not None:
                num_run += self._handle_error(closure, worker, result.error, now)
                continue
            num_run += 1
            if closure.pin is None:
                self.queue.finish(closure, (result, own))
            else:
                closure.settle(State.FINISHED, (result, own), None)
            self._record_settled([closure])
        if began and body.results:
            spans.record("finish", began, body.results[-1].closure, len(body.results))
        policy.record_finished(worker, num_run, now)
        if self.pool.available and len(self.queue):
            self._perform(self.pool.dispatch(self.queue, now))

    def _handle_error(
        self, closure: Closure, worker: int, error: messages.RemoteError, now: float
    ) -> bool:
        """Handles the error of a closure by its cause; returns whether the closure has run."""
        record = self.pool.workers[worker]
        if error.cause == "server" and 0 <= error.task < len(self.policy.servers):
            closure.unconfirmed += (record.incarnation,)
            is_restarted = error.kind.rpartition(".")[2] == _RESTARTED
            actions = self.policy.server_policy.reported_unreachable(
                worker, error.task, is_restarted, now
            )
            # If the server is lost, its error comes first, and cancels this closure too.
            self._perform([*actions, act.Requeue([closure])])
            return False
        if error.cause == "fenced":
            self._perform(self.policy.worker_policy.detached(worker, closure, now))
            return False
        if error.cause == "cancelled":
            self._perform([act.Requeue([closure])])
            return False
        if error.cause == "unknown_function":
            closure.num_function_misses += 1
            if closure.num_function_misses < _NUM_FUNCTION_MISSES:
                if closure.function is not None:
                    record.functions.pop(closure.function.sha, None)
                self._perform([act.Requeue([closure])])
                return False
        # Another attempt decides, and must have ended before the error is reported.
        if not self.policy.fencing.has_other_attempt(closure):
            self._perform([act.Fail(closure, rebuild_error(error, worker), cancels=True)])
        return True

    def _handle_worker_heartbeat(
        self, worker: int, counters: Mapping[str, int | float], now: float
    ) -> None:
        self.pool.workers[worker].counters = counters
        if counters.get("attached") == 0:
            self._perform(self.policy.worker_policy.detached(worker, None, now))
        elif "open" in counters:
            is_idle = counters["open"] == 0
            self._perform(self.policy.worker_policy.heartbeat(worker, is_idle))

    def _handle_resource(self, worker: int, body: messages.ResourceCreated) -> None:
        resource = self._outbox.resource(body.resource)
        if resource is None or body.error is None:
            return
        if body.error.cause == "unknown_function" and resource.function is not None:
            # The worker has evicted the function.
            record = self.pool.workers[worker]
            record.functions.pop(resource.function.sha, None)
            self._outbox.create_resource(record, resource)
            return
        # Closures that use it report the error again.
        error = rebuild_error(body.error, worker)
        text = "A per-worker %s could not be created on /job:worker/task:%d: %s"
        _log.warning(text, resource.kind, worker, error)

    # Replies.

    def _handle_reply(self, task: Task, envelope: messages.Envelope, now: float) -> None:
        body, request = envelope.body, self._outbox.take_request(task, envelope.request)
        if isinstance(body, messages.ErrorReply):
            self._handle_error_reply(task, request, body, now)
        elif isinstance(request, messages.Fence):
            for incarnation in request.incarnations:
                self._perform(
                    self.policy.server_policy.fence_confirmed(task.index, incarnation, now)
                )
        elif request is not None and task.job == "ps":
            _log.info("%s has recovered", task)
            self._perform(self.policy.server_policy.rejoined(task.index, envelope.incarnation, now))
        elif request is not None and self.policy.worker_policy.attached(task.index, now):
            self._outbox.create_resources(self.pool.workers[task.index])
            self._perform(self.pool.dispatch(self.queue, now))

    def _handle_error_reply(
        self, task: Task, request: Request | None, body: messages.ErrorReply, now: float
    ) -> None:
        _log.warning("%s rejected a message: %s: %s", task, body.code, body.text)
        workers, servers = self.policy.worker_policy, self.policy.server_policy
        if body.code == _FENCED and request is None and task.job == "worker":
            self._perform(workers.detached(task.index, None, now))
        elif body.code == _FENCED:
            self._stop_replaced(body.text)
        elif isinstance(request, messages.Fence):
            # Without the fence closures cannot move to another worker.
            reason = f"it failed to fence a worker: {body.text}"
            self._perform(servers.lost(task.index, reason, now))
        elif request is not None and task.job == "ps":
            self._perform(servers.lost_variables(task.index, body.text))
        elif task.job == "ps" and body.code == _RESTARTED:
            # It was restarted after the strategy attached it and before this connection.
            self._perform(servers.restarted(task.index, now))
        elif request is not None:
            workers.attach_failed(task.index, f"it failed to attach: {body.text}")

    def _stop_replaced(self, text: str) -> None:
        """Ends all closures, because another coordinator runs the job now."""
        if self.replaced is None:
            self.replaced = text
            self._perform(self.policy.job_lost(errors.FencedError(text)))
            # Servers accept no fences of this coordinator any more.
            unconfirmed = list(self.queue.unconfirmed.values())
            self._abandon(act.Abandon(unconfirmed, error_messages.replaced()))

    # Actions.

    def _perform(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            self._handlers[type(action)](self, action)

    def _dispatch(self, action: act.Dispatch) -> None:
        worker = self.pool.workers[action.worker]
        began = spans.now()
        for closure, error in self._outbox.run(worker, action.closures):
            self._fail(act.Fail(closure, error, cancels=True))
        if began:
            spans.record("assign", began, action.closures[0].id, len(action.closures))

    def _resend(self, action: act.Resend) -> None:
        worker = self.pool.workers[action.worker]
        self._outbox.resend(worker)
        self.pool.update(worker)

    def _requeue(self, action: act.Requeue) -> None:
        for closure in action.closures:
            if closure.pin is not None:
                self.pool.workers[closure.pin].pinned_closures.append(closure)
        fencing = self.policy.fencing
        free = [c for c in action.closures if not fencing.has_other_attempt(c)]
        self._record_settled(self.queue.requeue(free))

    def _fail(self, action: act.Fail) -> None:
        if action.closure.pin is not None:
            action.closure.settle(State.FAILED, None, action.error)
            self._record_settled([action.closure])
            return
        self._record_settled(self.queue.fail(action.closure, action.error, cancels=action.cancels))
        if action.cancels:
            self._perform(self.pool.recall_all())

    def _abandon(self, action: act.Abandon) -> None:
        for closure in action.closures:
            if closure.id in self.queue.in_flight:
                self.queue.abandon(closure, action.error)
            elif not closure.is_settled:
                closure.settle(State.FAILED, None, action.error)
        self._record_settled(action.closures)

    def _raise(self, action: act.Raise) -> None:
        # The text alone: a log record must not keep the objects that a traceback refers to. The
        # error itself is raised by `schedule` or `join`.
        _log.log(logging.INFO if self._exited else logging.ERROR, "%s", str(action.error))
        self._record_settled(self.queue.report(action.error))
        self._perform(self.pool.recall_all())

    def _record_settled(self, settled: Iterable[Closure]) -> None:
        if not self.has_awaited_result:
            self.has_awaited_result = any(c.is_awaited for c in settled)

    _handlers: dict[type[act.Action], Callable[[Core, Any], None]] = {
        act.RequestAttach: lambda self, action: self._outbox.attach_worker(action.worker),
        act.Release: lambda self, action: self._outbox.release(action.worker, action.is_dead),
        act.Recall: lambda self, action: self._outbox.recall(action.worker, action.closures),
        act.FenceAt: lambda self, action: self._outbox.fence(action.servers, action.incarnation),
        act.Rejoin: lambda self, action: self._outbox.attach_server(action.server),
        act.Dispatch: _dispatch,
        act.Resend: _resend,
        act.Requeue: _requeue,
        act.Fail: _fail,
        act.Abandon: _abandon,
        act.Raise: _raise,
    }
