"""`Watchdog`: reports what waits for what, with stacks, when no closure ends for too long."""

from __future__ import annotations

import contextlib
import enum
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Self, TextIO

from replicax.coordinator.cluster_coordinator import ClusterCoordinator
from replicax.coordinator.engine import Engine
from replicax.foundation import errors, thread_stacks
from replicax.protocol.tasks import Task

_log = logging.getLogger(__name__)

# The number of polls per timeout; and the limits of the interval, in seconds.
_POLLS = 10
_MAX_INTERVAL_S, _MIN_INTERVAL_S = 1.0, 0.02
# If it slept for so much longer than the interval, this process was stopped.
_PAUSE_S = 1.0
# The timeout of a request for the stacks of a task, and the maximum number of such requests.
_STACKS_S = 1.0
_NUM_STACKS = 6
# The time that `stop` waits for the thread: one request, and the writing of the report.
_STOP_S = 2 * _STACKS_S


class Change(enum.Enum):
    """The result of a poll."""

    NONE = "none"  # closures end, or there are none
    STALLED = "stalled"  # none has ended for the timeout; repeated after each further timeout
    RESUMED = "resumed"  # closures end, or are gone, after a stall


class StallDetector:
    """Detects stalls. Pure: the time is an argument.

    Args:
      timeout: The seconds without an ended closure after which the job is stalled.
      now: The time.

    Attributes:
      stalled_s: The seconds without an ended closure, at the last poll.

    >>> detector = StallDetector(timeout=10.0, now=0.0)
    >>> [detector.poll(0, True, now).value for now in (4.0, 8.0, 12.0, 16.0)]
    ['none', 'none', 'stalled', 'none']
    >>> detector.poll(1, True, 18.0).value
    'resumed'
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._mark: Hashable = 0
        self._since_s = now
        self._reported_s: float | None = None
        self.stalled_s = 0.0

    def poll(self, mark: Hashable, has_open: bool, now: float) -> Change:
        """Compares the progress with the last poll.

        Args:
          mark: Changes with each closure that ends.
          has_open: Whether closures are queued or running.
          now: The time.
        """
        self.stalled_s = now - self._since_s
        if mark != self._mark or not has_open:
            was_reported, self._reported_s = self._reported_s is not None, None
            self._mark, self._since_s = mark, now
            return Change.RESUMED if was_reported else Change.NONE
        if now - (self._since_s if self._reported_s is None else self._reported_s) < self._timeout:
            return Change.NONE
        self._reported_s = now
        return Change.STALLED

    def extend(self, pause_s: float) -> None:
        """Excludes the seconds for which this process was stopped."""
        self._since_s += pause_s


class Watchdog:
    """Watches a coordinator, and writes a report when no closure ends for too long.

    The report lists the waiting threads of this process, the running closures with their workers
    and durations, the servers that workers wait for, the state of the parameter servers, and the
    stacks of all threads, here and on the tasks involved. It is repeated after each further
    timeout, until closures end again. The watchdog only reports: it cancels and raises nothing.
    Names of files and functions are written, values are not.

    It starts at once, and ends with `stop`, with its `with` block, or with the coordinator.

    Args:
      coordinator: The coordinator.
      timeout: The seconds without an ended closure, while some are queued or running, after which
        it writes the report.
      file: The file to write to; the standard error stream by default.
      on_triggered: Called with the report, in the thread of the watchdog, after it was written.

    Raises:
      InvalidArgumentError: The timeout is not positive.
      ContextError: The coordinator is closed.

    Around a part of a program that might get stuck:

        with rx.coordinator.Watchdog(coordinator, timeout=120.0):
            coordinator.join()

    >>> import replicax as rx
    >>> with rx.testing.LocalCluster(workers=1, ps=1) as cluster:
    ...     strategy = rx.ParameterServerStrategy(cluster.resolver)
    ...     with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         with rx.coordinator.Watchdog(coordinator, timeout=120.0):
    ...             coordinator.schedule(lambda: 1).fetch()
    1
    """

    def __init__(
        self,
        coordinator: ClusterCoordinator,
        timeout: float = 300.0,
        file: TextIO | None = None,
        on_triggered: Callable[[str], object] | None = None,
    ) -> None:
        if not timeout > 0:
            raise errors.InvalidArgumentError(
                "`timeout` must be a positive number of seconds",
                f"it is {timeout!r}",
                "Choose how long a closure may take, and some more.",
            )
        # The engine alone: an unreferenced coordinator must be closed.
        self._engine: Engine = coordinator.engine
        self._timeout = timeout
        self._file = file
        self._on_triggered = on_triggered
        self._is_stopped = threading.Event()
        self._engine.add_close_callback(self._is_stopped.set)
        self._thread = threading.Thread(target=self._run, name="replicax-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._is_stopped.is_set() else "watching"
        return f"<Watchdog, {state}, timeout {self._timeout:g} s>"

    def stop(self) -> None:
        """Stops it. Idempotent."""
        self._is_stopped.set()
        self._engine.remove_close_callback(self._is_stopped.set)
        if threading.current_thread() is not self._thread:
            # It may block in the user's callback: the thread is a daemon.
            self._thread.join(_STOP_S)

    # The thread.

    def _run(self) -> None:
        interval_s = min(max(self._timeout / _POLLS, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
        detector = StallDetector(self._timeout, time.monotonic())
        slept_s = time.monotonic()
        while not self._is_stopped.wait(interval_s):
            now = time.monotonic()
            if now - slept_s > interval_s + _PAUSE_S:
                detector.extend(now - slept_s)
            with self._logging():
                change = detector.poll(*self._engine.progress(), now)
                if change is Change.STALLED:
                    self._report(detector.stalled_s)
                elif change is Change.RESUMED:
                    seconds = detector.stalled_s
                    self._write(f"replicax watchdog: resumed after {seconds:.1f} s\n")
            slept_s = time.monotonic()

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            # An error of the watchdog or of the user's callback does not stop training.
            _log.exception("The watchdog could not write its report")

    def _report(self, stalled_s: float) -> None:
        report = self._engine.wait_report()
        parts = [
            f"replicax watchdog: no closure has ended for {stalled_s:.1f} s",
            *(f"- {line}" for line in report.lines),
            "Stacks of this process:",
            thread_stacks.text(),
            *self._stacks_of(report.tasks),
        ]
        text = "\n".join(parts) + "\n"
        self._write(text)
        if self._on_triggered is not None:
            self._on_triggered(text)

    def _stacks_of(self, tasks: tuple[Task, ...]) -> Iterator[str]:
        for task in tasks[:_NUM_STACKS]:
            if self._is_stopped.is_set():
                return
            try:
                yield f"Stacks of {task}:\n{self._engine.request_stacks(task, _STACKS_S)}"
            except errors.DistributeError as error:
                yield f"Stacks of {task}: no reply ({type(error).__name__})"

    def _write(self, text: str) -> None:
        file = self._file or sys.stderr
        if file is not None:
            file.write(text)
            file.flush()
