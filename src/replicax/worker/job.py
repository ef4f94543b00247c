"""A worker's state of one job: queued work, and results that may be requested again.

The socket thread adds work, the compute thread takes it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from replicax.foundation import runtime
from replicax.protocol.codec import Buffer
from replicax.protocol.messages import Attach, ClosureCall, CreateResource, Result
from replicax.transport.service import Session
from replicax.worker.functions import Functions

# Limits of the sent results that may be requested again.
_MAX_RESULTS = 64
_MAX_RESULT_BYTES = 64 * 1024**2


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A closure to run, with its pickled arguments."""

    call: ClosureCall
    buffers: Sequence[Buffer]


@dataclasses.dataclass(frozen=True, slots=True)
class Create:
    """A resource to create, with the pickled arguments of its function."""

    order: CreateResource
    buffers: Sequence[Buffer]


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Resources to drop."""

    resources: list[int]


Work = Call | Create | Drop
Sent = tuple[Result, Sequence[Buffer]]


class Job:
    """One job, from `Attach` until it is replaced, detached, fenced or orphaned.

    Attributes:
      name: Its name.
      epoch: The epoch of its coordinator.
      incarnation: The incarnation of this worker that serves it.
      attach: The attach request.
      session: The session of the coordinator.
      request: The id of the attach request.
      functions: The functions of the job.
      last_seen_s: When the last message of the coordinator arrived.
      is_ready: Whether the attach request was answered, and closures can run.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        incarnation: int,
        attach: Attach,
        session: Session,
        request: int,
    ) -> None:
        self.name, self.epoch, self.incarnation = name, epoch, incarnation
        self.attach, self.session, self.request = attach, session, request
        self.functions = Functions()
        self.last_seen_s = 0.0
        self.is_ready = False
        # Protects everything below; notified when work is added or the job ends.
        self._changed = runtime.Condition()
        # Resources are created first, so that closures find them.
        self._urgent: collections.deque[Create] = collections.deque()
        self._work: collections.deque[Call | Drop] = collections.deque()
        # Closures that are queued, running or unreported: a message may arrive twice.
        self._known: set[int] = set()
        self._sent: collections.OrderedDict[int, Sent] = collections.OrderedDict()
        self._sent_bytes = 0
        # Recalled closures: a duplicate of their Run message may arrive later.
        self._cancelled: dict[int, Result] = {}
        self._is_ended = False

    def __str__(self) -> str:
        return f"job {self.name!r} (epoch {self.epoch})"

    def is_orphaned(self, now: float) -> bool:
        """Returns whether the coordinator has been silent for longer than the job allows."""
        seconds = self.attach.settings.get("orphan")
        if not isinstance(seconds, int | float) or seconds <= 0:
            return False
        return now - self.last_seen_s > seconds

    @property
    def is_ended(self) -> bool:
        """Whether the job has ended."""
        return self._is_ended

    @property
    def num_waiting(self) -> int:
        """The number of queued calls and resource operations."""
        return len(self._urgent) + len(self._work)

    @property
    def num_open(self) -> int:
        """The number of closures that are queued, running or unreported."""
        return len(self._known)

    # The socket thread.

    def add_calls(self, calls: Iterable[Call]) -> list[Sent]:
        """Queues closures; returns the results of those that have already run."""
        known = []
        with self._changed:
            if self._is_ended:
                return []
            for call in calls:
                closure = call.call.closure
                cancelled = self._cancelled.get(closure)
                if cancelled is not None and call.call.attempt <= cancelled.attempt:
                    known.append((cancelled, ()))
                elif closure in self._sent:
                    known.append(self._sent[closure])
                elif closure not in self._known:
                    self._known.add(closure)
                    self._work.append(call)
            self._changed.notify_all()
        return known

    def add(self, work: Create | Drop) -> None:
        """Queues an operation on resources."""
        with self._changed:
            if self._is_ended:
                return
            if isinstance(work, Create):
                self._urgent.append(work)
            else:
                self._work.append(work)
            self._changed.notify_all()

    def cancel(self, closures: Iterable[int]) -> list[ClosureCall]:
        """Removes and returns queued closures."""
        wanted = set(closures)
        with self._changed:
            kept = collections.deque[Call | Drop]()
            taken = []
            for work in self._work:
                if isinstance(work, Call) and work.call.closure in wanted:
                    taken.append(work.call)
                else:
                    kept.append(work)
            self._work = kept
            self._known.difference_update(call.closure for call in taken)
        return taken

    def record_cancelled(self, results: Iterable[Result]) -> None:
        """Records the results of recalled closures."""
        with self._changed:
            self._cancelled.update((result.closure, result) for result in results)

    def forget_settled(self, settled: int) -> None:
        """Drops results that the coordinator will not request again."""
        with self._changed:
            while self._sent and next(iter(self._sent)) < settled:
                self._forget_oldest()
            for closure in [c for c in self._cancelled if c < settled]:
                del self._cancelled[closure]

    def end(self) -> None:
        """Ends the job, and drops all queued work."""
        with self._changed:
            self._is_ended = True
            self._urgent.clear()
            self._work.clear()
            self._changed.notify_all()

    # The compute thread.

    def take(self) -> Work | None:
        """Returns the next piece of work, or None."""
        with self._changed:
            if self._urgent:
                return self._urgent.popleft()
            return self._work.popleft() if self._work else None

    def wait(self, timeout: float) -> None:
        """Waits for work, or for the end of the job."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or self.num_waiting, timeout)

    def wait_until_ended(self, timeout: float) -> None:
        """Waits for the end of the job."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended, timeout)

    def record_sent(self, sent: Sequence[Sent]) -> None:
        """Records sent results; those without an error may be requested again."""
        with self._changed:
            for result, buffers in sent:
                self._known.discard(result.closure)
                _, old = self._sent.pop(result.closure, (None, ()))
                self._sent_bytes -= _size(old)
                if result.error is None:
                    self._sent[result.closure] = (result, buffers)
                    self._sent_bytes += _size(buffers)
            while len(self._sent) > _MAX_RESULTS or self._sent_bytes > _MAX_RESULT_BYTES:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, (_, buffers) = self._sent.popitem(last=False)
        self._sent_bytes -= _size(buffers)


def _size(buffers: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
