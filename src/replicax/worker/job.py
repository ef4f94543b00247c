"""What a worker holds for one job: the work that waits, and results that may be asked again.

The thread of the socket puts work in, the thread that computes takes it out.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from replicax.protocol.messages import Attach, ClosureCall, CreateResource, Result
from replicax.worker.functions import Functions

# Results that were sent and may be asked for again, and their bytes.
_MOST_RESULTS = 64
_MOST_RESULT_BYTES = 64 * 1024**2


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A closure to run, with its pickled arguments."""

    call: ClosureCall
    buffers: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Make:
    """A resource to make, with the pickled arguments of its function."""

    order: CreateResource
    buffers: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Resources to drop."""

    resources: list[int]


Work = Call | Make | Drop
Sent = tuple[Result, Sequence[Any]]


class Job:
    """One job, from `Attach` until it is replaced, detached, fenced or orphaned.

    Attributes:
      name: Its name.
      epoch: Which coordinator of the job it is.
      incarnation: The life of this worker that serves it.
      attach: What the coordinator said about it.
      session: Where the coordinator is reached.
      request: The number of its question to attach.
      functions: What it was sent.
      last_seen_s: When its coordinator gave a sign of life.
      is_ready: Whether the question was answered, and closures can run.
    """

    def __init__(
        self, name: str, epoch: int, incarnation: int, attach: Attach, session: Any, request: int
    ) -> None:
        self.name, self.epoch, self.incarnation = name, epoch, incarnation
        self.attach, self.session, self.request = attach, session, request
        self.functions = Functions()
        self.last_seen_s = 0.0
        self.is_ready = False
        # Protects everything below, and says that work came or that the job has ended.
        self._changed = threading.Condition()
        # Resources are made before anything else, so that closures find them.
        self._urgent: collections.deque[Make] = collections.deque()
        self._work: collections.deque[Call | Drop] = collections.deque()
        # Closures that wait, run, or are not reported yet: the same message may come twice.
        self._known: set[int] = set()
        self._sent: collections.OrderedDict[int, Sent] = collections.OrderedDict()
        self._sent_bytes = 0
        # Closures that were taken back: the order to run them may come again after that.
        self._cancelled: dict[int, Result] = {}
        self._is_ended = False

    def __str__(self) -> str:
        return f"job {self.name!r} (epoch {self.epoch})"

    def is_orphaned(self, now: float) -> bool:
        """Tells whether its coordinator was not heard for longer than the job allows."""
        seconds = self.attach.settings.get("orphan")
        if not isinstance(seconds, int | float) or seconds <= 0:
            return False
        return now - self.last_seen_s > seconds

    @property
    def is_ended(self) -> bool:
        """Whether nothing of it may run any more."""
        return self._is_ended

    @property
    def num_waiting(self) -> int:
        """How many pieces of work wait."""
        return len(self._urgent) + len(self._work)

    @property
    def num_open(self) -> int:
        """How many closures wait, run, or are not reported yet."""
        return len(self._known)

    # The thread of the socket.

    def add_calls(self, calls: Iterable[Call]) -> list[Sent]:
        """Queues closures; returns the results of those that have run before."""
        again = []
        with self._changed:
            if self._is_ended:
                return []
            for call in calls:
                closure = call.call.closure
                cancelled = self._cancelled.get(closure)
                if cancelled is not None and call.call.attempt <= cancelled.attempt:
                    again.append((cancelled, ()))
                elif closure in self._sent:
                    again.append(self._sent[closure])
                elif closure not in self._known:
                    self._known.add(closure)
                    self._work.append(call)
            self._changed.notify_all()
        return again

    def add(self, work: Make | Drop) -> None:
        """Queues work on resources."""
        with self._changed:
            if self._is_ended:
                return
            if isinstance(work, Make):
                self._urgent.append(work)
            else:
                self._work.append(work)
            self._changed.notify_all()

    def cancel(self, closures: Iterable[int]) -> list[ClosureCall]:
        """Takes closures out that have not been started; returns those."""
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

    def note_cancelled(self, results: Iterable[Result]) -> None:
        """Notes what was said about closures that were taken out."""
        with self._changed:
            self._cancelled.update((result.closure, result) for result in results)

    def forget_settled(self, settled: int) -> None:
        """Drops results that the coordinator will not ask for again."""
        with self._changed:
            while self._sent and next(iter(self._sent)) < settled:
                self._forget_oldest()
            for closure in [c for c in self._cancelled if c < settled]:
                del self._cancelled[closure]

    def end(self) -> None:
        """Drops all work; the thread that computes closes the rest."""
        with self._changed:
            self._is_ended = True
            self._urgent.clear()
            self._work.clear()
            self._changed.notify_all()

    # The thread that computes.

    def take(self) -> Work | None:
        """Returns the next piece of work, if there is one."""
        with self._changed:
            if self._urgent:
                return self._urgent.popleft()
            return self._work.popleft() if self._work else None

    def wait(self, timeout: float) -> None:
        """Waits for work, or for the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or self.num_waiting, timeout)

    def note_sent(self, sent: Sequence[Sent]) -> None:
        """Notes results that were sent; those without an error may be asked for again."""
        with self._changed:
            for result, buffers in sent:
                self._known.discard(result.closure)
                _, old = self._sent.pop(result.closure, (None, ()))
                self._sent_bytes -= _size(old)
                if result.error is None:
                    self._sent[result.closure] = (result, buffers)
                    self._sent_bytes += _size(buffers)
            while len(self._sent) > _MOST_RESULTS or self._sent_bytes > _MOST_RESULT_BYTES:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, (_, buffers) = self._sent.popitem(last=False)
        self._sent_bytes -= _size(buffers)


def _size(buffers: Sequence[Any]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
