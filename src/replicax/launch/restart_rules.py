"""Whether a sync group runs again after it has ended, and with how many workers. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from replicax.group import exit_codes
from replicax.launch.outcomes import Outcome
from replicax.protocol.tasks import Task


class Ending(enum.Enum):
    """Why a run of a group has ended."""

    FINISHED = "finished"
    LOST = "lost"
    PREEMPTED = "preempted"
    FAILED = "failed"


def classify(ended: Sequence[Outcome]) -> Ending:
    """Returns why a run has ended.

    An error of the program itself is never restarted: it would happen again. A signal, or the exit
    code of a task that has lost another one, is; and so is an announced preemption.

    >>> classify([Outcome(Task("worker", 0), 75), Outcome(Task("worker", 1), -9)])
    <Ending.LOST: 'lost'>
    >>> classify([Outcome(Task("worker", 0), 75), Outcome(Task("worker", 1), 1)])
    <Ending.FAILED: 'failed'>
    """
    codes = [outcome.exit_code for outcome in ended if not outcome.was_killed]
    restartable = (0, exit_codes.RESTART_GROUP, exit_codes.PREEMPTED)
    if any(code is not None and code > 0 and code not in restartable for code in codes):
        return Ending.FAILED
    if all(outcome.is_ok for outcome in ended):
        return Ending.FINISHED
    is_announced = exit_codes.PREEMPTED in codes and set(codes) <= {0, exit_codes.PREEMPTED}
    return Ending.PREEMPTED if is_announced else Ending.LOST


# Exit codes of a task that serves and would end so again: of a configuration that is wrong, and of
# shells for a program that cannot be started, or is not there.
_FINAL_FOR_SERVING = (2, 126, 127)


def is_final_for_serving(code: int | None) -> bool:
    """Returns whether a worker or server of a ps cluster is not restarted after an exit code.

    These tasks run `replicax serve`, so a crash, such as code 1, is not an error of the program.

    >>> is_final_for_serving(1), is_final_for_serving(2)
    (False, True)
    """
    return code in _FINAL_FOR_SERVING


def lost_tasks(ended: Sequence[Outcome]) -> list[Task]:
    """Returns the tasks that were lost, and not those that left because of it."""
    return [o.task for o in ended if o.was_killed or (o.exit_code is not None and o.exit_code < 0)]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of the group.

    Attributes:
      number: 0 for the first one.
      tasks: The tasks that took part.
      outcomes: How they have ended.
      ending: Why the run has ended.
      started_s: When it was started, on the monotonic clock.
      ended_s: When the last process had ended.
    """

    number: int
    tasks: tuple[Task, ...]
    outcomes: tuple[Outcome, ...]
    ending: Ending
    started_s: float
    ended_s: float


def next_num_workers(
    before: Sequence[Attempt], min_workers: int, max_workers: int, available: int | None = None
) -> int:
    """Returns the number of workers of the next run. Pure.

    The workers that were lost in the last run do not take part in the next one, and may in the one
    after it. If fewer than `min_workers` are left, lost ones are started again at once.

    Args:
      before: The runs that have ended.
      min_workers: The fewest workers.
      max_workers: The most workers.
      available: How many could run, if that is known.
    """
    if available is not None:
        left = available
    elif not before or before[-1].ending is Ending.PREEMPTED:
        left = max_workers
    else:
        last = before[-1]
        lost = len(lost_tasks(last.outcomes))
        # Those that were away during the last run are newcomers of the next one.
        was_away = max_workers - len(last.tasks)
        left = len(last.tasks) - lost + was_away
    return min(max(left, min_workers), max_workers)
