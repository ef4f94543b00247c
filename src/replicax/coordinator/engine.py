"""The engine of the coordinator: one lock, with the client pool outside and the core inside.

Note [Threads]
    Threads of the user call `schedule`, `join` and the like. The thread of the client pool
    reports events, all through `_on_event`. Both change state under the one lock, and pass
    messages to the client pool while they hold it, which does not block; so messages to a task
    have one order. Finalizers run anywhere, even while the lock is held: they only append to
    `released`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from replicax.coordinator import wait_report
from replicax.coordinator.core import Core
from replicax.coordinator.outbox import Cluster, Kind
from replicax.coordinator.scheduling.closures import Closure, ShippedFunction
from replicax.coordinator.scheduling.pacing import Rounds
from replicax.coordinator.scheduling.status import Status
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.shipping import serialization
from replicax.foundation import errors, lazy, runtime, spans, thread_stacks
from replicax.foundation.types import Tree
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.protocol.tasks import Task

if TYPE_CHECKING:
    from replicax.transport import client_pool
else:
    # With it come sockets and TLS, which most programs do not need.
    client_pool = lazy.module("replicax.transport.client_pool")

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")

# The engines of this process that are not closed.
open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
# The interval at which waits check their condition, should a wake-up ever be missed.
_POLL_S = 1.0
# The time that the last messages have to leave.
_CLOSE_S = 1.0


def _waits_in(
    call: str,
) -> Callable[[Callable[Concatenate[Engine, _P], _R]], Callable[Concatenate[Engine, _P], _R]]:
    """Makes a method record that its thread waits in a call of the user, for the wait report."""

    def decorate(
        method: Callable[Concatenate[Engine, _P], _R],
    ) -> Callable[Concatenate[Engine, _P], _R]:
        @functools.wraps(method)
        def wrapped(self: Engine, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            thread = runtime.current_thread()
            waiting = wait_report.WaitingThread(thread.name, call, runtime.now())
            self.waiting_threads[runtime.get_ident()] = waiting
            began = spans.now()
            try:
                return method(self, *args, **kwargs)
            finally:
                if began:
                    spans.record("wait", began, label=call)
                del self.waiting_threads[runtime.get_ident()]

        return wrapped

    return decorate


class Engine:
    """Runs closures on the workers of a cluster, independent of any strategy."""

    def __init__(
        self, cluster: Cluster, timing: Timing, queue_limit: int, *, speculates: bool = False
    ) -> None:
        self._cluster = cluster
        self._timing = timing
        # By thread id; each thread changes its own entry.
        self.waiting_threads: dict[int, wait_report.WaitingThread] = {}
        # Protects everything below. Taken before the locks of the client pool.
        self._lock = runtime.RLock()
        # For `join`; for `schedule` while the queue is full; for single results.
        self._is_idle = runtime.Condition(self._lock)
        self._has_space = runtime.Condition(self._lock)
        self._is_settled = runtime.Condition(self._lock)
        # The number of threads that wait for space.
        self._num_blocked = 0
        self._is_closed = False
        self._close_callbacks: list[Callable[[], None]] = []
        # The thread of the client pool starts at once, and waits for the lock.
        with self._lock:
            self._clients = client_pool.ClientPool(
                cluster.me,
                cluster.keys,
                functools.partial(self._on_event, Core.received),
                functools.partial(self._on_event, Core.connected),
                functools.partial(self._on_event, Core.lost),
                lambda _: self._on_event(Core.tick),
                incarnation=cluster.incarnation,
            )
            self._clients.job, self._clients.epoch = cluster.job, cluster.epoch
            self._core = Core(cluster, self._clients, timing, queue_limit, runtime.now())
            self._core.speculates = speculates
            self._queue = self._core.queue
            for index, location in enumerate(cluster.servers):
                self._clients.connect(Task("ps", index), location)
            for index, location in enumerate(cluster.workers):
                self._clients.connect(Task("worker", index), location)
        open_engines.add(self)

    @property
    def num_workers(self) -> int:
        """The number of workers of the cluster."""
        return len(self._cluster.workers)

    @property
    def released(self) -> deque[int]:
        """Ids of per-worker resources without references; finalizers append to it."""
        return self._core.released

    # Events of tasks.

    def _on_event(self, handle: Callable[..., None], *event: object) -> None:
        """Passes an event to the core. Called by the thread of the client pool."""
        with self._lock:
            if not self._is_closed:
                handle(self._core, *event, runtime.now())
                self._wake()

    def _wake(self) -> None:
        queue = self._queue
        if queue.is_idle or queue.is_error_ready:
            self._is_idle.notify_all()
        # Not for each free place: threads would do nothing but take turns.
        has_space = len(queue) < queue.limit - queue.limit // 16
        if self._num_blocked and (queue.is_error_ready or has_space):
            self._has_space.notify_all()
        if self._core.has_awaited_result:
            self._core.has_awaited_result = False
            self._is_settled.notify_all()

    # Closures.

    def schedule(
        self,
        function: ShippedFunction,
        resources: Sequence[int],
        buffers: Sequence[Buffer],
        keep_alive: object,
        deadline_s: float | None = None,
    ) -> Closure:
        """Queues a call; waits while the queue is full. Raises the error of an earlier call."""
        queue = self._queue
        began = spans.now()
        with self._lock:
            self._raise_pending()
            if queue.is_full or queue.error is not None:
                self._wait_for_space()
            number = self._cluster.next_closure()
            closure = Closure(
                number, function, resources, buffers, keep_alive, deadline_s=deadline_s
            )
            self._core.add(closure, runtime.now())
        if began:
            spans.record("schedule", began, number)
        return closure

    @_waits_in("schedule")
    def _wait_for_space(self) -> None:
        while self._queue.is_full or self._queue.error is not None:
            self._num_blocked += 1
            try:
                self._has_space.wait(_POLL_S)
            finally:
                self._num_blocked -= 1
            self._raise_pending()

    def run_pinned(
        self, worker: int, fn: Callable[..., object], resource: int, keep_alive: object
    ) -> Closure:
        """Runs a function of a resource on one worker."""
        function = serialization.ship(fn)
        with self._lock:
            self._require_open()
            number = self._cluster.next_closure()
            closure = Closure(number, function, [resource], (), keep_alive, pin=worker)
            self._core.add(closure, runtime.now())
        return closure

    def any_worker(self) -> int:
        """Returns the index of a worker that is ready, or 0."""
        with self._lock:
            return next((w.index for w in self._core.pool.ready), 0)

    def create_resource(
        self, kind: Kind, function: ShippedFunction | None, source: int, keep_alive: object
    ) -> int:
        """Creates an object on each worker, now and whenever one recovers; returns its id."""
        with self._lock:
            self._require_open()
            return self._core.add_resource(kind, function, source, keep_alive)

    def unpack(self, closure: Closure) -> Tree:
        """Returns the result of a finished closure."""
        assert closure.result is not None
        result, buffers = closure.result
        return serialization.unpack_result(result, buffers, self._cluster)

    # Waits.

    @_waits_in("join")
    def join(self, timeout: float | None, on_poll: Callable[[], float] | None = None) -> None:
        """Waits until no closure is queued or running.

        Args:
          timeout: The maximum number of seconds.
          on_poll: Called repeatedly without the lock; returns the seconds until the next call.
        """
        deadline = None if timeout is None else runtime.now() + timeout
        poll_s = _POLL_S
        while True:
            with self._lock:
                error = self._pending_error()
                if error is not None or self._queue.is_idle:
                    break
                _wait(self._is_idle, deadline, poll_s, lambda: self._join_timeout(timeout))
            if on_poll is not None:
                poll_s = on_poll()
        if error is not None:
            # A closure that failed does not affect the gradients of the others.
            with contextlib.suppress(errors.DistributeError):
                self._complete_round(deadline)
            raise error
        self._complete_round(deadline)

    def _join_timeout(self, timeout: float | None) -> str:
        workers, now = self._core.pool.workers, runtime.now()
        return wait_report.join_timeout(workers, self._queue, timeout or 0.0, now)

    def _complete_round(self, deadline: float | None) -> None:
        """Makes servers apply gradients that wait for others, when no others will come."""
        rounds = self._core.pool.pacing
        if not isinstance(rounds, Rounds):
            return
        with self._lock:
            if self._is_closed or not rounds.is_begun or not self._queue.is_idle:
                return
            rounds.hold()
        try:
            for server in range(len(self._cluster.servers)):
                self._request(Task("ps", server), messages.FlushGradients(), deadline)
        finally:
            with self._lock:
                rounds.restart()

    def _request(self, task: Task, body: messages.Body, deadline: float | None) -> None:
        """Repeats an idempotent request until there is a reply, or the job cannot continue."""
        while True:
            with self._lock:
                self._raise_pending()
            try:
                self._clients.request(task, body, timeout=_POLL_S)
                return
            except (errors.UnavailableError, errors.DeadlineExceededError):
                with self._lock:
                    text = f"{task} did not apply the gradients of the last round in time."
                    _wait(self._is_idle, deadline, _POLL_S, lambda text=text: text)

    @_waits_in("fetch")
    def wait_for(self, closure: Closure, timeout: float | None) -> None:
        """Waits until a closure is settled."""
        deadline = None if timeout is None else runtime.now() + timeout

        def timed_out() -> str:
            workers, now = self._core.pool.workers, runtime.now()
            return wait_report.fetch_timeout(closure, workers, self._queue, timeout or 0.0, now)

        with self._lock:
            closure.is_awaited = True
            while not closure.is_settled:
                _wait(self._is_settled, deadline, _POLL_S, timed_out)

    def is_done(self) -> bool:
        """Returns whether no closure is queued or running. Raises an error that is ready."""
        with self._lock:
            self._raise_pending()
            return self._queue.is_idle and self._queue.error is None

    # Reports.

    def status(self) -> Status:
        """Returns a snapshot of the cluster."""
        with self._lock:
            return self._core.status()

    def counts(self) -> tuple[int, int]:
        """Returns the numbers of finished closures, and of queued or running ones."""
        with self._lock:
            return self._queue.num_finished, len(self._queue) + len(self._queue.in_flight)

    def loss_of(self, server: int) -> Exception | None:
        """Returns why a server is lost, or None. Takes no lock: callers may hold others."""
        found = self._core.policy.servers[server]
        return None if found.loss is None else found.error()

    def progress(self) -> tuple[tuple[int, int], bool]:
        """Returns a mark that changes with each ended closure, and whether any is open."""
        with self._lock:
            workers = self._core.pool.workers
            mark = sum(w.num_done for w in workers), self._queue.settled
            has_pinned = any(w.pinned_closures or w.assigned for w in workers)
            return mark, has_pinned or not self._queue.is_idle

    def wait_report(self) -> wait_report.WaitReport:
        """Returns what the threads, closures, workers and servers wait for."""
        with self._lock:
            policy = self._core.policy
            return wait_report.describe(
                policy.pool.workers,
                policy.servers,
                self._queue,
                list(self.waiting_threads.values()),
                self._timing.beat_s,
                runtime.now(),
            )

    def observe(self, timeout: float) -> tuple[Status, wait_report.WaitReport] | None:
        """Returns the status and the wait report; None if the lock is held for too long."""
        if not self._lock.acquire(timeout=timeout):
            return None
        try:
            return self._core.status(), self.wait_report()
        finally:
            self._lock.release()

    def request_stacks(self, task: Task, timeout: float) -> str:
        """Returns the stacks of all threads of a task."""
        body, _ = self._clients.request(task, messages.GetStacks(), timeout=timeout)
        if not isinstance(body, messages.Stacks):
            raise errors.ProtocolError(f"{task} replied {type(body).__name__} to GetStacks.")
        return thread_stacks.cleaned(body.text)

    def record_spans(self, trace: str, is_on: bool, timeout: float) -> list[bytes]:
        """Makes all tasks that are connected start or stop to record; returns what they recorded.

        Tasks that are lost, or do not answer in time, are logged and left out.
        """
        found: list[bytes] = []
        deadline = runtime.now() + timeout
        for task in [*self._tasks("ps"), *self._tasks("worker")]:
            left_s = max(deadline - runtime.now(), 0.1)
            try:
                body = messages.RecordSpans(trace, is_on)
                _, buffers = self._clients.request(task, body, timeout=left_s)
            except errors.DistributeError as error:
                _log.warning("%s is missing in the trace: %s", task, error)
            else:
                found += [bytes(buffer) for buffer in buffers if len(buffer)]
        return found

    def _tasks(self, job: str) -> list[Task]:
        locations = self._cluster.servers if job == "ps" else self._cluster.workers
        return [Task(job, index) for index in range(len(locations))]

    # Shutdown.

    def add_close_callback(self, callback: Callable[[], None]) -> None:
        """Registers a non-blocking close callback."""
        with self._lock:
            self._require_open()
            self._close_callbacks.append(callback)

    def remove_close_callback(self, callback: Callable[[], None]) -> None:
        """Removes a close callback. Idempotent."""
        with self._lock:
            if callback in self._close_callbacks:
                self._close_callbacks.remove(callback)

    def close(self) -> None:
        """Cancels all closures, and releases the workers. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                open_engines.discard(self)
                self._core.close()
                for callback in self._close_callbacks:
                    callback()
                for condition in (self._is_idle, self._has_space, self._is_settled):
                    condition.notify_all()
        self._clients.close(_CLOSE_S)

    def _require_open(self) -> None:
        if self._is_closed:
            raise errors.ContextError(
                "A ClusterCoordinator works until it is closed",
                "it is closed",
                "Make a new strategy and a new coordinator.",
            )

    def _raise_pending(self) -> None:
        error = self._pending_error()
        if error is not None:
            raise error

    def _pending_error(self) -> BaseException | None:
        self._require_open()
        return self._core.pending_error()


def _wait(
    condition: runtime.Condition,
    deadline: float | None,
    poll_s: float,
    timed_out: Callable[[], str],
) -> None:
    """Waits once, with the lock held by the caller; raises at the deadline.

    Args:
      condition: Wakes the thread earlier.
      deadline: When to raise; None for never.
      poll_s: The maximum number of seconds to wait.
      timed_out: Returns the text of the error.
    """
    if deadline is not None:
        left_s = deadline - runtime.now()
        if left_s <= 0:
            raise errors.DeadlineExceededError(timed_out())
        poll_s = min(poll_s, left_s)
    condition.wait(poll_s)
