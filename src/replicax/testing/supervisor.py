"""Restarts processes that stop themselves: those that exit with `START_AGAIN`, or abort."""

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

# Exit codes of processes that stopped themselves. ZeroMQ and XLA abort on fatal errors.
_OWN_ENDINGS = (START_AGAIN, -signal.SIGABRT)
_LOOK_S = 0.05
_JOIN_SECONDS = 5.0


class Backoff:
    """Decides when to restart a process. Pure: time is a parameter.

    Example:
      >>> backoff = Backoff()
      >>> [backoff.next(100.0) for _ in range(6)]
      [100.2, 100.4, 100.8, 101.6, 103.2, None]
      >>> backoff.next(200.0)
      200.2
    """

    FIRST_S = 0.2
    LONGEST_S = 5.0
    # At most this many restarts in this many seconds.
    MOST = 5
    WINDOW_S = 60.0

    def __init__(self) -> None:
        self._times: collections.deque[float] = collections.deque()

    def next(self, now: float) -> float | None:
        """Returns when to restart; None if it was restarted too often."""
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
        # Of children that exited: the process, and when to restart it.
        self._due: dict[int, tuple[int, float | None]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-supervisor", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stops watching, and waits for restarts in progress."""
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
