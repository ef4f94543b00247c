"""Throttled processes: they are stopped for a share of the time."""

from __future__ import annotations

import signal
import threading

from replicax.foundation import errors
from replicax.launch.task_process import TaskProcess

# One round of running and being stopped. Short, so that heartbeats are in time.
_ROUND_S = 0.1
_JOIN_SECONDS = 5.0


class Throttle:
    """Stops and continues a process in turn, in a thread.

    Args:
      child: The task of the process.
      throttle: The share of the time that it runs, between 0 and 1.
    """

    def __init__(self, child: TaskProcess, throttle: float) -> None:
        self._child = child
        self._share = throttle
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="replicax-throttle-cycle", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Ends the throttling, and waits until the process runs."""
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._child.send(signal.SIGSTOP)
                self._ended.wait(_ROUND_S * (1 - self._share))
                self._child.send(signal.SIGCONT)
                self._ended.wait(_ROUND_S * self._share)
        finally:
            self._child.send(signal.SIGCONT)


class Throttles:
    """The throttled processes of a cluster."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cycles: dict[int, Throttle] = {}

    def set(self, child: TaskProcess, throttle: object) -> None:
        """Throttles a process; 1 is full speed.

        Raises:
          InvalidArgumentError: `throttle` is not a number above 0 and at most 1.
        """
        if (
            isinstance(throttle, bool)
            or not isinstance(throttle, int | float)
            or not 0 < throttle <= 1
        ):
            raise errors.InvalidArgumentError(
                "`throttle` is the share of the time that a process runs, above 0 and at most 1",
                f"it is {throttle!r}",
                "Pass 0.1 for a tenth, or use `stop`.",
            )
        with self._lock:
            before = self._cycles.pop(id(child), None)
            if before is not None:
                before.end()
            if throttle < 1:
                self._cycles[id(child)] = Throttle(child, throttle)

    def end(self) -> None:
        """Ends all throttling."""
        with self._lock:
            for cycle in self._cycles.values():
                cycle.end()
            self._cycles.clear()
