"""How the processes of a group have ended."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.group import exit_codes
from replicax.protocol.tasks import Task


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the process of one task has ended.

    Attributes:
      task: The task.
      exit_code: Its exit code, -N for a signal N; None while it runs.
      value: What its function returned; None for a script or a command.
      error: What its function raised; None if it did not raise.
      log: The last lines that it printed.
      was_killed: Whether the launcher killed it, because another task had failed or the time was
        over.

    Example:
      >>> outcome = Outcome(Task("worker", 1), -9)
      >>> outcome.is_ok, outcome.text
      (False, '/job:worker/task:1 was killed by SIGKILL')
    """

    task: Task
    exit_code: int | None
    value: Tree = None
    error: Exception | None = None
    log: str = dataclasses.field(default="", repr=False)
    was_killed: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether it ended with exit code 0."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """How it has ended, in a few words."""
        if self.exit_code is None:
            return f"{self.task} is running"
        if self.was_killed:
            return f"{self.task} was killed by its launcher"
        if self.exit_code < 0:
            return f"{self.task} was killed by {_signal_name(-self.exit_code)}"
        if self.error is not None:
            return f"{self.task} raised {type(self.error).__name__}: {self.error}"
        return f"{self.task} ended with exit code {self.exit_code}"

    def failure(self) -> Exception:
        """Returns the error to raise for a task that has failed, with the end of its log."""
        if self.error is not None:
            self.error.add_note(f"{self.task} printed last:\n{self.log}")
            return self.error
        return errors.UnavailableError(f"{self.text}. It printed last:\n{self.log}")


def first_cause(ended: Iterable[Outcome]) -> Outcome | None:
    """Returns the failure that most likely caused the others; None if all tasks are well.

    A task that failed by itself comes before one that was killed by a signal, that before one that
    asks for a restart because it lost another one, and those that the launcher killed come last.

    Args:
      ended: The outcomes, in the order in which the processes have ended.
    """
    failed = [outcome for outcome in ended if outcome.exit_code not in (None, 0)]
    return min(failed, key=_rank, default=None)


def _rank(outcome: Outcome) -> int:
    if outcome.was_killed:
        return 3
    if outcome.exit_code in (exit_codes.RESTART_GROUP, exit_codes.PREEMPTED):
        return 2
    return 0 if outcome.exit_code is not None and outcome.exit_code > 0 else 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
