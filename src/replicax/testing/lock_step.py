"""Programs that all tasks of a local cluster run in lock step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.launch import program as programs
from replicax.launch.backoff import Backoff
from replicax.launch.group_supervisor import GRACE_S, GroupSupervisor
from replicax.launch.outcomes import Outcome
from replicax.launch.program import PreparedProgram, Program
from replicax.launch.restart_rules import Attempt
from replicax.launch.sync_group import GroupPlan, SyncGroup
from replicax.protocol.tasks import Task
from replicax.testing.launching import PATIENCE, Plan, ProcessGroup

# Between two restarts: tests do not wait.
_LONGEST_PAUSE_S = 0.5


class LaunchedProgram:
    """The processes of a program that `LocalCluster.launch` has started.

    >>> import replicax as rx
    >>> with rx.testing.LocalCluster(workers=2, ps=0) as cluster:
    ...     program = cluster.launch(lambda: 7)
    ...     [outcome.value for outcome in program.wait(timeout=60.0)]
    [7, 7]
    """

    def __init__(self, group: SyncGroup, supervisor: GroupSupervisor | None) -> None:
        self._first_group = group
        self._supervisor = supervisor

    def __repr__(self) -> str:
        return f"LaunchedProgram({', '.join(outcome.text for outcome in self.outcomes)})"

    @property
    def outcomes(self) -> list[Outcome]:
        """How each task has ended, or that it is running, in the order of the tasks."""
        return self._group.outcomes()

    @property
    def is_done(self) -> bool:
        """Whether all processes have ended, and will not be restarted."""
        if self._supervisor is not None:
            return self._supervisor.is_done
        return not self._group.running

    @property
    def attempts(self) -> list[Attempt]:
        """The runs that have ended, if the program is restarted."""
        return [] if self._supervisor is None else list(self._supervisor.attempts)

    @property
    def num_restarts(self) -> int:
        """How often all tasks were restarted."""
        return 0 if self._supervisor is None else self._supervisor.num_restarts

    def wait(self, timeout: float = PATIENCE) -> list[Outcome]:
        """Waits until all processes have ended, and returns how.

        Args:
          timeout: The most seconds to wait; then all are killed.

        Raises:
          DeadlineExceededError: One has not ended in time; with its stack, if it runs a function.
          Exception: What a function raised, if the program is restarted; see `values`.
        """
        return self._wait(timeout, None)

    def values(self, timeout: float = PATIENCE) -> list[Tree]:
        """Waits until all processes have ended, and returns what their functions returned.

        When one has failed, the others are killed after a while.

        Args:
          timeout: The most seconds to wait; then all are killed.

        Raises:
          Exception: What a function raised; see `LocalCluster.run`.
          UnavailableError: A process ended with another exit code than 0.
          DeadlineExceededError: One has not ended in time.
        """
        ended = self._wait(timeout, GRACE_S)
        failure = self._group.first_failure()
        if failure is not None:
            raise failure.failure()
        return [outcome.value for outcome in ended]

    def end(self) -> None:
        """Kills the processes that run. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.close()
        self._group.end()

    @property
    def _group(self) -> SyncGroup:
        return self._first_group if self._supervisor is None else self._supervisor.group

    def _wait(self, timeout: float, grace: float | None) -> list[Outcome]:
        try:
            if self._supervisor is not None:
                has_ended = self._supervisor.wait(timeout) is not None
            else:
                has_ended = self._group.wait(timeout, grace)
            if not has_ended:
                raise self._group.late(timeout)
        finally:
            self.end()
        return self.outcomes


def prepare(
    group: ProcessGroup,
    plan: Plan,
    program: Program,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
) -> PreparedProgram:
    """Prepares a program for `launch`, once the last one has ended."""
    before = group.sync_group
    if before is not None and (running := before.running):
        raise errors.ContextError(
            "A cluster runs one program at a time",
            f"{', '.join(str(process.task) for process in running)} still run the last one",
            "Wait for it, or end it.",
        )
    group.end_sync_group()
    return programs.prepare(
        program, args, kwargs, directory=group.directory, num_devices=plan.devices_per_worker
    )


def launch(
    group: ProcessGroup,
    plan: Plan,
    tasks: Sequence[Task],
    program: PreparedProgram,
    max_restarts: int,
) -> LaunchedProgram:
    """Starts a program; see `LocalCluster.launch`."""
    group_plan = GroupPlan(
        group.directory,
        group.logs,
        group.env,
        plan.devices_per_worker,
        group.keys_directory,
        *([] if group.namespaces is None else [group.namespaces.hosts, group.namespaces.prefixes]),
    )

    def start(number: int, before: Sequence[Attempt]) -> SyncGroup:
        group.sync_group = SyncGroup(group_plan, tasks, program)
        group.sync_group.start()
        return group.sync_group

    group.group_supervisor = None
    if not max_restarts:
        return LaunchedProgram(start(0, ()), None)
    backoff = Backoff(max_restarts, math.inf, _LONGEST_PAUSE_S)
    group.group_supervisor = supervisor = GroupSupervisor(start, backoff)
    supervisor.begin()
    return LaunchedProgram(supervisor.group, supervisor)
