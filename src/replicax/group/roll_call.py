"""The roll call: which tasks have reported, and whether they fit together."""

from __future__ import annotations

from collections.abc import Callable

from replicax.foundation import errors
from replicax.group.members import Members
from replicax.protocol import messages


class RollCall:
    """The reports of the members, compared with that of the chief.

    Args:
      members: The members, as the chief knows them.
      is_connected: Returns whether a process, by its incarnation, has an open connection.

    Attributes:
      error: Why the group cannot be formed; None while it can.
      is_complete: Whether all members have reported.
    """

    def __init__(self, members: Members, is_connected: Callable[[int], bool]) -> None:
        self._members = members
        self._is_connected = is_connected
        self._reports: dict[int, messages.JoinGroup] = {}
        self._incarnations: dict[int, int] = {}
        self.error: errors.DistributeError | None = None

    def add(self, report: messages.JoinGroup, incarnation: int) -> None:
        """Adds a report, again if it is repeated; sets `error` if it does not fit."""
        if self.error is None:
            self.error = self._mismatch(report, incarnation)
        if self.error is None or report.index not in self._reports:
            self._reports[report.index] = report
            self._incarnations[report.index] = incarnation

    def _mismatch(
        self, report: messages.JoinGroup, incarnation: int
    ) -> errors.DistributeError | None:
        index = report.index
        if report.cluster != self._members.digest or not 0 <= index < self._members.count:
            return errors.InvalidArgumentError(
                "All tasks of a group must be given the same cluster",
                f"that of {self._task(index)} ({report.process}) has other tasks or addresses "
                f"than that of {self._members.place(0)}",
                "Give each task the same cluster specification, in TF_CONFIG for example.",
            )
        other = self._reports.get(index)
        earlier = self._incarnations.get(index, incarnation)
        if other is not None and earlier != incarnation and self._is_connected(earlier):
            return errors.InvalidArgumentError(
                "Each task of a group must be one process",
                f"{self._members.place(index)} is two: {other.process} and {report.process}",
                "Give each process a task id of its own.",
            )
        first = self._reports.get(0)
        if first is not None and report.versions != first.versions:
            return errors.ProtocolError(
                "All tasks of a group must have the same versions",
                f"{self._members.name(index)} has {_text(report.versions, first.versions)}, and "
                f"{self._members.name(0)} has {_text(first.versions, report.versions)}",
                "Install the same versions everywhere.",
            )
        return None

    def _task(self, index: int) -> str:
        if 0 <= index < self._members.count:
            return self._members.name(index)
        return f"the task with index {index}"

    def drop_disconnected(self) -> None:
        """Forgets the reports of processes that have ended since; their tasks may restart."""
        for index in list(self._reports):
            if index != 0 and not self._is_connected(self._incarnations[index]):
                del self._reports[index], self._incarnations[index]

    @property
    def is_complete(self) -> bool:
        return len(self._reports) == self._members.count

    @property
    def missing(self) -> list[int]:
        """The members that have not reported."""
        return [i for i in range(self._members.count) if i not in self._reports]

    @property
    def incarnations(self) -> dict[int, int]:
        """The incarnations of the members that have reported."""
        return dict(self._incarnations)

    def process_of(self, index: int) -> str:
        """Returns the process of a member that has reported, for messages."""
        return self._reports[index].process

    def expired(self, seconds: float) -> errors.DeadlineExceededError:
        """Returns the error for members that have not reported in time."""
        return errors.DeadlineExceededError(
            f"All {self._members.count} tasks of the group must report within {seconds:g} s",
            f"these have not: {self._members.names(self.missing)}",
            "Start them, look at their logs, and compare their cluster specifications and keys.",
        )


def _text(mine: dict[str, str], others: dict[str, str]) -> str:
    """Returns the versions that differ."""
    names = [name for name in mine if mine[name] != others.get(name)]
    return ", ".join(f"{name} {mine[name][:40]}" for name in sorted(names)) or "fewer packages"
