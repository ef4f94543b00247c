"""Slow processes: they run for a part of the time, and are stopped for the rest."""

from __future__ import annotations

import signal
import threading
from typing import Any

from replicax.foundation import errors
from replicax.testing.child import Child

# One round of running and being stopped. Beats must get through, so it is short.
_ROUND_S = 0.1
_JOIN_SECONDS = 5.0


class DutyCycle:
    """Stops and continues a process in turn, in a thread, until it is ended.

    Args:
      child: Whose process.
      duty: The part of the time that it runs, between 0 and 1.
    """

    def __init__(self, child: Child, duty: float) -> None:
        self._child = child
        self._duty = duty
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-duty-cycle", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Lets the process run; waits until it does."""
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._child.send(signal.SIGSTOP)
                self._ended.wait(_ROUND_S * (1 - self._duty))
                self._child.send(signal.SIGCONT)
                self._ended.wait(_ROUND_S * self._duty)
        finally:
            self._child.send(signal.SIGCONT)


class DutyCycles:
    """The slow processes of a cluster."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cycles: dict[int, DutyCycle] = {}

    def set(self, child: Child, duty: Any) -> None:
        """Lets a process run for a part of the time; 1 ends it.

        Raises:
          InvalidArgumentError: It is not a number above 0, and at most 1.
        """
        if isinstance(duty, bool) or not isinstance(duty, int | float) or not 0 < duty <= 1:
            raise errors.InvalidArgumentError(
                "`duty` is the part of the time that a process runs, above 0 and at most 1",
                f"it is {duty!r}",
                "Pass 0.1 for a tenth, or use `stop`.",
            )
        with self._lock:
            before = self._cycles.pop(id(child), None)
            if before is not None:
                before.end()
            if duty < 1:
                self._cycles[id(child)] = DutyCycle(child, duty)

    def end(self) -> None:
        """Lets all processes run all the time."""
        with self._lock:
            for cycle in self._cycles.values():
                cycle.end()
            self._cycles.clear()
