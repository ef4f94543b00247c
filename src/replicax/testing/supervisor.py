"""Starts processes again that end themselves: those that exit with `START_AGAIN`, or abort."""

from __future__ import annotations

import collections
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable

from replicax.process.shutdown import START_AGAIN
from replicax.testing.child import Child

_log = logging.getLogger(__name__)

# Exit codes of processes that ended themselves. ZeroMQ and XLA abort a process that cannot go on.
_OWN_ENDINGS = (START_AGAIN, -signal.SIGABRT)
_LOOK_S = 0.05
_JOIN_SECONDS = 5.0


class Backoff:
    """Says when a process may be started again: pure, the time is given.

    Example:
      >>> backoff = Backoff()
      >>> [backoff.next(100.0) for _ in range(6)]
      [100.2, 100.4, 100.8, 101.6, 103.2, None]
      >>> backoff.next(200.0)
      200.2
    """

    FIRST_S = 0.2
    LONGEST_S = 5.0
    # At most so many times in so many seconds.
    MOST = 5
    WINDOW_S = 60.0

    def __init__(self) -> None:
        self._times: collections.deque[float] = collections.deque()

    def next(self, now: float) -> float | None:
        """Returns when to start; None if it was started too often."""
        while self._times and self._times[0] <= now - self.WINDOW_S:
            self._times.popleft()
        if len(self._times) >= self.MOST:
            return None
        pause = min(self.FIRST_S * 2 ** len(self._times), self.LONGEST_S)
        self._times.append(now)
        return now + pause


class Supervisor:
    """Watches processes in a thread.

    Args:
      children: Whom to watch.
      start: Starts a process again, if it has not been started by somebody else.
    """

    def __init__(self, children: Iterable[Child], start: Callable[[Child, int], None]) -> None:
        self._children = list(children)
        self._start = start
        self._backoffs: dict[int, Backoff] = collections.defaultdict(Backoff)
        # Of children that ended: the process that did, and when to start the next one.
        self._due: dict[int, tuple[int, float | None]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-supervisor", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Watches no more; waits until nothing is started any more."""
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            for child in self._children:
                self._look(child, time.monotonic())

    def _look(self, child: Child, now: float) -> None:
        pid = child.pid
        if pid is None or child.exit_code not in _OWN_ENDINGS:
            return
        known = self._due.get(id(child))
        if known is None or known[0] != pid:
            due_s = self._backoffs[id(child)].next(now)
            self._due[id(child)] = known = (pid, due_s)
            if due_s is None:
                _log.error("%s has ended too often to be started again", child)
        if known[1] is not None and now >= known[1]:
            self._due[id(child)] = (pid, None)
            self._start(child, pid)
