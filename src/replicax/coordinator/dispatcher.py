"""What is done about what happens: events of tasks go to the policy, its actions become messages.

No thread and no lock in here: the engine holds its lock around every call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from replicax.coordinator.courier import Cluster, Courier, Sender
from replicax.coordinator.deliveries import Deliveries
from replicax.coordinator.resources import Resource
from replicax.coordinator.scheduling import actions as act
from replicax.coordinator.scheduling import error_causes, error_messages, pacing, speculation
from replicax.coordinator.scheduling.closures import Closure, State
from replicax.coordinator.scheduling.policy import Policy
from replicax.coordinator.scheduling.queue import ClosureQueue
from replicax.coordinator.scheduling.status import Meter, Status
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.scheduling.workers import WorkerState
from replicax.coordinator.shipping import serialization
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task

_log = logging.getLogger(__name__)
_FENCED = errors.FencedError.__name__
_RESTARTED = errors.PSIncarnationError.__name__


class Dispatcher:
    """Keeps queue, policy and resources, and talks to the tasks.

    Attributes:
      queue: The closures.
      policy: What is known of the tasks.
      crew: The workers.
      has_news: Whether a closure was settled for which a thread waits.
      replaced: Why this coordinator has no say any more; None while it has.
      speculates: Whether idle workers run again what others take long for.
    """

    def __init__(
        self, cluster: Cluster, hub: Sender, timing: Timing, queue_limit: int, now: float
    ) -> None:
        self._cluster = cluster
        self._timing = timing
        self.queue = ClosureQueue(queue_limit)
        counts = len(cluster.workers), len(cluster.servers)
        self.policy = Policy(*counts, timing, now, cluster.fenced)
        for server in self.policy.servers:
            server.is_saved = cluster.is_saved(server.index)
        self.crew = self.policy.crew
        self.crew.pace(pacing.make(cluster.settings, len(cluster.workers)))
        self.has_news = False
        self.replaced: str | None = None
        self.speculates = False
        self._courier = Courier(cluster, hub, timing.worker_orphan_s, timing.data_s)
        self._deliveries = Deliveries(self._courier)
        self._resources = self._deliveries.resources
        self._meter = Meter(now)
        # Tasks that are gone because they were asked to end.
        self._ended: set[Task] = set()
        self._beat_s = now - timing.beat_s

    # What the user wants.

    def add(self, closure: Closure, now: float) -> None:
        """Takes a closure in, and hands it out if a worker has room."""
        if closure.pin is None:
            self.queue.put(closure)
            if not self.crew.hungry:
                return
        else:
            worker = self.crew.workers[closure.pin]
            worker.errands.append(closure)
            worker.asked_s = now
        self._perform(self.crew.dispatch(self.queue, now))

    def add_resource(self, *args: Any) -> Resource:
        """Makes an object on all workers, now and when they come back. See `ResourceTable`."""
        resource = self._resources.add(*args)
        for worker in self.crew.workers:
            if worker.state is WorkerState.READY:
                self._deliveries.make(worker, resource)
        return resource

    def drop_resources(self, resources: Iterable[int]) -> None:
        """Drops objects on all workers."""
        dropped = self._resources.remove(resources)
        for worker in self.crew.workers:
            if dropped and worker.state is WorkerState.READY:
                self._courier.drop(worker.index, dropped)

    def pending_error(self) -> BaseException | None:
        """Returns the error to raise now: once the queue's, and always that of the cluster."""
        error = self.queue.take_error()
        if error is not None or self.queue.error is not None:
            return error
        if self.replaced is not None:
            return errors.FencedError(self.replaced)
        server = self.policy.broken_server
        return None if server is None else server.error()

    def status(self) -> Status:
        """Returns how everything is doing."""
        return self._meter.status(self.policy, self.queue)

    def end(self) -> None:
        """Cancels everything and lets the workers go."""
        error = error_messages.closed()
        self._note(self.queue.report(error))
        errands = [c for w in self.crew.workers for c in (*w.errands, *w.window.values())]
        left = [*self.queue.in_flight.values(), *(c for c in errands if c.pin is not None)]
        self._abandon(act.Abandon(left, error))
        for worker in self.crew.workers:
            if worker.state in (WorkerState.READY, WorkerState.ATTACHING):
                self._courier.release(worker.index)

    # What happens.

    def connected(self, task: Task, incarnation: int, now: float) -> None:
        """A task was reached."""
        self._ended.discard(task)
        self._courier.forget_questions(task)
        if task.role == "worker":
            _log.info("%s is there, in its life %x", task, incarnation)
            self._perform(self.policy.worker_connected(task.index, incarnation, now))
        else:
            self._perform(self.policy.server_connected(task.index, incarnation, now))

    def lost(self, task: Task, reason: str, now: float, *, is_expected: bool = False) -> None:
        """A task cannot be reached any more.

        Args:
          task: The task.
          reason: Why.
          now: The time.
          is_expected: Whether it was asked to end: then this is no reason for a warning.
        """
        if is_expected:
            self._ended.add(task)
            _log.info("%s has ended, as it was asked to", task)
        else:
            _log.warning("%s was lost: %s", task, reason)
        self._courier.forget_questions(task)
        if task.role == "worker":
            self._perform(self.policy.worker_lost(task.index, reason, now))
        else:
            self._perform(self.policy.server_lost(task.index, reason, now))

    def message(
        self, task: Task, envelope: messages.Envelope, buffers: list[memoryview], now: float
    ) -> None:
        """A task said something."""
        body = envelope.body
        if task.role == "ps":
            if isinstance(body, messages.Pong):
                self.policy.servers[task.index].figures = body.figures
                self._perform(self.policy.server_heard(task.index, now))
                return
            self.policy.servers[task.index].heard_s = now
        else:
            self.crew.workers[task.index].heard_s = now
            if isinstance(body, messages.Finished):
                self._take_results(task.index, envelope.incarnation, body, buffers, now)
                return
            if isinstance(body, messages.ResourceCreated):
                self._take_resource(task.index, body)
                return
            if isinstance(body, messages.Pong):
                self._take_figures(task.index, body.figures, now)
                return
        self._take_answer(task, envelope, body, now)

    def tick(self, now: float) -> None:
        """Some time has passed."""
        if self.replaced is not None:
            return
        self._perform(self.policy.tick(self.queue, now))
        if now - self._beat_s >= self._timing.beat_s:
            self._beat_s = now
            self._beat(now)
        self._perform(self.crew.recalls(self.queue, now))
        if self.speculates:
            self._perform(speculation.copies(self.crew, self.queue, now))
        if len(self.queue) or self.crew.has_errands:
            self._perform(self.crew.dispatch(self.queue, now))

    def _beat(self, now: float) -> None:
        settled, oldest = self.queue.settled, self._cluster.oldest_write()
        settled = settled if oldest is None else min(settled, oldest)
        for server in self.policy.servers:
            if server.incarnation:
                self._courier.ping(Task("ps", server.index), settled)
        for worker in self.crew.workers:
            if worker.state is not WorkerState.CONNECTING:
                self._courier.ping(Task("worker", worker.index), settled)
        self._perform(self.policy.greet_again())
        self._meter.sample(self.policy, now)

    # What came.

    def _take_results(
        self,
        worker: int,
        incarnation: int,
        body: messages.Finished,
        buffers: list[memoryview],
        now: float,
    ) -> None:
        for text in body.warnings:
            # One line each, whatever it says.
            _log.warning("%s: %s", Task("worker", worker), " ".join(text.split()))
        position = num_run = 0
        for result in body.results:
            own = buffers[position : position + result.num_buffers]
            position += result.num_buffers
            closure = self.policy.take_ended(worker, incarnation, result.closure, result.attempt)
            if closure is None:
                # Of a life that was given up, or of a closure that was.
                continue
            if closure.is_settled:
                num_run += 1  # another worker, which ran it as well, was quicker
                continue
            if result.error is not None:
                num_run += self._take_error(closure, worker, result.error, now)
                continue
            num_run += 1
            if closure.pin is None:
                self.queue.finish(closure, (result, own))
            else:
                closure.settle(State.FINISHED, (result, own), None)
            self.has_news = self.has_news or closure.is_awaited
        self.policy.note_finished(worker, num_run, now)
        if self.crew.hungry and len(self.queue):
            self._perform(self.crew.dispatch(self.queue, now))

    def _take_error(
        self, closure: Closure, worker: int, error: messages.RemoteError, now: float
    ) -> bool:
        """Decides about a closure that did not end well; tells whether it has run."""
        verdict = error_causes.judge(closure, worker, error, len(self.policy.servers))
        if isinstance(verdict, Exception):
            # Another attempt decides, and must have ended before anybody is told.
            if not speculation.runs_elsewhere(self.crew, closure):
                self._perform([act.Fail(closure, verdict, cancels=True)])
            return True
        if isinstance(verdict, error_causes.Fenced):
            self._perform(self.policy.worker_disowned(worker, closure, now))
            return False
        if isinstance(verdict, error_causes.Blame):
            closure.doubts += (self.crew.workers[worker].incarnation,)
            actions = self.policy.server_blamed(worker, verdict.server, verdict.is_restarted, now)
            # If the server is given up, its error comes first, and cancels this closure too.
            self._perform([*actions, act.PutBack([closure])])
            return False
        if verdict.is_function_unknown and closure.function is not None:
            self.crew.workers[worker].functions.pop(closure.function.sha, None)
        self._perform([act.PutBack([closure])])
        return False

    def _take_figures(self, worker: int, figures: Mapping[str, int | float], now: float) -> None:
        self.crew.workers[worker].figures = figures
        if figures.get("attached") == 0:
            self._perform(self.policy.worker_disowned(worker, None, now))
        elif "open" in figures:
            self._perform(self.policy.worker_reported(worker, figures["open"] == 0))

    def _take_resource(self, worker: int, body: messages.ResourceCreated) -> None:
        resource = self._resources.get(body.resource)
        if resource is None or body.error is None:
            return
        if body.error.cause == "unknown_function" and resource.function is not None:
            # The worker made room for others.
            made_by = self.crew.workers[worker]
            made_by.functions.pop(resource.function.sha, None)
            self._courier.make(made_by, resource)
            return
        # Harmless unless a closure uses it: then the worker reports it with that closure.
        error = serialization.rebuild_error(body.error, worker)
        text = "A per-worker %s could not be made on /job:worker/task:%d: %s"
        _log.warning(text, resource.kind, worker, error)

    def _take_answer(
        self, task: Task, envelope: messages.Envelope, body: messages.Body, now: float
    ) -> None:
        question = self._courier.take_question(task, envelope.request)
        if isinstance(body, messages.ErrorReply):
            self._take_refusal(task, question, body, now)
        elif isinstance(question, messages.Fence):
            for life in question.incarnations:
                self._perform(self.policy.fence_acknowledged(task.index, life, now))
        elif question is not None and task.role == "ps":
            _log.info("%s is back", task)
            self._perform(self.policy.server_rejoined(task.index, envelope.incarnation, now))
        elif question is not None:
            self._welcome(task.index, now)

    def _take_refusal(
        self, task: Task, question: messages.Body | None, body: messages.ErrorReply, now: float
    ) -> None:
        _log.warning("%s refused something: %s: %s", task, body.code, body.text)
        if body.code == _FENCED and question is None and task.role == "worker":
            self._perform(self.policy.worker_disowned(task.index, None, now))
        elif body.code == _FENCED:
            self._stop_replaced(body.text)
        elif isinstance(question, messages.Fence):
            # Without it closures cannot move: the server is of no use.
            reason = f"it refused to fence a worker: {body.text}"
            self._perform(self.policy.server_lost(task.index, reason, now))
        elif question is not None and task.role == "ps":
            self._perform(self.policy.server_emptied(task.index, body.text))
        elif task.role == "ps" and body.code == _RESTARTED:
            # It was, after the strategy had attached it and before this was met.
            self._perform(self.policy.server_restarted(task.index, now))
        elif question is not None:
            self.policy.worker_refused(task.index, f"it refused to join: {body.text}")

    def _stop_replaced(self, text: str) -> None:
        """Another coordinator has taken the job over: this one has no say any more."""
        if self.replaced is None:
            self.replaced = text
            self._perform(self.policy.job_lost(errors.FencedError(text)))
            # Servers do not listen any more to who would settle doubts.
            self._abandon(act.Abandon(list(self.queue.doubted.values()), error_messages.replaced()))

    def _welcome(self, index: int, now: float) -> None:
        """A worker has joined: it gets its resources, then closures."""
        worker = self.crew.workers[index]
        if worker.state is not WorkerState.ATTACHING:
            return
        self.policy.worker_attached(index, now)
        self._deliveries.make_all(worker)
        self._perform(self.crew.dispatch(self.queue, now))

    # What is done.

    def _perform(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            self._carry_out[type(action)](self, action)

    def _greet(self, action: act.Greet) -> None:
        self._courier.greet(action.worker)

    def _release(self, action: act.Release) -> None:
        self._courier.release(action.worker, action.is_dead)

    def _rejoin(self, action: act.Rejoin) -> None:
        self._courier.rejoin(action.server)

    def _dispatch(self, action: act.Dispatch) -> None:
        worker = self.crew.workers[action.worker]
        for closure, error in self._deliveries.run(worker, action.closures):
            self._fail(act.Fail(closure, error, cancels=True))

    def _resend(self, action: act.Resend) -> None:
        worker = self.crew.workers[action.worker]
        self._deliveries.resend(worker)
        self.crew.refresh(worker)

    def _recall(self, action: act.Recall) -> None:
        self._courier.cancel(action.worker, action.closures)

    def _fence_at(self, action: act.FenceAt) -> None:
        self._courier.fence(action.servers, action.incarnation)

    def _put_back(self, action: act.PutBack) -> None:
        for closure in action.closures:
            if closure.pin is not None:
                self.crew.workers[closure.pin].errands.append(closure)
        free = [c for c in action.closures if not speculation.runs_elsewhere(self.crew, c)]
        self._note(self.queue.put_back(free))

    def _fail(self, action: act.Fail) -> None:
        if action.closure.pin is not None:
            action.closure.settle(State.FAILED, None, action.error)
            self._note([action.closure])
            return
        self._note(self.queue.fail(action.closure, action.error, cancels=action.cancels))
        if action.cancels:
            self._perform(self.crew.recall_all())

    def _abandon(self, action: act.Abandon) -> None:
        for closure in action.closures:
            if closure.id in self.queue.in_flight:
                self.queue.abandon(closure, action.error)
            elif not closure.is_settled:
                closure.settle(State.FAILED, None, action.error)
        self._note(action.closures)

    def _raise(self, action: act.Raise) -> None:
        # Its text alone: whoever keeps the record must not keep what its traceback refers to.
        # Those who wait or schedule get it; who has ended the tasks knows why.
        _log.log(logging.INFO if self._ended else logging.ERROR, "%s", str(action.error))
        self._note(self.queue.report(action.error))
        self._perform(self.crew.recall_all())

    def _note(self, settled: Iterable[Closure]) -> None:
        self.has_news = self.has_news or any(c.is_awaited for c in settled)

    _carry_out: dict[type, Callable[[Any, Any], None]] = {
        act.Greet: _greet,
        act.Release: _release,
        act.Dispatch: _dispatch,
        act.Resend: _resend,
        act.Recall: _recall,
        act.FenceAt: _fence_at,
        act.Rejoin: _rejoin,
        act.PutBack: _put_back,
        act.Fail: _fail,
        act.Abandon: _abandon,
        act.Raise: _raise,
    }
