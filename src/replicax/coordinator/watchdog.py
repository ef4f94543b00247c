"""`Watchdog`: says who waits for whom, and where, when no closure ends for too long."""

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

# How often it looks, as a part of the timeout; and at most and at least, in seconds.
_LOOKS = 10
_SELDOM_S, _OFTEN_S = 1.0, 0.02
# If it slept for so much longer than it meant to, this process was stopped.
_PAUSE_S = 1.0
# A task may take so long to say what it does. Later ones are asked in vain, perhaps: so few.
_ASK_S = 1.0
_NUM_ASKED = 6
# What a thread that was told to end does last: one question, and the writing of the text.
_STOP_S = 2 * _ASK_S


class News(enum.Enum):
    """What a look at the closures tells."""

    NOTHING = "nothing"  # closures end, or there are none
    STALL = "stall"  # when none has ended for the timeout, and again each time it has passed
    RESUMED = "resumed"  # when closures end, or are gone, after a stall


class Pulse:
    """Decides when a stall is told. Pure: the time is an argument.

    Args:
      timeout: For how many seconds no closure may end.
      now: The time.

    Attributes:
      stalled_s: For how long no closure had ended, at the last look.

    >>> pulse = Pulse(timeout=10.0, now=0.0)
    >>> [pulse.look(0, True, now).value for now in (4.0, 8.0, 12.0, 16.0)]
    ['nothing', 'nothing', 'stall', 'nothing']
    >>> pulse.look(1, True, 18.0).value
    'resumed'
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._mark: Hashable = 0
        self._since_s = now
        self._told_s: float | None = None
        self.stalled_s = 0.0

    def look(self, mark: Hashable, has_open: bool, now: float) -> News:
        """Takes what there is to see.

        Args:
          mark: Changes with each closure that ends.
          has_open: Whether closures wait or run.
          now: The time.
        """
        self.stalled_s = now - self._since_s
        if mark != self._mark or not has_open:
            was_told, self._told_s = self._told_s is not None, None
            self._mark, self._since_s = mark, now
            return News.RESUMED if was_told else News.NOTHING
        if now - (self._since_s if self._told_s is None else self._told_s) < self._timeout:
            return News.NOTHING
        self._told_s = now
        return News.STALL

    def forgive(self, pause_s: float) -> None:
        """Does not count some seconds in which this process was stopped and saw nothing."""
        self._since_s += pause_s


class Watchdog:
    """Watches a coordinator, and says who waits for whom when no closure ends for too long.

    It writes which threads of this process wait, which closures run where since when, what
    their workers wait for, how the parameter servers are, and the stacks of all threads, here
    and on the tasks involved. It does so again each time the timeout has passed, until closures
    end again. It only tells: nothing is cancelled, and nothing raised. Names of files and
    functions are written, values are not.

    It begins at once, and ends with `stop`, with its `with` block, or with the coordinator.

    Args:
      coordinator: Whose closures are watched.
      timeout: For how many seconds no closure may end, while some wait or run.
      file: Where to write; the standard error stream by default.
      on_triggered: Called with the text, in the thread of the watchdog, after it was written.

    Raises:
      InvalidArgumentError: The timeout is not positive.
      ContextError: The coordinator is closed.

    Around a part of a program that might get stuck:

        with rx.coordinator.Watchdog(coordinator, timeout=120.0):
            coordinator.join()
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
        # The engine alone: a coordinator that nobody else holds must end.
        self._engine: Engine = coordinator.engine
        self._timeout = timeout
        self._file = file
        self._on_triggered = on_triggered
        self._is_stopped = threading.Event()
        self._engine.add_ending(self._is_stopped.set)
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
        """Ends it; again is harmless."""
        self._is_stopped.set()
        self._engine.remove_ending(self._is_stopped.set)
        if threading.current_thread() is not self._thread:
            # If it hangs in what the user gave it, it is left behind: the thread is a daemon.
            self._thread.join(_STOP_S)

    # The thread.

    def _run(self) -> None:
        interval_s = min(max(self._timeout / _LOOKS, _OFTEN_S), _SELDOM_S)
        pulse = Pulse(self._timeout, time.monotonic())
        slept_s = time.monotonic()
        while not self._is_stopped.wait(interval_s):
            now = time.monotonic()
            if now - slept_s > interval_s + _PAUSE_S:
                pulse.forgive(now - slept_s)
            with self._logging():
                news = pulse.look(*self._engine.progress(), now)
                if news is News.STALL:
                    self._tell(pulse.stalled_s)
                elif news is News.RESUMED:
                    self._write(f"replicax watchdog: it goes on, after {pulse.stalled_s:.1f} s\n")
            slept_s = time.monotonic()

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            # Whatever is wrong with it or with what the user gave it: training goes on.
            _log.exception("The watchdog could not tell what it saw")

    def _tell(self, stalled_s: float) -> None:
        waits = self._engine.waits()
        parts = [
            f"replicax watchdog: no closure has ended for {stalled_s:.1f} s",
            *(f"- {line}" for line in waits.lines),
            "Stacks of this process:",
            thread_stacks.text(),
            *self._stacks_of(waits.tasks),
        ]
        text = "\n".join(parts) + "\n"
        self._write(text)
        if self._on_triggered is not None:
            self._on_triggered(text)

    def _stacks_of(self, tasks: tuple[Task, ...]) -> Iterator[str]:
        for task in tasks[:_NUM_ASKED]:
            if self._is_stopped.is_set():
                return
            try:
                yield f"Stacks of {task}:\n{self._engine.ask_stacks(task, _ASK_S)}"
            except errors.DistributeError as error:
                yield f"Stacks of {task}: it did not say ({type(error).__name__})"

    def _write(self, text: str) -> None:
        file = self._file or sys.stderr
        if file is not None:
            file.write(text)
            file.flush()
