"""The coordinator at work: one lock, the dispatcher behind it, the pool before it.

Note [Who runs what]
    Threads of the user call `schedule`, `join` and the like. The pool's one thread calls the
    methods that begin with `on_`. Both change state under the one lock and hand messages to
    the pool while they hold it, which does not wait; so what is said to a task has one order.
    Finalisers run anywhere, even while the lock is held: they only append to `released`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from replicax.coordinator import wait_report
from replicax.coordinator.courier import Cluster
from replicax.coordinator.dispatcher import Dispatcher
from replicax.coordinator.per_worker import PerWorkerDataset, return_argument
from replicax.coordinator.remote_value import RemoteValue
from replicax.coordinator.resources import Kind, Resource
from replicax.coordinator.scheduling.closures import Closure, ShippedFunction
from replicax.coordinator.scheduling.pacing import Rounds
from replicax.coordinator.scheduling.status import Status
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.scheduling.workers import WorkerState
from replicax.coordinator.shipping import serialization
from replicax.coordinator.waiting_threads import Waiter, noted
from replicax.foundation import errors, lazy, thread_stacks
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import expected_exits

if TYPE_CHECKING:
    from replicax.transport import client_pool
else:
    # ZeroMQ is imported with it.
    client_pool = lazy.module("replicax.transport.client_pool")

# Waits look around so often, should a wake-up ever be missed.
_LOOK_S = 1.0
# What was said last is given so long to leave.
_CLOSE_S = 1.0


class Engine:
    """Runs closures on the workers of a cluster. Knows no strategy."""

    def __init__(
        self, cluster: Cluster, timing: Timing, queue_limit: int, *, speculates: bool = False
    ) -> None:
        self._cluster = cluster
        self._timing = timing
        # Which threads wait for it, by their number; each changes its own entry.
        self.waiters: dict[int, Waiter] = {}
        # Protects everything below. Taken before the locks of the pool.
        self._lock = threading.RLock()
        # Waited on by `join`; by `schedule`, when the queue is full; for single results.
        self._is_idle = threading.Condition(self._lock)
        self._has_space = threading.Condition(self._lock)
        self._is_settled = threading.Condition(self._lock)
        # How many threads wait for space, so that nobody is woken for nothing.
        self._num_blocked = 0
        self._is_closed = False
        # What else ends with it.
        self._endings: list[Callable[[], None]] = []
        # See `ResourceHome`.
        self.released: deque[int] = deque()
        # The pool's thread starts at once, and waits for the lock.
        with self._lock:
            self._clients = client_pool.ClientPool(
                cluster.me,
                cluster.keys,
                self.on_message,
                self.on_connected,
                self.on_lost,
                self.on_idle,
                incarnation=cluster.incarnation,
            )
            self._clients.job, self._clients.epoch = cluster.job, cluster.epoch
            now = time.monotonic()
            self._dispatcher = Dispatcher(cluster, self._clients, timing, queue_limit, now)
            self._dispatcher.speculates = speculates
            self._queue = self._dispatcher.queue
            for index, location in enumerate(cluster.servers):
                self._clients.connect(Task("ps", index), location)
            for index, location in enumerate(cluster.workers):
                self._clients.connect(Task("worker", index), location)

    @property
    def num_workers(self) -> int:
        """How many workers the cluster has."""
        return len(self._cluster.workers)

    # What the user's threads call.

    def schedule(
        self,
        function: ShippedFunction,
        resources: Sequence[int],
        buffers: Sequence[Any],
        kept: Any,
        deadline_s: float | None = None,
    ) -> Closure:
        """Queues a call; waits while the queue is full. Raises an error of an earlier one."""
        queue = self._queue
        with self._lock:
            self._raise_pending()
            if queue.is_full or queue.error is not None:
                self._wait_for_space()
            number = self._cluster.next_closure()
            closure = Closure(number, function, resources, buffers, kept, deadline_s=deadline_s)
            self._dispatcher.add(closure, time.monotonic())
        return closure

    @noted("schedule")
    def _wait_for_space(self) -> None:
        while self._queue.is_full or self._queue.error is not None:
            self._num_blocked += 1
            try:
                self._has_space.wait(_LOOK_S)
            finally:
                self._num_blocked -= 1
            self._raise_pending()

    @noted("join")
    def join(self, timeout: float | None, on_look: Callable[[], float] | None = None) -> None:
        """Waits until nothing waits and nothing runs.

        Args:
          timeout: The seconds to wait at most.
          on_look: Called, without the lock, now and then; returns the seconds to the next time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        look_s = _LOOK_S
        while True:
            with self._lock:
                error = self._pending_error()
                if error is not None or self._queue.is_idle:
                    break
                _wait(self._is_idle, deadline, look_s, lambda: self._join_timeout(timeout))
            if on_look is not None:
                look_s = on_look()
        if error is not None:
            # What is whole is not touched by one that failed; the error itself comes first.
            with contextlib.suppress(errors.DistributeError):
                self._complete_round(deadline)
            raise error
        self._complete_round(deadline)

    def _join_timeout(self, timeout: float | None) -> str:
        workers, now = self._dispatcher.crew.workers, time.monotonic()
        return wait_report.join_timeout(workers, self._queue, timeout or 0.0, now)

    def _complete_round(self, deadline: float | None) -> None:
        """Lets servers apply gradients that wait for others, when no others will come."""
        rounds = self._dispatcher.crew.pacing
        if not isinstance(rounds, Rounds):
            return
        with self._lock:
            if self._is_closed or not rounds.is_begun or not self._queue.is_idle:
                return
            rounds.hold()
        try:
            for server in range(len(self._cluster.servers)):
                self._ask(Task("ps", server), messages.FlushGradients(), deadline)
        finally:
            with self._lock:
                rounds.begin_anew()

    def _ask(self, task: Task, body: messages.Body, deadline: float | None) -> None:
        """Asks for what may be asked twice, until there is an answer, or the job cannot go on."""
        while True:
            with self._lock:
                self._raise_pending()
            try:
                self._clients.request(task, body, timeout=_LOOK_S)
                return
            except (errors.UnavailableError, errors.DeadlineExceededError):
                with self._lock:
                    text = f"{task} has not applied the gradients of the last round in time."
                    _wait(self._is_idle, deadline, _LOOK_S, lambda text=text: text)

    def is_done(self) -> bool:
        """Tells whether nothing waits and nothing runs. Raises an error that is ready."""
        with self._lock:
            self._raise_pending()
            return self._queue.is_idle and self._queue.error is None

    @noted("fetch")
    def wait_for(self, closure: Closure, timeout: float | None) -> None:
        """Waits until a closure is settled."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            closure.is_awaited = True
            while not closure.is_settled:
                _wait(
                    self._is_settled,
                    deadline,
                    _LOOK_S,
                    lambda: wait_report.fetch_timeout(
                        closure,
                        self._dispatcher.crew.workers,
                        self._queue,
                        timeout or 0.0,
                        time.monotonic(),
                    ),
                )

    def unpack(self, closure: Closure) -> Any:
        """Returns the result of a closure that ended well."""
        result, buffers = closure.result
        return serialization.unpack_result(result, buffers, self._cluster)

    def run_errand(
        self,
        worker: int,
        resource: int,
        kept: Any,
        fn: Callable[[Any], Any] = return_argument,
    ) -> Closure:
        """Has one worker return what it keeps under a number, or a function of it."""
        function = serialization.ship(fn)
        with self._lock:
            self._require_open()
            number = self._cluster.next_closure()
            closure = Closure(number, function, [resource], (), kept, pin=worker)
            self._dispatcher.add(closure, time.monotonic())
        return closure

    def ask_any_worker(self, fn: Callable[[Any], Any], resource: int, kept: Any) -> Any:
        """Returns what a function gives for what one of the workers keeps under a number."""
        with self._lock:
            workers = self._dispatcher.crew.workers
            found = next((w.index for w in workers if w.state is WorkerState.READY), 0)
        return RemoteValue(self, self.run_errand(found, resource, kept, fn)).fetch()

    def make_resource(
        self, kind: Kind, function: ShippedFunction, buffers: Sequence[Any], kept: Any
    ) -> Resource:
        """Makes an object on each worker, now and whenever a worker comes back."""
        with self._lock:
            self._require_open()
            return self._dispatcher.add_resource(kind, function, 0, buffers, kept)

    def make_iterator(self, dataset: PerWorkerDataset) -> Resource:
        """Starts an iterator over a dataset on each worker."""
        with self._lock:
            self._require_open()
            return self._dispatcher.add_resource("iterator", None, dataset.resource)

    def status(self) -> Status:
        """Returns how everything is doing."""
        with self._lock:
            return self._dispatcher.status()

    def counts(self) -> tuple[int, int]:
        """Returns how many closures have ended well, and how many wait or run."""
        with self._lock:
            return self._queue.num_finished, len(self._queue) + len(self._queue.in_flight)

    def loss_of(self, server: int) -> Exception | None:
        """Returns why a server is lost, or None. Takes no lock: threads ask that hold others."""
        found = self._dispatcher.policy.servers[server]
        return None if found.loss is None else found.error()

    # What the watchdog calls.

    def progress(self) -> tuple[tuple[int, int], bool]:
        """Returns what changes with each closure that ends, and whether any waits or runs."""
        with self._lock:
            workers = self._dispatcher.crew.workers
            mark = sum(w.num_done for w in workers), self._queue.settled
            has_errands = any(w.errands or w.window for w in workers)
            return mark, has_errands or not self._queue.is_idle

    def waits(self) -> wait_report.Waits:
        """Says who waits for whom."""
        with self._lock:
            policy, now = self._dispatcher.policy, time.monotonic()
            return wait_report.describe(
                policy.crew.workers,
                policy.servers,
                self._queue,
                list(self.waiters.values()),
                self._timing.beat_s,
                now,
            )

    def ask_stacks(self, task: Task, timeout: float) -> str:
        """Asks a task what its threads are doing."""
        body, _ = self._clients.request(task, messages.GetStacks(), timeout=timeout)
        if not isinstance(body, messages.Stacks):
            raise errors.ProtocolError(f"{task} said {type(body).__name__}.")
        return thread_stacks.cleaned(body.text)

    def add_ending(self, end: Callable[[], None]) -> None:
        """Has something called, which does not wait, when this is closed."""
        with self._lock:
            self._require_open()
            self._endings.append(end)

    def remove_ending(self, end: Callable[[], None]) -> None:
        """Has it not called, if it has not been."""
        with self._lock:
            if end in self._endings:
                self._endings.remove(end)

    def close(self) -> None:
        """Ends everything: what waits or runs is cancelled, workers are let go."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._dispatcher.end()
                for end in self._endings:
                    end()
                for condition in (self._is_idle, self._has_space, self._is_settled):
                    condition.notify_all()
        self._clients.close(_CLOSE_S)

    # What the pool's thread calls.

    def on_connected(self, task: Task, welcome: messages.Welcome) -> None:
        """A task was reached."""
        with self._lock:
            if not self._is_closed:
                self._dispatcher.connected(task, welcome.incarnation, time.monotonic())
                self._wake()

    def on_lost(self, task: Task, reason: str) -> None:
        """A task cannot be reached any more."""
        with self._lock:
            if not self._is_closed:
                cluster = self._cluster
                places = cluster.servers if task.role == "ps" else cluster.workers
                is_expected = expected_exits.is_expected(places[task.index])
                self._dispatcher.lost(task, reason, time.monotonic(), is_expected=is_expected)
                self._wake()

    def on_message(
        self, task: Task, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> None:
        """A task said something."""
        with self._lock:
            if not self._is_closed:
                self._dispatcher.message(task, envelope, buffers, time.monotonic())
                self._wake()

    def on_idle(self, now: float) -> None:
        """Some time has passed."""
        with self._lock:
            if self._is_closed:
                return
            released = [self.released.popleft() for _ in range(len(self.released))]
            if released:
                self._dispatcher.drop_resources(released)
            self._dispatcher.tick(now)
            self._wake()

    def _wake(self) -> None:
        queue = self._queue
        if queue.is_idle or queue.is_error_ready:
            self._is_idle.notify_all()
        if self._num_blocked and (queue.is_error_ready or self._is_roomy()):
            self._has_space.notify_all()
        if self._dispatcher.has_news:
            self._dispatcher.has_news = False
            self._is_settled.notify_all()

    def _is_roomy(self) -> bool:
        # Not for each place that becomes free: threads would do nothing but take turns.
        return len(self._queue) < self._queue.limit - self._queue.limit // 16

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
        return self._dispatcher.pending_error()


def _wait(
    condition: threading.Condition,
    deadline: float | None,
    look_s: float,
    timed_out: Callable[[], str],
) -> None:
    """Waits for a while, with the lock held by the caller; raises at the deadline.

    Args:
      condition: Wakes the thread before.
      deadline: When to raise; None for never.
      look_s: How long to wait.
      timed_out: Returns the text of the error.
    """
    if deadline is not None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise errors.DeadlineExceededError(timed_out())
        look_s = min(look_s, left_s)
    condition.wait(look_s)
