"""The exit codes of the tasks of a group, for supervisors; see docs/reference/exit_codes.md."""

from __future__ import annotations

from replicax.foundation import errors

# A task of the group is lost, or did not start: restart all tasks of the group (EX_TEMPFAIL).
RESTART_GROUP = 75
# The group was preempted, and has saved a checkpoint: restart all tasks of the group. It was
# announced, so that supervisors do not count it. That of `PreemptionCheckpointHandler`.
PREEMPTED = 42
# An error of the program itself: a restart will not help.
FAILED = 1


def of(error: BaseException) -> int:
    """Returns the exit code for an uncaught error of a group.

    >>> of(errors.UnavailableError("/job:worker/task:1 is lost")), of(ValueError())
    (75, 1)
    """
    is_lost = isinstance(error, errors.UnavailableError | errors.DeadlineExceededError)
    return RESTART_GROUP if is_lost else FAILED
