"""Restarts processes that stop themselves: those that exit with `START_AGAIN`, or abort."""

from __future__ import annotations

import collections
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable

from replicax.launch.backoff import Backoff
from replicax.process.shutdown import START_AGAIN
from replicax.testing.child import Child

_log = logging.getLogger(__name__)

# Exit codes of processes that stopped themselves. XLA aborts on fatal errors.
_OWN_ENDINGS = (START_AGAIN, -signal.SIGABRT)
_LOOK_S = 0.05
_JOIN_SECONDS = 5.0


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
