"""Restarts a sync group as a whole: no task can join a group again that has lost another one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from replicax.foundation import errors
from replicax.launch.backoff import Backoff
from replicax.launch.outcomes import Outcome
from replicax.launch.restart_rules import Attempt, Ending, classify
from replicax.launch.sync_group import SyncGroup

_log = logging.getLogger(__name__)

# The seconds that tasks get to leave by themselves when one of them has failed. They detect the
# loss of another one within 12 s, with the default timing, and then save nothing.
GRACE_S = 25.0
_LOOK_S = 0.02
_JOIN_SECONDS = 20.0


# Starts a run: gets its number, and the runs before.
StartGroup = Callable[[int, Sequence[Attempt]], SyncGroup]


class GroupSupervisor:
    """Runs a program on a group until it finishes, and restarts all tasks when one is lost.

    When a task fails, the others get some time to notice, and are killed then. A new run has new
    processes and new ports; the program continues from its last checkpoint.

    Args:
      start: Creates and starts the group of a run.
      backoff: How often to restart. Announced preemptions are not counted.
      grace: The seconds that the other tasks get when one has failed.

    Attributes:
      attempts: The runs that have ended.
      group: The current or last run.
      num_restarts: How often the group was restarted.
    """

    def __init__(
        self, start: StartGroup, backoff: Backoff | None = None, *, grace: float = GRACE_S
    ) -> None:
        self._start = start
        self._backoff = backoff if backoff is not None else Backoff(10, 600.0)
        self._grace = grace
        self._asked_to_end = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Protects `group` against `close`.
        self._lock = threading.Lock()
        self.attempts: list[Attempt] = []
        self.num_restarts = 0
        self.group = start(0, ())
        self._started_s = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Whether there will be no other run."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self) -> None:
        """Supervises in a thread; `wait` returns what comes of it."""
        self._thread = threading.Thread(
            target=self._supervise, name="replicax-group-supervisor", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float) -> list[Outcome] | None:
        """Waits until the program has finished.

        Returns:
          How the tasks of the last run have ended; None if the time was over before.

        Raises:
          Exception: What a task raised, if it is not restarted.
          UnavailableError: The group was restarted too often.
        """
        assert self._thread is not None, "begin() was called"
        self._thread.join(timeout)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self.group.outcomes()

    def close(self) -> None:
        """Ends all processes, without another restart. Idempotent."""
        self._asked_to_end.set()
        with self._lock:
            self.group.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    # The thread.

    def _supervise(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException as error:
            self._error = error
        finally:
            self.group.end()

    def _run_once(self) -> bool:
        """Waits for the end of a run; returns whether there is another one."""
        group = self.group
        while not self._asked_to_end.is_set():
            if group.wait(_LOOK_S, self._grace):
                break
        group.end()
        ended = tuple(group.outcomes())
        tasks = tuple(outcome.task for outcome in ended)
        ending = classify(ended)
        now = time.monotonic()
        self.attempts.append(
            Attempt(len(self.attempts), tasks, ended, ending, self._started_s, now)
        )
        if ending is Ending.FINISHED or self._asked_to_end.is_set():
            return False
        cause = group.first_failure()
        assert cause is not None, "a run that has not finished has failed"
        if ending is Ending.FAILED:
            raise cause.failure()
        due_s = now if ending is Ending.PREEMPTED else self._backoff.next(now)
        if due_s is None:
            raise self._too_often(cause)
        _log.warning("Restarting the group, restart %d: %s", len(self.attempts), cause.text)
        if self._asked_to_end.wait(max(0.0, due_s - now)):
            return False
        with self._lock:
            if self._asked_to_end.is_set():
                return False
            self._started_s = time.monotonic()
            self.group = self._start(len(self.attempts), self.attempts)
            self.num_restarts += 1
        return True

    def _too_often(self, cause: Outcome) -> errors.UnavailableError:
        most, window_s = self._backoff.most, self._backoff.window_s
        return errors.UnavailableError(
            f"The group was restarted {most} times within {window_s:g} s and failed again: "
            f"{cause.text}. {cause.task} printed last:\n{cause.log}"
        )
